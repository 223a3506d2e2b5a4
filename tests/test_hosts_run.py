"""Checkpoints run by several processes, each with chips of its own, as they run by one."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.hosts_worker import CONTEXT, DRAWN, TALKING, talk
from tests.several import ended, python, several
from tp.door import free_port
from tp.engine import load

FOLDER = Path(__file__).parent / "checkpoints"
# How many chips each process has, and what is run on them: no width divides the sizes.
RUNS = {
    (4, 1): ("llama", "qwen3_next"),
    (1, 3, 2): ("mixtral", "deepseek_v2_lite"),
}
CASES = [(chips, name) for chips, names in RUNS.items() for name in names]
cases = pytest.mark.parametrize(("chips", "name"), CASES, ids=lambda part: str(part))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process of each run said, by chips and checkpoint."""
    told = {}
    for chips, names in RUNS.items():
        out = tmp_path_factory.mktemp("said")
        port, count = str(free_port()), str(len(chips))
        commands = [
            python("-m", "tests.hosts_worker", port, count, str(i), str(n), str(out), *names)
            for i, n in enumerate(chips)
        ]
        with several(commands) as processes:
            for process in processes:
                status, _, err = ended(process)
                assert (status, err) == (0, "")
        for name in names:
            parts = [out / f"{name}.{process}.json" for process in range(len(chips))]
            told[chips, name] = [json.loads(part.read_text()) for part in parts]
    return told


@cache
def expected(name):
    with np.load(FOLDER / name / "expected.npz") as file:
        return dict(file)


@cache
def alone(name, chips):
    """The same checkpoint on as many chips of one process."""
    engine = load(str(FOLDER / name), chips=chips, context=CONTEXT)
    engine.decoder.chunks = (16,)
    return engine


@cases
def test_logits_and_greedy_tokens_are_those_of_transformers(found, chips, name):
    wanted = expected(name)
    for said in found[chips, name]:
        limit = 1e-3 * wanted["logits_0"].std()
        np.testing.assert_allclose(said["logits"], wanted["logits_0"][-1], rtol=0, atol=limit)
        assert said["greedy"] == wanted["greedy_0"].tolist()


@pytest.mark.parametrize(("chips", "name"), [case for case in CASES if case[1] in TALKING])
def test_every_process_draws_the_tokens_that_one_would(found, chips, name):
    ids, greedy = (expected(name)[f"{word}_0"].tolist() for word in ("input_ids", "greedy"))
    drawn = talk(alone(name, sum(chips)), ids, len(greedy), DRAWN)
    assert drawn != greedy
    assert [said["drawn"] for said in found[chips, name]] == [drawn] * len(chips)


@cases
def test_a_process_reads_and_holds_what_its_chips_need(found, chips, name):
    one = alone(name, sum(chips)).receipt
    ours = [(held.bytes_read, held.bytes_held) for held in one.chips]
    first = 0
    for count, said in zip(chips, found[chips, name], strict=True):
        mine = range(first, first + count)
        assert said["receipt"]["chips"] == list(mine)
        read = sum(ours[chip][0] for chip in mine)
        assert said["receipt"]["bytes_read"] == read + one.shared_bytes_read
        assert [(c["bytes_read"], c["bytes_held"]) for c in said["chips"]] == ours
        first += count
