"""Llama 4's text model: chunks, layers that do not turn, experts that are fed scaled inputs."""

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
    layer_views,
    mixture,
    paired,
    shared,
    stands,
)
from author.families.model import Model, View, of_each
from author.families.rope import numbered, rotation
from author.spec import Attention, Moe, Rope, Temperature, Window

MODEL_TYPES = ("llama4_text",)

FULL, CHUNKED = "full_attention", "chunked_attention"
DENSE = {"Wg": "gate_proj", "Wu": "up_proj", "Wd": "down_proj"}


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of this family describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, defaults={"head_dim": 128})
    turned = rotation(config, size.width, theta=500000.0)
    turns = _turns(config, size.layers)
    ropes, rotations = numbered([turned if turn else None for turn in turns])
    bias = config.flag("attention_bias", False)
    attention = parts.attention(size, bias=bias, output_bias=bias)
    chunk = Window(kind="chunked", n=config.count("attention_chunk_size", 8192))
    kinds = config.each("layer_types", size.layers, (FULL, CHUNKED))
    if kinds is None:
        kinds = tuple(CHUNKED if turn else FULL for turn in turns)
    still = {"temperature": _temperature(config)}
    turning = {"qk_unit_norm": config.flag("use_qk_norm", True)}
    moe = _routed(config)
    dense = replace(parts.swiglu(config), dff=config.count("intermediate_size_mlp"))
    layers, found = [], []
    for number, sparse in enumerate(_sparse(config, size.layers)):
        rope, window = ropes[number], chunk if kinds[number] == CHUNKED else None
        fields = still if rope is None else turning
        mixer = replace(attention, rope=rope, window=window, **fields)
        layers.append(parts.layer_of(mixer, moe if sparse else dense))
        own = _routed_stands(moe, size.d) if sparse else stands("feed_forward", DENSE)
        found.append(_attended(mixer, rope) | own)
    config.done((*TRAINING, "for_llm_compressor"))
    return parts.model(family, size, layers, rotations, layer_views(found))


def _attended(a: Attention, rope: Rope | None) -> Stands:
    """Rotary pairs stand side by side; where nothing turns, any order does."""
    return attended(a) if rope is None else paired(a, attended(a), rope.dims)


def _turns(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers turn: an empty list is none given."""
    interval = config.count("no_rope_layer_interval", 4)
    usual = tuple((i + 1) % interval != 0 for i in range(layers))
    if not config.get("no_rope_layers", []):
        return usual
    named = config.each("no_rope_layers", layers, (0, 1))
    return usual if named is None else tuple(n == 1 for n in named)


def _temperature(config: Config) -> Temperature | None:
    """Queries scaled by position, in layers that do not turn; old configs say 4 for true."""
    floor, scale = config.real("floor_scale", 8192.0), config.real("attn_scale", 0.1)
    tuned = config.only("attn_temperature_tuning", (True, False, 4), True)
    return Temperature(floor=floor, scale=scale) if tuned else None


def _sparse(config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures."""
    step = config.count("interleave_moe_layer_step", 1)
    named = config.get("moe_layers", None)
    if named is None:
        return tuple((i + 1) % step == 0 for i in range(layers))
    if not isinstance(named, list):
        config.complain(f"moe_layers is {named!r}, wanted a list of layers")
        named = []
    return tuple(i in named for i in range(layers))


def _routed(config: Config) -> Moe:
    width = config.count("intermediate_size")
    return mixture(
        config.count("num_local_experts"),
        config.count("num_experts_per_tok", 1),
        width,
        gating="sigmoid_scaled_input",
        norm_top_k=False,
        shared_experts=1,
        shared_dff=width,
    )


def _routed_stands(moe: Moe, d: int) -> Stands:
    """Experts have their inputs first, and gates before ups."""
    n, width = moe.experts, moe.expert_dff
    gates, ups = ((first, width, 1) for first in (0, width))
    both = "feed_forward.experts.gate_up_proj"
    return {
        "Wr": "feed_forward.router.weight",
        "Wg": View(tensor=both, turned=d, rows=of_each(n, 2 * width, gates)),
        "Wu": View(tensor=both, turned=d, rows=of_each(n, 2 * width, ups)),
        "Wd": View(tensor="feed_forward.experts.down_proj", turned=width),
        **shared("feed_forward.shared_expert", moe),
    }
