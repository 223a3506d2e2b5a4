"""Reads the headers of a Hugging Face directory's safetensors files, checked by the library.

The format: eight bytes of header length, a JSON header of names to dtype, shape and
offsets, then the data without a hole (github.com/huggingface/safetensors).
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tp.stored import CheckpointError, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The library's own limit: a length of 2^60 must not be believed.
_LONGEST_HEADER = 100_000_000
_WHOLE_FILE = "wanted a whole safetensors file: fetch it again"


def read_directory(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a directory, by name, from one file or from the shards of an index.

    `model.safetensors` goes before an index, as in transformers. Every file is checked to
    be whole, and index and shards to name the same tensors: CheckpointError otherwise.
    """
    if (path / SINGLE).is_file():
        return read_file(path / SINGLE)
    if (path / INDEX).is_file():
        return _read_shards(path)
    raise _no_weights(path)


def read_file(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name; CheckpointError unless it is whole."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            file=path.name, found=_fault(path, error), wanted=_WHOLE_FILE
        ) from error
    start, header = _header(path)
    return {
        name: TensorInfo(
            name=name,
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            file=path,
            offset=start + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; CheckpointError says where it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            file=path.name, found=f"is not JSON ({error})", wanted="wanted a JSON object"
        ) from error
    if not isinstance(value, dict):
        found = f"holds a JSON {type(value).__name__}"
        raise CheckpointError(file=path.name, found=found, wanted="wanted a JSON object")
    return value


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the header; only for files that the library has accepted."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The library keeps the last of two tensors of one name and says nothing.
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            found = f"names {', '.join(twice)} twice in its header"
            raise CheckpointError(file=path.name, found=found, wanted=_WHOLE_FILE)
        return dict(pairs)

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length), object_pairs_hook=once)


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file, in sizes where they tell, and in the library's words."""
    said = str(error).removeprefix("Error while deserializing header: ")
    if not isinstance(error, SafetensorError):
        return f"cannot be read ({said})"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            return f"has {size} bytes, and a header that should take {length} of them ({said})"
        try:
            header = json.loads(file.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return f"has a header that cannot be read ({said})"
    if wanted != size:
        return f"has {size} bytes where its header describes {wanted} ({said})"
    return f"has a header that is not accepted ({said})"


def _read_shards(path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(v) for v in weight_map.values()):
        raise CheckpointError(
            file=INDEX,
            found="has no weight_map of tensor names to file names",
            wanted="wanted the index that save_pretrained writes",
        )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        found = (
            f"names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there"
        )
        raise CheckpointError(file=INDEX, found=found, wanted=f"fetch what is missing into {path}")
    held = {shard: read_file(path / shard) for shard in shards}
    _check_index(weight_map, held)
    return {name: held[shard][name] for name, shard in weight_map.items()}


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\")


def _check_index(weight_map: dict[str, str], held: dict[str, dict[str, TensorInfo]]) -> None:
    """Index and shards must say the same: no tensor only in one of them, none in two shards."""
    faults = [
        f"{name} is not in {shard}" for name, shard in weight_map.items() if name not in held[shard]
    ]
    homes: dict[str, list[str]] = {}
    for shard, tensors in held.items():
        for name in tensors:
            homes.setdefault(name, []).append(shard)
    for name, shards in homes.items():
        if len(shards) > 1:
            faults.append(f"{name} is in {' and in '.join(shards)}")
        elif name not in weight_map:
            faults.append(f"{name} is in {shards[0]} and not in the index")
    if faults:
        raise CheckpointError(
            file=INDEX,
            found=f"and the shards do not agree: {'; '.join(faults)}",
            wanted="wanted index and shards of one and the same model: fetch them again",
        )


def _no_weights(path: Path) -> CheckpointError:
    files = sorted(entry.name for entry in path.iterdir())
    suffixes = {Path(name).suffix for name in files}
    wanted = f"wanted {SINGLE}, or {INDEX} with its shards"
    if suffixes & {".bin", ".pt", ".pth"}:
        wanted += (
            "; PyTorch's own files are not read, convert them:"
            " model.save_pretrained(directory, safe_serialization=True)"
        )
    if ".gguf" in suffixes:
        wanted += "; for a GGUF give the path of the file itself"
    found = f"holds {', '.join(files)}"
    return CheckpointError(file=path, found=found, wanted=wanted)
