"""Families with mixtures, latent attention or recurrent layers: what their configs make of them."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from author.families.config import ConfigError
from author.families.registry import from_config
from author.names import Name
from author.refusals import check_tp
from author.spec import (
    Attention,
    ChannelDelta,
    Dense,
    GatedDelta,
    LinearMixer,
    Mla,
    Moe,
    NormedResidual,
    Rope,
    SigmoidGating,
    SwigluOai,
    Temperature,
    Window,
)
from tp.checkpoint import open_checkpoint

FOLDER = Path(__file__).parent / "checkpoints"


@cache
def keys(family):
    return json.loads((FOLDER / family / "config.json").read_text())


def shapes(family):
    return {t.name: t.shape for t in open_checkpoint(FOLDER / family).tensors.values()}


@cache
def model(family):
    return from_config(keys(family), "config.json", shapes(family))


def altered(family, **changes):
    """The model of a family's config with other keys; None takes one out."""
    found = {k: v for k, v in (keys(family) | changes).items() if v is not None}
    return from_config(found, "config.json", shapes(family))


def complaint(family, **changes):
    with pytest.raises(ConfigError) as caught:
        altered(family, **changes)
    return str(caught.value)


# --- Specs, by hand


def moe(experts, chosen, width, *, shared=0, **fields):
    plain = {
        "act": "silu",
        "gating": "softmax_then_top_k",
        "groups": None,
        "norm_top_k": True,
        "weights_scale": 1.0,
        "shared_experts": 0,
        "shared_dff": shared,
        "shared_gate": False,
        "biases": False,
    }
    return Moe(experts=experts, top_k=chosen, expert_dff=width, **{**plain, **fields})


SCORED = {"gating": SigmoidGating(bias=True)}
GATED = {"shared_experts": 1, "shared_gate": True}
OAI = SwigluOai(alpha=1.702, limit=1.5)
V2 = {"norm_top_k": False, "shared_experts": 2}
MIXTURES = {
    "deepseek_v2": moe(8, 3, 24, shared=48, groups=(4, 2), weights_scale=1.7, **V2),
    "deepseek_v2_lite": moe(8, 3, 24, shared=48, **V2),
    "deepseek_v3": moe(
        8, 3, 24, shared=24, shared_experts=1, groups=(4, 2), weights_scale=2.5, **SCORED
    ),
    "deepseek_v3_noqlora": moe(
        8, 2, 24, shared=48, shared_experts=2, weights_scale=2.446, **SCORED
    ),
    "dots1": moe(8, 2, 24, shared=24, shared_experts=1, weights_scale=2.5, **SCORED),
    "ernie4_5_moe": moe(8, 2, 24, shared=24, shared_experts=1, choice_bias=True),
    "glm4_moe": moe(8, 2, 24, shared=24, shared_experts=1, weights_scale=2.5, **SCORED),
    "gpt_oss": moe(4, 2, 24, act=OAI, gating="softmax_of_top_k", biases=True),
    "granitemoe": moe(8, 2, 24, gating="softmax_of_top_k"),
    "hunyuan_v1_moe": moe(8, 2, 24, shared=24, shared_experts=1),
    "kimi_linear": moe(6, 2, 16, shared=16, shared_experts=1, weights_scale=2.446, **SCORED),
    "llama4_text": moe(
        4, 1, 24, shared=24, shared_experts=1, gating="sigmoid_scaled_input", norm_top_k=False
    ),
    "minimax": moe(4, 2, 32),
    "minimax_m2": moe(6, 2, 32, **SCORED),
    "mixtral": moe(4, 2, 48),
    "olmoe": moe(8, 2, 24, norm_top_k=False),
    "qwen2_moe": moe(8, 2, 16, shared=40, norm_top_k=False, **GATED),
    "qwen3_5_moe": moe(8, 2, 16, shared=24, **GATED),
    "qwen3_moe": moe(8, 2, 16),
    "qwen3_moe_nonorm": moe(6, 3, 16, norm_top_k=False),
    "qwen3_next": moe(5, 2, 16, shared=24, **GATED),
}
# The hidden widths of plain feed-forwards, by layer; the others are mixtures.
DENSE = {
    "deepseek_v2": {0: 80},
    "deepseek_v2_lite": {0: 80},
    "deepseek_v3": {0: 80},
    "deepseek_v3_noqlora": {0: 80},
    "dots1": {0: 80},
    "ernie4_5_moe": {0: 64},
    "glm4_moe": {0: 80},
    "kimi_linear": {0: 56},
    "llama4_text": {0: 64, 2: 64},
    "qwen3_5": dict.fromkeys(range(4), 64),
    "qwen3_moe_nonorm": {0: 88},
}


