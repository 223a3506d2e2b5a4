"""`anyfold inspect` as a person meets it: numbers, stages that are read back, and refusals."""

import io
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from author.manifest import manifest_from_json
from author.spec import spec_from_json
from tp import inspect_command, launch
from tp.cli import main
from tp.engine import CONTEXT as ENGINE_CONTEXT
from tp.engine import load_source
from tp.inspect_command import MOST
from tp.outline import CONTEXT, open_outline
from tp.roll import roll
from tp.source import open_source
from tp.stages import Asked
from tp.step import whole_step
from tp.traced import traced
from tp.unfilled import unfilled

ROOT = Path(__file__).parent.parent
CHECKPOINTS = ROOT / "tests" / "checkpoints"
GOLDEN = ROOT / "tests" / "goldens" / "uneven_heads_9_3.json"
LLAMA = str(CHECKPOINTS / "llama")
MIXED = str(CHECKPOINTS / "mixtral")
RECURRENT = str(CHECKPOINTS / "qwen3_next")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(said(capsys, *arguments, "--json"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = main(["inspect", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert "\n" not in err.strip()
    return err.strip()


# --- Numbers


def test_the_json_of_a_width_has_every_chip_and_what_it_is_given(capsys) -> None:
    found = numbers(capsys, LLAMA, "--chips", "3")
    assert {"model", "chips", "collectives", "totals"} <= set(found)
    heads = [(c["chip"], c["query_heads"], c["given_query_heads"]) for c in found["chips"]]
    assert heads == [(0, 1, 2), (1, 1, 2), (2, 2, 2)]
    for chip in found["chips"]:
        assert chip["padding_bytes"] == chip["given_weight_bytes"] - chip["weight_bytes"] >= 0
    assert found["totals"]["folds"] == 1 + 2 * 2
    one = numbers(capsys, LLAMA, "--chips", "1")["chips"][0]
    shares = [chip["share_of_reads"] for chip in found["chips"]]
    assert shares == [chip["reads"] / one["reads"] for chip in found["chips"]]
    assert found["totals"]["speed_up"] == one["reads"] / found["chips"][0]["given_reads"]


def test_several_widths_are_each_as_they_are_alone(capsys) -> None:
    widths = numbers(capsys, MIXED, "--chips", "3,1-2")["widths"]
    assert [w["asked"]["chips"] for w in widths] == [3, 1, 2]
    assert widths[0] == numbers(capsys, MIXED, "--chips", "3")


def test_a_table_shows_what_chips_hold_and_what_they_are_given_apart(capsys) -> None:
    out = said(capsys, LLAMA, "--chips", "3")
    rows = [line.split() for line in out.splitlines()]
    held = [row[1:5] for row in rows if row[:1] in (["0"], ["1"], ["2"])]
    assert held == [["1", "1", "32", "64"], ["1", "1", "32", "64"], ["2", "1", "16", "42"]]
    assert [row[1:5] for row in rows if row[:1] == ["given"]] == [["2", "1", "32", "64"]]


def test_widths_that_gain_nothing_are_named_with_the_reason(capsys) -> None:
    out = said(capsys, RECURRENT, "--chips", "2-4")
    assert "3 chips gain nothing over 2: a chip still has 2 query heads, 1 kv head" in out
    assert "4 chips gain nothing" not in out


def test_many_chips_that_are_alike_share_a_row(capsys) -> None:
    out = said(capsys, LLAMA, "--chips", "1000")
    counted = re.findall(r"^ *(\d+)  .* %", out, re.MULTILINE)
    assert sum(map(int, counted)) == 1000
    assert len(counted) < 10


@pytest.mark.parametrize(
    ("memory", "answer"),
    [
        ("1GiB", "Fits 1 GiB a chip"),
        ("60kB", "Does not fit 60.0 kB a chip: a chip is given"),
        ("1", "no number of chips up to 512 would do"),
    ],
)
def test_memory_says_whether_it_fits_and_what_would(memory: str, answer: str, capsys) -> None:
    assert answer in said(capsys, LLAMA, "--chips", "2", "--memory", memory)


def test_what_is_said_to_fit_fits(capsys) -> None:
    found = numbers(capsys, LLAMA, "--chips", "1", "--memory", "150kB")["totals"]
    assert found["fits"] is False
    wider, longest = str(found["chips_that_would_fit"]), str(found["longest_context"])
    for more in (["--chips", wider], ["--chips", "1", "--ctx", longest]):
        assert numbers(capsys, LLAMA, *more, "--memory", "150kB")["totals"]["fits"] is True


def test_caches_of_half_the_size(capsys) -> None:
    whole, half = (
        numbers(capsys, LLAMA, "--chips", "2", *more) for more in ([], ["--cache", "f16"])
    )
    assert whole["chips"][0]["cache_bytes"] == 2 * half["chips"][0]["cache_bytes"]


def test_the_float_weights_of_a_cpu_are_named(capsys) -> None:
    assert "float32 holds Wr, Wg, Wu, Wd" in said(capsys, MIXED, "--chips", "1")
    assert "float32 holds" not in said(capsys, LLAMA, "--chips", "1")


# --- What a model may be


def test_a_config_alone_says_as_much_as_its_checkpoint(tmp_path: Path, capsys) -> None:
    place = tmp_path / "a name with spaces"
    place.mkdir()
    config = (CHECKPOINTS / "mixtral" / "config.json").read_text()
    (place / "config.json").write_text(config)
    expected = numbers(capsys, MIXED, "--chips", "3")
    for name in (place, place / "config.json"):
        found = numbers(capsys, str(name), "--chips", "3")
        assert (found["chips"], found["matrices"]) == (expected["chips"], expected["matrices"])


def test_a_golden_is_a_model_too(capsys) -> None:
    found = numbers(capsys, str(GOLDEN), "--chips", "2")
    assert [c["query_heads"] for c in found["chips"]] == [3, 6]


def test_experts_of_a_config_are_not_looked_at_one_by_one(tmp_path: Path, capsys) -> None:
    config = json.loads((CHECKPOINTS / "mixtral" / "config.json").read_text())
    config |= {"num_hidden_layers": 1000, "num_local_experts": 2048, "hidden_size": 1 << 15}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1 << 17}))
    started = time.process_time()
    found = numbers(capsys, str(tmp_path), "--chips", "8")
    assert found["model"]["weight_bytes"] > 1e15
    assert time.process_time() - started < 5


def test_sizes_that_no_text_could_hold_are_refused(tmp_path: Path, capsys) -> None:
    config = json.loads((CHECKPOINTS / "mixtral" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 10**12}))
    assert "wanted at most 65,536" in refusal(capsys, str(tmp_path))


