"""gpt-oss: attention sinks, biases everywhere, a clamped swiglu, experts with inputs first."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    Stands,
    attended,
    layer_views,
    mixture,
)
from author.families.model import Model, View, of_each
from author.families.rope import numbered, rotation
from author.spec import Moe, SwigluOai

MODEL_TYPES = ("gpt_oss",)

GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
# The activation is its own, whatever `hidden_act` says.
IGNORED = (*TRAINING, "hidden_act", "initial_context_length")


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width, theta=150000.0)] * size.layers)
    bias = config.flag("attention_bias", True)
    attention = parts.attention(size, bias=bias, output_bias=bias, sinks=True)
    types = parts.layer_types(config, size.layers, lambda layer: layer % 2 == 0)
    windows = parts.windows(config, types, parts.sliding(config, 128))
    moe = mixture(
        config.count("num_local_experts"),
        config.count("num_experts_per_tok", also=("experts_per_token",)),
        config.count("intermediate_size"),
        act=SwigluOai(
            alpha=config.real("swiglu_alpha", 1.702), limit=config.real("swiglu_limit", 7.0)
        ),
        gating="softmax_of_top_k",
        biases=True,
    )
    each = zip(ropes, windows, strict=True)
    layers = [parts.layer_of(replace(attention, rope=rope, window=w), moe) for rope, w in each]
    found = [attended(attention) | _routed_stands(moe, size.d) for _ in layers]
    config.done(IGNORED)
    return parts.model(family, size, layers, rotations, layer_views(found))


def _routed_stands(moe: Moe, d: int) -> Stands:
    """Gates and ups alternate; the biases of all experts are the rows of one tensor."""
    n, width = moe.experts, moe.expert_dff
    gates, ups = ((first, width, 2) for first in (0, 1))
    return {
        "Wr": "mlp.router.weight",
        "Br": "mlp.router.bias",
        "Wg": View(tensor=GATE_UP, turned=d, rows=of_each(n, 2 * width, gates)),
        "Wu": View(tensor=GATE_UP, turned=d, rows=of_each(n, 2 * width, ups)),
        "Wd": View(tensor=DOWN, turned=width),
        "Bg": View(tensor=f"{GATE_UP}_bias", turned=n, rows=of_each(1, 2 * width, gates)),
        "Bu": View(tensor=f"{GATE_UP}_bias", turned=n, rows=of_each(1, 2 * width, ups)),
        "Bd": View(tensor=f"{DOWN}_bias", turned=n),
    }
