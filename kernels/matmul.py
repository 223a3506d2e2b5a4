"""Products with weights as they are stored: outputs first, the axis that is summed last."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.arrays import Integer, Matrix, einsum, full
from kernels.native.packed import Packed, unpacked
from kernels.q8 import Q8, dequantise

Stored = Q8 | Packed | Float[Array, "_ _"]
AnyStored = Q8 | Packed | Float[Array, "..."]  # a matrix, or one for each expert


def matmul(x: Matrix, w: Stored, *, heads: int | None = None) -> Matrix:
    """`x` times a weight `[outputs, n]`; with heads `[heads * outputs of one, n of one]`.

    Measured on 2 CPU cores in float32 (jax 0.10.2), one row times 49152 x 576: 32 GB/s in this
    order, 32 turned (`w @ x.T`), 37 had the weight been stored `[n, outputs]`, 0.4 as products
    that are then summed; 512 rows: 200 Gflop/s in any order.
    """
    if heads is not None:
        return _by_heads(x, w, heads)
    if isinstance(w, Q8) and x.shape[0] == 1:
        # A product may lay the weight out in float32 first; this is one loop over its bytes.
        # Meant for accelerators and not yet measured there; for CPU devices see `pack`.
        return jnp.sum(x * dequantise(w), axis=1)[None]
    return einsum("rn,on->ro", x, as_float(w))


def _by_heads(x: Matrix, w: Stored, heads: int) -> Matrix:
    n = x.shape[1] // heads
    by_head = as_float(w).reshape(heads, -1, n)
    out = einsum("rhn,hon->rho", x.reshape(-1, heads, n), by_head)
    return out.reshape(x.shape[0], -1)


def embedding(
    tokens: Int[Array, " rows"] | Int[Array, "1 rows"], w: Stored, first: Integer | None = None
) -> Matrix:
    """The row of each token id from a table `[vocabulary, cols]`, which may serve a head too.

    With `first`, the table starts at that id, and rows that it does not hold are zeros.
    """
    ids = tokens.reshape(-1) - (0 if first is None else first)
    held = (ids >= 0) & (ids < w.shape[0])
    if w.shape[0] == 0:
        return full((ids.shape[0], w.shape[1]), 0.0, ids, w)
    return jnp.where(held[:, None], as_float(taken(w, jnp.where(held, ids, 0))), 0)


def as_float(w: AnyStored) -> Any:
    """The float32 values of a stored weight."""
    if isinstance(w, Packed):
        return unpacked(w)
    return dequantise(w) if isinstance(w, Q8) else w


def taken(w: AnyStored, ids: Integer | Int[Array, "..."]) -> AnyStored:
    """The rows, or whatever the first axis counts, with these numbers."""
    if isinstance(w, Q8):
        return Q8(values=w.values[ids], scales=w.scales[ids], block=w.block)
    return as_float(w)[ids]
