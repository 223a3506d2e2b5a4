"""Gemma 1 to 3: scaled embeddings, norms by `1 + w`, gelu; later ones norm after blocks too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.model import Model, Rotation
from author.families.rope import numbered, rotation, rotations_by_type
from author.spec import Attention, Dense

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text")

# What the packages of Gemma 3 leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}
NAMES = {**parts.POST_NORMS, "fn": "pre_feedforward_layernorm.weight"}
LOCAL = "rope_local_base_freq"


def read(
    keys: Mapping[str, Any], where: str, tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config, tied=True, defaults=DEFAULTS[family])
    config.only("use_bidirectional_attention", (False,), False)
    mixer = _attention(config, family, size)
    types, window = _types(config, family, size.layers), None
    if family != "gemma":
        window = parts.sliding(config, 4096)
    ropes, rotations = numbered(_turned(config, family, size.width, types))
    around = family != "gemma"
    ffn = _feed_forward(config)
    layers = [
        parts.layer_of(
            replace(mixer, rope=rope, window=seen),
            ffn,
            post_mixer_norm=around,
            post_ffn_norm=around,
        )
        for rope, seen in zip(ropes, parts.windows(config, types, window), strict=True)
    ]
    cap = config.optional("final_logit_softcapping") if around else None
    config.done()
    return parts.model(
        family,
        size,
        layers,
        rotations,
        parts.dense_views(layers, NAMES if around else None, norm_plus=1.0),
        norm_plus=1.0,
        embedding_scale=size.d**0.5,
        final_logit_softcap=cap,
    )


def _attention(config: Config, family: str, size: parts.Sizes) -> Attention:
    bias = config.flag("attention_bias", False)
    mixer = parts.attention(size, bias=bias, output_bias=bias)
    if family == "gemma":
        return mixer
    scalar = config.real("query_pre_attn_scalar", 256)
    if scalar <= 0:
        config.complain(f"query_pre_attn_scalar is {scalar!r}, wanted a positive number")
        scalar = 1.0
    cap = config.optional("attn_logit_softcapping")
    if cap is not None and family == "gemma3_text":
        config.complain("attn_logit_softcapping is not supported in gemma3_text, wanted null")
    return replace(mixer, scale=scalar**-0.5, softcap=cap, qk_norm=family == "gemma3_text")


def _feed_forward(config: Config) -> Dense:
    """The tanh form of gelu, whatever old configs call it; `hidden_activation` decides."""
    hidden_act = config.get("hidden_act", None)
    act = config.get("hidden_activation", None) or hidden_act
    if act not in ("gelu_pytorch_tanh", "gelu", None):
        config.complain(f"hidden_activation {act!r} is not supported ('gelu_pytorch_tanh' is)")
    return Dense(dff=config.count("intermediate_size"), act="gelu_tanh")


def _types(config: Config, family: str, layers: int) -> tuple[str, ...]:
    match family:
        case "gemma":
            return parts.layer_types(config, layers, lambda layer: False, parts.FULL)
        case "gemma2":
            return parts.layer_types(config, layers, lambda layer: layer % 2 == 0)
        case _:
            pattern = config.count("sliding_window_pattern", 6, also=("_sliding_window_pattern",))
            return parts.layer_types(config, layers, parts.every(pattern))


def _turned(config: Config, family: str, width: int, types: tuple[str, ...]) -> list[Rotation]:
    if family != "gemma3_text":
        return [rotation(config, width)] * len(types)
    bases = {parts.FULL: 1000000.0, parts.SLIDING: 10000.0}
    found = rotations_by_type(config, width, bases)
    if found is None:
        local = config.real(LOCAL, bases[parts.SLIDING])
        found = {
            parts.FULL: rotation(config, width, theta=bases[parts.FULL]),
            parts.SLIDING: Rotation(dims=width, theta=local),
        }
    elif config.get(LOCAL, None) not in (None, found[parts.SLIDING].theta):
        config.complain(f"{LOCAL} differs from the rope_theta of sliding layers")
    return [found[kind] for kind in types]
