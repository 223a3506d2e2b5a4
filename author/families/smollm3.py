"""SmolLM3: Llama with layers that do not rotate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("smollm3",)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, tied=True)
    turned = rotation(config, size.width, theta=2000000.0)
    turns = _turns(config, size.layers)
    used, window = config.flag("use_sliding_window", False), parts.sliding(config)
    types = parts.layer_types(config, size.layers, lambda layer: used and not turns[layer])
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    mixer = parts.attention(size, bias=bias, output_bias=bias)
    ffn = parts.swiglu(config, bias=mlp_bias, output_bias=mlp_bias)
    ropes, rotations = numbered([turned if turns[layer] else None for layer in range(size.layers)])
    layers = [
        parts.layer_of(replace(mixer, rope=rope, window=seen), ffn)
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    config.done(ignored=("max_window_layers",))
    return parts.model(family, size, layers, rotations, parts.dense_views(layers))


def _turns(config: Config, layers: int) -> list[bool]:
    """Whether each layer rotates: `no_rope_layers` says 1 where it does."""
    interval = config.count("no_rope_layer_interval", 4)
    named = config.each("no_rope_layers", layers, (1, 0))
    if named is not None:
        return [bool(turns) for turns in named]
    return [(layer + 1) % interval != 0 for layer in range(layers)]
