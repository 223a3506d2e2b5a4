"""Computes the norms, plainly: each segment of columns over its length."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.arrays import EPSILON


def rms_norm(
    x: Float[Array, "rows cols"],
    weight: Float[Array, "1 width"],
    *,
    heads: int | None = None,
    epsilon: float | None = None,
) -> Float[Array, "rows cols"]:
    """Each segment over its root mean square, times the weight; heads count the whole matrix."""
    segments = x.reshape(x.shape[0] if heads is None else heads, weight.shape[1])
    epsilon = EPSILON if epsilon is None else epsilon
    mean_square = jnp.mean(segments * segments, axis=1, keepdims=True)
    return (segments / jnp.sqrt(mean_square + epsilon) * weight).reshape(x.shape)


def l2_norm(
    x: Float[Array, "rows cols"], *, heads: int, epsilon: float | None = None
) -> Float[Array, "rows cols"]:
    """Each segment over its length; heads count the whole matrix."""
    segments = x.reshape(heads, -1)
    epsilon = EPSILON if epsilon is None else epsilon
    square = jnp.sum(segments * segments, axis=1, keepdims=True)
    return (segments / jnp.sqrt(square + epsilon)).reshape(x.shape)


def layer_norm(
    x: Float[Array, "rows cols"], weight: Float[Array, "1 cols"], *, epsilon: float | None = None
) -> Float[Array, "rows cols"]:
    """Each row less its mean, over the root of its variance, times the weight."""
    return rms_norm(x - jnp.mean(x, axis=1, keepdims=True), weight, epsilon=epsilon)


def square_sum(x: Float[Array, "rows _"]) -> Float[Array, "rows 1"]:
    """The sum of the squares of each row, as one column."""
    return jnp.sum(x * x, axis=1, keepdims=True)


def over_root(
    x: Float[Array, "rows cols"],
    squares: Float[Array, "rows 1"],
    weight: Float[Array, "1 cols"],
    *,
    columns: int,
    epsilon: float | None = None,
) -> Float[Array, "rows cols"]:
    """Some columns of an rmsnorm, from the square sum of all `columns` of a row."""
    epsilon = EPSILON if epsilon is None else epsilon
    return x / jnp.sqrt(squares / columns + epsilon) * weight
