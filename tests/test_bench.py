"""Benchmarks: what is counted, in which order, what is said of it; of speeds only their shape."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kernels.q8 import dequantise, quantise
from tests.gguf_of import gguf_of
from tests.making_gguf import make_gguf, normal
from tp.bench.contender import BenchError, start
from tp.bench.facts import facts_of
from tp.bench.machine import Watch, disturbances, pinned
from tp.bench.measure import Asked, Measuring
from tp.bench.orders import random_ids
from tp.bench.q8_file import q8_file
from tp.bench.reads import step_bytes, weight_bytes
from tp.bench.report import page, shown
from tp.bench.rivals import why_not
from tp.bench.turns import Thing, in_turns, joined, times
from tp.cli import main
from tp.decoder import Decoder
from tp.launch import devices
from tp.source import open_source

TESTS = Path(__file__).parent
CHECKPOINTS = TESTS / "checkpoints"
LLAMA = str(CHECKPOINTS / "llama")


# --- What a step reads


def decoder(family: str) -> Decoder:
    source = open_source(str(CHECKPOINTS / family))
    return Decoder(model=source.model, devices=devices(1), context=64)


def read_at(family: str, position: int) -> int:
    made = decoder(family)
    operands = {**made.operands, **made.decode.states}
    return step_bytes(made.model, operands, position, item_bytes=2)


# A layer of the tiny llama: queries and outputs, keys and values, the feed-forward.
LLAMA_LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 80
NORMS = 5 * 64 * 4


def test_weights_are_counted_as_q8_and_norms_as_floats() -> None:
    made = decoder("llama")
    matrices = 2 * 170 * 64 + 2 * LLAMA_LAYER
    assert weight_bytes(made.model, made.operands) == matrices * 17 // 16 + NORMS


def test_a_tied_head_is_counted_once() -> None:
    made = decoder("gemma3_text")
    assert made.model.tied
    head = made.operands["Wout"].whole
    untied = sum(
        np.prod(o.whole) * (17 / 16 if o.quantised else 4)
        for o in made.operands.values()
        if o.role == "weight"
    )
    assert weight_bytes(made.model, made.operands) == untied - np.prod(head) * 17 / 16


def test_a_step_reads_a_row_of_the_embedding_and_the_positions_it_sees() -> None:
    matrices = 64 + 170 * 64 + 2 * LLAMA_LAYER
    caches = 2 * 2 * 32 * 2  # layers, keys and values, columns, bytes
    assert read_at("llama", 10) == matrices * 17 // 16 + NORMS + 10 * caches


def test_a_step_reads_no_further_back_than_a_window() -> None:
    config = json.loads((CHECKPOINTS / "mistral" / "config.json").read_text())
    window, row = config["sliding_window"], read_at("mistral", 2) - read_at("mistral", 1)
    assert row > 0
    assert read_at("mistral", window) - read_at("mistral", 1) == (window - 1) * row
    assert read_at("mistral", window + 9) == read_at("mistral", window)


def test_a_step_reads_the_experts_it_chooses() -> None:
    experts = 2 * 4 * 3 * 64 * 48 * 17 // 16  # layers, experts
    made = decoder("mixtral")
    embedding = 159 * 64 * 17 // 16
    caches = 2 * 2 * 32 * 2
    all_read = weight_bytes(made.model, made.operands) - embedding + caches
    assert read_at("mixtral", 1) == all_read - experts // 2


# --- Turns


def test_things_are_measured_in_turns_and_the_first_turn_is_not_counted() -> None:
    calls: list[str] = []

    def thing(who: str) -> Thing:
        def measure() -> dict[str, float]:
            calls.append(who)
            return {"speed": len(calls)}

        return Thing(who=who, measure=measure, workers=(who,))

    found = in_turns([thing("a"), thing("b")], 2, Watch())
    assert calls == ["a", "b"] * 3
    assert found == {"a": {"speed": [3, 5]}, "b": {"speed": [4, 6]}}
    assert len(in_turns([thing("a")], 2, Watch(), warm=False)["a"]["speed"]) == 2


def test_speeds_are_compared_turn_by_turn() -> None:
    ours = {"x_per_second": [10.0, 100.0, 30.0], "first_token_seconds": [1.0, 1.0, 1.0]}
    theirs = {"x_per_second": [10.0, 20.0, 10.0], "first_token_seconds": [1.0, 1.0, 1.0]}
    assert times(ours, theirs) == {"x_per_second": 3.0}


def test_parts_are_joined_by_who_was_measured() -> None:
    assert joined({"a": {"x": [1.0]}}, {"a": {"y": [2.0]}, "b": {"x": [3.0]}}) == {
        "a": {"x": [1.0], "y": [2.0]},
        "b": {"x": [3.0]},
    }


def test_prompts_are_the_same_for_all_and_differ_by_seed() -> None:
    assert random_ids(9, 50, seed=1) == random_ids(9, 50, seed=1)
    assert random_ids(9, 50, seed=1) != random_ids(9, 50, seed=2)
    assert all(0 <= i < 50 for i in random_ids(200, 50))


# --- The machine


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(BenchError, match="--threads 9999: wanted at most"), pinned(9999):
        pass


def test_threads_are_cores_while_it_lasts() -> None:
    import os

    before = os.sched_getaffinity(0)
    with pinned(1) as threads:
        assert threads == len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_a_contender_that_works_out_of_turn_is_noticed() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = Watch(pids={"busy": busy.pid})
        with watch.turn_of(["another"]):
            while sum(_seconds(busy.pid)) < 0.3:
                pass
        with watch.turn_of(["busy"]):
            pass
    finally:
        busy.kill()
        busy.wait()
    assert watch.about()["waiting_contenders"] > 0.02
    assert "used" in " ".join(disturbances(watch.about()))


def _seconds(pid: int) -> list[float]:
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(n) / 100 for n in numbers[11:13]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"other_work": 0.2}, ["other work took 20% of the cores"]),
        ({"steal": 0.3}, ["host took 30%"]),
        ({"waiting_contenders": 0.1}, ["contenders used 10%"]),
        ({"other_work": None}, ["not known"]),
    ],
)
def test_what_disturbed_is_said(changes: dict[str, Any], said: list[str]) -> None:
    quiet = {"other_work": 0.01, "steal": 0.0, "waiting_contenders": 0.0}
    lines = disturbances(quiet | changes)
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


# --- Other programs


def test_a_file_of_other_types_is_written_as_q8_0(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_q.weight": "Q4_0", "blk.0.ffn_up.weight": "F16", "output.weight": "Q8_0"}
    tensors = {n: (normal(4, 64, seed=i), kind) for i, (n, kind) in enumerate(kinds.items())}
    kept = {
        "blk.0.attn_norm.weight": (normal(64, seed=7), "F32"),
        "blk.0.odd.weight": (normal(4, 50, seed=8), "F32"),
    }
    keys = {"llama.block_count": 1, "words": ["a", "Ġé"], "general.name": "Tiny"}
    path = make_gguf(tmp_path / "m.gguf", {**tensors, **kept}, keys)
    written = gguf.GGUFReader(q8_file(path, tmp_path / "cache"))
    assert {t.name: t.tensor_type.name for t in written.tensors} == {
        **dict.fromkeys(kinds, "Q8_0"),
        **dict.fromkeys(kept, "F32"),
    }
    for before, after in zip(gguf.GGUFReader(path).tensors, written.tensors, strict=True):
        wanted = gguf.dequantize(before.data, before.tensor_type)
        if before.name in kinds and before.tensor_type.name != "Q8_0":
            wanted = dequantise(quantise(wanted))
        found = gguf.dequantize(after.data, after.tensor_type)
        np.testing.assert_array_equal(found, wanted, err_msg=before.name)
    assert written.fields["words"].contents() == ["a", "Ġé"]
    assert written.fields["llama.block_count"].contents() == 1


def test_a_file_of_q8_0_is_taken_as_it_is(tmp_path: Path) -> None:
    tensors = {"output.weight": (normal(4, 64), "Q8_0"), "output_norm.weight": (normal(9), "F32")}
    path = make_gguf(tmp_path / "m.gguf", tensors)
    assert q8_file(path, tmp_path / "cache") == path
    assert not (tmp_path / "cache").exists()


def test_a_rival_that_is_not_here_says_what_would_do(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    assert why_not("llama.cpp", str(bare), "m.gguf") == (
        f"llama.cpp: {bare} has no xllamacpp; pip install xllamacpp, or --llama-python with "
        "another Python that has it, would do"
    )
    assert why_not("transformers", "/no/python", "m.gguf") == (
        "transformers: /no/python: No such file or directory; wanted a Python"
    )
    assert "reads .gguf files" in (why_not("llama.cpp", sys.executable, LLAMA) or "")


def test_a_contender_that_ends_says_why() -> None:
    with pytest.raises(BenchError, match=r"^x: ended with status 1: .*No module named"):
        start("x", "nothing", {})


# --- All together


@pytest.fixture(scope="module")
def rivals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has stand-ins for other programs, with clocks that are set."""
    python = tmp_path_factory.mktemp("rivals") / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={TESTS}/rivals exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def facts(rivals: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All parts of a measurement of a tiny model on two chips."""
    folder = tmp_path_factory.mktemp("bench")
    model = gguf_of(CHECKPOINTS / "llama", folder / "tiny.gguf")
    measuring = Measuring(
        asked=Asked(
            model=str(model),
            chips=(2,),
            threads=1,
            context=64,
            prompt_tokens=9,
            tokens=4,
            repeats=2,
            batch=3,
            position=20,
            cold=True,
            check=True,
            rivals={"llama.cpp": rivals, "transformers": rivals},
            cache=folder,
        ),
        say=lambda text: None,
    )
    with pinned(1):
        measuring.all()
    return json.loads(json.dumps(facts_of(measuring)))


def test_the_json_has_what_was_asked_for(facts: dict[str, Any]) -> None:
    numbers = (
        *("decode_tokens_per_second", "prefill_tokens_per_second", "memory_read_gb_per_second"),
        *("memory_share", "first_token_seconds", "first_token_compiling_seconds"),
        *("peak_host_bytes", "batch_decode_tokens_per_second", "batch_times_single"),
        *("position_decode_tokens_per_second", "position_memory_share"),
    )
    assert all(facts[name] > 0 for name in numbers)
    assert 0 <= facts["prefill_error"] < 1e-2
    (width,) = facts["widths"]
    assert width["chips"] == facts["chips"] == 2
    assert all(width[name] == facts[name] for name in numbers)
    least, largest = facts["spread"]["decode_tokens_per_second"]
    assert least <= facts["decode_tokens_per_second"] <= largest
    assert set(facts["against"]) == {
        "llama.cpp",
        "transformers float32",
        "transformers bfloat16",
    }


def test_a_rival_is_timed_by_its_own_clock(facts: dict[str, Any]) -> None:
    llama = facts["against"]["llama.cpp"]
    assert llama["version"] == "xllamacpp 0.0"
    assert llama["prefill_tokens_per_second"] == pytest.approx(500)
    assert llama["decode_tokens_per_second"] == pytest.approx(200)
    assert llama["position_decode_tokens_per_second"] == pytest.approx(200)
    ours = facts["prefill_tokens_per_second"]
    assert facts["times"]["llama.cpp"]["prefill_tokens_per_second"] == pytest.approx(ours / 500)


def test_the_table_has_a_line_for_each_thing_and_a_column_for_each_program(
    facts: dict[str, Any],
) -> None:
    lines = shown(facts).splitlines()
    assert re.split(r"  +", lines[1].strip()) == ["2 chips", *facts["against"]]
    starts = (
        *("reading 9, tokens/s", "  times llama.cpp", "  largest error / deviation"),
        *("making 4, tokens/s", "  memory reads, GB/s", "  share of that"),
        *("a batch of 3, tokens/s", "  times one sequence", "at position 20, tokens/s"),
        *("first token of a command, s", "  nothing compiled, s", "peak memory", "load average"),
    )
    assert all(any(line.startswith(start) for line in lines) for start in starts)
    assert f"| peak memory | {facts['peak_host_bytes'] / 1e6:.1f} MB |" in page(facts)


def test_what_was_not_measured_has_no_line(facts: dict[str, Any]) -> None:
    less = {k: v for k, v in facts["widths"][0].items() if not k.startswith("first_token")}
    text = shown(facts | {"widths": [less], "against": {}, "batch": None, "position": None})
    assert "making 4" in text
    assert not re.search("batch|position|first token|llama", text)


def test_a_context_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", LLAMA, "--ctx", "8", "--prompt-tokens", "9", "--repeats", "1"]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "1 chip: 9 tokens do not fit a context of 8" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "vllm"], "vllm: wanted some of llama.cpp, transformers"),
        (["--repeats", "0"], "'0': wanted a number of repeats from 1"),
        (["--threads", "9999"], "--threads 9999: wanted at most"),
        (["--against", "llama.cpp", "--llama-python", "/no/python"], "/no/python: No such file"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "nowhere.gguf", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]
