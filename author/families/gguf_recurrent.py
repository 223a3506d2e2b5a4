"""Architectures with recurrent layers: what their GGUF files say, and where matrices stand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families.gguf_keys import FULL, SIGMOID, Keys, experts, scored
from author.families.gguf_metadata import Metadata
from author.families.gguf_mixtures import latent, qwen_moe, shared
from author.families.model import Order, View, part, tiled
from author.spec import ChannelDelta, GatedDelta

LINEAR = "linear_attention"

# --- What they say


def qwen3next(f: Metadata) -> Keys:
    """Qwen 3 Next: delta layers and mixtures."""
    return _delta_sizes(f) | qwen_moe(norm=True)(f) | shared(f)


def qwen35(f: Metadata) -> Keys:
    """Qwen 3.5: delta layers and plain feed-forwards.

    Places of a picture turn by several numbers, in sections; those of a text by one.
    """
    f.each("rope.dimension_sections")
    return _delta_sizes(f)


def qwen35moe(f: Metadata) -> Keys:
    """The same, with mixtures whose weights are always divided by their sum."""
    f.only("expert_weights_norm", (True,))
    f.only("expert_weights_scale", (1.0, 0.0))
    return qwen35(f) | experts(f) | shared(f)


def _delta_sizes(f: Metadata) -> Keys:
    values, width = f.count("ssm.time_step_rank"), f.count("ssm.state_size")
    f.only("ssm.inner_size", (values * width,))
    return {
        "linear_conv_kernel_dim": f.need("ssm.conv_kernel"),
        "linear_key_head_dim": width,
        "linear_num_key_heads": f.need("ssm.group_count"),
        "linear_num_value_heads": values,
        **_recurrent_layers(f),
    }


def _recurrent_layers(f: Metadata) -> Keys:
    """Which layers are recurrent: as the file says one by one, or all but every fourth or so."""
    every, said = f.get("full_attention_interval", 4), "attention.recurrent_layers"
    if said not in f.keys:
        return {"full_attention_interval": every}
    return {"layer_types": [LINEAR if found else FULL for found in _each_layer(f, said)]}


# DeepSeek's keys that Kimi's config has under other names.
RENAMED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
}


def kimi_linear(f: Metadata) -> Keys:
    """Kimi Linear: latent attention that does not turn; keys of delta layers have 0 heads there."""
    f.only("expert_gating_func", (SIGMOID,))
    heads = _each_layer(f, "attention.head_count_kv")
    return {
        **{RENAMED.get(key, key): value for key, value in scored(f).items()},
        **latent(f),
        "mla_use_nope": True,
        "moe_renormalize": f.get("expert_weights_norm", True),
        "rotary_dim": None,
        "linear_attn_config": {
            "num_heads": f.need("attention.head_count"),
            "head_dim": f.need("kda.head_dim"),
            "short_conv_kernel_size": f.need("ssm.conv_kernel"),
            "kda_layers": [n for n, count in enumerate(heads, 1) if count == 0],
            "full_attn_layers": [n for n, count in enumerate(heads, 1) if count != 0],
        },
    }


def _each_layer(f: Metadata, key: str) -> list[Any]:
    """The value of a key for each layer, those for predicting several tokens aside."""
    said = f.each(key)
    if not isinstance(said, list) or len(said) < f.layers:
        f.complain(f"{f.prefix}{key} is {said!r}, wanted a value for each of {f.layers} layers")
        return []
    return said[: f.layers]


# --- Where their matrices stand

DELTA: Mapping[str, str] = {
    **dict.fromkeys(("Wq", "Wk", "Wv"), "attn_qkv.weight"),
    "Wz": "attn_gate.weight",
    **dict.fromkeys(("Wcq", "Wck", "Wcv"), "ssm_conv1d.weight"),
    "Wb": "ssm_beta.weight",
    "Wa": "ssm_alpha.weight",
    "Dt": "ssm_dt.bias",
    "Al": "ssm_a",
    "Gn": "ssm_norm.weight",
    "Wo": "ssm_out.weight",
}
CHANNEL_DELTA: Mapping[str, str] = {
    "Wcq": "ssm_conv1d_q.weight",
    "Wck": "ssm_conv1d_k.weight",
    "Wcv": "ssm_conv1d_v.weight",
    "Wfa": "ssm_f_a.weight",
    "Wfb": "ssm_f_b.weight",
    "Wga": "ssm_g_a.weight",
    "Wgb": "ssm_g_b.weight",
    "Wb": "ssm_beta.weight",
    "Dt": "ssm_dt.bias",
    "Al": "ssm_a",
    "Gn": "ssm_norm.weight",
}
# Of Qwen 3 Next: `b a` as there. Its first files have `q k v z` as there, too, in one tensor.
BOTH, ALL_FOUR = "ssm_ba.weight", "ssm_in.weight"


def stands(
    base: str, view: View, mixer: object, f: Metadata, number: int, *, in_order: bool
) -> View | None:
    """Where a matrix of a recurrent layer stands; none if it is another, or goes by a usual name.

    `view` is where it stands in safetensors. `in_order`: value heads stand as the language wants
    them, not by key head.
    """
    if isinstance(mixer, ChannelDelta) and base in CHANNEL_DELTA:
        found = replace(view, tensor=CHANNEL_DELTA[base])
    elif not isinstance(mixer, GatedDelta) or base not in DELTA:
        return None
    elif in_order:
        found = _straight(base, view)
    else:
        found = _by_key_head(base, view, mixer, legacy=f.has(ALL_FOUR, number))
    return replace(found, function="log_of_negative") if base == "Al" else found


def _straight(base: str, view: View) -> View:
    """The same places in the order in which they stand."""

    def run(order: Order | None) -> Order | None:
        if order is None:
            return None
        return part(min(start for start, _, _ in order.runs), order.length)

    return replace(view, tensor=DELTA[base], rows=run(view.rows), cols=run(view.cols))


def _by_key_head(base: str, view: View, g: GatedDelta, *, legacy: bool) -> View:
    """Value heads by key head; the projections of one are apart here, but for the first files."""
    if base in ("Wb", "Wa"):
        return replace(view, tensor=BOTH)
    repeat, n = g.v_heads // g.k_heads, g.head_dim
    keys = g.k_heads * n
    rows = {
        "Wq": part(0, keys),
        "Wk": part(keys, keys),
        "Wv": tiled(g.k_heads, repeat, n, start=2 * keys),
        "Wz": tiled(g.k_heads, repeat, n),
    }
    if base not in rows:
        return replace(view, tensor=DELTA[base])
    if legacy:
        return replace(view, tensor=ALL_FOUR)
    return View(tensor=DELTA[base], rows=rows[base])
