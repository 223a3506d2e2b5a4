"""The check of devices, on simulated chips: what it reads of a compiled program, and its parts."""

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import matmul
from kernels.q8 import Q8
from tests import device_parts
from tests.device_findings import Finding, page
from tests.device_models import int8_kept, model_of
from tests.device_run import Check, Item
from tests.hlo import floats_of_sizes
from tp.launch import LaunchError, devices

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "device_check"


def script() -> ModuleType:
    """The command, which has no `.py`, as a module."""
    loader = SourceFileLoader("device_check", str(SCRIPT))
    spec = spec_from_loader("device_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["device_check"] = module  # its dataclasses look their module up
    loader.exec_module(module)
    return module


# --- Compiled programs

HLO = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(s8[64,32]{1,0})->f32[1,64]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: s8[64,32]) -> f32[64] {
  %inside = f32[64,32]{1,0} convert(%p)
  ROOT %reduce.1 = f32[64]{0} reduce(%inside, %zero), dimensions={1}, to_apply=%add
}

%body.2 (arg: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %arg = (s32[], /*index=1*/f32[64,32]{1,0}) parameter(0)
  %held = f32[64,32]{1,0} get-tuple-element(%arg), index=1
  %in_loop = bf16[2,32,32]{2,1,0:T(8,128)(2,1)S(1)} fusion(%held), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[64,32]{1,0}) tuple(%i, %held)
}

