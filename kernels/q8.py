"""Turns float matrices into int8 with one float16 scale a block (Q8_0 of llama.cpp), and back.

The last axis of a quantised array is always the one that a product sums over
("inner"): it is cut into blocks from its start, and the last block may be short. The
axis before it ("outer") counts outputs. The scales have the rank of the values, so
that every cut of one is a cut of the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

Axis = Literal["outer", "inner"]
Ranges = Sequence[tuple[int, int]]
AnyFloat32 = Float32[np.ndarray, "..."] | Float32[jax.Array, "..."]

BLOCK = 32
SMALLEST_SCALE = np.float32(2.0**-24)
LARGEST_SCALE = np.float32(65504.0)

# Temporaries of this many elements stay in a core's cache.
_ELEMENTS_AT_ONCE = 1 << 17


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["block"])
@dataclass(frozen=True, kw_only=True)
class Q8:
    """A quantised array: `values[..., i] * scales[..., i // block]`, in float32.

    `values` is int8 `[..., outer, n]`, `scales` float16 `[..., outer, ceil(n / block)]`;
    both are NumPy arrays (while loading) or both JAX arrays (traced or not). The fields
    are not checked, since JAX puts other leaves (shapes, shardings) in their place.
    """

    values: Any
    scales: Any
    block: int = BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held by values and scales together."""
        return int(self.values.nbytes) + int(self.scales.nbytes)

    def refine(self, block: int) -> "Q8":
        """The same values at a finer block, each scale repeated.

        Raises ValueError if `block` does not divide the present block.
        """
        if block == self.block:
            return self
        if block < 1 or self.block % block != 0:
            raise ValueError(f"Q8.refine: block {block} does not divide {self.block}")
        xp = _array_module(self)
        scales = xp.repeat(self.scales, self.block // block, axis=-1)
        return replace(self, scales=scales[..., : -(-self.shape[-1] // block)], block=block)

    def cut(self, axis: Axis, ranges: Ranges) -> "Q8":
        """The named ranges `(start, length)` of an axis, joined in their order.

        Nothing is quantised anew: where a range of the inner axis starts or ends inside
        a block, the result has a finer block, with repeated scales. Raises ValueError if
        a range leaves the array.
        """
        ranges = _checked(ranges, self.shape[_NUMBER[axis]], axis)
        if axis == "outer":
            return replace(
                self,
                values=_join(self.values, ranges, axis=-2),
                scales=_join(self.scales, ranges, axis=-2),
            )
        fine = self.refine(_block_of_cut(self.block, ranges))
        blocks = [(start // fine.block, -(-length // fine.block)) for start, length in ranges]
        return replace(
            fine,
            values=_join(fine.values, ranges, axis=-1),
            scales=_join(fine.scales, blocks, axis=-1),
        )

    def padded(self, *, outer: int | None = None, inner: int | None = None) -> "Q8":
        """The array with zeros at the end of its axes, up to these lengths.

        Raises ValueError if a length is below the present one.
        """
        rows, n = self.shape[-2:]
        outer = rows if outer is None else outer
        inner = n if inner is None else inner
        if outer < rows or inner < n:
            raise ValueError(f"Q8.padded: [{rows}, {n}] does not fit into [{outer}, {inner}]")
        blocks = -(-inner // self.block)
        return replace(
            self,
            values=_pad(self.values, outer, inner),
            scales=_pad(self.scales, outer, blocks),
        )


_NUMBER = {"outer": -2, "inner": -1}


def quantise(array: Float[np.ndarray, "*lead cols"], block: int = BLOCK) -> Q8:
    """Quantise along the last axis by llama.cpp's Q8_0 rule, bit for bit.

    A block's scale is its largest magnitude / 127 in float32, stored as float16; its
    values are the elements times the reciprocal of the *float32* scale, halves rounded
    away from zero. Where float16 cannot hold the scale (magnitudes below 3.8e-6 or above
    8.3e6), the nearest scale it can hold is taken and the values are counted in that, the
    largest ending at 127: always finite. Raises ValueError for NaN and infinity.
    """
    if array.ndim == 0:
        raise ValueError("quantise: a scalar has no axis to cut into blocks")
    n = array.shape[-1]
    whole = n // block * block
    rows = array.reshape(-1, n) if n > 0 else array.reshape(int(np.prod(array.shape[:-1])), 0)
    values = np.empty(rows.shape, np.int8)
    scales = np.empty((rows.shape[0], -(-n // block)), np.float16)
    for part in _row_groups(*rows.shape):
        _quantise_into(rows[part, :whole], values[part, :whole], scales[part, : n // block])
        if whole < n:
            _quantise_into(rows[part, whole:], values[part, whole:], scales[part, n // block :])
    return Q8(
        values=values.reshape(array.shape),
        scales=scales.reshape(*array.shape[:-1], scales.shape[-1]),
        block=block,
    )


def dequantise(q: Q8) -> AnyFloat32:
    """The float32 values: NumPy for a NumPy array, otherwise JAX (and traceable)."""
    xp = _array_module(q)
    n = q.shape[-1]
    if n % q.block == 0:
        blocks = q.values.reshape(*q.shape[:-1], n // q.block, q.block).astype(xp.float32)
        return (blocks * q.scales.astype(xp.float32)[..., None]).reshape(q.shape)
    scales = xp.repeat(q.scales.astype(xp.float32), q.block, axis=-1)
    return q.values.astype(xp.float32) * scales[..., :n]


def concatenate(parts: Sequence[Q8], axis: Axis) -> Q8:
    """Join arrays along an axis, at the coarsest block that holds all of them.

    Along the inner axis every part but the last must fill its blocks, so parts of odd
    lengths come out at a finer block. Raises ValueError for no parts.
    """
    if len(parts) == 0:
        raise ValueError("concatenate: no parts")
    if axis == "inner":
        parts = [part for part in parts if part.shape[-1] > 0] or [parts[0]]
    if len(parts) == 1:
        return parts[0]
    block = gcd(*(part.block for part in parts))
    if axis == "inner":
        block = gcd(block, *(part.shape[-1] for part in parts[:-1]))
    xp = _array_module(*parts)
    fine = [part.refine(block) for part in parts]
    return Q8(
        values=xp.concatenate([part.values for part in fine], axis=_NUMBER[axis]),
        scales=xp.concatenate([part.scales for part in fine], axis=_NUMBER[axis]),
        block=block,
    )


def _array_module(*arrays: Q8) -> ModuleType:
    return np if all(isinstance(q.values, np.ndarray) for q in arrays) else jnp


def _checked(ranges: Ranges, size: int, axis: str) -> Ranges:
    """The ranges that hold something; all must lie within the axis."""
    outside = [r for r in ranges if r[0] < 0 or r[1] < 0 or r[0] + r[1] > size]
    if outside:
        raise ValueError(f"Q8.cut: ranges {outside} leave the {axis} axis, which has {size}")
    return [(start, length) for start, length in ranges if length > 0]


def _block_of_cut(block: int, ranges: Ranges) -> int:
    """The coarsest block whose borders all joins respect; the last range may end short."""
    starts = [start for start, _ in ranges]
    lengths = [length for _, length in ranges[:-1]]
    return gcd(block, *starts, *lengths)


def _join(array: Any, ranges: Ranges, *, axis: int) -> Any:
    xp = np if isinstance(array, np.ndarray) else jnp
    after = (slice(None),) * (-1 - axis)
    pieces = [array[(..., slice(s, s + length), *after)] for s, length in ranges]
    if not pieces:
        return array[(..., slice(0, 0), *after)]
    return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces, axis=axis)


def _pad(array: Any, outer: int, inner: int) -> Any:
    rows, cols = array.shape[-2:]
    if (rows, cols) == (outer, inner):
        return array
    xp = np if isinstance(array, np.ndarray) else jnp
    lead = [(0, 0)] * (array.ndim - 2)
    return xp.pad(array, [*lead, (0, outer - rows), (0, inner - cols)])


def _row_groups(rows: int, cols: int) -> Iterator[slice]:
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, cols))
    return (slice(at, at + at_once) for at in range(0, rows, at_once))


def _quantise_into(rows: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """Quantise `rows` [rows, cols] into as many equal blocks as `scales` has columns."""
    if rows.size == 0:
        return
    blocks = rows.astype(np.float32).reshape(*scales.shape, -1)
    largest = np.abs(blocks).max(axis=-1)
    if not np.isfinite(largest).all():
        raise ValueError("quantise: the array holds NaN or infinity; only finite numbers have a q8")
    scale, reciprocal = _scales_of(largest)
    counts = blocks
    counts *= reciprocal[..., None]
    # Halves go away from zero. x + 0.5 would round 0.49999997 up, so the fraction, which
    # is exact, is doubled instead.
    toward_zero = np.trunc(counts)
    counts -= toward_zero
    counts *= np.float32(2)
    toward_zero += np.trunc(counts, out=counts)
    # Only a block above the largest scale has more than 127 here.
    values[...] = np.clip(toward_zero, -127, 127, out=toward_zero).reshape(rows.shape)
    scales[...] = scale


def _scales_of(largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float16 scales, and the float32 reciprocals to multiply with; 0 for blocks of zeros."""
    exact = largest / np.float32(127)
    with np.errstate(over="ignore"):
        stored = exact.astype(np.float16)
    # llama.cpp would store 0 or infinity in these; its reciprocal may overflow as well.
    exact = np.where((stored == 0) & (largest > 0), SMALLEST_SCALE, exact)
    exact = np.where(np.isinf(stored), LARGEST_SCALE, exact)
    reciprocal = np.divide(np.float32(1), exact, where=exact > 0, out=np.zeros_like(exact))
    return exact.astype(np.float16), reciprocal
