"""Llama and its kin (SmolLM2, ERNIE 4.5, Seed-OSS): grouped queries, gated feed-forwards."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model
from author.families.rope import numbered, rotation

MODEL_TYPES = ("llama", "ernie4_5", "seed_oss")


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    ernie = family == "ernie4_5"
    size = parts.sizes(config, tied=ernie)
    turned = rotation(config, size.width, theta=500000.0 if ernie else 10000.0)
    biases = _biases(config, family)
    ropes, rotations = numbered([turned] * size.layers)
    mixer = parts.attention(size, bias=biases["qkv"], output_bias=biases["output"])
    ffn = parts.swiglu(config, bias=biases["mlp"], output_bias=biases["mlp"])
    layers = [parts.layer_of(replace(mixer, rope=rope), ffn) for rope in ropes]
    parts.layer_types(config, size.layers, lambda layer: False, parts.FULL)
    config.done()
    names = parts.interleaved(mixer, turned.dims) if ernie else None
    return parts.model(family, size, layers, rotations, parts.dense_views(layers, names))


def _biases(config: Config, family: str) -> dict[str, bool]:
    """Which projections have a bias."""
    match family:
        case "ernie4_5":
            return dict.fromkeys(("qkv", "output", "mlp"), config.flag("use_bias", False))
        case "seed_oss":
            return {
                "qkv": config.flag("attention_bias", True),
                "output": config.flag("attention_out_bias", False),
                "mlp": config.flag("mlp_bias", False),
            }
        case _:
            attention = config.flag("attention_bias", False)
            mlp = config.flag("mlp_bias", False)
            return {"qkv": attention, "output": attention, "mlp": mlp}