# --- Stages, each read back


def test_the_text_is_read_back_as_it_is(monkeypatch, capsys) -> None:
    for chosen in ([], ["--chip", "2"], ["--layer", "1"], ["--layer", "1", "--chip", "0"]):
        text = said(capsys, MIXED, "--chips", "3", "--text", *chosen)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["read", "-"]) == 0
        assert capsys.readouterr().out == text


def test_a_spec_is_read_back_as_the_same_model(tmp_path: Path, monkeypatch, capsys) -> None:
    for name in (LLAMA, RECURRENT, str(CHECKPOINTS / "gemma2")):
        spec = said(capsys, name, "--spec")
        (tmp_path / "s.json").write_text(spec)
        expected = numbers(capsys, name, "--chips", "3")
        assert spec_from_json(json.loads(spec)["spec"]) == open_outline(name).spec
        assert (
            numbers(capsys, str(tmp_path / "s.json"), "--chips", "3")["chips"]
            == (expected["chips"])
        )
        monkeypatch.setattr("sys.stdin", io.StringIO(spec))
        assert said(capsys, "-", "--spec") == spec


def test_a_manifest_is_read_back_and_is_that_of_the_text(capsys) -> None:
    found = manifest_from_json(json.loads(said(capsys, LLAMA, "--chips", "3", "--manifest")))
    text = said(capsys, LLAMA, "--chips", "3", "--text")
    assert found.chips == 3
    assert all(f"Let {p.name} be " in text for p in found.placed)
    alone = said(capsys, LLAMA, "--chips", "3", "--manifest", "--chip", "1")
    assert {p.chip for p in manifest_from_json(json.loads(alone)).placed} == {1}


def test_the_rolled_text_has_each_chip_once(capsys) -> None:
    out = said(capsys, LLAMA, "--chips", "3", "--rolled", "--layer", "0")
    assert "For each chip c of 0 to 2:\n  Let Wq0_c{c} be a 64 by {16/16/32} tensor" in out


@pytest.mark.parametrize("name", [LLAMA, RECURRENT])
def test_kernels_are_those_of_a_loaded_model(name: str) -> None:
    decoder = load_source(open_source(name), chips=3).decoder
    step = whole_step(decoder.decode, decoder.devices.mesh, ("logits",))
    step.lower(decoder.weights, decoder.fresh(), {"tok": jnp.int32(1), "pos": jnp.int32(1)})
    asked = Asked(outline=open_outline(name), chips=3, context=decoder.context)
    found = traced(roll(asked.joint), 3, "logits")
    loaded = {t.statement: (t.path, t.declined) for t in decoder.decode.taken}
    assert {s: (t.path, t.declined) for s, t in found.taken.items()} == loaded
    for key, operand in decoder.operands.items():
        like, held = unfilled(operand, decoder.devices.mesh), decoder.weights[key]
        assert jax.tree.map(_described, like) == jax.tree.map(_described, held)


