"""What the families with mixtures share: the experts of a config, and where they stand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from author.families.config import Config
from author.families.model import View, of_each
from author.families.parts import (
    ATTENTION,
    DENSE,
    NORMS,
    PRE_NORMS,
    attention_bases,
    dense_bases,
    interleaved,
)
from author.names import Name
from author.spec import Attention, Dense, Moe

Shapes = Mapping[str, tuple[int, ...]]
# Where the matrices of a layer stand, under the layer's prefix: one after another, if several.
Stands = dict[str, str | View | tuple[View, ...]]
Views = dict[Name, tuple[View, ...]]

SPLIT = {"Wg": "gate_proj", "Wu": "up_proj", "Wd": "down_proj"}
MIXTRAL = {"Wg": "w1", "Wu": "w3", "Wd": "w2"}

# Keys of training: they change no weight of an expert, and no choice.
TRAINING = (
    *("aux_loss_alpha", "ep_size", "expert_capacity", "moe_aux_loss_coef", "router_z_loss_coef"),
    "seq_aux",
)
LATER = "a layer for predicting several tokens"

# --- The experts of a config

_PLAIN = Moe(
    experts=1,
    top_k=1,
    expert_dff=1,
    act="silu",
    gating="softmax_then_top_k",
    groups=None,
    norm_top_k=True,
    weights_scale=1.0,
    shared_experts=0,
    shared_dff=0,
    shared_gate=False,
    biases=False,
)


def mixture(experts: int, top_k: int, expert_dff: int, **fields: Any) -> Moe:
    """Experts chosen by a softmax whose largest are renormalised, but for the fields given."""
    return replace(_PLAIN, experts=experts, top_k=top_k, expert_dff=expert_dff, **fields)


def groups(
    config: Config,
    count: str = "n_group",
    used: str = "topk_group",
    usual: tuple[int, int] = (1, 1),
) -> Any:
    """How many groups of experts there are and may be chosen from; none where one is all."""
    both = config.count(count, usual[0]), config.count(used, usual[1])
    return None if both[0] == 1 else both


def optional_count(config: Config, key: str) -> int:
    """A number that may be null, absent or 0, all of which are 0."""
    return config.count(key) if config.get(key, None) not in (None, 0) else 0


def number_of(config: Config, key: str, default: int) -> int:
    """The number of a layer, from 0; or -1, for what a family makes of it."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        config.complain(f"{key} is {value!r}, wanted the number of a layer")
        return default
    return value


# --- Layers that differ


def sparse_layers(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = config.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        config.complain(f"mlp_only_layers is {dense!r}, wanted a list of layers")
        dense = []
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def after_dense(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures: all but the first `first_k_dense_replace`."""
    config.only("moe_layer_freq", (1,), 1)
    dense = optional_count(config, "first_k_dense_replace")
    return tuple(i >= dense for i in range(layers))


def later_layers(config: Config, layers: int) -> dict[str, str]:
    """Why the tensors past the last layer are not used, under either of their names."""
    extra = max(optional_count(config, "num_nextn_predict_layers"), 1)
    later = (f"model.layers.{n}.*" for n in range(layers, layers + extra))
    return dict.fromkeys((*later, "mtp.*", "model.mtp*"), LATER)


# --- Where they stand


def stands(prefix: str, names: Mapping[str, str], kind: str = "weight") -> Stands:
    """Matrices that stand whole under a prefix."""
    return {base: f"{prefix}.{name}.{kind}" for base, name in names.items()}


def shared(prefix: str, m: Moe) -> Stands:
    """The shared experts, and their biases if they have any."""
    found = stands(prefix, {f"Ws{base[1]}": name for base, name in SPLIT.items()})
    if m.shared_bias:
        biases = {f"Bs{base[1]}": name for base, name in SPLIT.items()}
        found |= stands(prefix, biases, "bias")
    return found


def experts(
    prefix: str, m: Moe, number: int, tensors: Shapes, names: Mapping[str, str] = SPLIT
) -> Stands:
    """Experts that stand apart, or in the two tensors that transformers 5 may make of them."""
    both = f"{prefix}.gate_up_proj"
    if f"model.layers.{number}.{both}" in tensors:
        return fused(both, f"{prefix}.down_proj", m)
    return {
        base: tuple(View(tensor=f"{prefix}.{e}.{name}.weight") for e in range(m.experts))
        for base, name in names.items()
    }


def fused(gate_up: str, down: str, m: Moe) -> Stands:
    """Experts in two tensors, `[experts, 2 * width, inputs]` with the gates first."""
    width = m.expert_dff
    gates, ups = ((first, width, 1) for first in (0, width))
    return {
        "Wg": View(tensor=gate_up, rows=of_each(m.experts, 2 * width, gates)),
        "Wu": View(tensor=gate_up, rows=of_each(m.experts, 2 * width, ups)),
        "Wd": down,
    }


def attended(a: Attention) -> Stands:
    """The matrices of an attention, under their usual names."""
    return {base: ATTENTION[base] for base in attention_bases(a)}


def paired(a: Attention, found: Stands, turned: int) -> Stands:
    """The same, of queries and keys whose rotary pairs stand side by side."""
    return found | {base: v for base, v in interleaved(a, turned).items() if base in found}


def fed(f: Dense) -> Stands:
    """The matrices of a plain feed-forward, under their usual names."""
    return {base: DENSE[base] for base in dense_bases(f)}


def layer_views(found: Sequence[Stands], *, norm_plus: float = 0.0) -> Views:
    """The views of all layers, the usual norms included; `norm_plus` is added to norms."""
    return {
        Name(base, number): tuple(
            replace(
                view,
                tensor=f"model.layers.{number}.{view.tensor}",
                plus=norm_plus if base in NORMS else view.plus,
            )
            for view in _views(stand)
        )
        for number, layer in enumerate(found)
        for base, stand in ({**PRE_NORMS} | layer).items()
    }


def _views(stand: str | View | tuple[View, ...]) -> tuple[View, ...]:
    if isinstance(stand, str):
        return (View(tensor=stand),)
    return (stand,) if isinstance(stand, View) else stand
