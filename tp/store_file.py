"""Opens a q8 store, and re-reads one by its digests: a model kept quantised, as `convert` wrote it.

A store is a directory:

- `anyfold-q8.json`, the manifest, written last: the digest of every other file, and what the
  source was. Without it nothing is loaded.
- `q8-00001-of-00003.safetensors` and so on: a matrix `Wq0` of the program, outputs by inputs, as
  `Wq0.q8` (int8) and `Wq0.scales` (float16, one for each block of 32 inputs); norms, biases and
  the like in floats under their own names.
- the source's config and tokenizer: config.json and its kin, or `gguf.json`, a GGUF's metadata.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from kernels.q8 import BLOCK
from tp.safetensors_file import read_file, read_json
from tp.stored import CheckpointError, TensorInfo

FORMAT, VERSION = "anyfold q8 store", 1
MANIFEST = "anyfold-q8.json"
JOURNAL = "anyfold-q8.unfinished.json"
METADATA = "gguf.json"
VALUES, SCALES = ".q8", ".scales"
Q8_DTYPE = "Q8"  # of a tensor whose scales stand apart

_AGAIN = "remove it and convert the model again"
_AT_ONCE = 1 << 22  # bytes

Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, kw_only=True)
class Store:
    """A finished store: its tensors, the scales of those that have some, and its description.

    `config` is in the words of `format`; `shapes` are those that the source's tensors had, which
    go with it.
    """

    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, TensorInfo]
    scales: Mapping[str, TensorInfo]


def is_store(path: Path) -> bool:
    """Whether a directory is a store, finished or not."""
    return (path / MANIFEST).exists() or (path / JOURNAL).exists()


def open_store(path: Path) -> Store:
    """Open a finished store; its files are checked to be there and whole, and not re-read.

    Raises CheckpointError for one that is unfinished or at odds with its manifest.
    """
    manifest = read_manifest(path)
    problems = [fault for file, said in _files(manifest) for fault in _misfits(path / file, said)]
    if problems:
        raise CheckpointError(file=path, found="; ".join(problems), wanted=_AGAIN)
    tensors, scales = _matrices(path, manifest)
    source = manifest["source"]
    name = METADATA if source["format"] == "gguf" else "config.json"
    return Store(
        format=source["format"],
        config=read_json(path / name),
        shapes={tensor: tuple(shape) for tensor, shape in source["tensors"].items()},
        tensors=tensors,
        scales=scales,
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished store; CheckpointError where it is unfinished or not ours."""
    if not is_store(path):
        wanted = "wanted a directory that anyfold convert has written"
        raise CheckpointError(file=path, found="is no q8 store", wanted=wanted)
    if not (path / MANIFEST).exists():
        raise _unfinished(path)
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        found = f"is {manifest.get('format')!r} of version {manifest.get('version')!r}"
        wanted = f"wanted {FORMAT!r} of version {VERSION}: convert the model again"
        raise CheckpointError(file=path / MANIFEST, found=found, wanted=wanted)
    if not _is_sound(manifest):
        raise CheckpointError(file=path / MANIFEST, found="lacks some entries", wanted=_AGAIN)
    return manifest


def verify(path: Path, progress: Progress = lambda what, done, of: None) -> tuple[int, int]:
    """Re-read a store: the number of its files and their bytes, all as they were written.

    Raises CheckpointError with every file whose size or sha256 is not that of the manifest.
    """
    manifest = read_manifest(path)
    total = sum(said["bytes"] for _, said in _files(manifest))
    problems: list[str] = []
    done = 0
    for file, said in _files(manifest):
        wrong = list(_misfits(path / file, said))
        if not wrong and hashed(path / file).hexdigest() != said["sha256"]:
            wrong = [f"{file} is not as it was written: another sha256"]
        problems += wrong
        done += said["bytes"]
        progress(file, done, total)
    if problems:
        raise CheckpointError(file=path, found="; ".join(problems), wanted=_AGAIN)
    return len(manifest["files"]), total


def hashed(file: Path, length: int | None = None) -> Any:
    """The sha256 of a file, or of its first bytes, as hashlib has it."""
    found, left = hashlib.sha256(), file.stat().st_size if length is None else length
    with file.open("rb", buffering=0) as stream:
        while left > 0 and (piece := stream.read(min(left, _AT_ONCE))):
            found.update(piece)
            left -= len(piece)
    return found


def _files(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from sorted(manifest["files"].items())


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest has what the others here look for."""
    match manifest:
        case {
            "files": dict(files),
            "source": {"format": "safetensors" | "gguf", "sha256": str(), "tensors": dict(tensors)},
        }:
            shapes = all(isinstance(shape, list) for shape in tensors.values())
            return shapes and all(map(_is_stamp, files.values()))
        case _:
            return False


def _is_stamp(said: object) -> bool:
    match said:
        case {"bytes": int(), "sha256": str()}:
            return True
        case _:
            return False


def _misfits(file: Path, said: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a file before it is read."""
    if not file.is_file():
        yield f"{file.name} is missing"
    elif file.stat().st_size != said["bytes"]:
        yield f"{file.name} has {file.stat().st_size} bytes, and had {said['bytes']}"


def _unfinished(path: Path) -> CheckpointError:
    journal = read_json(path / JOURNAL)
    command = f"anyfold convert {quote(str(journal.get('model')))} {quote(str(path))}"
    return CheckpointError(
        file=path,
        found="is a q8 store that was never finished",
        wanted=f"run convert again, it goes on where it stopped: {command}",
    )


def _matrices(
    path: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The tensors of all shards, matrices under their names, and the scales of these."""
    held: dict[str, TensorInfo] = {}
    for file, _ in _files(manifest):
        if file.endswith(".safetensors"):
            held |= read_file(path / file)
    scales = {
        name.removesuffix(VALUES): held[name.removesuffix(VALUES) + SCALES]
        for name in held
        if name.endswith(VALUES) and name.removesuffix(VALUES) + SCALES in held
    }
    tensors = {
        name: tensor
        for name, tensor in held.items()
        if name.removesuffix(VALUES) not in scales and name.removesuffix(SCALES) not in scales
    }
    for name, scale in scales.items():
        values = replace(held[name + VALUES], name=name)
        blocks = (values.shape[0], -(-values.shape[1] // BLOCK)) if len(values.shape) == 2 else ()
        if (values.dtype, scale.dtype, scale.shape) != ("I8", "F16", blocks):
            found = f"is {values.dtype} {list(values.shape)}, scales {list(scale.shape)}"
            raise CheckpointError(file=path, tensor=name, found=found, wanted=_AGAIN)
        tensors[name] = replace(values, dtype=Q8_DTYPE)
    return tensors, scales
