"""Widths are compared with one chip and with another program, by the numbers of their logits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tp.check import transformers_model
from tp.check.transformers_model import OtherError, Transformers, check_there, run_transformers
from tp.check.wholes import whole_operands
from tp.check.widths import Check, apart
from tp.source import open_source

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


# --- Two sets of logits

WANTED = logits([0, 1, 2, 3], [3, 2, 1, 0], [0, 4, 0, 0])  # their deviation is 1.374


def test_the_largest_difference_is_found_and_where_it_is():
    found = WANTED + logits([0, 0, 0, 0], [0, 0, 0.1, 0], [0, -0.5, 0, 0])
    seen = apart(found, WANTED, 0.05)
    assert (seen.largest, seen.position, seen.token) == (0.5, 3, 1)
    assert seen.over == pytest.approx(0.5 / WANTED.std())
    assert (seen.first, seen.alike, seen.of) == (2, 3, 3)


def test_what_is_tolerated_is_no_difference():
    seen = apart(WANTED + logits([0, 0, 0, 0], [0, 0, 2.5, 0], [0, 0, 0, 0]), WANTED, 2.0)
    assert (seen.first, seen.alike) == (None, 2)


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_what_is_no_number_is_infinitely_far(strange):
    found = WANTED.copy()
    found[1, 2] = strange
    seen = apart(found, WANTED, 1e9)
    assert (seen.over, seen.position, seen.token, seen.first) == (np.inf, 2, 2, 2)


# --- Another program

SMOLLM = open_source(str(CHECKPOINTS / "smollm2"))
with np.load(CHECKPOINTS / "smollm2" / "expected.npz") as file:
    PROMPT, BY_TRANSFORMERS = file["input_ids_0"].tolist(), file["logits_0"]


@dataclass
class Other:
    """Another program, and what it is asked."""

    logits: list[np.ndarray]
    name: str = "another"
    asked: list[Any] = field(default_factory=list)

    def first_layer(self, decoder, prompt, limit):
        self.asked.append((decoder.devices.chips, prompt, limit))
        return 1


def compared(*others: np.ndarray, tolerance: float = 1e-3):
    other = Other([*others])
    checking = Check(
        source=SMOLLM,
        prompts=[PROMPT] * len(others),
        widths=(3,),
        context=32,
        tolerance=tolerance,
        other=other,
    )
    return checking.report(), other


def test_every_width_is_compared_with_another_program():
    report, other = compared(BY_TRANSFORMERS)
    rows = [(row.chips, row.way, row.against) for row in report.rows]
    of_one = [(1, "prefill", "another"), (1, "steps", "prefill"), (1, "steps", "another")]
    of_three = [(3, way, than) for way in ("prefill", "steps") for than in ("1 chip", "another")]
    assert rows == [*of_one, *of_three]
    assert report.holds
    assert (report.bisected, other.asked) == ((), [])


def test_what_every_width_has_otherwise_is_looked_for_on_one_chip():
    report, other = compared(BY_TRANSFORMERS, BY_TRANSFORMERS + np.eye(*BY_TRANSFORMERS.shape))
    assert not report.holds
    (found,) = report.bisected
    assert (found.chips, found.row.against, found.row.worst) == (1, "another", 1)
    assert (found.fault, found.layer) == (None, 1)
    assert found.nearest is not None
    assert found.nearest.off < 1e-3
    assert other.asked == [(1, 1, 1e-3)]


# --- Transformers


def test_a_python_without_transformers_is_told_of(monkeypatch):
    monkeypatch.setattr(transformers_model, "PACKAGES", ("jax", "no_such_package"))
    with pytest.raises(OtherError, match="this Python has no no_such_package; pip install"):
        check_there(SMOLLM)


def test_a_copy_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(transformers_model, "PACKAGES", ("jax",))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OtherError, match=r"has 1\.0 kB free, and a float32 copy"):
        check_there(SMOLLM)


def test_transformers_says_what_it_said_before():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made = run_transformers(SMOLLM, whole_operands(SMOLLM, 32), [PROMPT])
    np.testing.assert_allclose(made.logits[0], BY_TRANSFORMERS, rtol=0, atol=1e-4)


def test_the_first_layer_with_another_input_is_found():
    from tp.engine import load_source

    decoder = load_source(SMOLLM, chips=1, context=32).decoder
    streams = transformers_model._streams(decoder, PROMPT)
    assert [stream.shape for stream in streams] == [(len(PROMPT), 72)] * 2
    for layer in (0, 1):
        other = [stream + np.float32(number == layer) for number, stream in enumerate(streams)]
        made = Transformers(name="another", logits=[], streams=[other], prompts=[PROMPT])
        assert made.first_layer(decoder, 0, 1e-3) == layer
    same = Transformers(name="another", logits=[], streams=[streams], prompts=[PROMPT])
    assert same.first_layer(decoder, 0, 1e-3) is None
