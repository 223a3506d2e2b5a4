"""Small checkpoints give the logits and the greedy tokens of transformers, at every width."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tp.engine import Conversation, load

FOLDER = Path(__file__).parent / "checkpoints"
FAMILIES = ("llama", "smollm2", "mistral", "qwen3")
# Widths that divide nothing but by chance; the families together run on all of them.
WIDTHS = {"llama": (5, 1), "smollm2": (2, 7), "mistral": (3, 4), "qwen3": (5, 3)}
BOTH = [(family, chips) for family in FAMILIES for chips in WIDTHS[family]]
FIRST = [(family, WIDTHS[family][0]) for family in FAMILIES]
SECOND = [(family, WIDTHS[family][1]) for family in FAMILIES]
CONTEXT = 64


@cache
def expected(family):
    """What transformers gave, in float32, for two sequences of ids."""
    with np.load(FOLDER / family / "expected.npz") as file:
        return dict(file)


@cache
def engine(family, chips):
    made = load(str(FOLDER / family), chips=chips, context=CONTEXT)
    made.decoder.chunks = (16,)
    return made


def close(found, wanted):
    """Within a thousandth of how far logits differ from one another."""
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-3 * wanted.std())


@pytest.mark.parametrize(("family", "chips"), BOTH)
def test_a_prompt_has_the_logits_of_transformers(family, chips):
    wanted = expected(family)
    for number in (0, 1):
        ids = wanted[f"input_ids_{number}"].tolist()
        close(engine(family, chips).logits(ids), wanted[f"logits_{number}"])


@pytest.mark.parametrize(("family", "chips"), SECOND)
def test_one_token_after_another_has_them_too(family, chips):
    decoder, wanted = engine(family, chips).decoder, expected(family)
    states, rows = decoder.fresh(), []
    for position, token in enumerate(wanted["input_ids_1"].tolist(), start=1):
        logits, states = decoder.step(states, token, position)
        rows.append(np.asarray(logits)[0])
    close(rows, wanted["logits_1"])


@pytest.mark.parametrize(("family", "chips"), SECOND)
def test_sequences_of_unequal_length_share_a_batch(family, chips):
    decoder, wanted = engine(family, chips).decoder, expected(family)
    ids = [wanted[f"input_ids_{number}"].tolist() for number in (0, 1)]
    starts, batch = [2, len(ids[1]) - 4], decoder.fresh_batch(2)
    for slot, start in enumerate(starts):
        states = decoder.fresh()
        for position in range(start):
            _, states = decoder.step(states, ids[slot][position], position + 1)
        batch = decoder.insert(batch, slot, states)
    for step in range(4):
        at = [start + step for start in starts]
        tokens = [ids[slot][n] for slot, n in enumerate(at)]
        logits, batch = decoder.step_batch(batch, tokens, [n + 1 for n in at])
        for slot, n in enumerate(at):
            close(np.asarray(logits)[slot], wanted[f"logits_{slot}"][n])


@pytest.mark.parametrize(("family", "chips"), FIRST)
def test_greedy_tokens_are_those_of_transformers(family, chips):
    wanted = expected(family)
    for number in (0, 1):
        # How sure transformers was of each token: more than rounding can sway.
        assert wanted[f"greedy_margin_{number}"].min() > 1e-3 * wanted["logits_0"].std()
        ids, greedy = (wanted[f"{word}_{number}"].tolist() for word in ("input_ids", "greedy"))
        talk = Conversation(engine=engine(family, chips))
        assert list(talk.tokens(ids, max_tokens=len(greedy))) == greedy
