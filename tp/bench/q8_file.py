"""Writes a GGUF file's weights as Q8_0, so that another program can run what anyfold runs."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tp.bench.orders import Answer, obey

Q8_0 = gguf.GGMLQuantizationType.Q8_0
# What stays as it is, as in llama.cpp's own conversion: small, or wanted as floats.
_KEPT = ("_norm", "ffn_gate_inp", "conv1d", "ssm_", "rope_")
# Written anew, or not a key of the file.
_OWN_KEYS = ("general.file_type", "general.quantization_version", "general.architecture")


def main() -> None:
    """Answer with the path of a Q8_0 file of the model that the first argument names."""
    asked = json.loads(sys.argv[1])

    def start() -> tuple[Answer, Mapping[str, Callable[..., Answer]]]:
        return {"path": str(q8_file(Path(asked["model"]), Path(asked["cache"])))}, {}

    obey(start)


def q8_file(model: Path, cache: Path) -> Path:
    """The model's file where its matrices are Q8_0 already, or else one written into `cache`.

    The values are those that anyfold holds: dequantised to float32, then llama.cpp's rule.
    """
    reader = gguf.GGUFReader(model)
    if all(t.tensor_type == Q8_0 or not _wanted(t) for t in reader.tensors):
        return model
    stat = model.stat()
    key = sha256(f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    out = cache / f"{model.stem}-{key}-Q8_0.gguf"
    if not out.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_suffix(f".{os.getpid()}")
        try:
            _write(reader, unfinished)
            unfinished.rename(out)
        finally:
            unfinished.unlink(missing_ok=True)
    return out


def _wanted(tensor: gguf.ReaderTensor) -> bool:
    """Whether a tensor is one of the matrices that are quantised."""
    matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    whole_blocks = int(tensor.shape[0]) % 32 == 0
    return matrix and whole_blocks and not any(word in tensor.name for word in _KEPT)


def _write(reader: gguf.GGUFReader, path: Path) -> None:
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    _copy_keys(reader, writer)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        kind = Q8_0 if _wanted(tensor) else tensor.tensor_type
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        stored = [*shape[:-1], shape[-1] // block * nbytes]
        writer.add_tensor_info(
            tensor.name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one in memory at a time
        writer.write_tensor_data(_stored(tensor))
    writer.close()


def _copy_keys(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name in _OWN_KEYS or field.name.startswith("GGUF."):
            continue
        kind, inner = field.types[0], None
        if kind == gguf.GGUFValueType.ARRAY:
            inner = field.types[-1]
        writer.add_key_value(field.name, field.contents(), kind, inner)


def _stored(tensor: gguf.ReaderTensor) -> Any:
    data = np.asarray(tensor.data)
    if tensor.tensor_type == Q8_0 or not _wanted(tensor):
        return data
    return gguf.quantize(gguf.dequantize(data, tensor.tensor_type), Q8_0)
