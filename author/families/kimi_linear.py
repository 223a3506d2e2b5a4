"""Kimi Linear: delta layers with a decay for each channel, latent attention that does not turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.deepseek import latent, latent_stands
from author.families.mixtures import (
    MIXTRAL,
    TRAINING,
    Shapes,
    Stands,
    after_dense,
    experts,
    fed,
    groups,
    later_layers,
    layer_views,
    mixture,
    optional_count,
    shared,
    stands,
)
from author.families.model import Model
from author.spec import ChannelDelta, Moe, SigmoidGating

MODEL_TYPES = ("kimi_linear",)

MOE = "block_sparse_moe"
DELTA = {
    "Wq": "q_proj",
    "Wk": "k_proj",
    "Wv": "v_proj",
    "Wcq": "q_conv1d",
    "Wck": "k_conv1d",
    "Wcv": "v_conv1d",
    "Wfa": "f_a_proj",
    "Wfb": "f_b_proj",
    "Wga": "g_a_proj",
    "Wgb": "g_b_proj",
    "Wb": "b_proj",
    "Gn": "o_norm",
    "Wo": "o_proj",
}
# Nothing turns, and no head is as wide as `head_dim` says.
IGNORED = ("head_dim", "rope_theta", "rope_parameters", "rope_scaling", *TRAINING)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    config.only("mla_use_nope", (True,))
    size = parts.sizes(config)
    if config.get("model_max_length", None) is not None:
        size = replace(size, context=config.count("model_max_length"))
    full = latent(config, size.heads, None, 1.0)
    delta, delta_layers = _delta(config, size.layers)
    moe, dense = _routed(config), parts.swiglu(config)
    layers, found = [], []
    for number, sparse in enumerate(after_dense(config, size.layers)):
        mixer = delta if number in delta_layers else full
        layers.append(parts.layer_of(mixer, moe if sparse else dense))
        mixed = latent_stands(full, pairs=False) if mixer is full else _delta_stands()
        found.append(mixed | (_routed_stands(moe, number, tensors) if sparse else fed(dense)))
    skipped = later_layers(config, size.layers)
    config.done(IGNORED)
    return parts.model(family, size, layers, (), layer_views(found), skipped=skipped)


def _delta(config: Config, layers: int) -> tuple[ChannelDelta, frozenset[int]]:
    """The delta layers, and which they are: the config counts them from 1."""
    said = config.get("linear_attn_config", {})
    own = Config(said if isinstance(said, dict) else {}, "linear_attn_config")
    numbered = own.get("kda_layers", []), own.get("full_attn_layers", [])
    found = [n for part in numbered for n in (part if isinstance(part, list) else [part])]
    if not all(isinstance(n, int) for n in found) or sorted(found) != [*range(1, layers + 1)]:
        config.complain(f"kda_layers and full_attn_layers are {numbered}, wanted 1 to {layers}")
        numbered = [], []
    width = own.count("head_dim")
    delta = ChannelDelta(
        heads=own.count("num_heads"),
        head_dim=width,
        conv_taps=own.count("short_conv_kernel_size", 4),
        decay_rank=width,
        gate_rank=width,
    )
    unknown = sorted(set(own.keys) - own.read)
    if unknown:
        own.complain(f"nothing is known of {', '.join(unknown)}")
    for complaint in own.complaints:
        config.complain(f"{own.where}: {complaint}")
    return delta, frozenset(n - 1 for n in numbered[0])


def _delta_stands() -> Stands:
    bare = {"Dt": "self_attn.dt_bias", "Al": "self_attn.A_log"}
    return stands("self_attn", DELTA) | bare


def _routed(config: Config) -> Moe:
    """Sigmoids chosen with a bias; see DeepSeek V3's, which goes by other keys."""
    config.only("moe_router_activation_func", ("sigmoid",), "sigmoid")
    width, beside = (
        config.count("moe_intermediate_size"),
        optional_count(config, "num_shared_experts"),
    )
    runs = groups(config, "num_expert_group")
    config.only("use_grouped_topk", (True,) if runs is not None else (True, False), True)
    return mixture(
        config.count("num_experts"),
        config.count("num_experts_per_token", also=("num_experts_per_tok",)),
        width,
        gating=SigmoidGating(bias=True),
        groups=runs,
        norm_top_k=config.flag("moe_renormalize", True),
        weights_scale=config.real("routed_scaling_factor", 1.0),
        shared_experts=beside,
        shared_dff=beside * width,
    )


def _routed_stands(moe: Moe, number: int, tensors: Shapes) -> Stands:
    found = {"Wr": f"{MOE}.gate.weight", "Bs": f"{MOE}.gate.e_score_correction_bias"}
    own = shared(f"{MOE}.shared_experts", moe) if moe.shared_experts > 0 else {}
    return found | experts(f"{MOE}.experts", moe, number, tensors, MIXTRAL) | own
