"""Qwen 2 and 3: Llama with biases on queries, keys and values, or a norm of each head of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation
from author.spec import Window

MODEL_TYPES = ("qwen2", "qwen3")


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width)
    ropes, rotations = numbered([turned] * size.layers)
    if family == "qwen2":
        mixer = parts.attention(size, bias=True)
    else:
        bias = config.flag("attention_bias", False)
        mixer = parts.attention(size, bias=bias, output_bias=bias, qk_norm=True)
    ffn = parts.swiglu(config)
    layers = [
        parts.layer_of(replace(mixer, rope=rope, window=window), ffn)
        for rope, window in zip(ropes, windows(config, size.layers), strict=True)
    ]
    config.only("use_mrope", (False,), False)
    config.done()
    return parts.model(family, size, layers, rotations, parts.dense_views(layers))


def windows(config: Config, layers: int) -> list[Window | None]:
    """The window of each layer: with `use_sliding_window`, from `max_window_layers` on."""
    used = config.flag("use_sliding_window", False)
    window = parts.sliding(config)
    first = config.real("max_window_layers", 28)
    types = parts.layer_types(config, layers, lambda layer: used and layer >= first)
    return parts.windows(config, types, window)