@pytest.mark.parametrize("family", sorted({*MIXTURES, *DENSE}))
def test_each_layer_is_fed_by_its_mixture_or_its_plain_one(family):
    layers, plain = model(family).spec.layers, DENSE.get(family, {})
    wanted = [
        Dense(dff=plain[number], act="silu") if number in plain else MIXTURES[family]
        for number in range(len(layers))
    ]
    assert [layer.ffn for layer in layers] == wanted


def attention(heads, kv_heads, rope, width=16, **fields):
    plain = {
        **{"qk_norm": False, "qk_norm_whole": False, "qk_unit_norm": False, "temperature": None},
        **{"bias": False, "output_bias": False, "sinks": False, "output_gate": False},
        **{"fused_qkv": False, "window": None, "scale": width**-0.5, "softcap": None},
    }
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": width, "value_dim": width}
    return Attention(**sizes, rope=rope, **{**plain, **fields})


def rope(theta, dims=16):
    return Rope(dims=dims, theta=theta)


def latent(rank, stretch, turned):
    sizes = {"heads": 4, "kv_lora_rank": 32, "qk_nope": 16, "qk_rope": 8, "v_dim": 16}
    scale = stretch**2 * 24**-0.5
    return Mla(**sizes, q_lora_rank=rank, scale=scale, rope=turned, norm_eps=1e-6)


NORMED = {"qk_norm": True}
WHOLE = {"qk_norm": True, "qk_norm_whole": True}
GATE = {"qk_norm": True, "output_gate": True}
DELTA = GatedDelta(k_heads=2, v_heads=4, head_dim=16, conv_taps=4, gate="silu", unit_eps=1e-6)
QWEN_NEXT = [DELTA] * 3 + [attention(4, 2, rope(100.0, 4), **GATE)]
KIMI = ChannelDelta(heads=4, head_dim=16, conv_taps=4, decay_rank=16, gate_rank=16)
OSS = {"bias": True, "output_bias": True, "sinks": True}
CHUNKED = {"window": Window(kind="chunked", n=16), "qk_unit_norm": True}
STILL = {"temperature": Temperature(floor=8.0, scale=0.5, offset=1)}
MIXERS = {
    "deepseek_v2": [latent(32, 0.1 * 0.7 * math.log(8) + 1, rope(100.0, 8))] * 2,
    "deepseek_v2_lite": [latent(None, 0.1 * 0.707 * math.log(40) + 1, rope(100.0, 8))] * 2,
    "deepseek_v3": [latent(32, 0.1 * math.log(40) + 1, rope(100.0, 8))] * 2,
    "deepseek_v3_noqlora": [latent(None, 1.0, rope(50000.0, 8))] * 2,
    "dots1": [attention(4, 2, rope(10000.0), **NORMED)] * 2,
    "ernie4_5_moe": [attention(4, 2, rope(500000.0))] * 2,
    "glm4_moe": [attention(4, 2, rope(10000.0, 8), bias=True, **NORMED)] * 2,
    "gpt_oss": [
        attention(6, 2, rope(500.0), window=Window(kind="sliding", n=8), **OSS),
        attention(6, 2, rope(500.0), **OSS),
    ],
    "granitemoe": [attention(4, 2, rope(10000.0), scale=0.12)] * 2,
    "hunyuan_v1_moe": [attention(4, 2, rope(10000.0), qk_norm_after_rope=True, **NORMED)] * 2,
    "kimi_linear": [KIMI, KIMI, latent(None, 1.0, None)],
    "llama4_text": [attention(4, 2, rope(10000.0), **CHUNKED)] * 3
    + [attention(4, 2, None, **STILL)],
    "minimax": [
        LinearMixer(heads=4, head_dim=16, norm_eps=1e-6),
        attention(4, 2, rope(10000.0)),
    ],
    "minimax_m2": [attention(4, 2, rope(10000.0, 8), **WHOLE)] * 2,
    "mixtral": [attention(4, 2, rope(1000000.0))] * 2,
    "olmoe": [attention(4, 4, rope(10000.0), **WHOLE)] * 2,
    "qwen2_moe": [attention(4, 4, rope(1000000.0), bias=True)] * 2,
    "qwen3_5": QWEN_NEXT,
    "qwen3_5_moe": QWEN_NEXT[2:],
    "qwen3_moe": [attention(4, 2, rope(1000000.0), **NORMED)] * 2,
    "qwen3_moe_nonorm": [attention(8, 2, rope(10000.0, 8), 8, **NORMED)] * 2,
    "qwen3_next": QWEN_NEXT,
}


