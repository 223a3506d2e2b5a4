"""Pitfalls of configs and norms: values that stand in several places, or that a part forgets."""

import ml_dtypes
import numpy as np
import pytest

from author.families.config import ConfigError
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
from tests.oracle_models import forward

# --- C1 and C2: what a config says in several ways

THETA = 5e5
WRITTEN = {
    "at the top": {"rope_theta": THETA},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "both": {"rope_theta": THETA, "rope_parameters": {"rope_theta": THETA}},
}


def test_a_base_written_in_any_way_turns_three_hundred_positions_as_it_should(tmp_path):
    made, config = tensors("smollm2"), keys("smollm2", max_position_embeddings=320)
    del config["rope_parameters"]
    prompt, found = ids(160, 300), []
    for name, said in WRITTEN.items():
        path = write(tmp_path / name, config | said, made)
        found.append(decoder(path, 2, context=320))
    for other in found[1:]:
        for key in ("cosc0", "sinc0"):
            np.testing.assert_array_equal(found[0].weights[key], other.weights[key])
    close(found[0].score(prompt), forward(config | WRITTEN["nested"], made, prompt))
    apart(forward(config | {"rope_theta": 1e4}, made, prompt), found[0].score(prompt))
    unlike = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": THETA}}
    with pytest.raises(ConfigError, match=r"10000\.0 at the top and 500000\.0 among"):
        from_config(config | unlike, "config.json")


def test_a_base_written_for_each_type_of_layer_is_that_of_the_plain_one():
    plain = {"rope_theta": THETA, "rope_type": "default"}
    by_type = {"full_attention": plain, "sliding_attention": plain}
    nested = from_config(keys("olmo3", rope_parameters=by_type), "config.json")
    old = from_config(keys("olmo3", rope_parameters=None, rope_theta=THETA), "config.json")
    assert nested.rotations == old.rotations
    assert [r.theta for r in nested.rotations] == [THETA]


HEADS = {
    "given, and no divisor": {"hidden_size": 104, "num_attention_heads": 3, "head_dim": 32},
    "null": {"hidden_size": 96, "num_attention_heads": 4},
}


