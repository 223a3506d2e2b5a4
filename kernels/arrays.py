"""What all kernels share: annotations, products in true float32, and which rows count."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Integer = int | Int[Array, ""]
Row = Float[Array, "1 _"]
Matrix = Float[Array, "rows _"]

EPSILON = 1e-6  # of norms, where a statement does not say

# Accelerators multiply float32 in fewer bits unless told otherwise.
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def real(rows: int, count: Integer | None) -> Bool[Array, " rows"]:
    """Which of the rows are real: the first `count`."""
    return jnp.arange(rows) < (rows if count is None else count)


def visible(
    t: Int[Array, "..."],
    position: Integer | Int[Array, "..."],
    *,
    last: int | None,
    chunk: int | None,
) -> Bool[Array, "..."]:
    """Whether position `t` is read from `position`, both counted from 1."""
    seen = t <= position
    if last is not None:
        seen &= t > position - last
    if chunk is not None:
        seen &= (t - 1) // chunk == (position - 1) // chunk
    return seen


def full(shape: tuple[int, ...], value: float, *beside: Any) -> Float[Array, "..."]:
    """A constant that varies over a mesh wherever one of the arrays `beside` it does.

    A loop's carry must start out varying as it ends up, and only what is made from the
    inputs varies. The inputs' values do not matter: they may be NaN.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(beside)]
    zeros = [jnp.zeros_like(a, shape=(), dtype=jnp.float32) for a in arrays]
    return jnp.broadcast_to(sum(zeros, start=jnp.float32(value)), shape)


class Declined(Exception):
    """A path does not take this operation; raised before it does any work, with the reason."""
