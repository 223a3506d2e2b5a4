"""Statements that follow one another as one call: each is taken by its form, or declined.

A chain is written down while a step is traced: an operation on arrays, or on values that the chain
is still to compute, gives another such value. When something else needs one of them the chain is
closed, and its steps become a single call of the compiled handler: what lies between them never
leaves the CPU's caches, and simulated chips meet inside it.

Rows of values are the rows of a prompt's chunk, or the sequences of a batch: all steps but those
that read caches take them alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.arrays import EPSILON, Declined
from kernels.native.call import Call, Varying, varying_of
from kernels.native.call import Value as Value
from kernels.native.code import Binary, Kind, Read, Step, Unary
from kernels.native.library import why_not

# From so many rows on a product takes its inputs in 16 bits, and in 24 where that would show: in
# blocks with outliers. That is up to a third faster. SmolLM2 and Gemma 3 270M stay within about
# 1e-3 of their logits' deviation of float32 at every position, and within 4e-4 after a prompt;
# small models would not, so short prompts, and one sequence at a time, keep all bits. A batch is
# read for its speed.
INEXACT = 128
INEXACT_BATCH = 5


class Chain(Call):
    """A call to which operations are added one after the other."""

    def add(self, operation: str, *arrays: Any, **words: Any) -> Value:
        """One more operation, named and called as in `kernels.table`.

        Raises Declined, with nothing done, for what the handler does not know.
        """
        missing = why_not()
        if missing is not None:
            raise Declined(missing)
        if operation not in OPERATIONS:
            raise Declined("the compiled kernels have no such operation")
        return OPERATIONS[operation](self, *arrays, **words)


# --- Operations


def _matmul(chain: Chain, x: Any, w: Any, *, heads: int | None = None) -> Value:
    if heads is not None:
        raise Declined("takes no block-diagonal weights")
    tiles, varying = chain.tiles(w)
    row, (rows, cols), here, batched = chain.rows_of(x)
    if cols != w.shape[1]:
        raise Declined(f"rows of {cols} and a weight for {w.shape[1]}")
    return chain.made(
        Kind.PRODUCTS, (row, -1, 1, tiles), (rows, w.shape[0]), here | varying, batched
    )


def _embedding(chain: Chain, tokens: Any, w: Any, first: Any = None) -> Value:
    tiles, varying = chain.tiles(w)
    ids = jnp.asarray(tokens, jnp.int32).reshape(-1)
    start = jnp.asarray(0 if first is None else first, jnp.int32)
    parts = (chain.integers(ids), tiles, chain.integers(start), w.shape[0])
    varying |= varying_of(ids) | varying_of(start)
    return chain.made(Kind.EMBED, parts, (ids.shape[0], w.shape[1]), varying)


def _row(chain: Chain, x: Any, *, row: Any) -> Value:
    if not isinstance(x, Value):
        raise Declined("a row of a matrix that is there already")
    parts = (Read(x.number), chain.integers(row))
    return chain.made(Kind.ROW, parts, (1, x.shape[1]), x.varying)


def _rms_norm(
    chain: Chain, x: Any, weight: Any, *, heads: int | None = None, epsilon: float | None = None
) -> Value:
    row, (rows, cols), here, batched = chain.rows_of(x)
    scale, there = chain.whole(weight)
    width = weight.shape[-1]
    if weight.ndim != 2 or cols % width != 0 or (heads is None and cols != width):
        raise Declined(f"segments of {width} do not fill rows of {cols}")
    parts = (row, scale, float(EPSILON if epsilon is None else epsilon))
    return chain.made(Kind.NORM, parts, (rows, cols), here | there, batched)


def _rope(chain: Chain, x: Any, cos: Any, sin: Any, *, heads: int, position: Any = None) -> Value:
    row, shape, here, batched = chain.rows_of(x)
    if position is None and shape[0] > 1:
        raise Declined("rows that all stand at the first position")
    if shape[1] % heads != 0 or 2 * cos.shape[-1] > shape[1] // heads:
        raise Declined(f"{heads} heads of {cos.shape[-1]} pairs do not fit rows of {shape[1]}")
    at, varying = chain.positions(1 if position is None else position, shape[0], batched)
    tables = [chain.whole(table) for table in (cos, sin)]
    varying = here.union(varying, *(v for _, v in tables))
    parts = (row, *(read for read, _ in tables), at, heads)
    return chain.made(Kind.TURN, parts, shape, varying, batched)


def _set_rows(chain: Chain, matrix: Any, x: Any, *, row: Any, count: Any = None) -> Value:
    if isinstance(matrix, Value) and matrix.number not in chain.changed:
        raise Declined("takes a matrix that is given")
    if count is not None and chain.count is None:
        raise Declined("a count of rows of its own")
    rows, (many, _), here, batched = chain.rows_of(x)
    at, there = chain.positions(row, many, batched)
    if isinstance(matrix, Value):
        written = replace(matrix, varying=matrix.varying | here | there)
    else:
        given, varying = chain.whole(matrix, jnp.float32, jnp.float16)
        number = len(chain.shapes)
        chain.shapes[number] = (0, 0)
        chain.changed[number] = given.value
        varying |= here | there
        written = Value(
            call=chain, number=number, shape=matrix.shape, varying=varying, dtype=matrix.dtype
        )
    chain.varies[written.number] = written.varying
    chain.steps.append(Step(Kind.WRITE, (Read(written.number), rows, at)))
    return written


def _attention(
    chain: Chain,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any = None,
    *,
    heads: int,
    groups: int,
    position: Any = None,
    last: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    count: Any = None,
) -> Value:
    if count is not None and chain.count is None:
        raise Declined("a count of rows of its own")
    if cap is not None and cap <= 0:
        raise Declined(f"a cap of {cap}")
    row, (rows, cols), here, batched = chain.rows_of(q)
    if k.dtype != v.dtype:
        raise Declined(f"keys of {k.dtype} and values of {v.dtype}")
    keys, varying = chain.cache(k)
    values, there = chain.cache(v)
    at, where = chain.positions(k.shape[-2] if position is None else position, rows, batched)
    sink, also = (-1, Varying()) if sinks is None else chain.whole(sinks)
    varying = varying.union(here, there, where, also)
    parts = (
        row,
        keys,
        values,
        sink,
        at,
        heads,
        groups,
        float((cols // heads) ** -0.5 if scale is None else scale),
        float(0 if cap is None else cap),
        last or 0,
        chunk or 0,
    )
    shape = (rows, v.shape[-1] // groups * heads)
    return chain.made(Kind.ATTEND, parts, shape, varying, batched)


def _unary(kind: Unary) -> Callable[..., Value]:
    def add(chain: Chain, x: Any, **words: Any) -> Value:
        row, shape, here, batched = chain.rows_of(x)
        number = next(iter(words.values()), 0.0)
        if not isinstance(number, int | float):
            raise Declined("a number that is not known before")
        return chain.made(Kind.UNARY, (kind, row, float(number)), shape, here, batched)

    return add


def _binary(kind: Binary) -> Callable[..., Value]:
    def add(chain: Chain, a: Any, b: Any) -> Value:
        one, (rows, cols), here, batched = chain.rows_of(a)
        two, (others, width), there, also = chain.rows_of(b)
        if cols != width or (rows != others and 1 not in (rows, others)):
            raise Declined(f"rows of {cols} and {width}")
        shape = (max(rows, others), cols)
        return chain.made(Kind.BINARY, (kind, one, two), shape, here | there, batched or also)

    return add


def _argmax(chain: Chain, x: Any) -> Value:
    row, (rows, _), here, batched = chain.rows_of(x)
    if rows != 1 or batched:
        raise Declined("takes one row")
    value = chain.made(Kind.ARGMAX, (row,), (1, 1), here)
    return replace(value, dtype=jnp.int32)


def likeliest(logits: Float[Array, "rows vocabulary"]) -> Int[Array, " rows"]:
    """The first of the largest of each row, or of NaN: a call of its own."""
    chain = Chain(rows=logits.shape[0])
    row, (rows, _), here, _ = chain.rows_of(logits)
    value = chain.made(Kind.ARGMAX, (row,), (rows, 1), here)
    return chain.close([replace(value, dtype=jnp.int32)])[0].reshape(rows)


def _fold(chain: Chain, partial: Any) -> Value:
    row, shape, here, batched = chain.partial(partial)
    return chain.made(Kind.FOLD, (row,), shape, here - {chain.axis}, batched)


def _join(chain: Chain, partial: Any, *, held: Sequence[int]) -> Value:
    row, (rows, _), here, batched = chain.partial(partial)
    shape = (rows, sum(held))
    return chain.made(Kind.JOIN, (row,), shape, here - {chain.axis}, batched, after=held)


OPERATIONS: Mapping[str, Callable[..., Value]] = {
    "matmul": _matmul,
    "embedding": _embedding,
    "row": _row,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "set_row": _set_rows,
    "set_rows": _set_rows,
    "attention": _attention,
    "causal_attention": _attention,
    "silu": _unary(Unary.SILU),
    "sigmoid": _unary(Unary.SIGMOID),
    "gelu": _unary(Unary.GELU),
    "scaled": _unary(Unary.SCALED),
    "capped": _unary(Unary.CAPPED),
    "plus": _binary(Binary.PLUS),
    "hadamard": _binary(Binary.HADAMARD),
    "swiglu": _binary(Binary.SWIGLU),
    "argmax": _argmax,
    "fold": _fold,
    "join": _join,
}