@pytest.mark.parametrize("said", HEADS.values(), ids=HEADS)
def test_the_width_of_a_head_is_what_the_config_says_or_the_division(tmp_path, said):
    config = keys("smollm2", num_key_value_heads=1, head_dim=None) | said
    d, heads = config["hidden_size"], config["num_attention_heads"]
    width = said.get("head_dim", d // heads)
    made = redrawn(
        kept_layers(tensors("smollm2"), 0),
        5,
        q_proj=(heads * width, d),
        k_proj=(width, d),
        v_proj=(width, d),
        o_proj=(d, heads * width),
        gate_proj=(120, d),
        up_proj=(120, d),
        down_proj=(d, 120),
        embed_tokens=(160, d),
        norm=(d,),
    )
    config |= {"num_hidden_layers": 1, **({} if "head_dim" in said else {"head_dim": None})}
    prompt = ids(160, 12)
    path = write(tmp_path / "c", config, made)
    close(logits(path, 2, prompt), forward(config, made, prompt))


# --- N1, N3 and N4: norms


@pytest.mark.parametrize(("family", "chips"), [("olmo2", 3), ("minimax_m2", 2)])
def test_a_norm_over_all_heads_sees_heads_of_unequal_energy(tmp_path, family, chips):
    made = kept_layers(tensors(family), 0)
    config = keys(family, num_hidden_layers=1)
    for name in ("q_proj", "k_proj"):
        rows = made[f"model.layers.0.self_attn.{name}.weight"]
        powers = 4.0 ** np.repeat(np.arange(len(rows) // 16), 16)
        made[f"model.layers.0.self_attn.{name}.weight"] = rows * powers[:, None].astype(np.float32)
    prompt = ids(144, 14)
    found = logits(write(tmp_path / "c", config, made), chips, prompt)
    close(found, forward(config, made, prompt))


def test_a_small_weight_that_is_one_less_is_not_lost(tmp_path):
    made, random = kept_layers(tensors("gemma"), 0), np.random.default_rng(2)
    for name in [n for n in made if n.endswith("norm.weight")]:
        made[name] = (1e-3 * random.normal(size=made[name].shape)).astype(np.float32)
    half = {n: bfloat16(a) for n, a in made.items()}
    config, prompt = keys("gemma", num_hidden_layers=1), ids(144, 14)
    path = write(tmp_path / "c", config, half, "BF16")
    norm = half["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(weights(path, 2)["an0"][0], np.float32(1) + norm)
    close(logits(path, 2, prompt), forward(config, half, prompt))
    for key, name in (("an0", "layers.0.input_layernorm"), ("Qn3", "layers.3.self_attn.q_norm")):
        stored = tensors("qwen3_next")[f"model.{name}.weight"]
        held = np.asarray(weights(FOLDER / "qwen3_next", 3)[key])
        np.testing.assert_array_equal(held[0], np.float32(1) + stored)
    gated = tensors("qwen3_next")["model.layers.0.linear_attn.norm.weight"]
    np.testing.assert_array_equal(weights(FOLDER / "qwen3_next", 3)["Gn0"][0], gated)


def bfloat16(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


EPSILONS = {"qwen3_5": (0, 3), "olmo2": (0,), "deepseek_v3": (0,)}


@pytest.mark.parametrize(("family", "layers"), EPSILONS.items())
def test_an_epsilon_of_a_half_reaches_every_norm(tmp_path, family, layers):
    # What goes into the norms is small, so that it matters.
    made = scaled(kept_layers(tensors(family), *layers), embed_tokens=2**-4)
    config = keys(family, num_hidden_layers=len(layers), rms_norm_eps=0.5)
    config |= {"layer_types": ["linear_attention", "full_attention"]} if len(layers) > 1 else {}
    prompt = ids(config["vocab_size"], 14)
    wanted = forward(config, made, prompt)
    close(logits(write(tmp_path / "c", config, made), 2, prompt), wanted)
    apart(forward(config | {"rms_norm_eps": 1e-6}, made, prompt), wanted)


# --- M7: switches that a config leaves out are the family's

SWITCHES = {
    "mixtral": ({}, True, 1.0),
    "qwen2_moe": ({}, False, 1.0),
    "qwen3_moe": ({}, False, 1.0),
    "qwen3_next": ({}, True, 1.0),
    "olmoe": ({}, False, 1.0),
    "deepseek_v3": ({}, True, 2.5),
    "dots1": ({}, False, 1.0),
    "glm4_moe": ({}, True, 1.0),
    "deepseek_v2": ({}, False, 1.0),
    "kimi_linear": ({"moe_renormalize": None}, True, 1.0),
}


@pytest.mark.parametrize("family", SWITCHES)
def test_switches_that_a_config_leaves_out_are_those_of_the_family(family):
    said, norms, scale = SWITCHES[family]
    said = {"norm_topk_prob": None, "routed_scaling_factor": None, **said}
    model = from_config(keys(family, **said), "config.json", shapes(family))
    moe = model.spec.layers[-1].ffn
    assert (moe.norm_top_k, moe.weights_scale) == (norms, scale)
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v3", "dots1"):
        for norms in (True, False):
            said = keys(family, norm_topk_prob=norms)
            model = from_config(said, "config.json", shapes(family))
            assert model.spec.layers[-1].ffn.norm_top_k is norms


def test_groups_that_a_config_leaves_out_are_those_of_the_family():
    for family, groups in (("deepseek_v3", (8, 4)), ("dots1", None), ("glm4_moe", None)):
        found = from_config(keys(family, n_group=None, topk_group=None), "config.json")
        assert found.spec.layers[-1].ffn.groups == groups


def shapes(family):
    return {name: array.shape for name, array in tensors(family).items()}
