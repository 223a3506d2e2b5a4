"""OLMoE: a norm over all queries and over all keys, and a mixture in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    attended,
    experts,
    layer_views,
    mixture,
)
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("olmoe",)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    config.only("hidden_act", ("silu",), "silu")
    bias = config.flag("attention_bias", False)
    attention = parts.attention(
        size,
        qk_norm=True,
        qk_norm_whole=True,
        bias=bias,
        output_bias=bias,
        clip=config.optional("clip_qkv"),
    )
    moe = mixture(
        config.count("num_experts", 64),
        config.count("num_experts_per_tok", 8),
        config.count("intermediate_size"),
        norm_top_k=config.flag("norm_topk_prob", False),
    )
    layers = [parts.layer_of(replace(attention, rope=rope), moe) for rope in ropes]
    found = [
        attended(attention)
        | {"Wr": "mlp.gate.weight"}
        | experts("mlp.experts", moe, number, tensors)
        for number in range(size.layers)
    ]
    config.done(TRAINING)
    return parts.model(family, size, layers, rotations, layer_views(found))
