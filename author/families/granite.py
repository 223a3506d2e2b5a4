"""Granite: Llama with factors on embeddings, scores, what blocks add, and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("granite",)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    scale = config.real("attention_multiplier", 1.0)
    mixer = parts.attention(size, bias=bias, output_bias=bias, scale=scale)
    ffn = parts.swiglu(config, bias=mlp_bias, output_bias=mlp_bias)
    added = config.real("residual_multiplier", 1.0)
    layers = [
        parts.layer_of(replace(mixer, rope=rope), ffn, residual_scale=added) for rope in ropes
    ]
    factors = scales(config)
    config.done()
    return parts.model(family, size, layers, rotations, parts.dense_views(layers), **factors)


def scales(config: Config) -> dict[str, Any]:
    """The factors on the embeddings and on the logits."""
    return {
        "embedding_scale": config.real("embedding_multiplier", 1.0),
        "logit_scale": 1.0 / (config.real("logits_scaling", 1.0) or 1.0),
    }
