"""GLM 4.5 and dots.llm1: attention with a norm of each head, and the mixture of DeepSeek V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.deepseek import mixture_stands, scored
from author.families.mixtures import (
    TRAINING,
    Shapes,
    after_dense,
    attended,
    fed,
    later_layers,
    layer_views,
    number_of,
)
from author.families.model import Model
from author.families.rope import numbered, rotation
from author.spec import Window

GLM, DOTS = "glm4_moe", "dots1"
MODEL_TYPES = (GLM, DOTS)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of these families describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width, partial=0.5 if family == GLM else 1.0)
    ropes, rotations = numbered([turned] * size.layers)
    bias = config.flag("attention_bias", False)
    normed = config.flag("use_qk_norm", False) if family == GLM else True
    attention = parts.attention(
        size, qk_norm=normed, bias=bias, output_bias=bias and family == DOTS
    )
    windows = _windows(config, size.layers) if family == DOTS else [None] * size.layers
    moe, dense = scored(config, norm_top_k=family == GLM), parts.swiglu(config)
    layers, found = [], []
    for number, sparse in enumerate(after_dense(config, size.layers)):
        mixer = replace(attention, rope=ropes[number], window=windows[number])
        layers.append(parts.layer_of(mixer, moe if sparse else dense))
        own = mixture_stands(moe, number, tensors) if sparse else fed(dense)
        found.append(attended(mixer) | own)
    skipped = later_layers(config, size.layers)
    config.done((*TRAINING, "max_window_layers"))
    return parts.model(family, size, layers, rotations, layer_views(found), skipped=skipped)


def _windows(config: Config, layers: int) -> list[Window | None]:
    """The window of each layer of dots.llm1: from `max_window_layers` on, if there is any."""
    config.only("use_sliding_window", (False,), False)
    window, first = parts.sliding(config), number_of(config, "max_window_layers", layers)
    slides = window is not None
    types = parts.layer_types(config, layers, lambda layer: slides and layer >= first)
    return parts.windows(config, types, window)
