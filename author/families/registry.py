"""Which family reads a config: by `model_type`, or by a GGUF file's architecture."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from author.families import (
    apertus,
    cohere2,
    deepseek,
    ernie4_5_moe,
    exaone4,
    gemma,
    gguf,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan,
    hunyuan_moe,
    kimi_linear,
    llama,
    llama4,
    minimax,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
)
from author.families.config import IGNORED, ConfigError
from author.families.gguf_architectures import ARCHITECTURES
from author.families.gguf_metadata import Numbers
from author.families.model import Model

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[Mapping[str, Any], str, Shapes], Model]

# Each has its `MODEL_TYPES`, and `read` from a config's keys, where they stand, and the shapes of
# the checkpoint's tensors under the names of a bare text model.
MODULES = (
    apertus,
    cohere2,
    deepseek,
    ernie4_5_moe,
    exaone4,
    gemma,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan,
    hunyuan_moe,
    kimi_linear,
    llama,
    llama4,
    minimax,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
)
READERS: dict[str, Read] = {kind: m.read for m in MODULES for kind in m.MODEL_TYPES}

# What the architectures that nobody reads would need.
REFUSED = {
    "gpt2": "it would need learnt positions, layer norms with biases and plain feed-forwards",
    "starcoder2": "it would need layer norms with biases and plain feed-forwards",
    "falcon_h1": "it would need a state space model beside the attention of each layer",
    "mamba2": "it would need a state space model in place of attention",
}

# What a multimodal package says beside its text model.
BESIDE = (
    *("audio", "boa_", "boi_", "eoa_", "eoi_", "image", "mm_", "multimodal", "projector"),
    *("spatial_merge", "video", "vision"),
)
PREFIXES = ("model.language_model.", "language_model.model.")


def from_config(keys: Mapping[str, Any], where: str, tensors: Shapes | None = None) -> Model:
    """The model of a Hugging Face config; raises ConfigError where no family reads it.

    Of a multimodal package it is the text model, and the tensors of the rest are skipped.
    """
    shapes = tensors or {}
    text = keys.get("text_config")
    if not isinstance(text, Mapping):
        return _reader(keys, where)(keys, where, shapes)
    text = _text(keys, text, where)
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in shapes)), "")
    inside = {_stripped(name, prefix): shape for name, shape in shapes.items()}
    model = _reader(text, where)(text, f"{where}: text_config", inside)
    return _packaged(model, str(keys.get("model_type")), prefix, shapes)


def from_gguf(
    keys: Mapping[str, Any], tensors: Shapes, where: str, numbers: Numbers | None = None
) -> Model:
    """The model of a GGUF file, by its metadata and the shapes of its tensors.

    `numbers` reads a small tensor: some files hold factors of the rotation so.
    """
    found = keys.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise ConfigError(where, [_unknown("general.architecture", found, ARCHITECTURES)])
    return gguf.read_gguf(keys, tensors, where, READERS, numbers)


def _reader(keys: Mapping[str, Any], where: str) -> Read:
    found = keys.get("model_type")
    if found is not None and not isinstance(found, str):
        raise ConfigError(where, [f"model_type is {found!r}, wanted a string"])
    if found in REFUSED:
        raise ConfigError(where, [f"model_type {found!r} is not supported: {REFUSED[found]}"])
    if found not in READERS:
        raise ConfigError(where, [_unknown("model_type", found, READERS)])
    return READERS[found]


def _unknown(key: str, found: object, readers: Mapping[str, Any]) -> str:
    known = ", ".join(sorted(readers))
    said = "is missing" if found is None else f"{found!r} is of no family we know"
    return f"{key} {said} (there are {known})"


# --- Multimodal packages


def _text(keys: Mapping[str, Any], text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text model's own config; what the package says for all of it is handed down."""
    known = {"text_config", "tie_word_embeddings", *IGNORED}
    unknown = sorted(k for k in keys if k not in known and not k.startswith(BESIDE))
    if unknown:
        complaint = f"nothing is known of {', '.join(unknown)} beside text_config"
        raise ConfigError(where, [complaint])
    handed = {k: keys[k] for k in ("tie_word_embeddings",) if keys.get(k) is not None}
    return {**handed, **text}


def _stripped(name: str, prefix: str) -> str:
    """The name that a tensor has in the bare text model."""
    if prefix and name.startswith(prefix):
        return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _packaged(model: Model, family: str, prefix: str, shapes: Shapes) -> Model:
    """The model under the names of its package; what else is there is skipped."""
    names = {_stripped(name, prefix): name for name in shapes}
    views = {
        key: tuple(replace(v, tensor=names.get(v.tensor, v.tensor)) for v in parts)
        for key, parts in model.views.items()
    }
    ours = (prefix, "language_model.", "lm_head.") if prefix else ("model.", "lm_head.")
    others = {
        name: f"of the parts of {family} that are not its text model"
        for name in shapes
        if not name.startswith(ours)
    }
    return replace(
        model,
        family=f"{model.family} (of {family})",
        views=views,
        numbers={names.get(name, name): number for name, number in model.numbers.items()},
        skipped={**others, **_skipped(model, names)},
    )


def _skipped(model: Model, names: Mapping[str, str]) -> dict[str, str]:
    """What the text model itself leaves out, by the package's names."""
    found = {}
    for bare, name in names.items():
        reason = next((r for p, r in model.skipped.items() if fnmatchcase(bare, p)), None)
        if reason is not None:
            found[name] = reason
    return found
