"""Writes a checkpoint anew with the values that anyfold holds, in float32, for another program.

What anyfold quantises is quantised and turned back into floats, so that what differs afterwards is
not the quantising. A copy takes 4 bytes a weight.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from author.families.model import Order, View
from author.names import Name
from kernels.q8 import dequantise
from tp.checkpoint import Checkpoint
from tp.operands import Operand
from tp.source import Source
from tp.stored import FLOATS
from tp.views import read_q8, shape_of

SHARD = 1 << 30  # bytes
# Keys of a GGUF file that are written anew, or are none of its keys.
_OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")


def size_of(checkpoint: Checkpoint) -> int:
    """The bytes of a copy."""
    return sum(4 * tensor.rows * tensor.cols for tensor in checkpoint.tensors.values())


def write_copy(source: Source, operands: Mapping[Name, Operand], folder: Path) -> Path:
    """Write a copy into a folder: that folder, or the GGUF file in it."""
    views = _quantised_views(source, operands)
    if source.checkpoint.format == "gguf":
        return _write_gguf(source, views, folder / "copy.gguf")
    config = {k: v for k, v in source.checkpoint.config.items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    _write_shards(source, views, folder)
    return folder


def _quantised_views(source: Source, operands: Mapping[Name, Operand]) -> dict[str, list[View]]:
    """The views by which each tensor is quantised."""
    found: dict[str, list[View]] = {}
    for name, operand in operands.items():
        if operand.quantised:
            for view in source.model.views.get(name, ()):
                found.setdefault(view.tensor, []).append(view)
    return found


def held(checkpoint: Checkpoint, name: str, views: Sequence[View]) -> np.ndarray:
    """A tensor in its own shape, what its views take of it as it is held."""
    tensor = checkpoint.tensors[name]
    whole = np.array(checkpoint.read(name)).reshape(tensor.rows, tensor.cols)
    for view in views:
        outputs, inputs = shape_of(view, tensor)
        values = np.asarray(dequantise(read_q8(checkpoint, [view], 0, outputs, None)))
        rows, cols = _places(view.rows, outputs)[:, None], _places(view.cols, inputs)[None]
        values = values - np.float32(view.plus)
        if view.turned is None:
            whole[rows, cols] = values
        else:
            block, output = np.divmod(rows, tensor.cols)
            whole[block * view.turned + cols, output] = values
    return whole.reshape(tensor.shape)


def _places(order: Order | None, size: int) -> np.ndarray:
    """Where along an axis of what is seen each of the places wanted stands."""
    if order is None:
        return np.arange(size)
    runs = [np.arange(start, start + length * step, step) for start, length, step in order.runs]
    starts = np.arange(order.times) * order.stride
    return (starts[:, None] + np.concatenate(runs)[None]).ravel()


def _tensors(source: Source, views: Mapping[str, list[View]]) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of numbers, one in memory at a time: another program may use what we do not."""
    used = {view.tensor for each in source.model.views.values() for view in each}
    for name, tensor in source.checkpoint.tensors.items():
        if name in used or tensor.dtype in FLOATS:
            yield name, held(source.checkpoint, name, views.get(name, ()))


def _write_shards(source: Source, views: Mapping[str, list[View]], folder: Path) -> None:
    shard: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}

    def settle() -> None:
        file = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, array in _tensors(source, views):
        shard[name] = np.ascontiguousarray(array)
        if sum(a.nbytes for a in shard.values()) >= SHARD:
            settle()
    settle()
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_gguf(source: Source, views: Mapping[str, list[View]], path: Path) -> Path:
    reader = gguf.GGUFReader(source.path)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key in reader.fields.values():
        if key.name not in _OWN_KEYS and not key.name.startswith("GGUF."):
            inner = key.types[-1] if key.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key.name, key.contents(), key.types[0], inner)
    for name, array in _tensors(source, views):
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
