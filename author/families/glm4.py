"""GLM 4: norms before and after each block, half of a head rotated, gate and up in one tensor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("glm4",)
POST_NORMS = {
    "pan": "post_self_attn_layernorm.weight",
    "pfn": "post_mlp_layernorm.weight",
}


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width, partial=0.5)
    ropes, rotations = numbered([turned] * size.layers)
    mixer = parts.attention(size, bias=config.flag("attention_bias", False))
    ffn = parts.swiglu(config)
    layers = [
        parts.layer_of(replace(mixer, rope=rope), ffn, post_mixer_norm=True, post_ffn_norm=True)
        for rope in ropes
    ]
    parts.layer_types(config, size.layers, lambda layer: False, parts.FULL)
    config.done()
    names = {**POST_NORMS, **parts.interleaved(mixer, turned.dims), **parts.gate_up(ffn.dff)}
    return parts.model(family, size, layers, rotations, parts.dense_views(layers, names))
