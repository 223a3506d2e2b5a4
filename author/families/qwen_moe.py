"""Qwen 2 and Qwen 3 with mixtures in all layers, or in some."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    Stands,
    attended,
    experts,
    fed,
    layer_views,
    mixture,
    shared,
    sparse_layers,
)
from author.families.model import Model
from author.families.rope import numbered, rotation
from author.spec import Moe, Window

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of these families describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    if family == "qwen2_moe":
        attention = parts.attention(size, bias=config.flag("qkv_bias", True))
    else:
        bias = config.flag("attention_bias", False)
        attention = parts.attention(size, qk_norm=True, bias=bias, output_bias=bias)
    moe = routed(config, norm_top_k=False, shared_gate=family == "qwen2_moe")
    sparse = sparse_layers(config, size.layers)
    dense = None if all(sparse) else parts.swiglu(config)
    windows = _windows(config, family, size.layers)
    layers, found = [], []
    for number, (rope, window) in enumerate(zip(ropes, windows, strict=True)):
        mixer = replace(attention, rope=rope, window=window)
        feed = moe if sparse[number] or dense is None else dense
        layers.append(parts.layer_of(mixer, feed))
        found.append(attended(mixer) | _fed(feed, number, tensors))
    config.only("hidden_act", ("silu",), "silu")
    config.done((*TRAINING, "intermediate_size", "max_window_layers"))
    return parts.model(family, size, layers, rotations, layer_views(found))


def routed(config: Config, *, norm_top_k: bool | None, shared_gate: bool) -> Moe:
    """Qwen's mixture; `norm_top_k` is what the family does where the config is silent.

    None: it renormalises whatever the config says. `shared_gate`: with a gated shared expert.
    """
    width = config.count("shared_expert_intermediate_size") if shared_gate else 0
    norms = norm_top_k is None or config.flag("norm_topk_prob", norm_top_k)
    return mixture(
        config.count("num_experts", also=("num_local_experts",)),
        config.count("num_experts_per_tok"),
        config.count("moe_intermediate_size"),
        norm_top_k=norms,
        shared_experts=int(shared_gate),
        shared_dff=width,
        shared_gate=shared_gate,
    )


def routed_stands(moe: Moe, number: int, tensors: Shapes) -> Stands:
    """Where the mixture of a layer stands."""
    found: Stands = {"Wr": "mlp.gate.weight"} | experts("mlp.experts", moe, number, tensors)
    if moe.shared_gate:
        found |= shared("mlp.shared_expert", moe) | {"Wsgi": "mlp.shared_expert_gate.weight"}
    return found


def _fed(feed: Any, number: int, tensors: Shapes) -> Stands:
    return routed_stands(feed, number, tensors) if isinstance(feed, Moe) else fed(feed)


def _windows(config: Config, family: str, layers: int) -> list[Window | None]:
    """The window of each layer: `layer_types` decides where it is given."""
    used = config.flag("use_sliding_window", False)
    window = parts.sliding(config)
    if used and family == "qwen2_moe" and config.get("layer_types", None) is None:
        config.complain("use_sliding_window without layer_types: which layers slide is not known")
    types = parts.layer_types(config, layers, lambda layer: used)
    return parts.windows(config, types, window)
