"""GGUF files of the architecture `llama`, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from author.families.config import ConfigError
from author.families.llama import read
from author.families.model import Model, Rotation, View, half_split
from author.names import Name
from author.spec import Attention

PREFIX = "llama."
# GGUF key to the Hugging Face key that says the same.
KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
IGNORED = ("attention.value_length", "rope.dimension_count", "rope.scaling.finetuned")
TENSORS = {
    "an": "attn_norm",
    "Wq": "attn_q",
    "Wk": "attn_k",
    "Wv": "attn_v",
    "Wo": "attn_output",
    "fn": "ffn_norm",
    "Wg": "ffn_gate",
    "Wu": "ffn_up",
    "Wd": "ffn_down",
}


def read_gguf(keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], where: str) -> Model:
    """The model that the metadata of a GGUF file and the shapes of its tensors describe.

    Raises ConfigError with every key that is missing, unknown or not supported.
    """
    tied = "output.weight" not in tensors
    model = read(_translated(keys, tensors, tied, where), where)
    mixer = model.spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    # The converter puts the two entries of a rotary pair side by side.
    heads = {"Wq": mixer.heads, "Wk": mixer.kv_heads}
    width = mixer.head_dim
    paired = {base: half_split(n, width, width) for base, n in heads.items()}
    views = {
        Name("Emb"): (View(tensor="token_embd.weight"),),
        Name("on"): (View(tensor="output_norm.weight"),),
    }
    if not tied:
        views[Name("Wout")] = (View(tensor="output.weight"),)
    for number in range(len(model.spec.layers)):
        for base, tensor in TENSORS.items():
            view = View(tensor=f"blk.{number}.{tensor}.weight", rows=paired.get(base))
            views[Name(base, number)] = (view,)
    return replace(
        model,
        family="llama (gguf)",
        rotations=(_rotation(model.rotations[0], tensors),),
        views=views,
        skipped={},
    )


def _translated(
    keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], tied: bool, where: str
) -> dict[str, Any]:
    """The metadata as a Hugging Face config; complains of what has no counterpart."""
    mine = {k.removeprefix(PREFIX): v for k, v in keys.items() if k.startswith(PREFIX)}
    config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": tied}
    config |= {KEYS[k]: v for k, v in mine.items() if k in KEYS}
    if "vocab_size" not in config and "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"][0]
    config |= _scaling(mine)
    complaints = _complaints(mine)
    if complaints:
        raise ConfigError(where, complaints)
    return config


def _scaling(mine: Mapping[str, Any]) -> dict[str, Any]:
    kind = mine.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    return {"rope_scaling": {"rope_type": kind, "factor": mine.get("rope.scaling.factor")}}


def _complaints(mine: Mapping[str, Any]) -> list[str]:
    width = mine.get("attention.key_length")
    if width is None and mine.get("attention.head_count"):
        width = mine.get("embedding_length", 0) // mine["attention.head_count"]
    scaling = {"rope.scaling.type", "rope.scaling.factor"}
    unknown = sorted(k for k in mine if k not in {*KEYS, *IGNORED, *scaling})
    complaints = [f"nothing is known of {PREFIX}{k}" for k in unknown]
    for key in ("attention.value_length", "rope.dimension_count"):
        if mine.get(key, width) != width:
            complaints.append(f"{PREFIX}{key} is {mine[key]!r}, wanted the head width, {width}")
    return complaints


def _rotation(rotation: Rotation, tensors: Mapping[str, tuple[int, ...]]) -> Rotation:
    """Llama 3's scaling comes as a tensor that divides each frequency."""
    divisors = "rope_freqs.weight" if "rope_freqs.weight" in tensors else None
    return replace(rotation, divisors=divisors)
