"""A text of two rows or sequences, rolled and stretched, is the text of any other number."""

import pytest

from tests.tiny import SPECS, random_spec, written
from tp.roll import roll
from tp.stretch import stretch
from tp.unroll import unroll

RANDOM = {f"random{seed}": random_spec(seed) for seed in range(200, 206)}
ALL = {**SPECS, **RANDOM}
TOKENS = (3, 8, 1, 6, 5, 2, 4)
POSITIONS = (5, 1, 9, 2, 2, 7, 12)

# What of a kind says how many rows there are, for a number of them.
KINDS = {
    "prefill": lambda n: {"toks": TOKENS[:n], "pos0": 3},
    "prefill_logits": lambda n: {"toks": TOKENS[:n], "pos0": 3},
    "decode_batch": lambda n: {
        "seqs": [list(pair) for pair in zip(TOKENS[:n], POSITIONS, strict=False)]
    },
    "decode_batch_embed": lambda n: {"toks": TOKENS[:n]},
    "stacked_layer": lambda n: {"poss": POSITIONS[:n], "rows": "per_sequence"},
    "prefill_head": lambda n: {"chunk": n},
    "prefill_logits_head": lambda n: {"chunk": n},
    "decode_batch_head": lambda n: {"bsz": n},
}


def stretched(two, rows):
    found = stretch(roll(two), rows, tokens=TOKENS[:rows], positions=POSITIONS[:rows])
    return unroll(found)


def same_text(spec, kind, args, **split):
    two = written(spec, kind, **args(2), **split)
    for rows in (1, 3, 7):
        wanted = written(spec, kind, **args(rows), **split)
        assert stretched(two, rows) == wanted.statements


@pytest.mark.parametrize("name", ALL)
def test_a_text_of_two_stretches_to_any_number(name):
    for kind, args in KINDS.items():
        same_text(ALL[name], kind, args)


@pytest.mark.parametrize("name", ALL)
def test_a_text_of_two_stretches_on_any_number_of_chips(name):
    for number, (kind, args) in enumerate(KINDS.items()):
        split = {"tp": (1, 2, 3, 4, 7)[number % 5], "vocabulary": number % 2 == 0, "align": 4}
        same_text(ALL[name], f"tp_{kind}", args, **split)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_one_sequence_stretch_in_a_layer_too(name):
    def shared(rows):
        return {"poss": list(range(3, 3 + rows)), "rows": "shared"}

    same_text(ALL[name], "stacked_layer", shared)
    same_text(ALL[name], "tp_stacked_layer", shared, tp=3)


def test_without_numbers_the_first_authored_ones_are_repeated():
    two = written(SPECS["attention-silu"], "decode_batch", seqs=[[4, 9], [5, 2]])
    wanted = written(SPECS["attention-silu"], "decode_batch", seqs=[[4, 9]] * 5)
    assert unroll(stretch(roll(two), 5)) == wanted.statements


def test_a_text_of_one_row_does_not_say_what_runs():
    for kind, args in (("prefill", {"toks": [3], "pos0": 1}), ("decode_step", {})):
        with pytest.raises(ValueError, match="a text of 1 rows does not say what runs with them"):
            stretch(roll(written(SPECS["attention-silu"], kind, **args)), 4)


def test_many_rows_take_no_longer_text_than_two():
    two = written(SPECS["sinks-sigmoid"], "tp_prefill", toks=[1, 2], pos0=1, ctx=600, tp=5)
    rolled = roll(two)
    assert len(stretch(rolled, 512).items) == len(rolled.items)