@pytest.mark.parametrize("family", MIXERS)
def test_each_layer_mixes_as_its_config_says(family):
    assert [layer.mixer for layer in model(family).spec.layers] == MIXERS[family]


def test_what_is_around_the_blocks():
    granite, minimax = model("granitemoe").spec, model("minimax").spec
    assert (granite.embedding_scale, granite.logit_scale) == (2.0, 1 / 3)
    assert {layer.residual_scale for layer in granite.layers} == {0.8}
    fed = {"ffn_alpha": 1.2, "ffn_beta": 0.7}
    assert [layer.normed_residual for layer in minimax.layers] == [
        NormedResidual(mixer_alpha=1.3, mixer_beta=0.9, **fed),
        NormedResidual(mixer_alpha=1.5, mixer_beta=0.8, **fed),
    ]


def test_linear_attention_decays_as_its_checkpoint_says():
    (decays,) = model("minimax").constants[Name("Ld", 0)]
    slopes = open_checkpoint(FOLDER / "minimax").read("model.layers.0.self_attn.slope_rate")
    np.testing.assert_allclose(decays, np.exp(-slopes.ravel()), rtol=1e-6)


# --- What other configs say


def test_biases_that_no_checkpoint_here_has_have_their_places():
    latent = altered("deepseek_v3", attention_bias=True)
    order = latent.views[Name("Wkva", 0)][0].rows
    (turned,) = latent.views[Name("Bkva", 0)]
    assert (turned.tensor, turned.rows) == (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.bias",
        order,
    )
    biased = altered("ernie4_5_moe", use_bias=True)
    assert biased.spec.head_bias and biased.spec.layers[1].ffn.shared_bias
    names = {str(name) for name in biased.views}
    assert {"Bout", "Bg0", "Bu0", "Bd0", "Bsg1", "Bsu1", "Bsd1", "Bo1"} <= names
    assert {"Bg1", "Bu1", "Bd1"}.isdisjoint(names)
    check_tp(biased.spec, 3, beyond=True)


def test_published_names_and_keys_are_read():
    assert altered("deepseek_v3", model_type="kimi_k2").spec == model("deepseek_v3").spec
    lists = {"moe_topk": [2, 2], "num_shared_expert": [1, 1], "moe_intermediate_size": [24, 24]}
    assert altered("hunyuan_v1_moe", **lists).spec == model("hunyuan_v1_moe").spec
    assert altered("llama4_text", no_rope_layers=[]).spec == model("llama4_text").spec
    moe_layers = altered("llama4_text", moe_layers=[0]).spec.layers
    assert [isinstance(layer.ffn, Moe) for layer in moe_layers] == [True, False, False, False]
    assert altered("olmoe", clip_qkv=8.0).spec.layers[0].mixer.clip == 8.0


def test_what_would_matter_and_is_not_computed_is_refused():
    assert "moe_norm_min" in complaint("ernie4_5_moe", moe_norm_min=0.1)
    assert "scoring_func 'softmax'" in complaint("deepseek_v3", scoring_func="softmax")
    assert "mla_use_nope" in complaint("kimi_linear", mla_use_nope=False)
    assert "linear_value_head_dim" in complaint("qwen3_next", linear_value_head_dim=32)
    assert "layer_types is missing" in complaint("minimax", layer_types=None)
    assert "quantised" in complaint("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert "nothing is known of moe_twist" in complaint("mixtral", moe_twist=1)
    lost = keys("kimi_linear")["linear_attn_config"] | {"kda_layers": [1]}
    assert "wanted 1 to 3" in complaint("kimi_linear", linear_attn_config=lost)
