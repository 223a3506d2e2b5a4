"""Attention that reads only the rows it needs, a block of keys and values at a time.

The softmax is built up block by block (arXiv 1805.02867, 2205.14135). Keys and values stay as
they lie in the cache: heads that share a group are stacked as rows of one product instead.
Einsum letters: g groups, n the rows of all heads of a group, t positions, d width.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.arrays import Integer, Matrix, Row, einsum, full, visible

# Rows at a time, measured on 2 CPU cores with 9 heads of 64 in 3 groups: at 2048 positions one
# row takes 0.37 ms with 128 keys, 0.45 with 256; 512 rows 22 and 18 ms.
KEYS = 128
KEYS_OF_MANY = 256
QUERIES = 128

# Below every score, yet finite: the difference of two infinities is NaN.
LOWEST = -1e30


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """What a row of queries reads."""

    last: int | None
    chunk: int | None

    def start(self, position: Integer) -> Integer:
        """The first row, from 0, that is read from a position, which counts from 1."""
        start = 0 * position
        if self.last is not None:
            start = jnp.maximum(start, position - self.last)
        if self.chunk is not None:
            start = jnp.maximum(start, (position - 1) // self.chunk * self.chunk)
        return start

    def sees(self, t: Int[Array, "..."], position: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether row `t`, from 0, is read from a position, which counts from 1."""
        return visible(t + 1, position, last=self.last, chunk=self.chunk)


def attention(
    q: Row,
    k: Float[Array, "positions _"],
    v: Float[Array, "positions _"],
    sinks: Float[Array, "1 heads"] | None = None,
    *,
    heads: int,
    groups: int,
    position: Integer | None = None,
    last: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Row:
    """One row of queries over rows 1 to `position`; `vmap` it over sequences of a batch."""
    return causal_attention(
        q,
        k,
        v,
        sinks,
        heads=heads,
        groups=groups,
        position=k.shape[0] if position is None else position,
        last=last,
        chunk=chunk,
        scale=scale,
        cap=cap,
    )


def causal_attention(
    q: Matrix,
    k: Float[Array, "positions _"],
    v: Float[Array, "positions _"],
    sinks: Float[Array, "1 heads"] | None = None,
    *,
    heads: int,
    groups: int,
    position: Integer,
    last: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    count: Integer | None = None,
) -> Matrix:
    """Row `j` (from 0) stands at `position + j`; rows beyond `count` stand where the last does."""
    rows = q.shape[0]
    q = q.reshape(rows, groups, heads // groups, -1)
    q = q * (q.shape[3] ** -0.5 if scale is None else scale)
    if sinks is not None:
        sinks = sinks.reshape(groups, heads // groups)
    at = jnp.arange(rows, dtype=jnp.int32)
    at = position + (at if count is None else jnp.clip(at, 0, count - 1))
    reach = _Reach(last=last, chunk=chunk)

    def some(q: Any, at: Any) -> Any:
        return _attend(q, k, v, sinks, at=at, reach=reach, cap=cap)

    if rows <= QUERIES:
        return some(q, at)
    pieces = -(-rows // QUERIES)
    padding = pieces * QUERIES - rows
    q = jnp.pad(q, [(0, padding), (0, 0), (0, 0), (0, 0)])
    at = jnp.pad(at, (0, padding), mode="edge")
    piecewise = (q.reshape(pieces, QUERIES, *q.shape[1:]), at.reshape(pieces, QUERIES))
    out = jax.lax.map(lambda piece: some(*piece), piecewise)
    return out.reshape(pieces * QUERIES, -1)[:rows]


def _attend(
    q: Float[Array, "rows groups heads width"],
    k: Float[Array, "positions _"],
    v: Float[Array, "positions _"],
    sinks: Float[Array, "groups heads"] | None,
    *,
    at: Int[Array, " rows"],
    reach: _Reach,
    cap: float | None,
) -> Matrix:
    """Scaled queries at positions that do not fall, over the rows that they read."""
    rows, groups, heads, _ = q.shape
    positions = k.shape[0]
    size = min(KEYS if rows == 1 else KEYS_OF_MANY, positions)
    start = reach.start(at[0])
    end = jnp.minimum(at[-1], positions)
    stacked = q.transpose(1, 2, 0, 3).reshape(groups, heads * rows, -1)

    def block(i: Integer, carry: Any) -> Any:
        highest, total, out = carry
        # A slice that would run past the end starts earlier; what it repeats is masked.
        here = jnp.minimum(i * size, positions - size)
        t = here + jnp.arange(size, dtype=jnp.int32)
        mine = (t >= jnp.maximum(i * size, start)) & (t < end)
        keys = jax.lax.dynamic_slice_in_dim(k, here, size).reshape(size, groups, -1)
        values = jax.lax.dynamic_slice_in_dim(v, here, size)
        # What stands in rows that nobody wrote may be anything, and 0 * NaN is NaN.
        values = jnp.where(mine[:, None], values, 0).reshape(size, groups, -1)
        scores = einsum("gnd,tgd->gnt", stacked, keys)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        seen = mine[None] & reach.sees(t[None], at[:, None])
        by_head = scores.reshape(groups, heads, rows, size)
        scores = jnp.where(seen[None, None], by_head, -jnp.inf).reshape(scores.shape)
        new = jnp.maximum(highest, jnp.max(scores, axis=2))
        weights = jnp.exp(scores - new[:, :, None])
        shrink = jnp.exp(highest - new)
        total = shrink * total + jnp.sum(weights, axis=2)
        out = shrink[:, :, None] * out + einsum("gnt,tgd->gnd", weights, values)
        return new, total, out

    before = _before(stacked, k, v, sinks, at)
    _, total, out = jax.lax.fori_loop(start // size, -(-end // size), block, before)
    out = (out / total[:, :, None]).reshape(groups, heads, rows, -1)
    return out.transpose(2, 0, 1, 3).reshape(rows, -1)


def _before(stacked, k, v, sinks, at):
    """Highest score, sum of weights and weighted sum before the first block."""
    groups, n, _ = stacked.shape
    width = v.shape[1] // groups
    beside = (stacked, k, v, sinks, at)
    out = full((groups, n, width), 0.0, *beside)
    if sinks is None:
        return full((groups, n), LOWEST, *beside), full((groups, n), 0.0, *beside), out
    column = jnp.repeat(sinks, n // sinks.shape[1], axis=1)
    return column + full((groups, n), 0.0, *beside), full((groups, n), 1.0, *beside), out
