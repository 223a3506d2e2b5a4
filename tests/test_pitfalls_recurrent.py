"""Pitfalls of recurrent layers: padding, pieces, packed projections, slots that are used again.

A model of a gated delta layer and a full one, against a plain recurrence in float64.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.making_checkpoints import (
    close,
    decoder,
    ids,
    kept_layers,
    keys,
    logits,
    redrawn,
    tensors,
    weights,
    write,
)
from tests.oracle_models import forward
from tp.engine import load

TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
CONTEXT = 160
LONGEST = 136
PROMPT = ids(144, LONGEST)


def two_layers():
    return keys("qwen3_5", **TWO), kept_layers(tensors("qwen3_5"), 0, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("recurrent") / "c", *two_layers())


@pytest.fixture(scope="module")
def one(path):
    """On two chips, prompts in pieces of 64."""
    made = decoder(path, 2, context=CONTEXT)
    made.chunks = (64,)
    return made


@cache
def wanted():
    return forward(*two_layers(), PROMPT)


def stepped(one, states, start, end):
    """The logits of some of the prompt, a token at a time, and the states after them."""
    rows = []
    for at in range(start, end):
        row, states = one.step(states, PROMPT[at], at + 1)
        rows.append(np.asarray(row)[0])
    return rows, states


# --- R4 and R5: whatever the length, a prompt is its recurrence; padding is not in it


@pytest.mark.parametrize("length", [*range(1, 10), 63, 64, 65, 127, 130])
def test_a_prompt_and_what_follows_it_are_the_plain_recurrence(one, length):
    found, states = one.read(one.fresh(), PROMPT[:length])
    close(found, wanted()[:length])
    after, _ = stepped(one, states, length, length + 5)
    close(after, wanted()[length : length + 5])


def test_states_after_a_padded_piece_are_those_of_single_steps(one):
    states, at = one.fresh(), 0
    for length in (1, 3, 9, 65):
        _, states = stepped(one, states, at, length)
        at = length
        _, read = one.read(one.fresh(), PROMPT[:length])
        for key, leaf in states.items():
            np.testing.assert_allclose(read[key], leaf, atol=2e-5 * float(jnp.abs(leaf).max()))


def test_all_of_it_token_by_token_is_the_plain_recurrence(one):
    rows, _ = stepped(one, one.fresh(), 0, LONGEST)
    close(rows, wanted())


# --- R4 and A15: sequences side by side, some of them idle


def batched(one, slots, steps, idle=0):
    """Rows of a batch of four; a slot is where its sequence stands, or nothing for an idle one.

    Idle slots hold what is not a number, and are given the same token and position each step.
    """
    batch = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), one.fresh_batch(4))
    for slot, length in enumerate(slots):
        if length is not None:
            batch = one.insert(batch, slot, one.read(one.fresh(), PROMPT[:length])[1])
    rows = []
    for step in range(steps):
        at = [None if n is None else n + step for n in slots]
        tokens = [idle if n is None else PROMPT[n] for n in at]
        found, batch = one.step_batch(batch, tokens, [1 if n is None else n + 1 for n in at])
        rows.append(np.asarray(found))
    return np.stack(rows), batch


def test_rows_of_a_batch_are_their_solo_runs_beside_idle_ones(one):
    slots = (1, None, 9, 5)
    rows, batch = batched(one, slots, 50)
    for slot, length in enumerate(slots):
        if length is not None:
            close(rows[:, slot], wanted()[length : length + 50])
    other, again = batched(one, slots, 50, idle=77)
    live = [slot for slot, length in enumerate(slots) if length is not None]
    np.testing.assert_array_equal(rows[:, live], other[:, live])
    for key, leaf in batch.items():
        np.testing.assert_array_equal(np.asarray(leaf)[live], np.asarray(again[key])[live])


# --- R7: a slot and a conversation that are used again


def test_a_slot_used_again_remembers_nothing(one):
    _, batch = batched(one, (60, 9, 9, 9), 6)
    short = one.read(one.fresh(), [7, 3])[1]  # shorter than the convolution
    batch = one.insert(batch, 0, short)
    found, _ = one.step_batch(batch, [5, 1, 1, 1], [3, 16, 16, 16])
    alone, _ = one.step(one.read(one.fresh(), [7, 3])[1], 5, 3)
    close(found[0], np.asarray(alone)[0], 1e-5)


def test_a_conversation_given_up_half_way_leaves_nothing_behind(path):
    engine = load(str(path), chips=2, context=CONTEXT)
    engine.decoder.chunks = (64,)
    talk = engine.chat()
    made = talk.tokens(PROMPT[:40], max_tokens=30)
    first = [next(made) for _ in range(11)]
    made.close()
    found = list(talk.tokens([7, 3], max_tokens=12))
    assert talk.counts.prompt_tokens == 2
    assert found == list(engine.chat().tokens([7, 3], max_tokens=12))
    # The same again, and further than it got.
    longer = list(talk.tokens(PROMPT[:40], max_tokens=30))
    assert longer[:11] == first


# --- R1: packed projections


def packed(qkv, z, b, a, heads, values, width):
    """The two fused projections of Qwen 3 Next, from the four of Qwen 3.5."""
    r = values // heads
    q, k, v = np.split(qkv, [heads * width, 2 * heads * width])
    parts = [m.reshape(heads, -1, m.shape[-1]) for m in (q, k, v, z)]
    first = np.concatenate(parts, axis=1).reshape(-1, qkv.shape[-1])
    second = np.concatenate([m.reshape(heads, r, -1) for m in (b, a)], axis=1)
    return first, second.reshape(2 * values, -1)


def three_key_heads():
    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    made = redrawn(
        two_layers()[1],
        11,
        in_proj_qkv=(192, 64),
        in_proj_z=(96, 64),
        in_proj_a=(6, 64),
        in_proj_b=(6, 64),
        conv1d=(192, 1, 4),
        A_log=(6,),
        dt_bias=(6,),
        out_proj=(64, 96),
    )
    return keys("qwen3_5", **TWO, **sizes), made


def test_three_key_heads_on_two_chips_are_cut_by_head(tmp_path):
    config, made = three_key_heads()
    path = write(tmp_path / "c", config, made)
    close(logits(path, 2, PROMPT[:20]), forward(config, made, PROMPT[:20]))


@pytest.mark.parametrize("chips", [1, 2, 5])
def test_projections_packed_by_key_head_are_those_that_stand_apart(tmp_path, chips):
    config, made = three_key_heads()
    apart = weights(write(tmp_path / "apart", config, made), chips)
    p = "model.layers.0.linear_attn."
    separate = [made.pop(f"{p}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]
    qkvz, ba = packed(*separate, heads=3, values=6, width=16)
    made |= {f"{p}in_proj_qkvz.weight": qkvz, f"{p}in_proj_ba.weight": ba}
    # Qwen 3 Next has mixtures besides.
    moe = kept_layers(tensors("qwen3_next"), 0, 3)
    made = {n: a for n, a in made.items() if ".mlp." not in n}
    made |= {n: a for n, a in moe.items() if ".mlp." in n}
    sizes = {k: config[k] for k in ("linear_num_key_heads", "linear_num_value_heads")}
    other = keys("qwen3_next", vocab_size=144, **TWO, **sizes)
    fused = weights(write(tmp_path / "fused", other, made), chips)
    for key in ("Wq0", "Wk0", "Wv0", "Wz0", "Wb0", "Wa0", "Wcv0", "Wo0"):
        np.testing.assert_array_equal(fused[key], apart[key], err_msg=key)
