"""ERNIE 4.5 with mixtures: experts chosen with a bias on a softmax, shared experts beside them."""

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
    later_layers,
    layer_views,
    mixture,
    number_of,
    optional_count,
    paired,
    shared,
)
from author.families.model import Model, View
from author.families.rope import numbered, rotation
from author.spec import Moe

MODEL_TYPES = ("ernie4_5_moe",)

# Weights are divided by their sum, or by this where it is more: no float32 sum is so small unless
# all weights are 0, and it is refused where it could matter.
SMALL = 1e-9
IGNORED = (
    *(*TRAINING, "moe_capacity", "moe_gate", "moe_group", "moe_aux_loss_lambda"),
    *("moe_orthogonal_loss_lambda", "moe_z_loss_lambda", "multi_token_pred_lambda"),
    *("enable_mtp_magic_send", "num_nextn_predict_layers"),
)


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, tied=True)
    turned = rotation(config, size.width, theta=500000.0)
    ropes, rotations = numbered([turned] * size.layers)
    bias = config.flag("use_bias", False)
    attention = parts.attention(size, bias=bias, output_bias=bias)
    moe = _routed(config, biased=bias)
    dense = parts.swiglu(config, bias=bias, output_bias=bias)
    layers, found = [], []
    for number, sparse in enumerate(_sparse(config, size.layers)):
        layers.append(
            parts.layer_of(replace(attention, rope=ropes[number]), moe if sparse else dense)
        )
        own = _routed_stands(moe, number, tensors) if sparse else fed(dense)
        found.append(paired(attention, attended(attention), turned.dims) | own)
    skipped = later_layers(config, size.layers)
    config.done(IGNORED)
    views = layer_views(found)
    return parts.model(family, size, layers, rotations, views, skipped=skipped, head_bias=bias)


def _sparse(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures: every so many, from a first to a last; -1 is the model's last."""
    interval = config.count("moe_layer_interval", 1)
    first = number_of(config, "moe_layer_start_index", 1)
    last = number_of(config, "moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    return tuple((i + 1) % interval == 0 and first <= i <= last for i in range(layers))


def _routed(config: Config, *, biased: bool) -> Moe:
    if not 0 <= config.real("moe_norm_min", 1e-12) <= SMALL:
        smallest = config.get("moe_norm_min")
        config.complain(f"moe_norm_min is {smallest!r}, wanted at most {SMALL}: none is computed")
    config.only("moe_use_aux_free", (True,), True)
    config.only("use_rmsnorm", (True,), True)
    width = config.count("moe_intermediate_size")
    beside = optional_count(config, "moe_num_shared_experts")
    return mixture(
        config.count("moe_num_experts"),
        config.count("moe_k"),
        width,
        choice_bias=True,
        shared_experts=beside,
        shared_dff=beside * width,
        shared_bias=biased and beside > 0,
    )


def _routed_stands(moe: Moe, number: int, tensors: Shapes) -> Stands:
    found: Stands = {
        "Wr": "mlp.gate.weight",
        "Bs": View(tensor="mlp.moe_statics.e_score_correction_bias", turned=1),
    }
    own = shared("mlp.shared_experts", moe) if moe.shared_experts > 0 else {}
    return found | experts("mlp.experts", moe, number, tensors) | own
