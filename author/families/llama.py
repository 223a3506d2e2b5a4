"""Llama and its kin: SmolLM2, Mistral, Qwen 3; grouped queries, a gated feed-forward, RMS norms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families.config import Config
from author.families.model import Model, Rotation, View
from author.families.rope import rotation
from author.names import Name
from author.spec import Attention, Dense, Layer, ModelSpec, Rope, Window

MODEL_TYPES = ("llama", "mistral", "qwen3")

# Buffers that old checkpoints carry: they follow from the config.
SKIPPED = {"rotary_emb.inv_freq": "a buffer that follows from rope_theta"}


def read(keys: Mapping[str, Any], where: str) -> Model:
    """The model that a Hugging Face config of these families describes.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    width = config.count("head_dim", max(hidden // heads, 1))
    turned = rotation(config, width)
    config.only("hidden_act", ("silu",), "silu")
    config.only("attention_bias", (False,), False)
    config.only("mlp_bias", (False,), False)
    attention = _attention(config, heads, width, turned, qk_norm=family == "qwen3")
    dense = Dense(dff=config.count("intermediate_size"), act="silu")
    windows = _windows(config, family, config.count("num_hidden_layers"))
    tied = config.flag("tie_word_embeddings", False)
    spec = ModelSpec(
        d=hidden,
        vocab=config.count("vocab_size"),
        rms_eps=config.real("rms_norm_eps", 1e-6),
        layers=tuple(_layer(attention, window, dense) for window in windows),
        final_logit_softcap=None,
        embedding_scale=None,
        hyper=None,
        ple=None,
        indexer=None,
    )
    context = config.count("max_position_embeddings", 2048)
    config.done(ignored=("layer_types", "max_window_layers"))
    return Model(
        family=family,
        spec=spec,
        rotations=(turned,),
        views=_views(spec, tied),
        tied=tied,
        context=context,
        skipped={**SKIPPED, **({"lm_head.weight": "the embedding is the head"} if tied else {})},
    )


def _attention(
    config: Config, heads: int, width: int, turned: Rotation, *, qk_norm: bool
) -> Attention:
    return Attention(
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads),
        head_dim=width,
        value_dim=width,
        rope=Rope(dims=turned.dims, theta=turned.theta),
        qk_norm=qk_norm,
        qk_norm_whole=False,
        qk_unit_norm=False,
        temperature=None,
        bias=False,
        output_bias=False,
        sinks=False,
        output_gate=False,
        fused_qkv=False,
        window=None,
        scale=width**-0.5,
        softcap=None,
    )


def _windows(config: Config, family: str, layers: int) -> tuple[Window | None, ...]:
    """The window of each layer: `layer_types` decides where it is given."""
    n = config.get("sliding_window", None) or None
    sliding = None if n is None else Window(kind="sliding", n=config.count("sliding_window"))
    every = family == "mistral" and sliding is not None
    if config.flag("use_sliding_window", False) and sliding is None:
        config.complain("use_sliding_window is true and sliding_window is not given")
    types = config.get("layer_types", None)
    if types is None:
        first = config.get("max_window_layers", 0) if family == "qwen3" else 0
        used = every or (family == "qwen3" and config.flag("use_sliding_window", False))
        slides = [used and layer >= first for layer in range(layers)]
    else:
        slides = _typed(config, types, layers, sliding is not None)
    return tuple(sliding if s else None for s in slides)


def _typed(config: Config, types: Any, layers: int, windowed: bool) -> list[bool]:
    known = ("full_attention", "sliding_attention") if windowed else ("full_attention",)
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        config.complain(f"layer_types wants {layers} of {', '.join(known)}, found {types!r}")
        return [False] * layers
    return [t == "sliding_attention" for t in types]


def _layer(attention: Attention, window: Window | None, dense: Dense) -> Layer:
    mixer = replace(attention, window=window)
    return Layer(mixer=mixer, ffn=dense, post_mixer_norm=False, post_ffn_norm=False)


LAYER = {
    "an": "input_layernorm",
    "Wq": "self_attn.q_proj",
    "Wk": "self_attn.k_proj",
    "Wv": "self_attn.v_proj",
    "Wo": "self_attn.o_proj",
    "fn": "post_attention_layernorm",
    "Wg": "mlp.gate_proj",
    "Wu": "mlp.up_proj",
    "Wd": "mlp.down_proj",
}
QK_NORM = {"Qn": "self_attn.q_norm", "Kn": "self_attn.k_norm"}


def _views(spec: ModelSpec, tied: bool) -> dict[Name, tuple[View, ...]]:
    views = {
        Name("Emb"): (View(tensor="model.embed_tokens.weight"),),
        Name("on"): (View(tensor="model.norm.weight"),),
    }
    if not tied:
        views[Name("Wout")] = (View(tensor="lm_head.weight"),)
    for number, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, Attention)
        for base, tensor in (LAYER | (QK_NORM if layer.mixer.qk_norm else {})).items():
            view = View(tensor=f"model.layers.{number}.{tensor}.weight")
            views[Name(base, number)] = (view,)
    return views
