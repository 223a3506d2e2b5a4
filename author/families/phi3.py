"""Phi 3 and 4: Llama with fused projections, and a rotation with factors for long sequences."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model, View, part
from author.families.rope import ORIGINAL, numbered, rotation

MODEL_TYPES = ("phi3",)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    config.get(ORIGINAL, None)  # read where the rotation asks for it
    turned = rotation(config, size.width)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(key, (False,), False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.only(key, (1,), 1)
    window = parts.sliding(config)
    types = parts.layer_types(config, size.layers, lambda layer: window is not None)
    ropes, rotations = numbered([turned] * size.layers)
    mixer, ffn = parts.attention(size), parts.swiglu(config)
    layers = [
        parts.layer_of(replace(mixer, rope=rope, window=seen), ffn)
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    config.done()
    names = {**_qkv(size), **parts.gate_up(ffn.dff)}
    return parts.model(family, size, layers, rotations, parts.dense_views(layers, names))


def _qkv(size: parts.Sizes) -> dict[str, View]:
    """Queries, keys and values in one tensor, one after another."""
    queries, keys = size.heads * size.width, size.kv_heads * size.width
    ranges = {
        "Wq": part(0, queries),
        "Wk": part(queries, keys),
        "Wv": part(queries + keys, keys),
    }
    fused = "self_attn.qkv_proj.weight"
    return {base: View(tensor=fused, rows=rows) for base, rows in ranges.items()}
