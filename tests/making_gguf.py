"""Makes tiny GGUF files for tests, with the `gguf` library's own writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType

KEYS = {
    "llama.block_count": 3,
    "llama.eps": 0.5,
    "flag": True,
    "words": ["a", "Ġé", ""],
    "kinds": [1, 2, 3],
    "general.name": "Tiny",
}


def make_gguf(
    path: Path, tensors: Mapping[str, tuple[np.ndarray, str]], keys: Mapping[str, Any] | None = None
) -> Path:
    """Write a llama GGUF: each tensor a float array and its type, or raw bytes and theirs."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (keys or {}).items():
        _add_key(writer, key, value)
    for name, (array, kind) in tensors.items():
        raw = array.dtype == np.uint8
        data = array if raw else gguf.quantize(array, Kind[kind])
        writer.add_tensor(name, data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_tiny(path: Path) -> Path:
    """Write a GGUF of nine small tensors, of every kind that a reader treats in its own way."""
    tensors = {
        "norm": (normal(50, seed=1), "F32"),
        "f32": (normal(6, 50, seed=2), "F32"),
        "f16": (normal(6, 50, seed=3), "F16"),
        "bf16": (normal(6, 50, seed=4), "BF16"),
        "q8_0": (normal(6, 96, seed=5), "Q8_0"),
        "experts": (normal(3, 4, 64, seed=6), "Q8_0"),
        "q4_0": (normal(6, 96, seed=7), "Q4_0"),
        "q5_0": (normal(6, 96, seed=8), "Q5_0"),
        "q4_k": (q4_k_bytes(6, 512), "Q4_K"),
    }
    return make_gguf(path, tensors, KEYS)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def q4_k_bytes(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Random Q4_K rows with finite scales: the library reads this type and cannot write it."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, cols // 256, 144), dtype=np.uint8)
    scales = random.uniform(0.001, 0.01, (rows, cols // 256, 2)).astype(np.float16)
    blocks[:, :, :4] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {type(value).__name__}")