%cond.2 (arg: (s32[], f32[64,32])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%yes (x: f32[32]) -> f32[32] {
  %in_branch = (f32[32,64]{1,0}, s8[4096]{0}) custom-call(%x), custom_call_target="gemm"
}

%no (x: f32[32]) -> f32[32] {
  ROOT %same = f32[32]{0} copy(%x)
}

%parallel (p: s8[64,32]) -> f32[64,32] {
  ROOT %in_call = f32[64,32]{1,0} convert(%p)
}

ENTRY %main.3 (w: s8[64,32], x: f32[64,32]) -> f32[1,64] {
  %w = s8[64,32]{1,0} parameter(0)
  %x = f32[64,32]{1,0} parameter(1)
  %small = f32[64]{0} fusion(%w), kind=kInput, calls=%fused
  %offender.7 = f32[64,32]{1,0} convert(%w)
  %bits = s32[64,32]{1,0} convert(%w)
  %flat = f32[2048]{0} bitcast(%offender.7)
  %loop = (s32[], f32[64,32]{1,0}) while(%init), condition=%cond.2, body=%body.2
  %either = f32[32]{0} conditional(%p, %x, %x), branch_computations={%yes, %no}
  %called = f32[64,32]{1,0} call(%w), to_apply=%parallel
  ROOT %out = f32[1,64]{1,0} reshape(%small)
}
"""


def test_floats_as_large_as_a_weight_are_found_wherever_they_are_left_in_memory() -> None:
    found = floats_of_sizes(HLO, {64 * 32})
    assert [(f.computation, f.name, f.type, f.nbytes) for f in found] == [
        ("main.3", "offender.7", "f32[64,32]", 8192),
        ("body.2", "in_loop", "bf16[2,32,32]", 4096),
        ("yes", "in_branch", "f32[32,64]", 8192),
        ("parallel", "in_call", "f32[64,32]", 8192),
    ]


def test_floats_of_other_sizes_are_left_alone() -> None:
    assert [f.name for f in floats_of_sizes(HLO, {64, 4096})] == ["small", "out"]


def test_a_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        floats_of_sizes("HloModule empty\n", {1})


# XLA for CPUs writes floats for every product of many rows: a piece at a time, or at once.
@pytest.mark.parametrize(("piece", "problems"), [(1 << 22, 0), (1, 5)])
def test_products_are_read_in_the_program_that_is_compiled(
    monkeypatch: pytest.MonkeyPatch, piece: int, problems: int
) -> None:
    monkeypatch.setattr(device_parts, "PIECE", piece)
    model = model_of("llama", larger=False)
    found = device_parts.products("llama", model, devices(2), "chunk")
    assert found.holds is (problems == 0)
    assert found.cells[:3] == ("llama", "2", "chunk")
    assert found.problem.count(" makes f32[") == int(found.cells[3]) >= problems


def test_rows_are_chosen_that_no_weight_is_a_multiple_of() -> None:
    assert device_parts.rows_apart({7 * 64: "a", 8 * 5: "b"}, 8) == 6
    assert device_parts.rows_apart({2 * 3: "a"}, 3) == 1


# --- Products with int8, by every way


def q8(heads: int, outputs: int, blocks: int, block: int) -> tuple[Q8, np.ndarray]:
    """A weight by heads, and what it says in float64."""
    random = np.random.default_rng(0)
    values = random.integers(-127, 128, (heads, outputs, blocks * block), np.int8)
    scales = random.uniform(0.5, 2, (heads, outputs, blocks)).astype(np.float16)
    said = values.astype(np.float64) * np.repeat(scales.astype(np.float64), block, axis=2)
    made = Q8(values=jnp.asarray(values), scales=jnp.asarray(scales), block=block)
    return made, said


WAYS: list[Callable[..., Any]] = [
    matmul._on_tpu,
    matmul._elsewhere,
    matmul._by_blocks,
    matmul._in_pieces,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_product_with_int8_is_that_of_its_floats(
    monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any], rows: int, heads: int
) -> None:
    monkeypatch.setattr(matmul, "PIECE", 1)  # 128 outputs at a time, the last 128 overlapping
    w, floats = q8(heads, 300, 2, 32)
    x = np.random.default_rng(1).normal(size=(rows, heads, 64)).astype(np.float32)
    wanted = np.einsum("rhn,hon->rho", x.astype(np.float64), floats)
    np.testing.assert_allclose(jax.jit(way)(x, w), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


# --- Parts


def test_logits_of_weights_that_stay_int8_are_those_of_transformers() -> None:
    with int8_kept():
        found = device_parts.logits("deepseek_v3", 3, kernels="xla")
    assert found.holds, found.line
    assert found.cells[:2] == ("deepseek_v3", "3")
    assert found.cells[-1] == "84/84"


def test_speed_and_memory_of_a_made_up_model() -> None:
    model = device_parts.made_up("llama", 2, larger=False)
    found = device_parts.speed(model, 1e9, tokens=8, repeats=1)
    assert found.holds is None
    decode, prefill = (float(cell.replace(",", "")) for cell in found.cells[2:4])
    assert decode > 0 < prefill
    # Both chips' halves of every matrix: 17 bytes of 16 numbers; norms and tables whole.
    assert sum(model.held) >= 17 / 16 * (2 * 170 * 64 + 2 * 27648)
    assert device_parts.memory(model).cells[-1] == "not told"  # by a CPU


@pytest.mark.parametrize(("peak", "holds"), [(1456e6, True), (1457e6, False)])
def test_memory_is_judged_by_the_chip_that_is_worst_off(peak: float, holds: bool) -> None:
    peaks = [900_000_000, int(peak)]
    found = device_parts.worst_off(("model", "2"), [900_000_000] * 2, 100_000_000, peaks)
    assert (found.holds, found.cells[2]) == (holds, "1")


def test_a_device_reads_its_memory_at_some_speed() -> None:
    assert device_parts.memory_speed(jax.devices()[0], size=1 << 20, passes=2) > 1e6


# --- The report and the command


def finding(holds: bool | None, problem: str = "") -> Finding:
    cells = ("llama", "3", "1e-06", "1e-06", "2e-02", "83/84")
    return Finding(part="logits", cells=cells, holds=holds, problem=problem)


def test_the_report_says_first_what_does_not_hold_and_what_was_skipped() -> None:
    text = page([finding(True), finding(False)], ["speed on 2"], by="here", complete=True)
    assert "1 of 2 findings hold." in text
    assert "- **logits: llama on 3: prefill 1e-06, decode 1e-06, batch 2e-02, greedy 83/84" in text
    assert "Skipped, for lack of time: speed on 2." in text
    assert "| llama | 3 | 1e-06 | 1e-06 | 2e-02 | 83/84 |" in text
    assert "| **llama** | **3** |" in text
    assert "## Speed" not in text
    assert "did not come to its end" in page([], [], by="here", complete=False)


def test_what_fits_no_longer_is_left_out_and_what_raises_is_a_finding(tmp_path: Path) -> None:
    def fails() -> list[Finding]:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    items = [
        Item("logits", "one", lambda: [finding(True)]),
        Item("products", "two", fails),
        Item("speed", "three", lambda: [finding(True)]),
    ]
    report = tmp_path / "report.md"
    check = Check(minutes=1.0, report=report, about="here")
    check.longest["speed"] = 61.0  # seconds
    assert [item.name for item in check.run(items)] == ["three"]
    assert [f.holds for f in check.findings] == [True, False]
    assert check.findings[1].problem == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert "out of memory" in report.read_text()


def test_widths_are_taken_from_the_ends() -> None:
    command = script()
    args = command._parser().parse_args([])
    assert command._widths(args, 5) == [5, 1, 4, 3, 2]
    with pytest.raises(LaunchError, match="9 chips were asked for, and there are 5"):
        command._widths(command._parser().parse_args(["--chips", "3,9"]), 5)


def test_without_accelerators_it_says_so_in_a_line() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "no accelerator here" in line
