"""The tensors of a Hugging Face checkpoint as llama.cpp's converter writes them into a GGUF file.

Names come from the table of the `gguf` library, what is done to the numbers from the converter.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np

from tests import gguf_recurrent
from tests.gguf_recurrent import LAYER, Config, Tensor

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
PAIRED = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
UNNAMED = {"e_score_correction_bias": "e_score_correction.bias", "sinks": "sinks.weight"}


def converted(arch: str, c: Config, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file of this architecture."""
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = c["num_hidden_layers"] + c.get("mtp_num_hidden_layers", 0)
    named = gguf.get_tensor_name_map(number, layers)
    found = {}
    for name, array in _all(arch, c, tensors):
        new = named.get_name(name, try_suffixes=(".weight", ".bias")) or _given(name)
        assert new is not None, f"{arch} has no {name}"
        assert new not in found, new
        found[new] = np.ascontiguousarray(array, np.float32)
    return found | dict(_factors(arch, c))


def _given(name: str) -> str | None:
    return name if name.startswith("blk.") else None


def _all(arch: str, c: Config, tensors: Mapping[str, np.ndarray]) -> Iterator[Tensor]:
    for name, array in _merged(tensors).items():
        for old, new in UNNAMED.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name.endswith("e_score_correction.bias"):
            array = array.reshape(-1)
        if arch in PLUS_ONE and name.endswith("norm.weight") and "linear_attn.norm" not in name:
            array = array + 1
        if arch in PAIRED and re.search(r"[qk]_proj\.(weight|bias)$", name):
            heads = c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = permute(array, heads)
        yield from SPECIAL.get(arch, _plain)(c, name, array)


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute`: the two entries of a rotary pair side by side."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _merged(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts stacked, `[experts, outputs, inputs]`."""
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            found[name] = array
            continue
        prefix, number, matrix = expert.groups()
        found.setdefault(f"{prefix}.{matrix}.weight", {})[int(number)] = array
    return {
        name: np.stack([v[i] for i in range(len(v))]) if isinstance(v, dict) else v
        for name, v in found.items()
    }


# --- What single architectures do


def _plain(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    yield name, array


def _llama(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    mixed = re.fullmatch(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.(w\d\.weight)", name)
    yield (name if mixed is None else f"{mixed[1]}.feed_forward.experts.{mixed[2]}"), array


def _gemma2(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Scores are scaled by the head width: what the checkpoint scales by goes into the queries."""
    folded = math.sqrt(c["head_dim"] / c["query_pre_attn_scalar"])
    yield name, array * np.float32(folded) if name.endswith("q_proj.weight") else array


def _gemma3(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """The same, into their norm."""
    folded = math.sqrt(c["head_dim"] / c["query_pre_attn_scalar"])
    yield name, array * np.float32(folded) if name.endswith("q_norm.weight") else array


def _granitemoe(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    if not name.endswith("input_linear.weight"):
        yield name, array
        return
    number = LAYER.match(name)[1]
    for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
        yield f"blk.{number}.ffn_{part}_exps.weight", half


def _gpt_oss(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    if name.endswith("_bias"):
        name = name.removesuffix("_bias") + ".bias"
    elif name.endswith(("down_proj", "gate_up_proj")):
        name, array = f"{name}.weight", array.swapaxes(-1, -2)
    if "gate_up_proj" not in name:
        yield name, array
        return
    for first, part in enumerate(("gate_proj", "up_proj")):
        half = array[..., first::2] if name.endswith("bias") else array[:, first::2]
        yield name.replace("gate_up_proj", part), half


def _llama4(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Experts have their outputs first here."""
    number = LAYER.match(name)
    if name.endswith("experts.down_proj"):
        yield f"blk.{number[1]}.ffn_down_exps.weight", array.swapaxes(-1, -2)
    elif name.endswith("experts.gate_up_proj"):
        halves = np.split(array.swapaxes(-1, -2), 2, axis=-2)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield f"blk.{number[1]}.ffn_{part}_exps.weight", half
    else:
        yield name, array


def _apertus(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    if ".act_fn." not in name:
        yield name, array


SPECIAL: Mapping[str, Callable[[Config, str, np.ndarray], Iterator[Tensor]]] = {
    "apertus": _apertus,
    "deepseek2": gguf_recurrent.keys_and_values,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "kimi-linear": gguf_recurrent.kimi_linear,
    "llama": _llama,
    "llama4": _llama4,
    "qwen3next": gguf_recurrent.qwen3next,
    "qwen35": gguf_recurrent.qwen35,
    "qwen35moe": gguf_recurrent.qwen35,
}

# --- Factors of the rotation


def rope(c: Config) -> dict[str, Any]:
    """What the config says of the rotation, in either layout."""
    said = {"rope_theta": c.get("rope_theta"), **(c.get("rope_scaling") or {})}
    said |= c.get("rope_parameters") or {}
    if "type" in said:
        said["rope_type"] = said.pop("type")
    return {"partial_rotary_factor": c.get("partial_rotary_factor")} | said


def width(c: Config) -> int:
    """How wide a head is."""
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _factors(arch: str, c: Config) -> Iterator[Tensor]:
    said = rope(c)
    if said.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3(said, width(c))
    if said.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(said[f"{length}_factor"], np.float32)


def _llama3(said: Config, dims: int) -> np.ndarray:
    """`generate_extra_tensors`."""
    found = []
    old, low, high = (
        said[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    for i in range(0, dims, 2):
        wave = 2 * math.pi * said["rope_theta"] ** (i / dims)
        if wave < old / high:
            found.append(1.0)
        elif wave > old / low:
            found.append(said["factor"])
        else:
            smooth = (old / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / said["factor"] + smooth))
    return np.array(found, np.float32)
