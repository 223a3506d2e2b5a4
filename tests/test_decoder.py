"""A decoder compiles once, keeps its states in place, and says the same however it is asked."""

from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from author.names import Name
from tests.tiny import CTX, VOCAB, decoder, kept, layer, model, outcome, written
from tp.decoder import ContextError
from tp.generation import NumbersError
from tp.sample import Sampling

TOKENS = (3, 8, 1, 8, 5, 30, 2)
SPECS = {
    "attention": model(layer("qk_norm", "softmax"), layer("sliding_window")),
    "recurrent": model(layer("gated_delta"), layer("chunked_window")),
    "latent": model(layer("latent", "shared_gated"), final_logit_softcap=2.0),
}
WIDTHS = {"attention": 3, "recurrent": 5, "latent": 2}


@cache
def made(name):
    return decoder(SPECS[name], WIDTHS[name], chunks=(2, 4) if name == "attention" else (4,))


@cache
def wanted(name):
    """The logits after each token, from the texts in float64."""
    env, rows = {}, []
    for position, token in enumerate(TOKENS, start=1):
        program = written(SPECS[name], "decode_step", tok=token, pos=position)
        after = outcome(program, env)
        rows.append(after[Name("logits")][0])
        env = kept(program, after)
    return np.array(rows)


def close(found, rows):
    np.testing.assert_allclose(np.asarray(found), rows, rtol=0, atol=2e-4)


def read(name, count):
    """States that hold the first tokens."""
    one = made(name)
    return one.prefill(one.fresh(), TOKENS[:count])[1] if count else one.fresh()


# --- The same however it is asked


@pytest.mark.parametrize("name", SPECS)
def test_steps_and_chunks_give_what_the_texts_do(name):
    one, rows = made(name), wanted(name)
    states = one.fresh()
    for position, token in enumerate(TOKENS, start=1):
        logits, states = one.step(states, token, position)
        assert logits.shape == (1, VOCAB)
        close(logits, rows[position - 1 : position])
    close(one.score(TOKENS), rows)
    for sizes in ((7,), (3, 4), (1, 6)):
        states, at = one.fresh(), 0
        for size in sizes:
            logits, states = one.prefill(states, TOKENS[at : at + size], at + 1)
            at += size
            close(logits, rows[at - 1 : at])


@pytest.mark.parametrize("name", SPECS)
def test_a_sequence_in_a_batch_does_not_see_its_neighbours(name):
    one, rows = made(name), wanted(name)
    batch = one.fresh_batch(3)
    for slot, count in enumerate((5, 0, 2)):
        batch = one.insert(batch, slot, read(name, count))
    at = [5, 0, 2]
    for _ in range(2):
        logits, batch = one.step_batch(batch, [TOKENS[n] for n in at], [n + 1 for n in at])
        close(logits, rows[at])
        at = [n + 1 for n in at]
    # A slot is used again for a shorter sequence, and its neighbours swap what they say.
    batch = one.insert(batch, 0, read(name, 1))
    logits, batch = one.step_batch(batch, [TOKENS[1], 9, TOKENS[4]], [2, 3, 5])
    close(logits[0], rows[1])
    close(logits[2], rows[4])


DRAWN = Sampling(temperature=1.5, top_k=9, seed=4)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("attention", Sampling()), ("attention", DRAWN), ("recurrent", Sampling())],
    ids=["attention", "attention, drawn", "recurrent"],
)
def test_tokens_made_on_the_device_are_those_of_one_step_after_another(name, sampling):
    one = made(name)
    logits, states = one.prefill(one.fresh(), TOKENS[:2])
    first = one.first_token(logits, 2, sampling)
    stepwise, held = [first], jax.tree.map(lambda leaf: leaf.copy(), states)
    for position in range(3, CTX + 1):
        logits, held = one.step(held, stepwise[-1], position)
        stepwise.append(one.first_token(logits, position, sampling))
    words = {"limit": CTX - 2, "sampling": sampling, "stops": frozenset()}
    assert [first, *tokens_of(one.generate(states, first, 3, **words))] == stepwise


def tokens_of(parts):
    return [token for tokens, _ in parts for token in tokens]


def test_generation_ends_with_the_first_stop_token():
    one = made("attention")
    logits, states = one.prefill(one.fresh(), TOKENS[:2])
    first = one.first_token(logits, 2, Sampling())
    words = {"limit": 9, "sampling": Sampling()}
    whole = tokens_of(one.generate(states, first, 3, stops=frozenset(), **words))
    stop = next(token for token in whole[2:] if token not in whole[:2])
    _, states = one.prefill(one.fresh(), TOKENS[:2])
    stopped = tokens_of(one.generate(states, first, 3, stops=frozenset({stop, 36}), **words))
    assert stopped == whole[: whole.index(stop) + 1]


