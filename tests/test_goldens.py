"""Every golden case comes out the same: text, tables and manifest, messages of refusals."""

import difflib
import json
from functools import cache
from pathlib import Path

import pytest

from author.english import read_program
from author.kinds import author, run_case
from author.spec import spec_from_json, spec_to_json

FOLDER = Path(__file__).parent / "goldens"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))

# At width 1 a fold has one partial. The goldens leave `out` unbound there, so that what reads it
# reads nothing; here a statement binds it. The text without those statements is the golden text.
LONE_FOLDS = {
    ("gated_delta_dense", 14),
    ("gated_delta_sigmoid_gate", 20),
    ("llama_gqa", 23),
    ("llama_gqa", 28),
    ("mha", 16),
    ("mqa", 10),
    ("qk_norm", 16),
    ("softcaps_and_post_norms", 20),
    ("uneven_heads_9_3", 10),
    ("value_width", 10),
}


@cache
def golden(stem):
    return json.loads((FOLDER / f"{stem}.json").read_text())


def spec_of(stem):
    return spec_from_json(golden(stem)["spec"])


def cases(field="kind"):
    """Every case that has a field, by file and number."""
    return [
        pytest.param(stem, number, id=f"{stem}-{number}-{case['kind']}")
        for stem in FILES
        for number, case in enumerate(golden(stem)["cases"])
        if field in case
    ]


def without_lone_folds(text):
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(" across 1 chips.\n"))


def difference(found, wanted):
    lines = difflib.unified_diff(
        wanted.splitlines(), found.splitlines(), "golden", "authored", lineterm="", n=2
    )
    return "\n".join(lines)


@pytest.mark.parametrize("stem", FILES)
def test_a_spec_reads_and_writes_back(stem):
    assert spec_to_json(spec_of(stem)) == golden(stem)["spec"]


@pytest.mark.parametrize(("stem", "number"), cases())
def test_a_case_comes_out_as_in_the_golden(stem, number):
    wanted = golden(stem)["cases"][number]
    found = run_case(spec_of(stem), wanted["kind"], wanted["args"])
    if (stem, number) in LONE_FOLDS:
        text = without_lone_folds(found["text"])
        assert text != found["text"]
        found = found | {"text": text}
    if "text" in wanted and "text" in found:
        assert found["text"] == wanted["text"], difference(found["text"], wanted["text"])
    assert found == wanted


@pytest.mark.parametrize(("stem", "number"), cases("text"))
def test_an_authored_program_reads_back_as_its_statements(stem, number):
    case = golden(stem)["cases"][number]
    program = author(spec_of(stem), case["kind"], case["args"])
    assert read_program(program.text) == program.statements


def test_there_are_goldens_of_every_kind_that_the_reference_has():
    kinds = {case["kind"] for stem in FILES for case in golden(stem)["cases"]}
    assert len(kinds) == 19
    assert sum(len(golden(stem)["cases"]) for stem in FILES) == 607
