"""Recurrent forms in float64, row after row; states come back anew."""

import numpy as np
from numpy.typing import ArrayLike

from tests.oracle_rowwise import Matrix, as_matrix, rms_normed, sigmoid, silu


def decay(x: ArrayLike, bias: ArrayLike, rate: ArrayLike, *, heads: int | None = None) -> Matrix:
    """`exp(-exp(rate) * softplus(x + bias))`; with heads, each column at the rate of its head."""
    out, b, rates = as_matrix(x), as_matrix(bias), as_matrix(rate)
    width = 1 if heads is None else out.shape[1] // heads
    assert rates.shape == (1, out.shape[1] // width)
    for r, c in np.ndindex(*out.shape):
        softplus = np.logaddexp(0.0, out[r, c] + b[0, c])
        out[r, c] = np.exp(-np.exp(rates[0, c // width]) * softplus)
    return out


def causal_conv(
    x: ArrayLike, weight: ArrayLike, state: ArrayLike, *, taps: int, count: int | None = None
) -> tuple[Matrix, Matrix]:
    """A depthwise convolution over the last `taps` inputs; also the state after it."""
    a, w, s = as_matrix(x), as_matrix(weight), as_matrix(state)
    assert len(w) == len(s) == taps
    out = np.zeros_like(a)
    for j in range(len(a) if count is None else count):
        s = np.concatenate([s[1:], a[j : j + 1]])
        out[j] = sum(s[t] * w[t] for t in range(taps))
    return out, s


def gated_delta(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    beta: ArrayLike,
    decay: ArrayLike,
    state: ArrayLike,
    norm: ArrayLike,
    *,
    heads: int,
    groups: int,
    sigmoid_gate: bool = False,
    by_channel: bool = False,
    epsilon: float | None = None,
    count: int | None = None,
) -> tuple[Matrix, Matrix]:
    """The gated delta rule, its output normed and gated; also the state after it."""
    values, gates, b, d, n = (as_matrix(m) for m in (v, gate, beta, decay, norm))
    s = np.split(as_matrix(state), heads)  # of each value head: value rows, key columns
    width = n.shape[1]
    out = np.zeros_like(values)
    for r in range(len(values) if count is None else count):
        for j in range(heads):
            key = _head(k, r, j % groups, width)
            query = _head(q, r, j % groups, width) / np.sqrt(width)
            if by_channel:
                for c in range(width):
                    s[j][:, c] = d[r, j % groups * width + c] * s[j][:, c]
            else:
                s[j] = d[r, j] * s[j]
            s[j] = s[j] + np.outer(b[r, j] * (_head(values, r, j, width) - s[j] @ key), key)
            normed = rms_normed(s[j] @ query, n[0], epsilon)
            z = _head(gates, r, j, width)
            act = sigmoid(z) if sigmoid_gate else silu(z)
            out[r, j * width : (j + 1) * width] = normed * act[0]
    return out, np.concatenate(s)


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    decay: ArrayLike,
    state: ArrayLike,
    *,
    heads: int,
    count: int | None = None,
) -> tuple[Matrix, Matrix]:
    """A decaying sum of outer products, read by each row; also the state after it."""
    values, d = as_matrix(v), as_matrix(decay)
    width = values.shape[1] // heads
    s = np.split(as_matrix(state), heads)  # of each head: value rows, key columns
    out = np.zeros_like(values)
    for r in range(len(values) if count is None else count):
        for h in range(heads):
            query, key, value = (_head(m, r, h, width) for m in (q, k, v))
            for a in range(width):
                for b in range(width):
                    s[h][a, b] = d[0, h] * s[h][a, b] + value[a] * key[b]
                out[r, h * width + a] = sum(s[h][a, b] * query[b] for b in range(width))
    return out, np.concatenate(s)


def _head(x: ArrayLike, row: int, head: int, width: int) -> Matrix:
    return as_matrix(x)[row, head * width : (head + 1) * width]
