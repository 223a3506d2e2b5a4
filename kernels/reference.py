"""Computes every form of the language on matrices, plainly, in the order of LANGUAGE.md.

A function is named after its form. Its matrices come in the order of the form's fields;
numbers are keywords, the fields of a part under their own names. Matrices are float32
`[rows, cols]`. Positions and rows count from 1 and may be traced; token ids count from 0.
A form that changes a matrix in place returns it anew, last. Where a form works row by
row, `count` says how many of its first rows are real: the rest reach no cache and no state,
and what comes out of them means nothing, but is finite.

Norms, mixtures and recurrent layers have files of their own. Einsum letters: r rows, h heads,
g groups, t positions, d and e widths.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.arrays import Integer, Matrix, Row, einsum, real, visible
from kernels.reference_mixture import moe as moe
from kernels.reference_norms import l2_norm as l2_norm
from kernels.reference_norms import layer_norm as layer_norm
from kernels.reference_norms import over_root as over_root
from kernels.reference_norms import rms_norm as rms_norm
from kernels.reference_norms import square_sum as square_sum
from kernels.reference_recurrent import causal_conv as causal_conv
from kernels.reference_recurrent import decay as decay
from kernels.reference_recurrent import gated_delta as gated_delta
from kernels.reference_recurrent import linear_attention as linear_attention

# --- Rows


def row(x: Float[Array, "_ cols"], *, row: Integer, first: Integer | None = None) -> Row:
    """One row, counted from 1; one counted from a `first` is the row of a token id."""
    if first is not None:
        return embedding_row(x, row=row, first=first)
    return x[row - 1][None]


def embedding_row(x: Float[Array, "_ cols"], *, row: Integer, first: Integer | None = None) -> Row:
    """The row of a token id; zeros where `x`, which starts at id `first`, does not hold it."""
    return rows(jnp.full((1, 1), row), x, first=first)


def rows(
    tokens: Int[Array, "1 rows"], x: Float[Array, "_ cols"], *, first: Integer | None = None
) -> Float[Array, "rows cols"]:
    """The row of each token id; zeros where `x`, which starts at id `first`, does not hold it."""
    ids = tokens[0] if first is None else tokens[0] - first
    held = (ids >= 0) & (ids < x.shape[0])
    with_zeros = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])
    return with_zeros[jnp.where(held, ids, x.shape[0])]


def set_row(matrix: Float[Array, "_ cols"], x: Row, *, row: Integer) -> Float[Array, "_ cols"]:
    """The matrix with one row, counted from 1, replaced."""
    return set_rows(matrix, x, row=row)


def set_rows(
    matrix: Float[Array, "_ cols"],
    x: Float[Array, "rows cols"],
    *,
    row: Integer,
    count: Integer | None = None,
) -> Float[Array, "_ cols"]:
    """The matrix with the rows from `row`, counted from 1, replaced; nothing goes past its end."""
    at = row - 1 + jnp.arange(x.shape[0])
    written = jnp.where(real(x.shape[0], count), at, matrix.shape[0])
    return matrix.at[written].set(x, mode="drop")


# --- Products, sums and tables


def matmul(x: Matrix, w: Float[Array, "_ _"], *, heads: int | None = None) -> Matrix:
    """The matrix product; with heads, block-diagonal."""
    if heads is None:
        return einsum("ra,ab->rb", x, w)
    by_head = w.reshape(heads, -1, w.shape[1])
    out = einsum("rha,hab->rhb", x.reshape(x.shape[0], heads, -1), by_head)
    return out.reshape(x.shape[0], -1)


def plus(a: Float[Array, "#rows cols"], b: Float[Array, "#rows cols"]) -> Float[Array, "_ cols"]:
    """The elementwise sum; a row vector is added to every row."""
    return a + b


def hadamard(
    a: Float[Array, "#rows cols"], b: Float[Array, "#rows cols"]
) -> Float[Array, "_ cols"]:
    """The elementwise product."""
    return a * b


def scaled(x: Float[Array, "rows cols"], *, factor: float) -> Float[Array, "rows cols"]:
    """A multiple."""
    return factor * x


def capped(x: Float[Array, "rows cols"], *, cap: float) -> Float[Array, "rows cols"]:
    """A soft cap."""
    return cap * jnp.tanh(x / cap)


def clamped(x: Float[Array, "rows cols"], *, low: float, high: float) -> Float[Array, "rows cols"]:
    """Every column brought into a range."""
    return jnp.clip(x, low, high)


def rope(
    x: Float[Array, "rows cols"],
    cos: Float[Array, "positions width"],
    sin: Float[Array, "positions width"],
    *,
    heads: int,
    position: Integer | None = None,
) -> Float[Array, "rows cols"]:
    """Rotary embedding, half-split, of each of the heads of a row (arXiv 2104.09864).

    Rows that stand beyond the end of the tables take their last row.
    """
    half = cos.shape[1]
    at = jnp.zeros(x.shape[0], int) if position is None else position - 1 + jnp.arange(x.shape[0])
    cos = cos.at[at].get(mode="clip")[:, None]
    sin = sin.at[at].get(mode="clip")[:, None]
    by_head = x.reshape(x.shape[0], heads, -1)
    low, high, rest = jnp.split(by_head, [half, 2 * half], axis=2)
    turned = [low * cos - high * sin, high * cos + low * sin, rest]
    return jnp.concatenate(turned, axis=2).reshape(x.shape)


# --- Columns


def first(x: Matrix, *, kept: int, run: int) -> Matrix:
    """The first columns of each run of columns."""
    return x.reshape(x.shape[0], -1, run)[:, :, :kept].reshape(x.shape[0], -1)


def last(x: Matrix, *, kept: int, run: int) -> Matrix:
    """The last columns of each run of columns."""
    return x.reshape(x.shape[0], -1, run)[:, :, run - kept :].reshape(x.shape[0], -1)


def joined(x: Matrix, y: Matrix, *, heads: int | None = None) -> Matrix:
    """Columns side by side; with heads, head by head."""
    heads = 1 if heads is None else heads
    by_head = [a.reshape(a.shape[0], heads, -1) for a in (x, y)]
    return jnp.concatenate(by_head, axis=2).reshape(x.shape[0], -1)


# --- Activations


def swiglu(
    gate: Float[Array, "rows cols"], up: Float[Array, "rows cols"]
) -> Float[Array, "rows cols"]:
    """`silu(gate) * up` (arXiv 2002.05202)."""
    return silu(gate) * up


def silu(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def sigmoid(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    """`1 / (1 + exp(-x))`."""
    return jax.nn.sigmoid(x)


def gelu(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    """Gelu in the tanh form (arXiv 1606.08415)."""
    return 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def xielu(
    x: Float[Array, "rows cols"],
    positive: Float[Array, "1 1"],
    negative: Float[Array, "1 1"],
    *,
    beta: float,
    cut: float,
) -> Float[Array, "rows cols"]:
    """A parabola above zero, a scaled exponential below, and a line (arXiv 2411.13010)."""
    above = positive * x * x
    below = negative * (jnp.expm1(jnp.minimum(x, cut)) - x)
    return jnp.where(x > 0, above, below) + beta * x


def argmax(x: Float[Array, "1 cols"]) -> Int[Array, ""]:
    """The index, from 0, of the largest column, the first of equals: a token id."""
    return jnp.argmax(x[0])


# --- Attention


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
    """One row of queries over rows 1 to `position` of keys and values; sinks as in gpt-oss."""
    positions = k.shape[0]
    position = positions if position is None else position
    seen = visible(jnp.arange(1, positions + 1), position, last=last, chunk=chunk)
    # What stands in rows that nobody wrote may be anything, and 0 * NaN is NaN.
    k = jnp.where(seen[:, None], k, 0).reshape(positions, groups, -1)
    v = jnp.where(seen[:, None], v, 0).reshape(positions, groups, -1)
    # Head i reads group i // (heads / groups).
    q = q.reshape(groups, heads // groups, -1)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    scores = factor * einsum("ghd,tgd->ght", q, k)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    if sinks is not None:
        column = sinks.reshape(groups, heads // groups, 1)
        scores = jnp.concatenate([scores, column], axis=2)
    weights = jax.nn.softmax(scores, axis=2)[:, :, :positions]
    return einsum("ght,tgd->ghd", weights, v).reshape(1, -1)


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
    """Row `j` (from 0) of the queries stands at `position + j` and reads rows up to its own."""
    last_real = q.shape[0] - 1 if count is None else count - 1
    words = {"heads": heads, "groups": groups, "last": last, "chunk": chunk}

    def one(j: Int[Array, ""], q: Float[Array, " _"]) -> Row:
        # A row that is not real reads what the last real one does: it must find something finite.
        place = {"position": position + jnp.minimum(j, last_real), "scale": scale, "cap": cap}
        return attention(q[None], k, v, sinks, **words, **place)

    return jax.vmap(one)(jnp.arange(q.shape[0]), q)[:, 0]


# --- Tensor parallelism


def fold(partials: Sequence[Float[Array, "rows cols"]]) -> Float[Array, "rows cols"]:
    """The sum of every chip's partial."""
    return sum(partials[1:], start=partials[0])


def join(partials: Sequence[Matrix]) -> Matrix:
    """The columns of every chip's partial, in chip order."""
    return jnp.concatenate(partials, axis=1)
