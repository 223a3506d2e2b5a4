"""One tensor as it lies in a file: what is known of it, and its rows, read through a map."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Integer, UInt8

from kernels.q8 import Ranges

Rows = Ranges | Integer[np.ndarray, "rows"]

# A piece of this many elements is decoded at a time, so that the temporaries of a big
# embedding stay small.
ELEMENTS_AT_ONCE = 1 << 22


@dataclass(kw_only=True, eq=False)
class CheckpointError(Exception):
    """A checkpoint that cannot be used: where, what was found, and what would do."""

    file: str | os.PathLike[str]
    tensor: str | None = None
    found: str
    wanted: str

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f"{self.tensor} "
        return f"{self.file}: {tensor}{self.found}; {self.wanted}"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor of a checkpoint; `shape` is in NumPy's order, outer first.

    Its bytes are the `nbytes` from `offset` in `file`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """All axes but the last, flattened; a one-dimensional tensor is a column."""
        sizes = self.shape if len(self.shape) < 2 else self.shape[:-1]
        return int(np.prod(sizes, dtype=np.int64))

    @property
    def cols(self) -> int:
        """The length of the last axis; 1 where there is only one."""
        return 1 if len(self.shape) < 2 else self.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How a dtype stores numbers: `block` of them in `nbytes`, decoded a row at a time."""

    block: int
    nbytes: int
    decode: Callable[[UInt8[np.ndarray, "rows bytes"]], np.ndarray]

    def bytes_of(self, cols: int) -> int:
        """The bytes of so many whole blocks' worth of columns."""
        return cols // self.block * self.nbytes


def _float_coding(dtype: type) -> Coding:
    # The view costs nothing; the assignment that follows it converts straight from the map.
    return Coding(block=1, nbytes=np.dtype(dtype).itemsize, decode=lambda raw: raw.view(dtype))


FLOATS = {
    "F32": _float_coding(np.float32),
    "F16": _float_coding(np.float16),
    "BF16": _float_coding(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a tensor, and where they go in the result."""

    rows: slice | np.ndarray
    at: slice


def pieces_of(tensor: TensorInfo, outer: Rows | None, cols: int) -> tuple[list[Piece], int]:
    """The rows that `outer` names, in pieces of bounded size, and how many there are."""
    if outer is None:
        outer = [(0, tensor.rows)]
    if isinstance(outer, np.ndarray):
        _check_index(tensor, outer)
        runs: list[slice | np.ndarray] = [outer]
    else:
        check_ranges(tensor, "rows", outer, tensor.rows)
        runs = [slice(start, start + length) for start, length in outer if length > 0]
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, cols))
    pieces: list[Piece] = []
    total = 0
    for run in runs:
        for rows, count in _split(run, at_once):
            pieces.append(Piece(rows=rows, at=slice(total, total + count)))
            total += count
    return pieces, total


def check_ranges(tensor: TensorInfo, axis: str, ranges: Ranges, size: int) -> None:
    """Raise CheckpointError, with every range that leaves the axis, if one does."""
    outside = [r for r in ranges if r[0] < 0 or r[1] < 0 or r[0] + r[1] > size]
    if outside:
        raise CheckpointError(
            file=tensor.file.name,
            tensor=tensor.name,
            found=f"is {list(tensor.shape)}; {axis} {outside} (start, length) lie outside it",
            wanted=f"wanted {axis} from 0 to {size}",
        )


def map_rows(tensor: TensorInfo) -> UInt8[np.ndarray, "rows bytes"]:
    """The bytes of a tensor, a row of the tensor a row, mapped and not read.

    The map lives as long as the array, so that a loader holds no pages of tensors that
    it is done with. Raises CheckpointError if the file has changed since it was opened.
    """
    if tensor.nbytes == 0:
        return np.zeros((tensor.rows, 0), np.uint8)
    shape = (tensor.rows, tensor.nbytes // tensor.rows)
    try:
        mapped = np.memmap(tensor.file, np.uint8, "r", offset=tensor.offset, shape=shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            file=tensor.file.name,
            tensor=tensor.name,
            found=f"can no longer be read ({error})",
            wanted="the file must stay as it was when it was opened",
        ) from error
    return mapped.view(np.ndarray)


def decode_into(
    out: Float32[np.ndarray, "rows cols"],
    mapped: UInt8[np.ndarray, "all_rows bytes"],
    coding: Coding,
    rows: slice | np.ndarray,
    first: int,
) -> int:
    """Decode some rows' columns from `first` on, as many as `out` has; return bytes touched.

    Columns that share a block with a wanted one are decoded too, and dropped.
    """
    cols = out.shape[1]
    start = first // coding.block * coding.block
    end = -(-(first + cols) // coding.block) * coding.block
    used = mapped[rows, coding.bytes_of(start) : coding.bytes_of(end)]
    if used.size > 0:
        out[...] = coding.decode(used)[:, first - start : first - start + cols]
    return used.size


def _check_index(tensor: TensorInfo, index: np.ndarray) -> None:
    outside = index[(index < 0) | (index >= tensor.rows)]
    if outside.size > 0:
        raise CheckpointError(
            file=tensor.file.name,
            tensor=tensor.name,
            found=f"is {list(tensor.shape)}; rows {outside.tolist()} lie outside it",
            wanted=f"wanted rows from 0 to {tensor.rows - 1}",
        )


def _split(run: slice | np.ndarray, at_once: int) -> list[tuple[slice | np.ndarray, int]]:
    if isinstance(run, np.ndarray):
        return [
            (run[at : at + at_once], min(at_once, len(run) - at))
            for at in range(0, len(run), at_once)
        ]
    return [
        (slice(at, min(at + at_once, run.stop)), min(at_once, run.stop - at))
        for at in range(run.start, run.stop, at_once)
    ]
