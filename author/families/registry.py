"""Which family reads a config: by `model_type`, or by a GGUF file's architecture."""

from collections.abc import Mapping
from typing import Any

from author.families import llama, llama_gguf
from author.families.config import ConfigError
from author.families.model import Model

READERS = dict.fromkeys(llama.MODEL_TYPES, llama.read)
GGUF_READERS = {"llama": llama_gguf.read_gguf}


def from_config(keys: Mapping[str, Any], where: str) -> Model:
    """The model of a Hugging Face config; raises ConfigError where no family reads it."""
    found = keys.get("model_type")
    if found not in READERS:
        raise ConfigError(where, [_unknown("model_type", found, READERS)])
    return READERS[found](keys, where)


def from_gguf(keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], where: str) -> Model:
    """The model of a GGUF file, by its metadata and the shapes of its tensors."""
    found = keys.get("general.architecture")
    if found not in GGUF_READERS:
        raise ConfigError(where, [_unknown("general.architecture", found, GGUF_READERS)])
    return GGUF_READERS[found](keys, tensors, where)


def _unknown(key: str, found: object, readers: Mapping[str, Any]) -> str:
    known = ", ".join(sorted(readers))
    said = "is missing" if found is None else f"{found!r} is of no family we know"
    return f"{key} {said} (there are {known})"
