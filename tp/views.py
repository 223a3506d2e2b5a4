"""Reads matrices through their views: some outputs and inputs, as floats or quantised."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float32

from author.families.model import Function, Order, View
from kernels.q8 import BLOCK, Q8, Ranges, concatenate, quantise
from tp.checkpoint import Checkpoint, CheckpointError, TensorInfo

Floats = Float32[np.ndarray, "outputs inputs"]


# --- Shapes


def shape_of(view: View, tensor: TensorInfo) -> tuple[int, int]:
    """Outputs and inputs of a view."""
    rows, cols = _seen(view, tensor)
    return (
        rows if view.rows is None else view.rows.length,
        cols if view.cols is None else view.cols.length,
    )


def misfits(view: View, tensor: TensorInfo) -> Iterator[str]:
    """What a view wants of a tensor that is not there."""
    if view.turned is not None and (view.turned < 1 or tensor.rows % view.turned != 0):
        yield f"{tensor.name} is {list(tensor.shape)}, wanted blocks of {view.turned} rows"
        return
    for order, size in zip((view.rows, view.cols), _seen(view, tensor), strict=True):
        if order is not None and order.length > 0 and int(_places(order).max()) >= size:
            wanted = int(_places(order).max()) + 1
            yield f"{tensor.name} is {list(tensor.shape)}, wanted {wanted} of its {size} rows"


def _seen(view: View, tensor: TensorInfo) -> tuple[int, int]:
    """The matrix that a view selects from."""
    if view.turned is None:
        return tensor.rows, tensor.cols
    return tensor.rows // view.turned * tensor.cols, view.turned


@lru_cache(maxsize=4096)
def _places(order: Order) -> np.ndarray:
    runs = [np.arange(start, start + length * step, step) for start, length, step in order.runs]
    once = np.concatenate(runs) if runs else np.zeros(0, np.int64)
    return (np.arange(order.times)[:, None] * order.stride + once[None]).ravel()


def _range(order: Order | None, first: int, count: int) -> np.ndarray:
    """Where a range of the places wanted stands."""
    return np.arange(first, first + count) if order is None else _places(order)[first:][:count]


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Places as ranges, in their order."""
    if len(places) == 0:
        return []
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    starts = [0, *ends.tolist()]
    lengths = np.diff([*starts, len(places)]).tolist()
    return [(int(places[at]), length) for at, length in zip(starts, lengths, strict=True)]


# --- Matrices of several views


def read_q8(
    checkpoint: Checkpoint, views: Sequence[View], first: int, count: int, inner: Ranges | None
) -> Q8:
    """A range of outputs of a quantised matrix, through its views; `inner` are ranges of inputs."""
    parts: list[Q8] = []
    for view, at, held in _outputs(checkpoint, views, first, count):
        parts.append(_q8(checkpoint, view, at, held, inner))
    return concatenate(parts, "outer")


def read_floats(
    checkpoint: Checkpoint, views: Sequence[View], first: int, count: int, start: int, length: int
) -> Floats:
    """A range of outputs and of inputs, in float32, through the views of a matrix."""
    parts = [
        _floats(checkpoint, view, at, held, start, length)
        for view, at, held in _outputs(checkpoint, views, first, count)
    ]
    found = np.concatenate(parts)
    if not np.isfinite(found).all():
        raise CheckpointError(
            file=str(checkpoint.path),
            tensor=", ".join(view.tensor for view in views),
            found="holds NaN or infinity",
            wanted="wanted finite numbers: download the file again",
        )
    return found


def _outputs(
    checkpoint: Checkpoint, views: Sequence[View], first: int, count: int
) -> Iterator[tuple[View, int, int]]:
    """Each view that holds some of a range of outputs, and which of its own; one at the least."""
    at, none_yet = 0, True
    for view in views:
        rows, _ = shape_of(view, checkpoint.tensors[view.tensor])
        low, high = max(first, at), min(first + count, at + rows)
        if low < high:
            none_yet = False
            yield view, low - at, high - low
        at += rows
    if none_yet:
        yield views[0], 0, 0


