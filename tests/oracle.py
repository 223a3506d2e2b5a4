"""What every form of the language computes, in float64 NumPy, loop by loop.

Written from LANGUAGE.md apart from `kernels/reference.py`, so that each checks the other. A form is
the function of its name in snake case: the fields that name matrices are positional, in the order
of the class, every other field is a keyword, and a part is spelled out as its own fields. A form
that changes a matrix returns the new one and leaves its arguments alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from tests.oracle_mixture import moe as moe
from tests.oracle_recurrent import causal_conv as causal_conv
from tests.oracle_recurrent import decay as decay
from tests.oracle_recurrent import gated_delta as gated_delta
from tests.oracle_recurrent import linear_attention as linear_attention
from tests.oracle_rowwise import Matrix, as_matrix, by_head, softmax
from tests.oracle_rowwise import capped as capped
from tests.oracle_rowwise import clamped as clamped
from tests.oracle_rowwise import gelu as gelu
from tests.oracle_rowwise import hadamard as hadamard
from tests.oracle_rowwise import l2_norm as l2_norm
from tests.oracle_rowwise import layer_norm as layer_norm
from tests.oracle_rowwise import over_root as over_root
from tests.oracle_rowwise import plus as plus
from tests.oracle_rowwise import rms_norm as rms_norm
from tests.oracle_rowwise import scaled as scaled
from tests.oracle_rowwise import sigmoid as sigmoid
from tests.oracle_rowwise import silu as silu
from tests.oracle_rowwise import square_sum as square_sum
from tests.oracle_rowwise import swiglu as swiglu
from tests.oracle_rowwise import xielu as xielu

# --- Rows and columns


def row(x: ArrayLike, *, row: int) -> Matrix:
    """Row `row`, counted from 1."""
    matrix = as_matrix(x)
    assert 1 <= row <= len(matrix)
    return matrix[row - 1 : row]


def embedding_row(x: ArrayLike, *, row: int, first: int | None = None) -> Matrix:
    """The row of a token id, from 0; zeros for one that `x`, of the ids from `first`, lacks."""
    matrix = as_matrix(x)
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
    return _kept(as_matrix(x), [i for i in range(run) if i < kept], run)


def last(x: ArrayLike, *, kept: int, run: int) -> Matrix:
    """The last `kept` columns of every `run`."""
    return _kept(as_matrix(x), [i for i in range(run) if i >= run - kept], run)


def _kept(x: Matrix, wanted: list[int], run: int) -> Matrix:
    assert x.shape[1] % run == 0
    return x[:, [start + i for start in range(0, x.shape[1], run) for i in wanted]]


def joined(x: ArrayLike, y: ArrayLike, *, heads: int | None = None) -> Matrix:
    """Columns of `x`, then of `y`; with heads, head by head."""
    a, b = as_matrix(x), as_matrix(y)
    count = 1 if heads is None else heads
    pairs = zip(by_head(a, count), by_head(b, count), strict=True)
    return np.concatenate([part for pair in pairs for part in pair], axis=1)


def set_row(matrix: ArrayLike, x: ArrayLike, *, row: int) -> Matrix:
    """`matrix` with row `row`, counted from 1, replaced."""
    return set_rows(matrix, as_matrix(x)[:1], row=row)


def set_rows(matrix: ArrayLike, x: ArrayLike, *, row: int, count: int | None = None) -> Matrix:
    """`matrix` with rows `row`, `row + 1`, … replaced by the first `count` rows of `x`."""
    out, new = as_matrix(matrix), as_matrix(x)
    for i in range(len(new) if count is None else count):
        out[row - 1 + i] = new[i]
    return out


# --- Products


def matmul(x: ArrayLike, w: ArrayLike, *, heads: int | None = None) -> Matrix:
    """`x @ w`; with heads, each head of a row times its own rows of `w`."""
    a, b = as_matrix(x), as_matrix(w)
    if heads is None:
        return a @ b
    blocks = np.split(b, heads)
    parts = [h @ block for h, block in zip(by_head(a, heads), blocks, strict=True)]
    return np.concatenate(parts, axis=1)


def argmax(x: ArrayLike) -> int:
    """The index, from 0, of the largest column of one row; the first of equals."""
    (values,) = as_matrix(x)
    best = 0
    for i, value in enumerate(values):
        if value > values[best]:
            best = i
    return best


# --- Rotation


def rope(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, heads: int, position: int | None = None
) -> Matrix:
    """Half-split rotary embedding of each of the heads of a row."""
    out, c, s = as_matrix(x), as_matrix(cos), as_matrix(sin)
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
    queries, keys, values = as_matrix(q), as_matrix(k), as_matrix(v)
    assert len(queries) == 1 and heads % groups == 0
    at = len(keys) if position is None else position
    seen = [t for t in range(1, at + 1) if _sees(at, t, last, chunk)]
    shared = heads // groups
    out = []
    for i, query in enumerate(by_head(queries, heads)):
        group_k, group_v = by_head(keys, groups)[i // shared], by_head(values, groups)[i // shared]
        factor = query.shape[1] ** -0.5 if scale is None else scale
        scores = [factor * float(query[0] @ group_k[t - 1]) for t in seen]
        if cap is not None:
            scores = [cap * np.tanh(score / cap) for score in scores]
        sink = None if sinks is None else float(as_matrix(sinks)[0, i])
        weights = softmax(scores, sink)
        out.append(sum(w * group_v[t - 1] for w, t in zip(weights, seen, strict=True)))
    return np.concatenate(out)[None, :]


def _sees(p: int, t: int, last: int | None, chunk: int | None) -> bool:
    """Whether the query at position `p` reads position `t`, both from 1."""
    if last is not None:
        return p - last < t <= p
    if chunk is not None:
        return t <= p and (t - 1) // chunk == (p - 1) // chunk
    return t <= p


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
        for j, one in enumerate(as_matrix(q))
    ]
    return np.concatenate(out)


# --- Collectives


def fold(partials: Sequence[ArrayLike]) -> Matrix:
    """The sum of every chip's partial."""
    total = as_matrix(partials[0])
    for partial in partials[1:]:
        total = total + as_matrix(partial)
    return total


def join(partials: Sequence[ArrayLike]) -> Matrix:
    """The columns of every chip's partial, in chip order."""
    return np.concatenate([as_matrix(p) for p in partials], axis=1)
