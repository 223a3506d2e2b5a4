"""Elementwise forms and norms in float64, and what all parts of the oracle share."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]

EPSILON = 1e-6  # where a norm does not say


def as_matrix(x: ArrayLike) -> Matrix:
    return np.array(x, dtype=np.float64, ndmin=2)


def by_head(x: Matrix, heads: int) -> list[Matrix]:
    """The columns of each head."""
    assert x.shape[1] % heads == 0
    width = x.shape[1] // heads
    return [x[:, i * width : (i + 1) * width] for i in range(heads)]


def softmax(scores: Sequence[float], sink: float | None) -> list[float]:
    """Weights of the scores; a sink takes its share and is dropped."""
    most = max(scores) if sink is None else max(*scores, sink)
    parts = [np.exp(s - most) for s in scores]
    whole = sum(parts) + (0.0 if sink is None else np.exp(sink - most))
    return [p / whole for p in parts]


# --- Elementwise


def plus(a: ArrayLike, b: ArrayLike) -> Matrix:
    """The sum; a row vector is added to every row."""
    return as_matrix(a) + as_matrix(b)


def hadamard(a: ArrayLike, b: ArrayLike) -> Matrix:
    """The elementwise product."""
    return as_matrix(a) * as_matrix(b)


def scaled(x: ArrayLike, *, factor: float) -> Matrix:
    """A multiple."""
    return factor * as_matrix(x)


def capped(x: ArrayLike, *, cap: float) -> Matrix:
    """`cap * tanh(x / cap)`."""
    return cap * np.tanh(as_matrix(x) / cap)


def clamped(x: ArrayLike, *, low: float, high: float) -> Matrix:
    """Every column brought into a range."""
    out = as_matrix(x)
    for i, value in np.ndenumerate(out):
        out[i] = low if value < low else high if value > high else value
    return out


def sigmoid(x: ArrayLike) -> Matrix:
    """`1 / (1 + exp(-x))`."""
    return np.exp(-np.logaddexp(0.0, -as_matrix(x)))  # never overflows


def silu(x: ArrayLike) -> Matrix:
    """`x * sigmoid(x)`."""
    return as_matrix(x) * sigmoid(x)


def gelu(x: ArrayLike) -> Matrix:
    """Gelu in the tanh form."""
    a = as_matrix(x)
    return 0.5 * a * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (a + 0.044715 * a**3)))


def swiglu(gate: ArrayLike, up: ArrayLike) -> Matrix:
    """`silu(gate) * up`."""
    return silu(gate) * as_matrix(up)


def xielu(
    x: ArrayLike, positive: ArrayLike, negative: ArrayLike, *, beta: float, cut: float
) -> Matrix:
    """A parabola above zero, a scaled exponential below, and a line through both."""
    out = as_matrix(x)
    ((p,),), ((n,),) = as_matrix(positive), as_matrix(negative)
    for i, z in np.ndenumerate(out):
        if z > 0:
            out[i] = p * z**2 + beta * z
        else:
            out[i] = n * (np.expm1(min(z, cut)) - z) + beta * z
    return out


# --- Norms


def rms_norm(
    x: ArrayLike, weight: ArrayLike, *, heads: int | None = None, epsilon: float | None = None
) -> Matrix:
    """Each segment over its root mean square, times the weight; heads count the whole matrix."""
    a, w = as_matrix(x), as_matrix(weight)[0]
    out = [rms_normed(s, w, epsilon) for s in _segments(a, len(a) if heads is None else heads)]
    return np.concatenate(out).reshape(a.shape)


def l2_norm(x: ArrayLike, *, heads: int, epsilon: float | None = None) -> Matrix:
    """Each segment over the root of its square sum; heads count the whole matrix."""
    a = as_matrix(x)
    e = EPSILON if epsilon is None else epsilon
    out = [s / np.sqrt(np.sum(s**2) + e) for s in _segments(a, heads)]
    return np.concatenate(out).reshape(a.shape)


def layer_norm(x: ArrayLike, weight: ArrayLike, *, epsilon: float | None = None) -> Matrix:
    """Each row less its mean, over the root of its variance, times the weight."""
    a, w = as_matrix(x), as_matrix(weight)[0]
    for row in a:
        row -= sum(row) / len(row)
    return np.stack([rms_normed(row, w, epsilon) for row in a])


def square_sum(x: ArrayLike) -> Matrix:
    """The sum of the squares of each row."""
    return np.array([[sum(value**2 for value in row)] for row in as_matrix(x)], np.float64)


def over_root(
    x: ArrayLike,
    squares: ArrayLike,
    weight: ArrayLike,
    *,
    columns: int,
    epsilon: float | None = None,
) -> Matrix:
    """`x / sqrt(squares / columns + epsilon) * weight`."""
    out, s, w = as_matrix(x), as_matrix(squares), as_matrix(weight)
    e = EPSILON if epsilon is None else epsilon
    assert s.shape == (len(out), 1) and w.shape == (1, out.shape[1])
    for r, c in np.ndindex(*out.shape):
        out[r, c] = out[r, c] / np.sqrt(s[r, 0] / columns + e) * w[0, c]
    return out


def _segments(x: Matrix, count: int) -> Matrix:
    assert count % len(x) == 0 and x.size % count == 0
    return x.reshape(count, x.size // count)


def rms_normed(segment: Matrix, weight: Matrix, epsilon: float | None) -> Matrix:
    e = EPSILON if epsilon is None else epsilon
    return segment / np.sqrt(np.mean(segment**2) + e) * weight
