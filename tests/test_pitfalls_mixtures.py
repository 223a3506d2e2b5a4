"""Pitfalls of mixtures, and of blocks that no number of chips divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.q8 import Q8, dequantise, quantise
from tests.making_checkpoints import (
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
from tests.oracle_models import forward

PROMPT = ids(128, 14)
ONE = {"num_hidden_layers": 1}


def one_layer(family, **changes):
    """The config and the tensors of one layer, a mixture."""
    said = {"deepseek_v3": {"first_k_dense_replace": 0}, "qwen2_moe": {"layer_types": None}}
    config = keys(family, **{**ONE, **said.get(family, {}), **changes})
    return config, kept_layers(tensors(family), 1)


def same(tmp_path, config, made, *chips):
    """The logits are those of the oracle at these widths."""
    path, wanted = write(tmp_path / "c", config, made), forward(config, made, PROMPT)
    for width in chips:
        close(logits(path, width, PROMPT), wanted)
    return wanted


# --- M3 and M4: shared experts, and biases that choose


@pytest.mark.parametrize(("family", "chips"), [("qwen2_moe", (4,)), ("deepseek_v3", (3,))])
def test_a_shared_expert_that_outweighs_all_others_counts_once(tmp_path, family, chips):
    config, made = one_layer(family)
    louder = scaled(made, **{"shared_expert": 8}) if family == "deepseek_v3" else made
    louder = scaled(louder, shared_expert__down_proj=8) if family == "qwen2_moe" else louder
    wanted = same(tmp_path, config, louder, *chips)
    apart(forward(config, made, PROMPT), wanted, 0.5)


@pytest.mark.parametrize("norms", [True, False])
def test_a_large_bias_chooses_experts_and_does_not_weigh_them(tmp_path, norms):
    config, made = one_layer("deepseek_v3", norm_topk_prob=norms)
    bias = np.random.default_rng(6).uniform(-12, 12, 8).astype(np.float32)
    name = "model.layers.0.mlp.gate."
    made |= {f"{name}e_score_correction_bias": bias}
    made |= {f"{name}weight": made[f"{name}weight"] * np.float32(4)}
    # Some scores are next to nothing beside the bias, and are weights all the same.
    same(tmp_path, config, made, 3)


# --- M7: renormalised or not, against what the config of the checkpoint says


def test_weights_are_renormalised_where_the_config_says_so(tmp_path):
    config, made = one_layer("qwen3_moe")
    other = config | {"norm_topk_prob": not config["norm_topk_prob"]}
    wanted = same(tmp_path, other, made, 2)
    apart(forward(config, made, PROMPT), wanted)


# --- M8, Q1 and Q4: experts of uneven widths


def resized(family, width, shared=0, seed=3):
    """One layer of four experts, each so wide."""
    config, made = one_layer(family, num_experts=4, num_local_experts=None)
    size = "moe_intermediate_size"
    config |= {size: width, "shared_expert_intermediate_size": shared or 40}
    made = {n: a for n, a in made.items() if not any(f".experts.{e}." in n for e in range(4, 8))}
    shapes = {"mlp__gate__": (4, 64)}
    shapes |= dict.fromkeys(("shared_expert__gate_proj", "shared_expert__up_proj"), (shared, 64))
    shapes |= {"shared_expert__down_proj": (64, shared)} if shared else {}
    made = redrawn(made, seed, **{w: s for w, s in shapes.items() if 0 not in s})
    for e in range(4):
        inner = dict.fromkeys((f"experts__{e}__gate", f"experts__{e}__up"), (width, 64))
        made = redrawn(made, seed + e, **inner, **{f"experts__{e}__down": (64, width)})
    return config, made


@pytest.mark.parametrize(("width", "shared", "chips"), [(64, 40, 3), (96, 40, 2), (160, 64, 4)])
def test_experts_of_any_width_are_shared_in_whole_blocks(tmp_path, width, shared, chips):
    config, made = resized("qwen2_moe", width, shared)
    same(tmp_path, config, made, chips)
    found = decoder(tmp_path / "c", chips).operands["Wd0"].layout
    held = [sum(n for _, n in ranges) for ranges in found.ranges]
    assert sum(held) == width
    assert all(n % 32 == 0 for n in held)


def merged(made):
    """The experts in the two tensors that transformers 5 makes of them."""
    p, found = "model.layers.0.mlp.experts.", dict(made)
    parts = {
        part: np.stack([found.pop(f"{p}{e}.{part}_proj.weight") for e in range(4)])
        for part in ("gate", "up", "down")
    }
    both = np.concatenate([parts["gate"], parts["up"]], axis=1)
    return found | {f"{p}gate_up_proj": both, f"{p}down_proj": parts["down"]}


@pytest.mark.parametrize("width", [160, 64])
def test_experts_merged_or_apart_are_the_same_on_three_chips(tmp_path, width):
    config, made = resized("qwen2_moe", width, 64)
    wanted = weights(write(tmp_path / "a", config, made), 3)
    for key, leaf in weights(write(tmp_path / "b", config, merged(made)), 3).items():
        np.testing.assert_array_equal(leaf, wanted[key], err_msg=key)


def test_experts_whose_gates_and_ups_alternate_are_cut_by_pairs(tmp_path):
    width = 160
    config, made = one_layer("gpt_oss", intermediate_size=width, layer_types=["full_attention"])
    made = redrawn(
        made,
        2,
        gate_up_proj_bias=(4, 2 * width),
        gate_up_proj=(4, 64, 2 * width),
        down_proj_bias=(4, 64),
        down_proj=(4, width, 64),
    )
    same(tmp_path, config, made, 3)


def test_blocks_of_experts_keep_their_scales_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)  # as an accelerator has them
    config, made = resized("qwen2_moe", 928)
    path = write(tmp_path / "c", config, made)
    down = np.concatenate(
        [made[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(4)]
    )
    whole = quantise(down)
    for chips in (2, 3, 4):
        held = weights(path, chips)["Wd0"]
        blocks_are_whole(held, whole, decoder(path, chips).operands["Wd0"].layout.ranges)


def blocks_are_whole(held, whole, ranges):
    """Values and scales of each chip are those of its columns, in blocks of 32."""
    assert isinstance(held, Q8) and held.block == 32
    chips = len(ranges)
    values, scales = (np.split(np.asarray(a), chips, 1) for a in (held.values, held.scales))
    for chip, ((start, length),) in enumerate(ranges):
        assert length % 32 == 0
        np.testing.assert_array_equal(values[chip][:, :length], whole.values[:, start:][:, :length])
        blocks = whole.scales[:, start // 32 :][:, : length // 32]
        np.testing.assert_array_equal(scales[chip][:, : length // 32], blocks)


# --- A15: a row of nonsense leaves the routing of the others alone


def test_idle_rows_do_not_reach_the_experts_of_others(tmp_path):
    config, made = one_layer("deepseek_v3")
    one, wanted = decoder(write(tmp_path / "c", config, made), 3), forward(config, made, PROMPT)
    batch = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), one.fresh_batch(3))
    for slot in (0, 2):
        batch = one.insert(batch, slot, one.fresh())
    for at in range(len(PROMPT)):
        found, batch = one.step_batch(batch, [PROMPT[at], 0, PROMPT[0]], [at + 1, 3, 1])
        close(found[0], wanted[at])
        close(found[2], wanted[0])


# --- Q1 and Q5: a plain feed-forward of 29 blocks, and blocks that are hard

DOWN = "model.layers.0.mlp.down_proj.weight"


def wide():
    made = redrawn(
        kept_layers(tensors("smollm2"), 0),
        6,
        gate_proj=(928, 72),
        up_proj=(928, 72),
        down_proj=(72, 928),
    )
    return keys("smollm2", intermediate_size=928, **ONE), made


@pytest.mark.parametrize("chips", [2, 3, 4])
def test_29_blocks_are_cut_between_blocks_scales_and_all(tmp_path, chips, monkeypatch):
    monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)
    config, made = wide()
    path = write(tmp_path / "c", config, made)
    ranges = decoder(path, chips).operands["Wd0"].layout.ranges
    blocks_are_whole(weights(path, chips)["Wd0"], quantise(made[DOWN]), ranges)
    lengths = [length for ((_, length),) in ranges]
    assert sum(lengths) == 928 and max(lengths) - min(lengths) <= 32


def test_29_blocks_on_four_chips_have_the_logits_of_the_whole(tmp_path):
    same(tmp_path, *wide(), 4)


def test_rows_of_zeros_of_denormals_and_of_huge_numbers_stay_finite(tmp_path):
    config, made = wide()
    embedding = made["model.embed_tokens.weight"].copy()
    embedding[3] = 0
    embedding[4] = 1e-45
    embedding[5] = 3e4
    embedding[6] = [3e4, *[1e-6] * 71]
    made["model.embed_tokens.weight"] = embedding
    back = np.asarray(dequantise(quantise(embedding)))
    prompt = [9, 3, 4, 5, 6, 10]
    found = logits(write(tmp_path / "hard", config, made), 4, prompt)
    assert np.isfinite(found).all()
    assert not found[:, 3].any()
    close(found, forward(config, made | {"model.embed_tokens.weight": back}, prompt), 1e-3)