def alone(one, prompt, sampling, limit, stops=frozenset()):
    """A first token, and those that follow it."""
    logits, states = one.prefill(one.fresh(), prompt)
    first = one.first_token(logits, len(prompt), sampling)
    words = {"limit": limit, "sampling": sampling, "stops": stops}
    return [first, *tokens_of(one.generate(states, first, len(prompt) + 1, **words))]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_sequences_side_by_side_are_made_as_each_alone(name, sampling):
    """Each goes on until its own limit or stop token, and none waits in another's place."""
    one = made(name)
    prompts, limits = [TOKENS[:2], TOKENS[:5], [TOKENS[3]]], [CTX - 2, 2, CTX - 1]
    freely = [alone(one, p, sampling, n) for p, n in zip(prompts, limits, strict=True)]
    stops = frozenset({freely[2][3], 36})
    wanted = [alone(one, p, sampling, n, stops) for p, n in zip(prompts, limits, strict=True)]
    assert len(set(map(len, wanted))) > 1
    batch = one.fresh_batch(3)
    for slot, prompt in enumerate(prompts):
        batch = one.insert(batch, slot, one.prefill(one.fresh(), prompt)[1])
    parts = one.generate_batch(
        batch,
        [tokens[0] for tokens in wanted],
        [len(prompt) + 1 for prompt in prompts],
        limits=limits,
        sampling=sampling,
        stops=stops,
    )
    found = [tokens[:1] for tokens in wanted]
    for part, _ in parts:
        for tokens, more in zip(found, part, strict=True):
            tokens += more
    assert found == wanted


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_not_numbers_end_a_generation(sampling, batch):
    one = made("attention")
    lost = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), read("attention", 3))
    words = {"sampling": sampling, "stops": frozenset()}
    if batch:
        both = one.insert(one.fresh_batch(2), 1, lost)
        parts = one.generate_batch(both, [5, 5], [1, 4], limits=[2, 2], **words)
    else:
        parts = one.generate(lost, 5, 4, limit=2, **words)
    with pytest.raises(NumbersError, match="are not numbers"):
        list(parts)


def test_only_a_recurrent_state_cannot_go_back():
    assert {name: made(name).rewinds for name in SPECS} == {
        "attention": True,
        "recurrent": False,
        "latent": True,
    }


# --- Nothing is compiled twice, and states stay where they are


@contextmanager
def compilations():
    """The compilations that happen meanwhile."""
    seen = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def use(one, draw):
    """Every way to use a decoder, with numbers drawn anew."""
    count = int(draw.integers(1, 9))
    ids = draw.integers(0, VOCAB, count).tolist()
    sampling = Sampling(
        temperature=float(draw.uniform(0.1, 3)),
        top_k=int(draw.integers(0, 9)),
        top_p=float(draw.uniform(0.1, 1)),
        seed=int(draw.integers(1 << 20)),
    )
    logits, states = one.prefill(one.fresh(), ids)
    token = one.first_token(logits, count, sampling)
    token = one.first_token(logits, count, Sampling())
    _, states = one.step(states, token, count + 1)
    stops = frozenset(draw.integers(0, VOCAB, int(draw.integers(0, 4))).tolist())
    for how in (sampling, Sampling()):
        limit = int(draw.integers(1, 3))
        parts = one.generate(states, token, count + 2, limit=limit, sampling=how, stops=stops)
        *_, (_, states) = parts
    batch = one.insert(one.fresh_batch(2), int(draw.integers(2)), states)
    one.step_batch(batch, draw.integers(0, VOCAB, 2).tolist(), draw.integers(1, CTX, 2).tolist())
    return 4


def test_nothing_is_compiled_again_over_two_hundred_steps():
    one, draw = made("attention"), np.random.default_rng(0)
    with compilations() as first:
        for _ in range(8):  # every chunk size is met
            use(one, draw)
    assert len(first) > 0
    with compilations() as again:
        steps = sum(use(one, draw) for _ in range(50))
    assert (steps, again) == (200, [])


def test_states_are_given_up_to_every_step():
    one = made("latent")
    states = one.fresh()
    _, after = one.step(states, 3, 1)
    assert all(leaf.is_deleted() for leaf in states.values())
    _, read_on = one.prefill(after, [1, 2], 2)
    assert all(leaf.is_deleted() for leaf in after.values())
    assert not any(leaf.is_deleted() for leaf in read_on.values())
    batch = one.fresh_batch(3)
    inserted = one.insert(batch, 1, read_on)
    assert all(leaf.is_deleted() for leaf in batch.values())
    one.step_batch(inserted, [1, 2, 3], [1, 4, 1])
    assert all(leaf.is_deleted() for leaf in inserted.values())


def test_each_chip_holds_a_slice_of_the_states():
    one = made("attention")
    states = one.fresh()
    for leaf in states.values():
        shards = {shard.device: shard.data.shape for shard in leaf.addressable_shards}
        assert len(shards) == 3
        assert len(set(shards.values())) == 1
        assert leaf.shape[1] == 3 * next(iter(shards.values()))[1]


# --- What does not fit


def test_what_a_context_has_no_room_for_is_refused_before_anything_runs():
    one = made("latent")
    states = one.fresh()
    with pytest.raises(ContextError, match=f"13 tokens do not fit a context of {CTX}"):
        one.prefill(states, range(13))
    with pytest.raises(ContextError, match=f"13 tokens do not fit a context of {CTX}"):
        one.step(states, 1, 13)
    with pytest.raises(ContextError, match=f"14 tokens do not fit a context of {CTX}"):
        one.read(states, [1, 2], 13)
    with pytest.raises(ContextError, match="an empty prompt"):
        one.prefill(states, [])
    with pytest.raises(ContextError, match="token ids 37, -1 are not among the 37"):
        one.prefill(states, [1, 37, -1])
    with pytest.raises(ContextError, match="token ids 40 are not"):
        one.step_batch(one.fresh_batch(2), [1, 40], [1, 1])
    assert not any(leaf.is_deleted() for leaf in states.values())


def test_a_full_context_is_used_to_its_last_row():
    one = made("attention")
    ids = [*TOKENS, *TOKENS[:5]]
    assert len(ids) == CTX
    whole = one.score(ids)
    logits, _ = one.prefill(one.fresh(), ids)
    close(logits[0], whole[-1])
    _, states = one.prefill(one.fresh(), ids[:-1])
    logits, _ = one.step(states, ids[-1], CTX)
    close(logits[0], whole[-1])
