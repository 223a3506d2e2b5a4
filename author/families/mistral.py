"""Mistral and Ministral 3: Llama with windows, or with queries scaled by position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import ORIGINAL, given, numbered, rotation
from author.spec import Temperature

MODEL_TYPES = ("mistral", "ministral3")
BETA = "llama_4_scaling_beta"


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    tempered = family == "ministral3"
    size = parts.sizes(config)
    turned = rotation(config, size.width, beside=(BETA,) if tempered else ())
    config.only("attention_bias", (False,), False)
    config.only("mlp_bias", (False,), False)
    window = parts.sliding(config)
    types = parts.layer_types(config, size.layers, lambda layer: window is not None)
    ropes, rotations = numbered([turned] * size.layers)
    mixer = parts.attention(size, temperature=_temperature(config) if tempered else None)
    ffn = parts.swiglu(config)
    layers = [
        parts.layer_of(replace(mixer, rope=rope, window=seen), ffn)
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    config.done()
    return parts.model(family, size, layers, rotations, parts.dense_views(layers))


def _temperature(config: Config) -> Temperature | None:
    parameters = given(config)
    scale, length = parameters.get(BETA), parameters.get(ORIGINAL)
    if scale is None:
        return None
    if not isinstance(scale, int | float) or not isinstance(length, int | float):
        config.complain(f"{BETA} is {scale!r} and {ORIGINAL} {length!r}, wanted two numbers")
        return None
    return Temperature(floor=float(length), scale=float(scale), offset=0)