def _described(leaf) -> tuple:
    return leaf.shape, leaf.dtype, leaf.sharding


def test_kernels_say_why_a_path_declined(capsys) -> None:
    out = said(capsys, RECURRENT, "--chips", "2", "--kernels")
    lines = out.splitlines()
    assert lines[0].startswith("On 2 chips (cpu)")
    at = next(i for i, line in enumerate(lines) if " be gated delta of " in line)
    assert lines[at].startswith("xla")
    assert lines[at + 1].split(":")[0].strip() == "native"


def test_the_compiled_step_is_the_same_from_run_to_run(capsys) -> None:
    first, second = (said(capsys, LLAMA, "--chips", "2", "--hlo") for _ in range(2))
    assert first.startswith("HloModule")
    assert first == second


# --- Refusals, and a terminal


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ([LLAMA, "--chips", "0"], "'0': wanted chips from 1 to 4096, as in 3, 1-8 or 1,2,5"),
        ([LLAMA, "--chips", "5000"], "wanted chips from 1 to 4096"),
        ([LLAMA, "--chips", "3-1"], "wanted chips from 1 to 4096"),
        ([LLAMA, "--chips", "1,,2"], "wanted chips from 1 to 4096"),
        ([LLAMA, "--chips", "1-100"], "wanted at most 64 widths at once"),
        ([LLAMA, "--chips", "1,2", "--text"], "--text is of one width: found 2 in --chips"),
        ([LLAMA, "--chip", "1"], "--chip goes with --text or --manifest"),
        ([LLAMA, "--layer", "1"], "--layer goes with a stage"),
        ([LLAMA, "--json", "--text"], "leave out --text"),
        ([LLAMA, "--text", "--rolled"], "not allowed with argument"),
        ([LLAMA, "--text", "--layer", "2"], "l is 2, wanted a layer from 0 to 1"),
        ([LLAMA, "--text", "--chips", "2", "--chip", "2"], "wanted chips from 0 to 1"),
        ([LLAMA, "--ctx", "257"], "a context of 257 was asked for; this model was made for"),
        ([LLAMA, "--ctx", "0"], "wanted a number of tokens from 1"),
        ([LLAMA, "--memory", "lots"], "wanted bytes, as in 24GiB or 16GB"),
        (["no where"], "no where: is not there; wanted `demo`, a directory with config.json"),
        ([str(ROOT / "tests")], "has no config.json"),
        ([str(ROOT / "README.md")], "is neither a directory nor a GGUF"),
        ([str(CHECKPOINTS / "gpt2")], "model_type 'gpt2' is not supported"),
        ([str(GOLDEN.parent / "refused_ple.json")], "a per-layer n-gram embedding"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(arguments: list[str], answer: str, capsys) -> None:
    assert answer in refusal(capsys, *arguments)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}', '{"d": 1, "vocab": 2, "layers": 3}'])
def test_json_that_is_no_model_is_refused_by_its_name(text: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "m.json").write_text(text)
    assert "m.json: " in refusal(capsys, str(tmp_path / "m.json"))


def test_the_defaults_are_those_of_a_running_model(capsys) -> None:
    assert (MOST, CONTEXT) == (launch.MOST, ENGINE_CONTEXT)
    assert numbers(capsys, str(GOLDEN), "--chips", "1")["asked"]["context"] == CONTEXT


def test_a_context_of_one_is_answered_for_the_two_rows_that_its_caches_have(capsys) -> None:
    one = numbers(capsys, LLAMA, "--chips", "1", "--ctx", "1")
    two = numbers(capsys, LLAMA, "--chips", "1", "--ctx", "2")
    assert one["chips"] == two["chips"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 << 30), ("16 GB", 16 * 10**9), ("1.5kib", 1536), ("7", 7), ("8B", 8)],
)
def test_sizes_are_read_as_they_are_written(text: str, expected: int) -> None:
    assert inspect_command.size(text) == expected


def test_numbers_start_no_device_and_a_closed_pipe_is_no_error() -> None:
    code = (
        "import sys; from tp.cli import main; status = main(sys.argv[1:]);"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized();"
        "sys.exit(status)"
    )
    command = shlex.join([sys.executable, "-c", code, "inspect", LLAMA, "--chips", "900", "--json"])
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "{", "")


def test_a_full_disk_is_told() -> None:
    command = [sys.executable, "-m", "tp.cli", "inspect", LLAMA, "--json"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert "No space left on device" in run.stderr
