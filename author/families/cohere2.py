"""Cohere's Command R7B and A: layer norms, both blocks side by side, rotary in sliding layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("cohere2",)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, tied=True, eps="layer_norm_eps")
    turned = rotation(config, size.width)
    _check_plain(config)
    pattern = config.count("sliding_window_pattern", 4, also=("layer_switch",))
    types = parts.layer_types(config, size.layers, parts.every(pattern))
    window = parts.sliding(config, 4096)
    ropes, rotations = numbered([turned if kind == parts.SLIDING else None for kind in types])
    bias = config.flag("attention_bias", False)
    mixer, ffn = parts.attention(size, bias=bias, output_bias=bias), parts.swiglu(config)
    layers = [
        parts.layer_of(replace(mixer, rope=rope, window=seen), ffn, parallel=True)
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    scale = config.real("logit_scale", 0.0625)
    config.done()
    names = parts.interleaved(mixer, turned.dims)
    views = parts.dense_views(layers, names)
    return parts.model(family, size, layers, rotations, views, norm="layer", logit_scale=scale)


def _check_plain(config: Config) -> None:
    """Refuse what Cohere's own code knows and transformers does not."""
    config.only("use_qk_norm", (False,), False)
    config.only("use_gated_activation", (True,), True)
    config.only("use_parallel_block", (True,), True)
    config.only("use_embedding_sharing", (True,), True)
    config.only("use_parallel_embedding", (True, False), False)
    config.only("position_embedding_type", ("rope_gptj",), "rope_gptj")
    config.only("order_of_interleaved_layers", ("local_attn_first",), "local_attn_first")
    config.only("rotary_pct", (1.0,), 1.0)
