"""Hunyuan with mixtures: norms of heads after the rotation, one shared expert beside the others."""

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
    layer_views,
    mixture,
    shared,
)
from author.families.model import Model
from author.families.rope import numbered, rotation
from author.spec import Moe

MODEL_TYPES = ("hunyuan_v1_moe",)

QK_NORMS = {"Qn": "self_attn.query_layernorm.weight", "Kn": "self_attn.key_layernorm.weight"}
# Ways of training, and keys of parts that a config of this family may name and not have.
IGNORED = (
    *(*TRAINING, "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"),
    *("cla_share_factor", "dense_list", "sep_token_id", "eod_token_id", "org_vocab_size"),
    *("num_media_embeds", "position_embedding_xdrope", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group"),
    *("class_num", "mask_init_id", "pad_id", "pool_type", "skip_cls_token", "im_newline_id"),
    *(f"{part}_{end}_id" for part in ("im", "text", "video") for end in ("start", "end")),
)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    config.only("attention_head_dim", (size.width,), size.width)
    ropes, rotations = numbered([rotation(config, size.width)] * size.layers)
    config.only("hidden_act", ("silu",), "silu")
    _plain(config)
    bias = config.flag("attention_bias", False)
    attention = parts.attention(
        size, qk_norm=True, qk_norm_after_rope=True, bias=bias, output_bias=bias
    )
    mixtures = _mixtures(config, size.layers)
    layers, found = [], []
    for number, (rope, moe) in enumerate(zip(ropes, mixtures, strict=True)):
        layers.append(parts.layer_of(replace(attention, rope=rope), moe))
        found.append(attended(attention) | QK_NORMS | _routed_stands(moe, number, tensors))
    config.done(IGNORED)
    return parts.model(family, size, layers, rotations, layer_views(found))


def _plain(config: Config) -> None:
    """What published configs name and this family does one way only."""
    for key in ("use_qk_norm", "use_mixed_mlp_moe", "norm_topk_prob", "use_rotary_pos_emb"):
        config.only(key, (True,), True)
    for key in ("use_cla", "use_mla", "mlp_bias", "group_limited_greedy"):
        config.only(key, (False,), False)
    config.only("routed_scaling_factor", (False, 1.0), 1.0)
    config.only("norm_type", ("rms",), "rms")
    config.only("moe_layer_num_skipped", (0,), 0)


def _mixtures(config: Config, layers: int) -> list[Moe]:
    """The mixture of each layer."""
    width = config.count("intermediate_size")
    for key, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if any(given != value for given in _each(config, key, layers, value)):
            config.complain(f"{key} is {config.get(key)!r}, wanted {value} in every layer")
    counts = _each(config, "num_experts", layers, 1), _each(config, "moe_topk", layers, 1)
    return [
        mixture(experts, top_k, width, shared_experts=1, shared_dff=width)
        for experts, top_k in zip(*counts, strict=True)
    ]


def _each(config: Config, key: str, layers: int, default: int) -> list[int]:
    """A number a layer, or one for all of them."""
    found = config.get(key, default)
    if not isinstance(found, list):
        return [config.count(key, default)] * layers
    if len(found) != layers or any(not isinstance(n, int) or n < 1 for n in found):
        config.complain(f"{key} is {found!r}, wanted {layers} whole numbers of at least 1")
        return [default] * layers
    return found


def _routed_stands(moe: Moe, number: int, tensors: Shapes) -> Stands:
    found: Stands = {"Wr": "mlp.gate.wg.weight"}
    found |= experts("mlp.experts", moe, number, tensors)
    return found | shared("mlp.shared_mlp", moe)
