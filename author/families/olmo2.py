"""OLMo 2 and 3: norms after the blocks alone, queries and keys normed whole; 3 with windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model, Rotation
from author.families.rope import numbered, rotation, rotations_by_type

MODEL_TYPES = ("olmo2", "olmo3")
# Also the base of sliding layers in any config of the old layout.
BASE = 500000.0


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    bias = config.flag("attention_bias", False)
    mixer = parts.attention(size, bias=bias, output_bias=bias, qk_norm=True, qk_norm_whole=True)
    if family == "olmo2":
        types = parts.layer_types(config, size.layers, lambda layer: False, parts.FULL)
        turned, window = [rotation(config, size.width)] * size.layers, None
    else:
        types = parts.layer_types(config, size.layers, parts.every(4))
        turned, window = _turned(config, size.width, types), parts.sliding(config, 4096)
    ropes, rotations = numbered(turned)
    ffn = parts.swiglu(config)
    layers = [
        parts.layer_of(
            replace(mixer, rope=rope, window=seen),
            ffn,
            pre_norm=False,
            post_mixer_norm=True,
            post_ffn_norm=True,
        )
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    config.done()
    views = parts.dense_views(layers, parts.POST_NORMS)
    return parts.model(family, size, layers, rotations, views)


def _turned(config: Config, width: int, types: tuple[str, ...]) -> list[Rotation]:
    bases = {parts.FULL: BASE, parts.SLIDING: BASE}
    found = rotations_by_type(config, width, bases)
    if found is None:
        found = {
            parts.FULL: rotation(config, width, theta=BASE),
            parts.SLIDING: Rotation(dims=width, theta=BASE),
        }
    return [found[kind] for kind in types]
