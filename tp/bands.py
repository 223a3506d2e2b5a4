"""Puts what a chip holds of a quantised matrix together in place, a band of outputs at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import numpy as np

from kernels.q8 import BLOCK, Q8
from tp.slices import Padded, begins

# So many numbers are in the works at a time, as floats and as what they become.
NUMBERS_AT_ONCE = 1 << 20
# On a CPU JAX takes over an array that begins at such an address; any other it copies.
ALIGNMENT = 64  # bytes


def bands(outer: Sequence[Padded], inputs: int) -> Iterator[list[Padded]]:
    """The padded ranges of outputs cut into bands of bounded size, whole blocks but the last."""
    total = sum(width for *_, width in outer)
    at_once = max(BLOCK, NUMBERS_AT_ONCE // max(inputs, 1) // BLOCK * BLOCK)
    for first in range(0, max(total, 1), at_once):
        yield list(_between(outer, first, first + at_once)) or [(0, 0, 0)]


def _between(outer: Sequence[Padded], first: int, end: int) -> Iterator[Padded]:
    """What of padded ranges, put one after another, is from `first` to before `end`."""
    for (start, length, width), at in zip(outer, begins(outer), strict=True):
        low, high = max(first - at, 0), min(end - at, width)
        if low < high:
            skipped = min(low, length)
            yield start + skipped, min(high, length) - skipped, high - low


def put_together(parts: Iterator[Any], outputs: int) -> Any:
    """Bands of a matrix of so many outputs, one below another: all of `Q8`, or all of floats."""
    first = next(parts)
    whole = _room(first, outputs)
    targets, at = jax.tree.leaves(whole), 0
    for part in chain([first], parts):
        leaves = jax.tree.leaves(part)
        for target, leaf in zip(targets, leaves, strict=True):
            target[at : at + len(leaf)] = leaf
        at += len(leaves[0])
    return whole


def _room(part: Any, outputs: int) -> Any:
    """Empty arrays for a whole matrix of which one band is given."""
    if isinstance(part, Q8):
        values, scales = _empty(outputs, part.values), _empty(outputs, part.scales)
        return replace(part, values=values, scales=scales)
    return _empty(outputs, part)


def _empty(rows: int, like: np.ndarray) -> np.ndarray:
    """An array of so many rows like those given, which a CPU device takes over."""
    shape = (rows, *like.shape[1:])
    size = int(np.prod(shape)) * like.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(like.dtype).reshape(shape)
