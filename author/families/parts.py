"""What most families share: sizes, attention, windows, the names of tensors, and a model of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from author.families.config import Config
from author.families.model import Model, Rotation, View, half_split, part
from author.names import Name
from author.spec import Attention, Dense, Layer, ModelSpec, Moe, Window

FULL, SLIDING = "full_attention", "sliding_attention"

# --- What a config says in every family


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model, and whether its head is its embedding."""

    d: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    vocab: int
    eps: float
    context: int
    tied: bool


def sizes(
    config: Config,
    *,
    tied: bool = False,
    eps: str = "rms_norm_eps",
    defaults: Mapping[str, Any] | None = None,
) -> Sizes:
    """Read the sizes; `tied` is what the family does where the config says nothing."""
    usual = defaults or {}

    def count(key: str) -> int:
        return config.count(key, usual[key]) if key in usual else config.count(key)

    d, heads = count("hidden_size"), count("num_attention_heads")
    return Sizes(
        d=d,
        layers=count("num_hidden_layers"),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", usual.get("num_key_value_heads", heads)),
        width=config.count("head_dim", usual.get("head_dim", max(d // heads, 1))),
        vocab=count("vocab_size"),
        eps=config.real(eps, 1e-6),
        context=config.count("max_position_embeddings", usual.get("max_position_embeddings", 2048)),
        tied=config.flag("tie_word_embeddings", tied),
    )


def attention(size: Sizes, **fields: Any) -> Attention:
    """Plain grouped-query attention, but for the fields given."""
    plain = Attention(
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.width,
        value_dim=size.width,
        rope=None,
        qk_norm=False,
        qk_norm_whole=False,
        qk_unit_norm=False,
        temperature=None,
        bias=False,
        output_bias=False,
        sinks=False,
        output_gate=False,
        fused_qkv=False,
        window=None,
        scale=size.width**-0.5,
        softcap=None,
    )
    return replace(plain, **fields)


def swiglu(config: Config, **fields: Any) -> Dense:
    """The gated feed-forward of a config with SiLU."""
    config.only("hidden_act", ("silu", "swish"), "silu")
    return Dense(dff=config.count("intermediate_size"), act="silu", **fields)


def layer_types(
    config: Config, layers: int, slides: Callable[[int], bool], *known: str
) -> tuple[str, ...]:
    """The kind of each layer: `layer_types` decides where it is given, else what slides."""
    named = config.each("layer_types", layers, known or (FULL, SLIDING))
    if named is not None:
        return named
    return tuple(SLIDING if slides(layer) else FULL for layer in range(layers))


def every(pattern: int) -> Callable[[int], bool]:
    """Slides but in every layer that `pattern` divides, counted from 1."""
    return lambda layer: (layer + 1) % pattern != 0


def sliding(config: Config, default: int | None = None) -> Window | None:
    """The window of `sliding_window`; none where it is null, 0 or absent."""
    n = config.get("sliding_window", default)
    return None if not n else Window(kind="sliding", n=config.count("sliding_window", default))


def windows(config: Config, types: Sequence[str], window: Window | None) -> list[Window | None]:
    """The window of each layer of these types."""
    if window is None and SLIDING in types:
        config.complain("layers slide and sliding_window is not given")
    return [window if kind == SLIDING else None for kind in types]


# --- Where the tensors are


ATTENTION = {
    "Wq": "self_attn.q_proj.weight",
    "Wk": "self_attn.k_proj.weight",
    "Wv": "self_attn.v_proj.weight",
    "Wo": "self_attn.o_proj.weight",
    "Bq": "self_attn.q_proj.bias",
    "Bk": "self_attn.k_proj.bias",
    "Bv": "self_attn.v_proj.bias",
    "Bo": "self_attn.o_proj.bias",
    "Qn": "self_attn.q_norm.weight",
    "Kn": "self_attn.k_norm.weight",
    "Sk": "self_attn.sinks",
}
DENSE = {
    "Wg": "mlp.gate_proj.weight",
    "Wu": "mlp.up_proj.weight",
    "Wd": "mlp.down_proj.weight",
    "Bg": "mlp.gate_proj.bias",
    "Bu": "mlp.up_proj.bias",
    "Bd": "mlp.down_proj.bias",
}
PRE_NORMS = {"an": "input_layernorm.weight", "fn": "post_attention_layernorm.weight"}
POST_NORMS = {"pan": "post_attention_layernorm.weight", "pfn": "post_feedforward_layernorm.weight"}
WHOLE = {
    "Emb": "model.embed_tokens.weight",
    "on": "model.norm.weight",
    "Wout": "lm_head.weight",
    "Bout": "lm_head.bias",
}
NORMS = ("an", "fn", "pan", "pfn", "Qn", "Kn")

# Buffers that old checkpoints carry, and copies that tied ones do.
SKIPPED = {"*rotary_emb.inv_freq": "a buffer that follows from the config"}
TIED = {"lm_head.weight": "the embedding is the head"}

# A matrix of a layer to its tensor, or a part of one, under the layer's prefix.
Names = Mapping[str, str | View]


def norm_bases(layer: Layer) -> tuple[str, ...]:
    """The norms around the blocks of a layer."""
    before = ("an", "fn") if layer.pre_norm else ()
    after = (("pan", layer.post_mixer_norm), ("pfn", layer.post_ffn_norm))
    return (*before[: 1 if layer.parallel else 2], *(base for base, has in after if has))


def attention_bases(a: Attention) -> tuple[str, ...]:
    """The matrices of an attention."""
    return (
        *("Wq", "Wk", "Wv", "Wo"),
        *(("Bq", "Bk", "Bv") if a.bias else ()),
        *(("Bo",) if a.output_bias else ()),
        *(("Qn", "Kn") if a.qk_norm else ()),
        *(("Sk",) if a.sinks else ()),
    )


def dense_bases(f: Dense) -> tuple[str, ...]:
    """The matrices of a feed-forward."""
    return (
        *(("Wg", "Wu", "Wd") if f.gated else ("Wu", "Wd")),
        *((("Bg", "Bu") if f.gated else ("Bu",)) if f.bias else ()),
        *(("Bd",) if f.output_bias else ()),
        *(("Xp", "Xn") if f.xielu is not None else ()),
    )


def interleaved(a: Attention, turned: int) -> dict[str, View]:
    """Query and key projections whose rotary pairs stand side by side in a checkpoint."""
    return {
        base: View(tensor=ATTENTION[base], rows=half_split(heads, a.head_dim, turned))
        for bases, heads in ((("Wq", "Bq"), a.heads), (("Wk", "Bk"), a.kv_heads))
        for base in bases
    }


def gate_up(dff: int) -> dict[str, View]:
    """Gate and up in one tensor, the gate first."""
    fused = "mlp.gate_up_proj.weight"
    return {
        "Wg": View(tensor=fused, rows=part(0, dff)),
        "Wu": View(tensor=fused, rows=part(dff, dff)),
    }


def views(
    bases: Sequence[str], names: Names, *, layer: int | None = None, norm_plus: float = 0.0
) -> dict[Name, tuple[View, ...]]:
    """Where these matrices stand, of one layer or of none; `norm_plus` is added to norms."""
    prefix = "" if layer is None else f"model.layers.{layer}."
    found = {}
    for base in bases:
        named = names[base]
        view = View(tensor=named) if isinstance(named, str) else named
        plus = norm_plus if base in (*NORMS, "on") else view.plus
        tensor = prefix + view.tensor
        found[Name(base, layer)] = (replace(view, tensor=tensor, plus=plus),)
    return found


def dense_views(
    layers: Sequence[Layer], names: Names | None = None, *, norm_plus: float = 0.0
) -> dict[Name, tuple[View, ...]]:
    """The views of layers of attention and plain feed-forwards; `names` override the usual ones."""
    all_names: Names = {**PRE_NORMS, **ATTENTION, **DENSE, **(names or {})}
    found: dict[Name, tuple[View, ...]] = {}
    for number, layer in enumerate(layers):
        assert isinstance(layer.mixer, Attention)
        assert isinstance(layer.ffn, Dense)
        bases = (
            *norm_bases(layer),
            *attention_bases(layer.mixer),
            *dense_bases(layer.ffn),
        )
        found |= views(bases, all_names, layer=number, norm_plus=norm_plus)
    return found


# --- A model


def model(
    family: str,
    size: Sizes,
    layers: Sequence[Layer],
    rotations: Sequence[Rotation],
    layer_views: Mapping[Name, tuple[View, ...]],
    *,
    norm_plus: float = 0.0,
    names: Names = WHOLE,
    skipped: Mapping[str, str] | None = None,
    **fields: Any,
) -> Model:
    """The model of these layers; `fields` are those of its spec that are out of the ordinary."""
    bases = ["Emb", "on", *([] if size.tied else ["Wout"])]
    usual = ModelSpec(
        d=size.d,
        vocab=size.vocab,
        rms_eps=size.eps,
        layers=tuple(layers),
        final_logit_softcap=None,
        embedding_scale=None,
        hyper=None,
        ple=None,
        indexer=None,
    )
    spec = replace(usual, **fields)
    if spec.head_bias:
        bases.append("Bout")
    return Model(
        family=family,
        spec=spec,
        rotations=tuple(rotations),
        views={**views(bases, names, norm_plus=norm_plus), **layer_views},
        tied=size.tied,
        context=size.context,
        skipped={**SKIPPED, **(TIED if size.tied else {}), **(skipped or {})},
    )


def layer_of(mixer: Any, ffn: Dense | Moe, **fields: Any) -> Layer:
    """A layer with a norm before each block, but for the fields given."""
    plain = Layer(mixer=mixer, ffn=ffn, post_mixer_norm=False, post_ffn_norm=False)
    return replace(plain, **fields)
