"""Products with weights as they are stored: outputs first, the axis that is summed last."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.arrays import Integer, Matrix, einsum, full
from kernels.native.packed import Packed, unpacked
from kernels.q8 import Q8, dequantise

Stored = Q8 | Packed | Float[Array, "_ _"]
AnyStored = Q8 | Packed | Float[Array, "..."]  # a matrix, or one for each expert

# Weights that are made floats at a time, of a q8 that many rows are multiplied with: 16 MB, which
# an accelerator's cache holds.
PIECE = 1 << 22
# Outputs of a piece are a multiple of this.
ALIGN = 128


def matmul(x: Matrix, w: Stored, *, heads: int | None = None) -> Matrix:
    """`x` times a weight `[outputs, n]`; with heads `[heads * outputs of one, n of one]`.

    Measured on 2 CPU cores in float32 (jax 0.10.2), one row times 49152 x 576: 32 GB/s in this
    order, 32 turned (`w @ x.T`), 37 had the weight been stored `[n, outputs]`, 0.4 as products
    that are then summed; 512 rows: 200 Gflop/s in any order.
    """
    if isinstance(w, Q8):
        return _quantised(x, w, 1 if heads is None else heads)
    if heads is not None:
        return _by_heads(x, w, heads)
    return einsum("rn,on->ro", x, as_float(w))


def _by_heads(x: Matrix, w: Packed | Float[Array, "_ _"], heads: int) -> Matrix:
    n = x.shape[1] // heads
    by_head = as_float(w).reshape(heads, -1, n)
    out = einsum("rhn,hon->rho", x.reshape(-1, heads, n), by_head)
    return out.reshape(x.shape[0], -1)


# --- Weights that stay q8: those of accelerators
#
# Read in what XLA compiles for an H200 and for TPUs (v4 to v6e; jax 0.10.2), and run on none of
# them. Left to itself, XLA writes the whole weight in floats beside it, for a TPU even where one
# row is multiplied with it: so its scales are put to what a block comes to, or it is taken in
# pieces. `scripts/device_check` looks.

ByHead = Float[Array, "rows heads n"]


def _quantised(x: Matrix, w: Q8, heads: int) -> Matrix:
    rows = x.shape[0]
    height = w.shape[0] // heads
    by_head = jax.tree.map(lambda a: a.reshape(heads, height, a.shape[1]), w)
    by_row = x.reshape(rows, heads, -1)
    out = jax.lax.platform_dependent(by_row, by_head, tpu=_on_tpu, default=_elsewhere)
    return out.reshape(rows, heads * height)


def _on_tpu(x: ByHead, w: Q8) -> Float[Array, "rows heads outputs"]:
    """By blocks, whose sums and scales XLA puts into the product, however many rows there are."""
    if x.shape[2] % w.block != 0:
        return _in_pieces(x, w)
    rows = x.shape[0]
    # Of one row's product XLA makes a sum, for which it writes floats.
    padded = jnp.pad(x, [(0, max(0, 2 - rows)), (0, 0), (0, 0)])
    return _by_blocks(padded, w)[:rows]


def _elsewhere(x: ByHead, w: Q8) -> Float[Array, "rows heads outputs"]:
    """One row in a single loop over the bytes, a few by blocks, many in pieces."""
    rows, _, n = x.shape
    if rows == 1:
        return jnp.sum(x[0][:, None] * dequantise(w), axis=2)[None]
    # Here the sums of blocks are written: 4 bytes a row and block, up to one a weight.
    if n % w.block == 0 and 4 * rows <= w.block:
        return _by_blocks(x, w)
    return _in_pieces(x, w)


def _by_blocks(x: ByHead, w: Q8) -> Float[Array, "rows heads outputs"]:
    """Products of each block with its int8, then the scales: nothing is dequantised."""

    def blocks(a: Any) -> Any:
        return a.reshape(*a.shape[:2], -1, w.block)

    values = blocks(w.values).astype(jnp.float32)
    sums = einsum("rhbk,hobk->rhbo", blocks(x), values)
    return jnp.sum(sums * w.scales.astype(jnp.float32).transpose(0, 2, 1)[None], axis=2)


def _in_pieces(x: ByHead, w: Q8) -> Float[Array, "rows heads outputs"]:
    """Some outputs of every head at a time, their weights in floats only as long as that takes."""
    rows, heads, n = x.shape
    outputs = w.shape[1]
    size = min(outputs, max(1, PIECE // (heads * n * ALIGN)) * ALIGN)

    def put(i: Integer, out: Any) -> Any:
        # The last piece starts earlier where it would run past the end, and repeats some.
        first = jnp.minimum(i * size, outputs - size)
        piece = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, size, axis=1), w)
        found = einsum("rhn,hon->rho", x, dequantise(piece))
        return jax.lax.dynamic_update_slice_in_dim(out, found, first, axis=2)

    if size == outputs:
        return einsum("rhn,hon->rho", x, dequantise(w))
    before = full((rows, heads, outputs), 0.0, x, w)
    return jax.lax.fori_loop(0, -(-outputs // size), put, before)


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
