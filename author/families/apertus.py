"""Apertus: a norm of each head, and a feed-forward without gate behind a learnt xIELU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model, View
from author.families.rope import ORIGINAL, numbered, rotation
from author.spec import Dense, Xielu

MODEL_TYPES = ("apertus",)
NORMS = {"an": "attention_layernorm.weight", "fn": "feedforward_layernorm.weight"}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Each layer's tensors hold these two as well.
XIELU = Xielu(beta=0.5, cut=-1e-6)


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of this family describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width, theta=12000000.0, default=SCALING)
    ropes, rotations = numbered([turned] * size.layers)
    bias = config.flag("attention_bias", False)
    config.only("qk_norm", (True,), True)
    config.only("post_norm", (False,), False)
    config.only("mlp_bias", (False,), False)
    config.only("hidden_act", ("xielu",), "xielu")
    mixer = parts.attention(size, bias=bias, output_bias=bias, qk_norm=True)
    ffn = Dense(dff=config.count("intermediate_size"), act="silu", gated=False, xielu=XIELU)
    layers = [parts.layer_of(replace(mixer, rope=rope), ffn) for rope in ropes]
    parts.layer_types(config, size.layers, lambda layer: False, parts.FULL)
    config.done()
    learnt = {
        "Xp": View(tensor="mlp.act_fn.alpha_p", function="softplus"),
        "Xn": View(tensor="mlp.act_fn.alpha_n", function="softplus", plus=XIELU.beta),
    }
    views = parts.dense_views(layers, {**NORMS, **learnt})
    model = parts.model(family, size, layers, rotations, views)
    return replace(model, numbers=_numbers(size.layers))


def _numbers(layers: int) -> dict[str, float]:
    found = {}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.act_fn.beta"] = XIELU.beta
        found[f"model.layers.{layer}.mlp.act_fn.eps"] = XIELU.cut
    return found
