"""GGUF files, as llama.cpp's converter writes them: the model that one describes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from author.families import gguf_recurrent
from author.families.config import ConfigError
from author.families.gguf_architectures import ARCHITECTURES, Architecture
from author.families.gguf_keys import usual
from author.families.gguf_metadata import Metadata, Numbers, Shapes
from author.families.mixtures import LATER
from author.families.model import Model, Order, Rotation, View, half_split, of_each
from author.families.parts import NORMS
from author.names import Name
from author.spec import Attention, Layer, Mla, Moe

Read = Callable[[Mapping[str, Any], str, Shapes], Model]

# --- The usual names of tensors

WHOLE = {
    "Emb": "token_embd.weight",
    "on": "output_norm.weight",
    "Wout": "output.weight",
    "Bout": "output.bias",
}
AROUND = {
    "an": "attn_norm.weight",
    "fn": "ffn_norm.weight",
    "pan": "post_attention_norm.weight",
    "pfn": "post_ffw_norm.weight",
}
ATTENTION = {
    "Wq": "attn_q.weight",
    "Wqg": "attn_q.weight",
    "Wk": "attn_k.weight",
    "Wv": "attn_v.weight",
    "Wo": "attn_output.weight",
    "Bq": "attn_q.bias",
    "Bk": "attn_k.bias",
    "Bv": "attn_v.bias",
    "Bo": "attn_output.bias",
    "Qn": "attn_q_norm.weight",
    "Kn": "attn_k_norm.weight",
    "Sk": "attn_sinks.weight",
}
LATENT = {
    "Wqa": "attn_q_a.weight",
    "Qan": "attn_q_a_norm.weight",
    "Wqb": "attn_q_b.weight",
    "Wq": "attn_q.weight",
    "Wkva": "attn_kv_a_mqa.weight",
    "Kan": "attn_kv_a_norm.weight",
    "Wkb": "attn_kv_b.weight",
    "Wvb": "attn_kv_b.weight",
    "Wo": "attn_output.weight",
}
# In newer files these two stand apart, the keys turned.
FACTORS = {"Wkb": "attn_k_b.weight", "Wvb": "attn_v_b.weight"}
DENSE = {
    "Wg": "ffn_gate.weight",
    "Wu": "ffn_up.weight",
    "Wd": "ffn_down.weight",
    "Bg": "ffn_gate.bias",
    "Bu": "ffn_up.bias",
    "Bd": "ffn_down.bias",
}
MIXTURE = {
    "Wr": "ffn_gate_inp.weight",
    "Br": "ffn_gate_inp.bias",
    "Bs": "exp_probs_b.bias",
    "Wg": "ffn_gate_exps.weight",
    "Wu": "ffn_up_exps.weight",
    "Wd": "ffn_down_exps.weight",
    "Bg": "ffn_gate_exps.bias",
    "Bu": "ffn_up_exps.bias",
    "Bd": "ffn_down_exps.bias",
    "Wsg": "ffn_gate_shexp.weight",
    "Wsu": "ffn_up_shexp.weight",
    "Wsd": "ffn_down_shexp.weight",
    "Wsgi": "ffn_gate_inp_shexp.weight",
}
FUSED = "ffn_gate_up_exps.weight"
# Phi 3 and GLM 4 keep what is fused in safetensors, under the name of one part.
FUSED_ATTENTION, FUSED_FEED = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

# --- A model


def read_gguf(
    keys: Mapping[str, Any],
    shapes: Shapes,
    where: str,
    readers: Mapping[str, Read],
    numbers: Numbers | None = None,
) -> Model:
    """The model that the metadata of a GGUF file and the shapes of its tensors describe.

    `readers` are the families', by model_type; `numbers` reads a small tensor. Raises ConfigError
    with every key that is missing, unknown or not supported.
    """
    found = keys["general.architecture"]
    architecture = ARCHITECTURES[found]
    f = Metadata(keys, shapes, where, numbers)
    config = {"model_type": architecture.family, **usual(f), **architecture.keys(f)}
    _check_widths(f, config)
    constants = architecture.constants(f)
    f.done()
    said = {key: value for key, value in config.items() if value is not None}
    model = readers[config["model_type"]](said, where, {})
    views = {
        name: _views(name, views, model, architecture, f)
        for name, views in model.views.items()
        if name not in constants
    }
    return replace(
        model,
        family=f"{model.family} (gguf)",
        rotations=tuple(_rotation(rotation, f) for rotation in model.rotations),
        views=views,
        constants={**model.constants, **constants},
        numbers={},
        skipped=_skipped(f),
    )


def _check_widths(f: Metadata, config: Mapping[str, Any]) -> None:
    """Complain of values that are not as wide as keys, where a head has one width."""
    width = f.get("attention.value_length", f.width)
    if "kv_lora_rank" not in config and width != f.width:
        said = f"is {width}, wanted the head width, {f.width}"
        f.complain(f"{f.prefix}attention.value_length {said}")


def _rotation(rotation: Rotation, f: Metadata) -> Rotation:
    """Llama 3's scaling comes as a tensor that divides each frequency."""
    tensor = "rope_freqs.weight"
    if tensor not in f.shapes:
        return rotation
    if f.shapes[tensor] != (rotation.dims // 2,):
        complaint = f"{tensor} is {list(f.shapes[tensor])}, wanted [{rotation.dims // 2}]"
        raise ConfigError(f.where, [complaint])
    return replace(rotation, divisors=tensor)


def _skipped(f: Metadata) -> dict[str, str]:
    later = {f"blk.{n}.*": LATER for n in range(f.layers, f.layers + f.later)}
    twice = any(_apart(f, n) for n in range(f.layers))
    return {
        **later,
        "*attn_rot_embd.weight": "a buffer that follows from the metadata",
        "rope_factors_*.weight": "read with the metadata",
        **({"blk.*.attn_kv_b.weight": "attn_k_b and attn_v_b hold it"} if twice else {}),
    }


# --- Where a matrix stands


def _views(
    name: Name, views: Sequence[View], model: Model, architecture: Architecture, f: Metadata
) -> tuple[View, ...]:
    base, number = name.base, name.layer
    if number is None:
        return (replace(views[0], tensor=WHOLE[base], plus=0.0),)
    layer = model.spec.layers[number]
    view = _tensor(base, views[0], layer, architecture, f, number)
    if view is None:
        bare = View(tensor=_name(base, views[0], layer, architecture))
        view = bare if len(views) > 1 or base in architecture.whole else _kept(views[0], bare)
        if base in architecture.unsplit:
            view = replace(view, rows=None)
    if architecture.paired and base in ("Wq", "Bq", "Wk", "Bk"):
        view = replace(view, rows=_pairs(base, layer))
    plus = 0.0 if base in NORMS else view.plus  # a converter adds what is to be added
    return (replace(view, tensor=f"blk.{number}.{view.tensor}", plus=plus),)


def _kept(view: View, bare: View) -> View:
    """The same part of a tensor that the converter has only renamed."""
    return replace(view, tensor=bare.tensor)


def _name(base: str, view: View, layer: Layer, architecture: Architecture) -> str:
    if view.tensor.endswith(FUSED_ATTENTION):
        return "attn_qkv.weight"
    if view.tensor.endswith(FUSED_FEED):
        return "ffn_up.weight"
    mixed = LATENT if isinstance(layer.mixer, Mla) else ATTENTION
    fed = MIXTURE if isinstance(layer.ffn, Moe) else DENSE
    return {**AROUND, **mixed, **fed, **architecture.names}[base]


def _pairs(base: str, layer: Layer) -> Order:
    a = layer.mixer
    assert isinstance(a, Attention)
    return half_split(a.heads if base[1] == "q" else a.kv_heads, a.head_dim, a.head_dim)


def _apart(f: Metadata, number: int) -> bool:
    return f.has(FACTORS["Wkb"], number)


def _tensor(
    base: str, view: View, layer: Layer, architecture: Architecture, f: Metadata, number: int
) -> View | None:
    """What stands otherwise than in safetensors, or otherwise from file to file."""
    if base in FACTORS and _apart(f, number):
        return View(tensor=FACTORS[base])
    recurrent = gguf_recurrent.stands(
        base, view, layer.mixer, f, number, in_order=architecture.in_order
    )
    if recurrent is not None:
        return recurrent
    if not isinstance(layer.ffn, Moe):
        return None
    if base == "Bs":
        shape = f.shapes.get(f"blk.{number}.{MIXTURE[base]}", ())
        return View(tensor=MIXTURE[base], turned=1 if len(shape) > 1 else None)
    if base in ("Wg", "Wu") and f.has(FUSED, number):
        width = layer.ffn.expert_dff
        run = (0 if base == "Wg" else width, width, 1)
        return View(tensor=FUSED, rows=of_each(layer.ffn.experts, 2 * width, run))
    return None
