"""Granite with mixtures: multipliers on embedding, scores, residuals and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    attended,
    fused,
    layer_views,
    mixture,
)
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("granitemoe",)

MOE = "block_sparse_moe"


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    config.only("hidden_act", ("silu",), "silu")
    bias = config.flag("attention_bias", False)
    scale = config.real("attention_multiplier", 1.0)
    attention = parts.attention(size, bias=bias, output_bias=bias, scale=scale)
    moe = mixture(
        config.count("num_local_experts"),
        config.count("num_experts_per_tok"),
        config.count("intermediate_size"),
        gating="softmax_of_top_k",
    )
    residual = config.real("residual_multiplier", 1.0)
    layers = [
        parts.layer_of(replace(attention, rope=rope), moe, residual_scale=residual)
        for rope in ropes
    ]
    found = attended(attention) | {"Wr": f"{MOE}.router.layer.weight"}
    found |= fused(f"{MOE}.input_linear.weight", f"{MOE}.output_linear.weight", moe)
    views = layer_views([found] * size.layers)
    embedding = config.real("embedding_multiplier", 1.0)
    logits = config.real("logits_scaling", 1.0)
    if logits == 0:
        config.complain("logits_scaling is 0, wanted a number to divide logits by")
        logits = 1.0
    config.done(TRAINING)
    return parts.model(
        family,
        size,
        layers,
        rotations,
        views,
        embedding_scale=embedding,
        logit_scale=1 / logits,
    )
