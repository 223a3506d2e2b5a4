"""Opens a checkpoint (a Hugging Face directory, a GGUF file, a q8 store) and reads its slices.

With the files that it opens through, this is the only door to the libraries `safetensors`
and `gguf`. Opening checks that everything is there and reads no weights.
"""

import difflib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, UInt8

from kernels.q8 import BLOCK, Q8, concatenate, dequantise, quantise
from tp import gguf_file, safetensors_file, store_file
from tp.stored import (
    FLOATS,
    CheckpointError,
    Coding,
    Piece,
    Ranges,
    Rows,
    TensorInfo,
    check_ranges,
    decode_into,
    map_rows,
    pieces_of,
)

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "open_checkpoint"]

_EITHER = "wanted a directory with config.json and safetensors, or a .gguf file"


@dataclass(kw_only=True, eq=False)
class Checkpoint:
    """An open checkpoint: what it holds, and its tensors by slices.

    `config` is config.json, or all metadata keys of a GGUF; `generation_config` is that
    file of a directory, if it is there. A store has the config of its source, in the words
    of its `format`, and `source_shapes`: those of the source's tensors, which go with it.
    Its quantised tensors are the program's matrices; `scales` has theirs.

    `bytes_read` counts the bytes of the files that reads have touched: rows times the bytes
    of the columns, and a row twice if it is asked for twice. Reads may come from several
    threads.

    Rows are named by ranges `(start, length)` or by an index array, columns by ranges;
    they are joined in the order given. None is all of them. The rows of a tensor with
    more than two axes are its leading axes, flattened.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    tensors: Mapping[str, TensorInfo]
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    scales: Mapping[str, TensorInfo] = field(default_factory=dict)
    source_shapes: Mapping[str, tuple[int, ...]] | None = None
    bytes_read: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _here: threading.local = field(default_factory=threading.local, repr=False)

    @property
    def is_store(self) -> bool:
        """Whether its tensors are the matrices of a program rather than those of a family."""
        return self.source_shapes is not None

    @property
    def described(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors that the config describes."""
        if self.source_shapes is not None:
            return self.source_shapes
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(
        self, name: str, *, outer: Rows | None = None, inner: Ranges | None = None
    ) -> Float32[np.ndarray, "..."]:
        """Some rows and columns in float32: [rows, cols], or [rows] for one axis.

        Only the bytes of these are touched (for quantised types, of the blocks they lie
        in). Raises CheckpointError for a tensor that is not there, a range outside it or
        a dtype that is not read.
        """
        tensor = self._found(name)
        if name in self.scales:
            return np.asarray(dequantise(self.read_q8(name, outer=outer, inner=inner)))
        coding = _coding(tensor)
        if len(tensor.shape) < 2:
            _check_one_axis(tensor, coding, inner)
        inner = [(0, tensor.cols)] if inner is None else inner
        check_ranges(tensor, "columns", inner, tensor.cols)
        width = sum(length for _, length in inner)
        pieces, rows = pieces_of(tensor, outer, width)
        out = np.empty((rows, width), np.float32)
        mapped = map_rows(tensor)
        for piece in pieces:
            self._read_piece(tensor, coding, mapped, piece, inner, out[piece.at])
        return out if len(tensor.shape) >= 2 else out.reshape(-1)

    def read_q8(self, name: str, *, outer: Rows | None = None, inner: Ranges | None = None) -> Q8:
        """Some rows and columns as Q8, in blocks that are those of the whole tensor.

        What is q8 already comes as it is, bit for bit; any other is quantised from float32,
        in the enclosing blocks of the whole tensor where a range begins or ends inside
        one, so that the numbers do not depend on the slice. Raises as `read` does, and
        for tensors of one axis or with NaN or infinity.
        """
        tensor = self._found(name)
        if len(tensor.shape) < 2:
            found, wanted = f"is {list(tensor.shape)}", "q8 wants rows and columns"
            raise _error(tensor, found, wanted)
        inner = [(0, tensor.cols)] if inner is None else inner
        check_ranges(tensor, "columns", inner, tensor.cols)
        parts = [self._read_q8_range(tensor, outer, start, length) for start, length in inner]
        return concatenate(parts or [self._read_q8_range(tensor, outer, 0, 0)], "inner")

    def _found(self, name: str) -> TensorInfo:
        tensor = self.tensors.get(name)
        if tensor is None:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            hint = f"the nearest names are {', '.join(near)}" if near else "no name is near"
            found = f"has no tensor {name}"
            wanted = f"wanted one of its {len(self.tensors)} tensors ({hint})"
            raise CheckpointError(file=self.path.name, found=found, wanted=wanted)
        return tensor

    def _read_piece(
        self,
        tensor: TensorInfo,
        coding: Coding,
        mapped: UInt8[np.ndarray, "all_rows bytes"],
        piece: Piece,
        inner: Ranges,
        out: Float32[np.ndarray, "rows cols"],
    ) -> None:
        at = 0
        for start, length in inner:
            try:
                used = decode_into(out[:, at : at + length], mapped, coding, piece.rows, start)
            except NotImplementedError as error:
                raise _unread_dtype(tensor) from error
            self._count(used)
            at += length

    @property
    def bytes_read_here(self) -> int:
        """What the reads of the calling thread have touched."""
        return getattr(self._here, "bytes_read", 0)

    def _count(self, touched: int) -> None:
        self._here.bytes_read = self.bytes_read_here + touched
        with self._counting:
            self.bytes_read += touched

    def _read_q8_range(self, tensor: TensorInfo, outer: Rows | None, start: int, length: int) -> Q8:
        first = start // BLOCK * BLOCK
        last = min(tensor.cols, -(-(start + length) // BLOCK) * BLOCK)
        pieces, rows = pieces_of(tensor, outer, last - first)
        whole = Q8(
            values=np.empty((rows, last - first), np.int8),
            scales=np.empty((rows, -(-(last - first) // BLOCK)), np.float16),
        )
        for piece, q in self._q8_pieces(tensor, pieces, first, last - first):
            whole.values[piece.at] = q.values
            whole.scales[piece.at] = q.scales
        return whole.cut("inner", [(start - first, length)])

    def _q8_pieces(
        self, tensor: TensorInfo, pieces: list[Piece], first: int, cols: int
    ) -> Iterator[tuple[Piece, Q8]]:
        """Each piece's columns from `first` on; whole blocks, but at the tensor's end."""
        if tensor.name in self.scales:
            yield from self._stored_pieces(tensor, pieces, first, cols)
            return
        coding, mapped = _coding(tensor), map_rows(tensor)
        for piece in pieces:
            if tensor.dtype == "Q8_0":
                begin, end = coding.bytes_of(first), coding.bytes_of(first + cols)
                raw = mapped[piece.rows, begin:end]
                self._count(raw.size)
                yield piece, _q8_of(raw)
                continue
            floats = np.empty((piece.at.stop - piece.at.start, cols), np.float32)
            self._read_piece(tensor, coding, mapped, piece, [(first, cols)], floats)
            try:
                yield piece, quantise(floats)
            except ValueError as error:
                wanted = "wanted finite numbers only: fetch or convert it again"
                raise _error(tensor, f"holds NaN or infinity ({error})", wanted) from error

    def _stored_pieces(
        self, tensor: TensorInfo, pieces: list[Piece], first: int, cols: int
    ) -> Iterator[tuple[Piece, Q8]]:
        """The same of a store, which keeps values and scales apart."""
        values, scales = map_rows(tensor), map_rows(self.scales[tensor.name])
        wanted = slice(2 * (first // BLOCK), 2 * -(-(first + cols) // BLOCK))
        for piece in pieces:
            ours, theirs = values[piece.rows, first : first + cols], scales[piece.rows, wanted]
            self._count(ours.size + theirs.size)
            halves = np.ascontiguousarray(theirs).view(np.float16)
            yield piece, Q8(values=ours.view(np.int8), scales=halves)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face directory with safetensors, a GGUF file, or a finished q8 store.

    Raises CheckpointError, before any weight is read, if something is missing, cut short
    or at odds with itself.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        found = f"cannot be read ({error})"
        raise CheckpointError(file=path, found=found, wanted=_EITHER) from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(file=path, found="is not there", wanted=_EITHER)
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf" or _begins_with(path, gguf_file.MAGIC):
        header = gguf_file.read_header(path)
        return Checkpoint(path=path, format="gguf", tensors=header.tensors, config=header.keys)
    wanted = _EITHER
    if path.suffix in (".safetensors", ".json"):
        wanted = f"give its directory, {path.parent}, which must hold config.json too"
    raise CheckpointError(file=path.name, found="is neither a directory nor a GGUF", wanted=wanted)


def _open_directory(path: Path) -> Checkpoint:
    if store_file.is_store(path):
        return _open_store(path)
    files = sorted(entry.name for entry in path.iterdir())
    if not files:
        raise CheckpointError(file=path, found="is empty", wanted=_EITHER)
    if "config.json" not in files:
        found = f"has no config.json; it holds {', '.join(files)}"
        gguf_files = [name for name in files if name.endswith(".gguf")]
        wanted = f"give the GGUF file itself, {path / gguf_files[0]}" if gguf_files else _EITHER
        raise CheckpointError(file=path, found=found, wanted=wanted)
    return Checkpoint(
        path=path,
        format="safetensors",
        tensors=safetensors_file.read_directory(path),
        config=safetensors_file.read_json(path / "config.json"),
        generation_config=_generation_config(path),
    )


def _open_store(path: Path) -> Checkpoint:
    store = store_file.open_store(path)
    return Checkpoint(
        path=path,
        format=store.format,
        tensors=store.tensors,
        config=store.config,
        generation_config=_generation_config(path),
        scales=store.scales,
        source_shapes=store.shapes,
    )


def _generation_config(path: Path) -> dict[str, Any] | None:
    file = path / "generation_config.json"
    return safetensors_file.read_json(file) if file.exists() else None


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _coding(tensor: TensorInfo) -> Coding:
    """How a tensor is decoded; raises CheckpointError for a dtype that is not read."""
    dtype = tensor.dtype
    coding = FLOATS[dtype] if dtype in FLOATS else gguf_file.coding_of(dtype)
    if coding is None:
        raise _unread_dtype(tensor)
    return coding


def _q8_of(raw: UInt8[np.ndarray, "rows bytes"]) -> Q8:
    """Q8_0 as it lies in a file: a float16 scale before each 32 values."""
    rows, nbytes = raw.shape
    blocks = raw.reshape(rows, nbytes // (2 + BLOCK), 2 + BLOCK)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    values = blocks[:, :, 2:].view(np.int8).reshape(rows, blocks.shape[1] * BLOCK)
    return Q8(values=values, scales=scales)


def _check_one_axis(tensor: TensorInfo, coding: Coding, inner: Ranges | None) -> None:
    if inner is not None:
        wanted = "its only axis is named by outer"
        raise _error(tensor, f"is {list(tensor.shape)} and has no columns", wanted)
    if coding.block != 1:
        wanted = "wanted F32, F16 or BF16 where there is one axis"
        raise _error(tensor, f"is {list(tensor.shape)} in {tensor.dtype}", wanted)


def _unread_dtype(tensor: TensorInfo) -> CheckpointError:
    wanted = "F32, F16, BF16 and the quantised types of GGUF are read"
    return _error(tensor, f"has dtype {tensor.dtype}", wanted)


def _error(tensor: TensorInfo, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(file=tensor.file.name, tensor=tensor.name, found=found, wanted=wanted)
