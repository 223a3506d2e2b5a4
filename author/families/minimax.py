"""MiniMax Text 01 and M2: mixtures in every layer; the first has linear attention in most."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    MIXTRAL,
    TRAINING,
    Shapes,
    Stands,
    attended,
    experts,
    later_layers,
    layer_views,
    mixture,
)
from author.families.model import Model, View, of_each
from author.families.rope import numbered, rotation
from author.names import Name
from author.spec import LinearMixer, Moe, NormedResidual, SigmoidGating

FIRST, SECOND = "minimax", "minimax_m2"
MODEL_TYPES = (FIRST, SECOND)

MOE = "block_sparse_moe"
# Of M2: layers for predicting several tokens, and shared and plain parts that it does not have.
IGNORED = (
    *(*TRAINING, "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    *("mlp_intermediate_size", "shared_moe_mode"),
)
FULL, LINEAR = "full_attention", "linear_attention"
LINEAR_EPSILON = 1e-6  # of the norm in linear attention, whatever the config says of others
DECAY = "a buffer that follows from the layer's number"
DECAYS = {
    f"*.self_attn.{name}": DECAY
    for name in ("slope_rate", "diagonal_decay", "key_decay", "query_decay")
}


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of these families describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    config.only("hidden_act", ("silu",), "silu")
    return (_first if family == FIRST else _second)(config, tensors)


def _routed(config: Config, **fields: Any) -> Moe:
    experts, top_k = config.count("num_local_experts"), config.count("num_experts_per_tok")
    return mixture(experts, top_k, config.count("intermediate_size"), **fields)


def _routed_stands(moe: Moe, number: int, tensors: Shapes) -> Stands:
    found: Stands = {"Wr": f"{MOE}.gate.weight"}
    return found | experts(f"{MOE}.experts", moe, number, tensors, MIXTRAL)


# --- M2


def _second(config: Config, tensors: Shapes) -> Model:
    size = parts.sizes(config)
    ropes, rotations = numbered([rotation(config, size.width, theta=5e6)] * size.layers)
    config.only("use_qk_norm", (True,), True)
    config.only("qk_norm_type", ("per_layer",), "per_layer")
    config.only("scoring_func", ("sigmoid",), "sigmoid")
    config.only("use_routing_bias", (True,), True)
    config.only("shared_intermediate_size", (0,), 0)
    for part in ("full_attention", "linear_attention", "mlp"):
        config.only(f"layernorm_{part}_beta", (1.0,), 1.0)
    config.each("attn_type_list", size.layers, (1,))
    moe = _routed(config, gating=SigmoidGating(bias=True))
    attention = parts.attention(size, qk_norm=True, qk_norm_whole=True)
    layers = [parts.layer_of(replace(attention, rope=rope), moe) for rope in ropes]
    found = [
        attended(attention)
        | _routed_stands(moe, number, tensors)
        | {"Bs": f"{MOE}.e_score_correction_bias"}
        for number in range(size.layers)
    ]
    skipped = later_layers(config, size.layers)
    config.done(IGNORED)
    views = layer_views(found)
    return parts.model(SECOND, size, layers, rotations, views, skipped=skipped)


# --- Text 01: the stream goes on from the normed input


def _first(config: Config, tensors: Shapes) -> Model:
    size = parts.sizes(config)
    kinds = config.each("layer_types", size.layers, (FULL, LINEAR))
    if kinds is None:
        config.complain(f"layer_types is missing: which layers are {LINEAR} is not known")
        kinds = (FULL,) * size.layers
    turned = rotation(config, size.width, theta=1e6)
    ropes, rotations = numbered([turned if kind == FULL else None for kind in kinds])
    full, moe = parts.attention(size, window=parts.sliding(config)), _routed(config)
    linear = LinearMixer(heads=size.heads, head_dim=size.width, norm_eps=LINEAR_EPSILON)
    residuals = _residuals(config)
    layers, found = [], []
    for number, (kind, rope) in enumerate(zip(kinds, ropes, strict=True)):
        mixer = linear if kind == LINEAR else replace(full, rope=rope)
        layers.append(parts.layer_of(mixer, moe, normed_residual=residuals[kind]))
        mixed = _linear_stands(linear) if kind == LINEAR else attended(full)
        found.append(mixed | _routed_stands(moe, number, tensors))
    config.done((*TRAINING, "block_size"))  # of a way to compute linear attention
    decays = {
        Name("Ld", number): (_decays(linear.heads, number, size.layers),)
        for number, kind in enumerate(kinds)
        if kind == LINEAR
    }
    views = layer_views(found)
    return replace(
        parts.model(FIRST, size, layers, rotations, views, skipped=DECAYS), constants=decays
    )


def _residuals(config: Config) -> dict[str, NormedResidual]:
    """How the stream goes on, by the kind of layer."""

    def factors(of: str) -> tuple[float, float]:
        return config.real(f"{of}_alpha_factor", 1.0), config.real(f"{of}_beta_factor", 1.0)

    fed = factors("mlp")
    mixed = {FULL: factors("full_attn"), LINEAR: factors("linear_attn")}
    return {
        kind: NormedResidual(mixer_alpha=alpha, mixer_beta=beta, ffn_alpha=fed[0], ffn_beta=fed[1])
        for kind, (alpha, beta) in mixed.items()
    }


def _decays(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """What a state keeps from one token to the next, a head: later layers keep more."""
    depth = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    rates = (2 ** (-8 * (head + 1) / heads) * depth for head in range(heads))
    return tuple(math.exp(-rate) for rate in rates)


def _linear_stands(m: LinearMixer) -> Stands:
    """Each head of the fused projection has its queries, keys and values."""
    tensor, width = "self_attn.qkv_proj.weight", m.head_dim
    heads = {
        base: View(tensor=tensor, rows=of_each(m.heads, 3 * width, (at * width, width, 1)))
        for at, base in enumerate(("Wq", "Wk", "Wv"))
    }
    return {
        **heads,
        "Wz": "self_attn.output_gate.weight",
        "Ln": "self_attn.norm.weight",
        "Wo": "self_attn.out_proj.weight",
    }
