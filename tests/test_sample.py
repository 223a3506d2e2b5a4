"""A token is chosen as the parameters say, and alike at every width."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from author.names import Name
from tests.tiny import decoder, kept, layer, model, outcome, written
from tp.sample import Sampling, choose, likeliest

# Logits whose softmax is known: probabilities in a mixed order.
CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = np.log(CHANCES).astype(np.float32)[None]
DRAWS = 4000


def drawn(logits, sampling, draws=DRAWS):
    """Tokens at as many positions."""
    tokens = at_every_position(jnp.asarray(logits), sampling.numbers(), greedy=sampling.greedy)
    return np.asarray(tokens)[:draws]


@partial(jax.jit, static_argnames="greedy")
def at_every_position(logits, numbers, *, greedy):
    pick = jax.vmap(lambda at: choose(logits, at, numbers, greedy=greedy))
    return pick(jnp.arange(1, DRAWS + 1, dtype=jnp.int32))


def same_shares(tokens, wanted):
    """How often each token comes, within five standard deviations of what is wanted."""
    wanted = np.asarray(wanted, float)
    found = np.bincount(tokens, minlength=len(wanted)) / len(tokens)
    assert len(found) == len(wanted)
    assert (found[wanted == 0] == 0).all()
    bound = 5 * np.sqrt(wanted * (1 - wanted) / len(tokens))
    assert (np.abs(found - wanted) <= bound).all(), (found, wanted)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"temperature": 1.0}, CHANCES),
        # Twice the temperature: square roots; half: squares.
        ({"temperature": 2.0}, CHANCES**0.5 / (CHANCES**0.5).sum()),
        ({"temperature": 0.5}, CHANCES**2 / (CHANCES**2).sum()),
        ({"temperature": 1.0, "top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"temperature": 1.0, "top_k": 99}, CHANCES),
        # 0.4 and 0.25 reach 0.6 together; the 0.2 after them is not needed.
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1.0, "top_p": 0.66}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # Of the two that top-k keeps, 0.4 / 0.65 is 0.615 already.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.61}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(how, wanted):
    same_shares(drawn(LOGITS, Sampling(**how, seed=3)), wanted)


def test_the_first_of_equals_is_taken_by_greed_and_by_top_k():
    level = np.zeros((1, 6), np.float32)
    assert set(drawn(level, Sampling(), 5)) == {0}
    assert set(drawn(level, Sampling(temperature=1.0, top_k=2), 200)) == {0, 1}


def test_what_is_not_a_number_is_found_among_others():
    rows = np.array([[1, np.nan, 3, 0], [1, 5, 5, 0], [np.nan] * 4], np.float32)
    assert likeliest(jnp.asarray(rows)).tolist() == [1, 1, 0]


def test_top_p_keeps_no_more_tokens_than_reach_it_among_equals():
    level = np.zeros((1, 4), np.float32)
    tokens = drawn(level, Sampling(temperature=1.0, top_p=0.5), 400)
    same_shares(tokens, [0.5, 0.5, 0, 0])


def test_a_draw_depends_on_seed_and_position_alone():
    one, again, other = (drawn(LOGITS, Sampling(temperature=1.0, seed=s), 64) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert len(set(one.tolist())) > 1


def test_a_seed_may_be_any_integer():
    for seed in (-1, 1 << 40):
        assert drawn(LOGITS, Sampling(temperature=1.0, seed=seed), 3).shape == (3,)


def test_logits_of_minus_infinity_are_never_drawn():
    logits = LOGITS.copy()
    logits[0, 1] = -np.inf
    tokens = drawn(logits, Sampling(temperature=5.0))
    assert 1 not in set(tokens.tolist())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; wanted 0 to 1e+06"),
        ({"temperature": float("nan")}, "temperature is nan; wanted 0 to 1e+06"),
        ({"temperature": float("inf")}, "temperature is inf; wanted 0 to 1e+06"),
        ({"top_k": -1}, "top_k is -1; wanted 0 (all tokens) to 2147483647"),
        ({"top_p": 0.0}, "top_p is 0.0; wanted more than 0, at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; wanted more than 0, at most 1"),
    ],
    ids=str,
)
def test_what_no_choice_can_be_made_by_is_refused(how, said):
    with pytest.raises(ValueError, match=next(iter(how))) as caught:
        Sampling(**how)
    assert str(caught.value) == said


# --- On chips: a vocabulary that no width divides, and nonsense beside its columns

VOCABULARY = 101
SPEC = model(layer("attention"), d=8, vocab=VOCABULARY)
WARM = Sampling(temperature=5.0, seed=11)


@cache
def on_chips(chips):
    return decoder(SPEC, chips, context=40, padding=1e30)


def generated(chips, sampling):
    one = on_chips(chips)
    logits, states = one.prefill(one.fresh(), [3, 100, 7])
    first = one.first_token(logits, 3, sampling)
    words = {"limit": 36, "sampling": sampling, "stops": frozenset()}
    return [first, *(t for tokens, _ in one.generate(states, first, 4, **words) for t in tokens)]


def test_the_same_seed_gives_the_same_tokens_at_every_width():
    alone, split = (generated(chips, WARM) for chips in (1, 3))
    assert alone == split
    assert len(set(alone)) > 10
    assert generated(3, replace(WARM, seed=12)) != split


@pytest.mark.parametrize("chips", [2, 3, 4])
def test_no_token_past_the_vocabulary_is_ever_drawn(chips):
    env = {}
    for position, token in enumerate((3, 100, 7), start=1):
        program = written(SPEC, "decode_step", tok=token, pos=position, ctx=40)
        after = outcome(program, env)
        env = kept(program, after)
    one = on_chips(chips)
    logits, _ = one.prefill(one.fresh(), [3, 100, 7])
    assert logits.shape == (1, VOCABULARY)
    np.testing.assert_allclose(logits, after[Name("logits")], rtol=0, atol=1e-4)
    assert drawn(logits, WARM).max() < VOCABULARY
    assert 0 <= one.first_token(logits, 3, Sampling()) < VOCABULARY
