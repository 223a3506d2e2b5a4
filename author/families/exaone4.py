"""EXAONE 4: norms after the blocks alone, a norm of each head, rotary in sliding layers only."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("exaone4",)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width)
    window, slides = parts.sliding(config), _slides(config)
    types = parts.layer_types(
        config, size.layers, lambda layer: window is not None and slides(layer)
    )
    ropes, rotations = numbered(
        [turned if window is None or kind == parts.SLIDING else None for kind in types]
    )
    mixer, ffn = parts.attention(size, qk_norm=True), parts.swiglu(config)
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
    config.done(ignored=("layer_norm_epsilon",))
    views = parts.dense_views(layers, parts.POST_NORMS)
    return parts.model(family, size, layers, rotations, views)


def _slides(config: Config) -> Callable[[int], bool]:
    """By `sliding_window_pattern`: a number, or letters, `L` for layers that slide."""
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return lambda layer: pattern[layer % len(pattern)] == "L"
    return parts.every(config.count("sliding_window_pattern", 4))
