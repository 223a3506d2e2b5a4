"""Pitfalls of caches: positions of a batch, windows read in pieces, words that must not change."""

import re
from functools import cache

import numpy as np
import pytest

from tests.making_checkpoints import FOLDER, close, decoder, ids, keys, logits, tensors
from tests.oracle_models import forward

LENGTHS = (3, 9, 17)
STEPS = 20
PROMPTS = [ids(160, length + STEPS, seed=length) for length in LENGTHS]


@cache
def wanted(number):
    return forward(keys("smollm2"), tensors("smollm2"), PROMPTS[number])


@pytest.fixture(scope="module")
def one():
    return decoder(FOLDER / "smollm2", 3)


def run(one, slots):
    """The logits of some of the prompts side by side after their beginnings, slot by slot."""
    batch = one.fresh_batch(len(slots))
    for slot, number in enumerate(slots):
        start = one.read(one.fresh(), PROMPTS[number][: LENGTHS[number]])[1]
        batch = one.insert(batch, slot, start)
    rows = []
    for step in range(STEPS):
        at = [LENGTHS[number] + step for number in slots]
        tokens = [PROMPTS[number][n] for number, n in zip(slots, at, strict=True)]
        found, batch = one.step_batch(batch, tokens, [n + 1 for n in at])
        rows.append(np.asarray(found))
    return np.stack(rows, axis=1)


# --- K2 and K6


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 1, 0), (1, 1, 2), (0, 0, 0)])
def test_a_row_is_its_solo_run_whoever_its_neighbours_are(one, slots):
    found = run(one, slots)
    for slot, number in enumerate(slots):
        alone = wanted(number)[LENGTHS[number] :]
        close(found[slot], alone)
        # The greedy word, too: in float32 none hangs on rounding here.
        np.testing.assert_array_equal(found[slot].argmax(axis=1), alone.argmax(axis=1))


def test_the_likeliest_word_is_the_same_at_every_width_and_way(one):
    prompt = PROMPTS[2]
    words = wanted(2).argmax(axis=1)
    found = logits(FOLDER / "smollm2", 4, prompt[:31])
    np.testing.assert_array_equal(found.argmax(axis=1), words[:31])
    states, made = one.fresh(), []
    for position, token in enumerate(prompt, start=1):
        row, states = one.step(states, token, position)
        made.append(int(np.asarray(row).argmax()))
    assert made == words.tolist()


# --- K4: a window read in pieces


@pytest.fixture(scope="module")
def windowed():
    return decoder(FOLDER / "mistral", 3)


@cache
def windowed_wanted():
    return forward(keys("mistral"), tensors("mistral"), ids(160, 40))


@pytest.mark.parametrize("size", [1, 4, 8, 12, 32])
@pytest.mark.parametrize("length", [8, 9, 20])
def test_a_window_of_eight_is_one_window_in_pieces_of_any_size(windowed, length, size):
    prompt, states, found = ids(160, 40), windowed.fresh(), []
    for at in range(0, length, size):
        rows, states = windowed.read(states, prompt[at : min(at + size, length)], at + 1)
        found.extend(rows)
    for at in range(length, length + 20):
        row, states = windowed.step(states, prompt[at], at + 1)
        found.append(np.asarray(row)[0])
    close(found, windowed_wanted()[: length + 20])


# --- The page that says which test holds what


def test_every_test_that_the_page_of_pitfalls_names_is_there():
    page = (FOLDER.parent.parent / "docs" / "PITFALLS.md").read_text()
    named = re.findall(r"`(test_\w+)::(test_\w+)`", page)
    assert len(re.findall(r"^\| [A-Z]\d+ \|", page, re.MULTILINE)) == 37
    for file, test in named:
        assert f"def {test}(" in (FOLDER.parent / f"{file}.py").read_text(), f"{file}::{test}"