# --- One view


def _q8(checkpoint: Checkpoint, view: View, first: int, count: int, inner: Ranges | None) -> Q8:
    tensor = checkpoint.tensors[view.tensor]
    if view.turned is None and view.cols is None and view.function is None and view.plus == 0:
        places = _range(view.rows, first, count)
        runs = _runs(places)
        few = len(runs) * 16 <= len(places) or len(runs) < 16
        return checkpoint.read_q8(view.tensor, outer=runs if few else places, inner=inner)
    wanted = [(0, shape_of(view, tensor)[1])] if inner is None else inner
    parts = [_quantised(checkpoint, view, first, count, *piece) for piece in wanted]
    return concatenate(parts, "inner")


def _quantised(
    checkpoint: Checkpoint, view: View, first: int, count: int, start: int, length: int
) -> Q8:
    """Quantised here, in the enclosing blocks of all inputs: no number depends on the slice."""
    _, inputs = shape_of(view, checkpoint.tensors[view.tensor])
    low = start // BLOCK * BLOCK
    high = min(inputs, -(-(start + length) // BLOCK) * BLOCK)
    floats = _floats(checkpoint, view, first, count, low, high - low)
    try:
        whole = quantise(floats)
    except ValueError as error:
        raise CheckpointError(
            file=checkpoint.tensors[view.tensor].file.name,
            tensor=view.tensor,
            found=f"holds NaN or infinity ({error})",
            wanted="wanted finite numbers only: fetch or convert it again",
        ) from error
    return whole.cut("inner", [(start - low, length)])


def _floats(
    checkpoint: Checkpoint, view: View, first: int, count: int, start: int, length: int
) -> Floats:
    rows, cols = _range(view.rows, first, count), _range(view.cols, start, length)
    if view.turned is None:
        found = _read(checkpoint, view.tensor, rows, cols)
    else:
        found = _read_turned(checkpoint, view.tensor, view.turned, rows, cols)
    if view.function is not None:
        found = _applied(view.function, found)
    return found + np.float32(view.plus) if view.plus != 0 else found


def _read(checkpoint: Checkpoint, name: str, rows: np.ndarray, cols: np.ndarray) -> Floats:
    """These rows and columns of a tensor, of whatever rank."""
    tensor = checkpoint.tensors[name]
    if len(rows) == 0 or len(cols) == 0:
        return np.zeros((len(rows), len(cols)), np.float32)
    if len(tensor.shape) < 2:
        return checkpoint.read(name, outer=rows).reshape(-1, 1)[:, cols]
    runs = _runs(cols)
    if len(runs) <= 16:
        return checkpoint.read(name, outer=rows, inner=runs)
    low, high = int(cols.min()), int(cols.max()) + 1
    return checkpoint.read(name, outer=rows, inner=[(low, high - low)])[:, cols - low]


def _read_turned(
    checkpoint: Checkpoint, name: str, block: int, rows: np.ndarray, cols: np.ndarray
) -> Floats:
    """The same of a tensor that has its inputs first, in blocks of rows."""
    found = np.empty((len(rows), len(cols)), np.float32)
    blocks, outputs = np.divmod(rows, max(checkpoint.tensors[name].cols, 1))
    for number in np.unique(blocks):
        here = blocks == number
        found[here] = _read(checkpoint, name, number * block + cols, outputs[here]).T
    return found


def _applied(function: Function, floats: Floats) -> Floats:
    wide = floats.astype(np.float64)
    match function:
        case "softplus":
            return np.logaddexp(0, wide).astype(np.float32)
        case "log_of_negative":
            if np.any(wide >= 0):
                raise ValueError("the logarithm of what is negated wants negative numbers")
            return np.log(-wide).astype(np.float32)


def is_about(found: float, wanted: float) -> bool:
    """Whether a number is another one, but for being stored in half precision."""
    return math.isclose(found, wanted, rel_tol=2**-7)
