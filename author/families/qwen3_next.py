"""Qwen 3 Next and Qwen 3.5: gated delta layers between layers of gated attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    Stands,
    attended,
    fed,
    later_layers,
    layer_views,
    sparse_layers,
)
from author.families.model import Model, View, of_each, part, tiled
from author.families.qwen_moe import routed, routed_stands
from author.families.rope import numbered, rotation
from author.spec import Attention, Dense, GatedDelta, Moe

NEXT, DENSE, MIXED = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
MODEL_TYPES = (NEXT, DENSE, MIXED)

FULL, LINEAR = "full_attention", "linear_attention"
UNIT_EPSILON = 1e-6  # whatever the config says of other norms
IGNORED = (
    *(*TRAINING, "full_attention_interval", "intermediate_size", "mamba_ssm_dtype"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "max_window_layers"),
    *("mlp_only_layers", "decoder_sparse_step"),  # of one of the three
)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of these families describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, size.width, partial=0.25)
    config.only("attention_bias", (False,), False)
    config.only("attn_output_gate", (True,), True)
    config.only("use_sliding_window", (False,), False)
    attention = parts.attention(size, qk_norm=True, output_gate=True)
    delta = _delta(config)
    kinds = _kinds(config, size.layers)
    ropes, rotations = numbered([turned if kind == FULL else None for kind in kinds])
    feeds = _feeds(config, family, size.layers)
    layers, found = [], []
    for number, (kind, rope, feed) in enumerate(zip(kinds, ropes, feeds, strict=True)):
        full = replace(attention, rope=rope)
        mixer = full if kind == FULL else delta
        layers.append(parts.layer_of(mixer, feed))
        fused = family == NEXT
        mixed = _attended(full) if kind == FULL else _delta_stands(delta, fused=fused)
        own = routed_stands(feed, number, tensors) if isinstance(feed, Moe) else fed(feed)
        found.append(mixed | own)
    skipped = later_layers(config, size.layers)
    config.only("hidden_act", ("silu",), "silu")
    config.done(IGNORED)
    views = layer_views(found, norm_plus=1.0)
    return parts.model(family, size, layers, rotations, views, norm_plus=1.0, skipped=skipped)


def _delta(config: Config) -> GatedDelta:
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    width = config.count("linear_key_head_dim")
    config.only("linear_value_head_dim", (width,), width)
    if values % keys != 0:
        config.complain(
            f"linear_num_value_heads is {values}, wanted a multiple of {keys} key heads"
        )
    return GatedDelta(
        k_heads=keys,
        v_heads=values,
        head_dim=width,
        conv_taps=config.count("linear_conv_kernel_dim", 4),
        gate="silu",
        unit_eps=UNIT_EPSILON,
    )


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    """The kind of each layer: `layer_types` decides where it is given."""
    named = config.each("layer_types", layers, (FULL, LINEAR))
    interval = config.count("full_attention_interval", 4)
    if named is not None:
        return named
    return tuple(LINEAR if (i + 1) % interval != 0 else FULL for i in range(layers))


def _feeds(config: Config, family: str, layers: int) -> Sequence[Dense | Moe]:
    if family == DENSE:
        return [parts.swiglu(config)] * layers
    moe = routed(config, norm_top_k=True if family == NEXT else None, shared_gate=True)
    sparse = sparse_layers(config, layers) if family == NEXT else (True,) * layers
    if all(sparse):
        return [moe] * layers
    dense = parts.swiglu(config)
    return [moe if mixed else dense for mixed in sparse]


def _attended(a: Attention) -> Stands:
    """Each head of the query projection has its queries, then its gate."""
    rows, tensor = 2 * a.head_dim, "self_attn.q_proj.weight"
    queries, gates = ((first, a.head_dim, 1) for first in (0, a.head_dim))
    return attended(a) | {
        "Wq": View(tensor=tensor, rows=of_each(a.heads, rows, queries)),
        "Wqg": View(tensor=tensor, rows=of_each(a.heads, rows, gates)),
    }


# --- Gated delta: a checkpoint's value heads stand by key head, in the language they are tiled


def _delta_stands(g: GatedDelta, *, fused: bool) -> Stands:
    repeat, n = g.v_heads // g.k_heads, g.head_dim
    keys = g.k_heads * n
    values = tiled(g.k_heads, repeat, n)
    heads = tiled(g.k_heads, repeat, 1)
    conv = "linear_attn.conv1d.weight"
    return {
        **(_fused(g, repeat) if fused else _separate(g, repeat)),
        "Wcq": View(tensor=conv, rows=part(0, keys)),
        "Wck": View(tensor=conv, rows=part(keys, keys)),
        "Wcv": View(tensor=conv, rows=tiled(g.k_heads, repeat, n, start=2 * keys)),
        "Dt": View(tensor="linear_attn.dt_bias", rows=heads),
        "Al": View(tensor="linear_attn.A_log", rows=heads),
        "Gn": "linear_attn.norm.weight",
        "Wo": View(tensor="linear_attn.out_proj.weight", cols=values),
    }


def _separate(g: GatedDelta, repeat: int) -> Stands:
    """Qwen 3.5: one projection of all queries, keys and values, and three more."""
    n = g.head_dim
    keys, qkv = g.k_heads * n, "linear_attn.in_proj_qkv.weight"
    heads = tiled(g.k_heads, repeat, 1)
    return {
        "Wq": View(tensor=qkv, rows=part(0, keys)),
        "Wk": View(tensor=qkv, rows=part(keys, keys)),
        "Wv": View(tensor=qkv, rows=tiled(g.k_heads, repeat, n, start=2 * keys)),
        "Wz": View(tensor="linear_attn.in_proj_z.weight", rows=tiled(g.k_heads, repeat, n)),
        "Wb": View(tensor="linear_attn.in_proj_b.weight", rows=heads),
        "Wa": View(tensor="linear_attn.in_proj_a.weight", rows=heads),
    }


def _fused(g: GatedDelta, repeat: int) -> Stands:
    """Qwen 3 Next: each key head with what belongs to it, `q k v z` in one tensor, `b a` in one."""
    n, groups = g.head_dim, g.k_heads
    qkvz, ba = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    rows = (2 + 2 * repeat) * n
    z = (2 + repeat) * n
    return {
        "Wq": View(tensor=qkvz, rows=of_each(groups, rows, (0, n, 1))),
        "Wk": View(tensor=qkvz, rows=of_each(groups, rows, (n, n, 1))),
        "Wv": View(tensor=qkvz, rows=tiled(groups, repeat, n, start=2 * n, stride=rows)),
        "Wz": View(tensor=qkvz, rows=tiled(groups, repeat, n, start=z, stride=rows)),
        "Wb": View(tensor=ba, rows=tiled(groups, repeat, 1, stride=2 * repeat)),
        "Wa": View(tensor=ba, rows=tiled(groups, repeat, 1, start=repeat, stride=2 * repeat)),
    }
