"""What every form of the language computes, in float64 NumPy, loop by loop.

Written from LANGUAGE.md apart from `kernels/reference.py`, so that each checks the other. A form is
the function of its name in snake case: the fields that name matrices are positional, in the order
of the class, every other field is a keyword, and a part is spelled out as its own fields. A form
that changes a matrix returns the new one and leaves its arguments alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]

EPSILON = 1e-6  # where a norm does not say


def _matrix(x: ArrayLike) -> Matrix:
    return np.array(x, dtype=np.float64, ndmin=2)


# --- Rows and columns


def row(x: ArrayLike, *, row: int) -> Matrix:
    """Row `row`, counted from 1."""
    matrix = _matrix(x)
    assert 1 <= row <= len(matrix)
    return matrix[row - 1 : row]


def embedding_row(x: ArrayLike, *, row: int, first: int | None = None) -> Matrix:
    """The row of a token id, from 0; zeros for one that `x`, of the ids from `first`, lacks."""
    matrix = _matrix(x)
    held = row if first is None else row - first
    if first is None:
        assert 0 <= held < len(matrix)
    if not 0 <= held < len(matrix):
        return np.zeros((1, matrix.shape[1]))
    return matrix[held : held + 1]


def rows(tokens: ArrayLike, x: ArrayLike, *, first: int | None = None) -> Matrix:
    """One row of `x` for each id of `tokens`."""
    ids = np.asarray(tokens).reshape(-1)
    return np.concatenate([embedding_row(x, row=int(i), first=first) for i in ids])


def first(x: ArrayLike, *, kept: int, run: int) -> Matrix:
    """The first `kept` columns of every `run`."""
    return _kept(_matrix(x), [i for i in range(run) if i < kept], run)


def last(x: ArrayLike, *, kept: int, run: int) -> Matrix:
    """The last `kept` columns of every `run`."""
    return _kept(_matrix(x), [i for i in range(run) if i >= run - kept], run)


def _kept(x: Matrix, wanted: list[int], run: int) -> Matrix:
    assert x.shape[1] % run == 0
    return x[:, [start + i for start in range(0, x.shape[1], run) for i in wanted]]


def joined(x: ArrayLike, y: ArrayLike, *, heads: int | None = None) -> Matrix:
    """Columns of `x`, then of `y`; with heads, head by head."""
    a, b = _matrix(x), _matrix(y)
    count = 1 if heads is None else heads
    pairs = zip(_cut(a, count), _cut(b, count), strict=True)
    return np.concatenate([part for pair in pairs for part in pair], axis=1)


def _cut(x: Matrix, heads: int) -> list[Matrix]:
    """The columns of each head."""
    assert x.shape[1] % heads == 0
    width = x.shape[1] // heads
    return [x[:, i * width : (i + 1) * width] for i in range(heads)]


def set_row(matrix: ArrayLike, x: ArrayLike, *, row: int) -> Matrix:
    """`matrix` with row `row`, counted from 1, replaced."""
    return set_rows(matrix, _matrix(x)[:1], row=row)


def set_rows(matrix: ArrayLike, x: ArrayLike, *, row: int, count: int | None = None) -> Matrix:
    """`matrix` with rows `row`, `row + 1`, … replaced by the first `count` rows of `x`."""
    out, new = _matrix(matrix), _matrix(x)
    for i in range(len(new) if count is None else count):
        out[row - 1 + i] = new[i]
    return out


# --- Products and elementwise forms


def matmul(x: ArrayLike, w: ArrayLike, *, heads: int | None = None) -> Matrix:
    """`x @ w`; with heads, each head of a row times its own rows of `w`."""
    a, b = _matrix(x), _matrix(w)
    if heads is None:
        return a @ b
    blocks = np.split(b, heads)
    parts = [h @ block for h, block in zip(_cut(a, heads), blocks, strict=True)]
    return np.concatenate(parts, axis=1)


def plus(a: ArrayLike, b: ArrayLike) -> Matrix:
    """The sum; a row vector is added to every row."""
    return _matrix(a) + _matrix(b)


def hadamard(a: ArrayLike, b: ArrayLike) -> Matrix:
    """The elementwise product."""
    return _matrix(a) * _matrix(b)


def scaled(x: ArrayLike, *, factor: float) -> Matrix:
    """A multiple."""
    return factor * _matrix(x)


def capped(x: ArrayLike, *, cap: float) -> Matrix:
    """`cap * tanh(x / cap)`."""
    return cap * np.tanh(_matrix(x) / cap)


def sigmoid(x: ArrayLike) -> Matrix:
    """`1 / (1 + exp(-x))`."""
    return np.exp(-np.logaddexp(0.0, -_matrix(x)))  # never overflows


def silu(x: ArrayLike) -> Matrix:
    """`x * sigmoid(x)`."""
    return _matrix(x) * sigmoid(x)


def gelu(x: ArrayLike) -> Matrix:
    """Gelu in the tanh form."""
    a = _matrix(x)
    return 0.5 * a * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (a + 0.044715 * a**3)))


def swiglu(gate: ArrayLike, up: ArrayLike) -> Matrix:
    """`silu(gate) * up`."""
    return silu(gate) * _matrix(up)


def argmax(x: ArrayLike) -> int:
    """The index, from 0, of the largest column of one row; the first of equals."""
    (values,) = _matrix(x)
    best = 0
    for i, value in enumerate(values):
        if value > values[best]:
            best = i
    return best


def decay(x: ArrayLike, bias: ArrayLike, rate: ArrayLike) -> Matrix:
    """`exp(-exp(rate) * softplus(x + bias))`."""
    return np.exp(-np.exp(_matrix(rate)) * np.logaddexp(0.0, _matrix(x) + _matrix(bias)))


# --- Norms and rotation


def rms_norm(
    x: ArrayLike, weight: ArrayLike, *, heads: int | None = None, epsilon: float | None = None
) -> Matrix:
    """Each segment over its root mean square, times the weight; heads count the whole matrix."""
    a, w = _matrix(x), _matrix(weight)[0]
    out = [_rms_normed(s, w, epsilon) for s in _segments(a, len(a) if heads is None else heads)]
    return np.concatenate(out).reshape(a.shape)


def l2_norm(x: ArrayLike, *, heads: int, epsilon: float | None = None) -> Matrix:
    """Each segment over the root of its square sum; heads count the whole matrix."""
    a = _matrix(x)
    e = EPSILON if epsilon is None else epsilon
    out = [s / np.sqrt(np.sum(s**2) + e) for s in _segments(a, heads)]
    return np.concatenate(out).reshape(a.shape)


def _segments(x: Matrix, count: int) -> Matrix:
    assert count % len(x) == 0 and x.size % count == 0
    return x.reshape(count, x.size // count)


def _rms_normed(segment: Matrix, weight: Matrix, epsilon: float | None) -> Matrix:
    e = EPSILON if epsilon is None else epsilon
    return segment / np.sqrt(np.mean(segment**2) + e) * weight


def rope(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, heads: int, position: int | None = None
) -> Matrix:
    """Half-split rotary embedding of each of the heads of a row."""
    out, c, s = _matrix(x), _matrix(cos), _matrix(sin)
    source = out.copy()
    width, half = out.shape[1] // heads, c.shape[1]
    assert width * heads == out.shape[1] and 2 * half <= width
    for j in range(len(out)):
        at = 0 if position is None else position + j - 1
        for start in range(0, out.shape[1], width):
            for i in range(half):
                u, v = source[j, start + i], source[j, start + i + half]
                out[j, start + i] = u * c[at, i] - v * s[at, i]
                out[j, start + i + half] = v * c[at, i] + u * s[at, i]
    return out


# --- Attention


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    sinks: ArrayLike | None = None,
    *,
    heads: int,
    groups: int,
    position: int | None = None,
    last: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Matrix:
    """One row of queries over rows 1 to `position` of keys and values."""
    queries, keys, values = _matrix(q), _matrix(k), _matrix(v)
    assert len(queries) == 1 and heads % groups == 0
    at = len(keys) if position is None else position
    seen = [t for t in range(1, at + 1) if _sees(at, t, last, chunk)]
    shared = heads // groups
    out = []
    for i, query in enumerate(_cut(queries, heads)):
        group_k, group_v = _cut(keys, groups)[i // shared], _cut(values, groups)[i // shared]
        factor = query.shape[1] ** -0.5 if scale is None else scale
        scores = [factor * float(query[0] @ group_k[t - 1]) for t in seen]
        if cap is not None:
            scores = [cap * np.tanh(score / cap) for score in scores]
        sink = None if sinks is None else float(_matrix(sinks)[0, i])
        weights = _softmax(scores, sink)
        out.append(sum(w * group_v[t - 1] for w, t in zip(weights, seen, strict=True)))
    return np.concatenate(out)[None, :]


def _sees(p: int, t: int, last: int | None, chunk: int | None) -> bool:
    """Whether the query at position `p` reads position `t`, both from 1."""
    if last is not None:
        return p - last < t <= p
    if chunk is not None:
        return t <= p and (t - 1) // chunk == (p - 1) // chunk
    return t <= p


def _softmax(scores: Sequence[float], sink: float | None) -> list[float]:
    """Weights of the scores; a sink takes its share and is dropped."""
    most = max(scores) if sink is None else max(*scores, sink)
    parts = [np.exp(s - most) for s in scores]
    whole = sum(parts) + (0.0 if sink is None else np.exp(sink - most))
    return [p / whole for p in parts]


def causal_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    sinks: ArrayLike | None = None,
    *,
    heads: int,
    groups: int,
    position: int,
    last: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Matrix:
    """Row `j` (from 0) of the queries stands at `position + j` and reads rows up to its own."""
    out = [
        attention(
            one[None, :],
            k,
            v,
            sinks,
            heads=heads,
            groups=groups,
            position=position + j,
            last=last,
            chunk=chunk,
            scale=scale,
            cap=cap,
        )
        for j, one in enumerate(_matrix(q))
    ]
    return np.concatenate(out)


# --- Recurrent forms


def causal_conv(
    x: ArrayLike, weight: ArrayLike, state: ArrayLike, *, taps: int, count: int | None = None
) -> tuple[Matrix, Matrix]:
    """A depthwise convolution over the last `taps` inputs; also the state after it."""
    a, w, s = _matrix(x), _matrix(weight), _matrix(state)
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
    epsilon: float | None = None,
    count: int | None = None,
) -> tuple[Matrix, Matrix]:
    """The gated delta rule, its output normed and gated; also the state after it."""
    values, gates, b, d, n = (_matrix(m) for m in (v, gate, beta, decay, norm))
    s = np.split(_matrix(state), heads)  # of each value head: value rows, key columns
    width = n.shape[1]
    out = np.zeros_like(values)
    for r in range(len(values) if count is None else count):
        for j in range(heads):
            key = _head(k, r, j % groups, width)
            query = _head(q, r, j % groups, width) / np.sqrt(width)
            s[j] = d[r, j] * s[j]
            s[j] = s[j] + np.outer(b[r, j] * (_head(values, r, j, width) - s[j] @ key), key)
            normed = _rms_normed(s[j] @ query, n[0], epsilon)
            z = _head(gates, r, j, width)
            act = sigmoid(z) if sigmoid_gate else silu(z)
            out[r, j * width : (j + 1) * width] = normed * act[0]
    return out, np.concatenate(s)


def _head(x: ArrayLike, row: int, head: int, width: int) -> Matrix:
    return _matrix(x)[row, head * width : (head + 1) * width]


# --- Mixture of experts


def moe(
    x: ArrayLike,
    router: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    down: ArrayLike,
    router_bias: ArrayLike | None = None,
    gate_bias: ArrayLike | None = None,
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    choice_bias: ArrayLike | None = None,
    *,
    chosen: int,
    experts: int,
    by_sigmoid: bool = False,
    used_groups: int | None = None,
    group_count: int | None = None,
    without_renormalizing: bool = False,
    scale: float | None = None,
    weighting_inputs: bool = False,
    limit: float | None = None,
    slope: float | None = None,
) -> Matrix:
    """The weighted sum of the chosen experts of one row."""
    (one,) = _matrix(x)
    logits = one @ _matrix(router) + _bias(router_bias, 0)
    scores = sigmoid(logits)[0] if by_sigmoid else np.array(_softmax(list(logits), None))
    worth = scores + _bias(choice_bias, 0)
    eligible = list(range(experts))
    if used_groups is not None and group_count is not None:
        best = 2 if by_sigmoid and choice_bias is not None else 1
        eligible = _eligible(worth, experts // group_count, used_groups, best)
    picked = sorted(eligible, key=lambda e: (-worth[e], e))[:chosen]
    weights = {e: scores[e] for e in picked}
    if not without_renormalizing:
        weights = {e: w / sum(scores[p] for p in picked) for e, w in weights.items()}
    total = np.zeros_like(one)
    for e, weight in weights.items():
        w = weight * (1.0 if scale is None else scale)
        given = one * w if weighting_inputs else one
        g = np.split(_matrix(gate), experts)[e] @ given + _bias(gate_bias, e)
        u = np.split(_matrix(up), experts)[e] @ given + _bias(up_bias, e)
        hidden = _activated(g, u, limit, slope)
        y = np.split(_matrix(down), experts)[e] @ hidden + _bias(down_bias, e)
        total = total + (y if weighting_inputs else w * y)
    return total[None, :]


def _bias(bias: ArrayLike | None, row: int) -> Matrix | float:
    return 0.0 if bias is None else _matrix(bias)[row]


def _eligible(worth: Matrix, size: int, used: int, best: int) -> list[int]:
    """The experts of the `used` runs whose `best` largest have the largest sum."""
    runs = [range(start, start + size) for start in range(0, len(worth), size)]
    values = [sum(sorted((worth[e] for e in run), reverse=True)[:best]) for run in runs]
    order = sorted(range(len(runs)), key=lambda r: (-values[r], r))[:used]
    return sorted(e for r in order for e in runs[r])


def _activated(g: Matrix, u: Matrix, limit: float | None, slope: float | None) -> Matrix:
    if limit is None or slope is None:
        return swiglu(g, u)[0]
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (u + 1.0) * g * sigmoid(slope * g)[0]


# --- Collectives


def fold(partials: Sequence[ArrayLike]) -> Matrix:
    """The sum of every chip's partial."""
    total = _matrix(partials[0])
    for partial in partials[1:]:
        total = total + _matrix(partial)
    return total


def join(partials: Sequence[ArrayLike]) -> Matrix:
    """The columns of every chip's partial, in chip order."""
    return np.concatenate([_matrix(p) for p in partials], axis=1)
