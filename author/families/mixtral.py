"""Mixtral: Mistral's attention and a mixture in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    MIXTRAL,
    TRAINING,
    Shapes,
    attended,
    experts,
    layer_views,
    mixture,
)
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("mixtral",)

MOE = "block_sparse_moe"


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, defaults={"num_key_value_heads": 8})
    ropes, rotations = numbered([rotation(config, size.width, theta=1e6)] * size.layers)
    window = parts.sliding(config)
    types = parts.layer_types(config, size.layers, lambda layer: window is not None)
    config.only("hidden_act", ("silu",), "silu")
    moe = mixture(
        config.count("num_local_experts", 8),
        config.count("num_experts_per_tok", 2),
        config.count("intermediate_size"),
    )
    attention = parts.attention(size)
    found = [
        attended(attention)
        | {"Wr": f"{MOE}.gate.weight"}
        | experts(f"{MOE}.experts", moe, number, tensors, MIXTRAL)
        for number in range(size.layers)
    ]
    each = zip(ropes, parts.windows(config, types, window), strict=True)
    layers = [parts.layer_of(replace(attention, rope=rope, window=w), moe) for rope, w in each]
    config.done(TRAINING)
    return parts.model(family, size, layers, rotations, layer_views(found))
