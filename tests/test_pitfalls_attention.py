"""Pitfalls of attention and of its split: heads, fused layouts, biases, windows, sinks, latents."""

import numpy as np
import pytest

from author.families.registry import from_config
from tests.making_checkpoints import (
    FOLDER,
    apart,
    close,
    decoder,
    ids,
    kept_layers,
    keys,
    logits,
    redrawn,
    scaled,
    tensors,
    weights,
    write,
)
from tests.oracle_models import forward, magnitude, yarn
from tp.loader import read_whole
from tp.source import open_source

ONE = {"num_hidden_layers": 1}

# --- A1: few key/value heads on many chips


def twelve(tmp_path, kv_heads):
    """One layer of twelve query heads of 8."""
    config = keys("smollm2", num_attention_heads=12, num_key_value_heads=kv_heads, **ONE)
    made = redrawn(
        kept_layers(tensors("smollm2"), 0),
        kv_heads,
        q_proj=(96, 72),
        k_proj=(8 * kv_heads, 72),
        v_proj=(8 * kv_heads, 72),
        o_proj=(72, 96),
    )
    return write(tmp_path / f"{kv_heads}", config, made), config, made


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("chips", [2, 3, 4, 6, 8])
def test_a_chip_holds_just_the_kv_heads_that_its_query_heads_read(tmp_path, kv_heads, chips):
    path, _, made = twelve(tmp_path, kv_heads)
    one = decoder(path, chips, kernels="xla")
    for name, tensor in (("Wk0", "k_proj"), ("Wv0", "v_proj")):
        whole = made[f"model.layers.0.self_attn.{tensor}.weight"]
        held = np.split(np.asarray(one.weights[name]), chips)
        for chip in range(chips):
            queries = [
                row // 8
                for start, length in one.operands["Wq0"].layout.ranges[chip]
                for row in range(start, start + length, 8)
            ]
            wanted = sorted({head // (12 // kv_heads) for head in queries})
            rows = [row for head in wanted for row in range(8 * head, 8 * head + 8)]
            np.testing.assert_array_equal(held[chip][: len(rows)], whole[rows])
            assert not held[chip][len(rows) :].any()


@pytest.mark.parametrize(("kv_heads", "chips"), [(1, 8), (2, 3)])
def test_more_chips_than_kv_heads_have_the_logits_of_the_whole(tmp_path, kv_heads, chips):
    path, config, made = twelve(tmp_path, kv_heads)
    close(logits(path, chips, ids(160, 14)), forward(config, made, ids(160, 14)))


# --- A3: fused projections


def test_queries_keys_and_values_in_one_tensor_are_those_that_stand_apart(tmp_path):
    made = kept_layers(tensors("smollm2"), 0)
    p, m = "model.layers.0.self_attn.", "model.layers.0.mlp."
    fused = {n: a for n, a in made.items() if not n.startswith((p, m))}
    fused[p + "qkv_proj.weight"] = np.concatenate([made[f"{p}{n}_proj.weight"] for n in "qkv"])
    fused[m + "gate_up_proj.weight"] = np.concatenate(
        [made[f"{m}{n}_proj.weight"] for n in ("gate", "up")]
    )
    fused |= {n: made[n] for n in (p + "o_proj.weight", m + "down_proj.weight")}
    config = keys("smollm2", **ONE)
    apart_path = write(tmp_path / "apart", config, made)
    fused_path = write(tmp_path / "fused", config | {"model_type": "phi3"}, fused)
    wanted = weights(apart_path, 2)
    for key, leaf in weights(fused_path, 2).items():
        np.testing.assert_array_equal(leaf, wanted[key], err_msg=key)


def test_a_projection_fused_by_head_is_taken_apart_by_head():
    source = open_source(str(FOLDER / "minimax"))
    one = decoder(FOLDER / "minimax", 1)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    by_head = tensors("minimax")[name].reshape(4, 3, 16, 64)
    for part, key in enumerate(("Wq0", "Wk0", "Wv0")):
        found = read_whole(source.model, source.checkpoint, one.operands[key])
        np.testing.assert_array_equal(found.T, by_head[:, part].reshape(64, 64))


# --- A4: a bias after a sum over chips is added once


def test_the_biases_after_a_fold_are_added_once(tmp_path):
    made, random = kept_layers(tensors("smollm2"), 0), np.random.default_rng(4)
    for name in [n for n in made if "proj.weight" in n]:
        bias = random.normal(size=len(made[name])).astype(np.float32)
        made[name.replace("weight", "bias")] = bias
    config = keys("smollm2", attention_bias=True, mlp_bias=True, **ONE)
    path = write(tmp_path / "c", config, made)
    close(logits(path, 3, ids(160, 9)), forward(config, made, ids(160, 9)))


def test_the_bias_of_one_of_two_parallel_blocks_is_added_once(tmp_path):
    made, random = kept_layers(tensors("cohere2"), 0), np.random.default_rng(4)
    config = keys("cohere2", attention_bias=True, **ONE)
    for name in "qkvo":
        weight = made[f"model.layers.0.self_attn.{name}_proj.weight"]
        bias = random.normal(size=len(weight)).astype(np.float32)
        made[f"model.layers.0.self_attn.{name}_proj.bias"] = bias
    path = write(tmp_path / "c", config, made)
    alone = logits(path, 1, ids(144, 9))
    close(logits(path, 3, ids(144, 9)), alone, 1e-5)


# --- A6 and M1: sinks, and biases of experts


def test_sinks_belong_to_their_heads_and_biases_of_experts_count_once(tmp_path):
    made, random = tensors("gpt_oss"), np.random.default_rng(8)
    for name in made:
        if name.endswith(("bias", "sinks")):
            spread = 3.0 if name.endswith("sinks") else 1.0
            made[name] = (spread * random.normal(size=made[name].shape)).astype(np.float32)
    permuted = made | {n: np.roll(a, 1) for n, a in made.items() if n.endswith("sinks")}
    config, prompt = keys("gpt_oss"), ids(128, 16)
    wanted, other = (forward(config, m, prompt) for m in (made, permuted))
    apart(other, wanted)
    path, permuted_path = (
        write(tmp_path / n, config, m) for n, m in (("a", made), ("b", permuted))
    )
    close(logits(path, 4, prompt), wanted)
    close(logits(permuted_path, 4, prompt), other)


# --- A8: which keys a window shows


def test_a_window_of_four_shows_four_keys_in_prompts_and_in_steps(tmp_path):
    config = keys("mistral", sliding_window=4, **ONE)
    path = write(tmp_path / "c", config, kept_layers(tensors("mistral"), 0))
    one, prompt = decoder(path, 2), ids(160, 12)

    def stepped(tokens):
        states, rows = one.fresh(), []
        for position, token in enumerate(tokens, start=1):
            row, states = one.step(states, token, position)
            rows.append(np.asarray(row)[0])
        return np.stack(rows)

    for read in (one.score, stepped):
        before = read(prompt)
        for at in range(12):
            after = read([*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]])
            changed = np.flatnonzero((before != after).any(axis=1))
            assert changed.tolist() == list(range(at, min(at + 4, 12)))


# --- A9: caps


def test_caps_on_scores_and_logits_bite(tmp_path):
    made = scaled(kept_layers(tensors("gemma2"), 0, 1), q_proj=4, k_proj=4)
    config, prompt = keys("gemma2", num_hidden_layers=2), ids(144, 16)
    wanted = forward(config, made, prompt)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        apart(forward({**config, cap: None}, made, prompt), wanted, 0.5)
    found = logits(write(tmp_path / "c", config, made), 3, prompt)
    close(found, wanted)
    assert np.abs(found).max() <= 2.0


# --- A10: the latent cache is one, and every chip has it


def test_the_latent_cache_is_the_same_on_every_chip(tmp_path):
    config = keys("deepseek_v3", **ONE)
    one = decoder(write(tmp_path / "c", config, kept_layers(tensors("deepseek_v3"), 0)), 3)
    states, wanted = one.fresh(), forward(config, kept_layers(tensors("deepseek_v3"), 0), [5, 9, 7])
    for position, token in enumerate((5, 9, 7), start=1):
        row, states = one.step(states, token, position)
        close(row[0], wanted[position - 1])
    for key, leaf in states.items():
        assert one.decode.states[key].layout is None
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == 2 and np.abs(first[:3]).max() > 0
        for other in others:
            np.testing.assert_array_equal(first, other)


# --- A11: what YaRN multiplies by; the formulas are those of transformers 5.24

STRETCHED = [
    {"factor": 8.0},
    {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    {"factor": 4.0, "mscale": 1.3},
    {"factor": 4.0, "mscale_all_dim": 0.7},
    {"factor": 8.0, "mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.25},
    {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
]


@pytest.mark.parametrize("said", STRETCHED, ids=str)
@pytest.mark.parametrize("family", ["smollm2", "deepseek_v3"])
def test_yarn_stretches_tables_and_scale_as_its_family_does(tmp_path, family, said):
    said = {"rope_type": "yarn", "original_max_position_embeddings": 16, **said}
    config = keys(family, rope_parameters=None, rope_theta=100.0, rope_scaling=said, **ONE)
    found = from_config(config, "config.json")
    mixer, (turned,) = found.spec.layers[0].mixer, found.rotations
    f = 100.0 ** (-np.arange(0, 8, 2) / 8)
    stretched, factor = yarn(f, 8, 100.0, said)
    assert turned.attention == pytest.approx(factor, 1e-12)
    latent = family == "deepseek_v3"
    if latent:
        m = magnitude(said.get("mscale_all_dim") or 0.0, said["factor"])
        assert mixer.scale == pytest.approx(m * m * 24**-0.5, 1e-12)
    else:
        assert mixer.scale == pytest.approx(8**-0.5, 1e-12)
    # To four times the length that was trained for.
    path = write(tmp_path / "c", config, kept_layers(tensors(family), 0))
    cos = np.asarray(decoder(path, 1, context=64).weights["cosc0"])
    wanted = factor * np.cos(np.arange(64)[:, None] * stretched)
    np.testing.assert_allclose(cos, wanted, atol=1e-6)
