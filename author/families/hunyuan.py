"""Hunyuan's dense models: Llama with a norm of each head after the rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("hunyuan_v1_dense",)
HEAD_NORMS = {
    "Qn": "self_attn.query_layernorm.weight",
    "Kn": "self_attn.key_layernorm.weight",
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
    size = replace(size, width=config.count("head_dim", size.width, also=("attention_head_dim",)))
    check_plain(config)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    bias = config.flag("attention_bias", False)
    config.only("mlp_bias", (False,), False)
    mixer = parts.attention(
        size, bias=bias, output_bias=bias, qk_norm=True, qk_norm_after_rope=True
    )
    ffn = parts.swiglu(config)
    layers = [parts.layer_of(replace(mixer, rope=rope), ffn) for rope in ropes]
    parts.layer_types(config, size.layers, lambda layer: False, parts.FULL)
    config.done()
    views = parts.dense_views(layers, HEAD_NORMS)
    return parts.model(family, size, layers, rotations, views)


def check_plain(config: Config) -> None:
    """Refuse what Hunyuan's own code knows and transformers does not."""
    config.only("use_qk_norm", (True,), True)
    config.only("use_cla", (False,), False)
    config.only("use_rotary_pos_emb", (True,), True)
    config.only("norm_type", ("rms", "hf_rms"), "rms")
