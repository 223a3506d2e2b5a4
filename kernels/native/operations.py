"""Operations of the language as calls of the compiled handlers; each declines what it lacks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Float, Int

from kernels.arrays import EPSILON, Declined, Integer, Matrix, Row
from kernels.matmul import Stored
from kernels.native.library import target, why_not
from kernels.native.packed import Packed


def matmul(x: Matrix, w: Stored, *, heads: int | None = None) -> Matrix:
    """`x` times a packed weight; a row is rounded to 24 bits a block of 32, about as float32 is."""
    if heads is not None:
        raise Declined("takes no block-diagonal weights")
    tiles = _tiles(w)
    return _call("matmul", (x.shape[0], w.shape[0]), [_floats(x), tiles])


def embedding(
    tokens: Int[Array, " rows"] | Int[Array, "1 rows"], w: Stored, first: Integer | None = None
) -> Matrix:
    """The row of each token id from a packed table; zeros for those that it does not hold."""
    tiles = _tiles(w)
    ids = jnp.asarray(tokens).reshape(-1).astype(jnp.int32)
    arrays = [ids, tiles, _integer(0 if first is None else first)]
    return _call("embedding", (ids.shape[0], w.shape[1]), arrays, held=np.int32(w.shape[0]))


def rms_norm(
    x: Float[Array, "rows cols"],
    weight: Float[Array, "1 width"],
    *,
    heads: int | None = None,
    epsilon: float | None = None,
) -> Float[Array, "rows cols"]:
    """Each segment over its root mean square, times the weight."""
    if x.size == 0 or (x.shape[0] if heads is None else heads) * weight.shape[1] != x.size:
        raise Declined(f"segments of {weight.shape[1]} do not fill a matrix {list(x.shape)}")
    epsilon = EPSILON if epsilon is None else epsilon
    return _call("rms_norm", x.shape, [_floats(x), _floats(weight)], epsilon=np.float32(epsilon))


def rope(
    x: Float[Array, "rows cols"],
    cos: Float[Array, "positions width"],
    sin: Float[Array, "positions width"],
    *,
    heads: int,
    position: Integer | None = None,
) -> Float[Array, "rows cols"]:
    """Rotary embedding, half-split, of each of the heads of a row."""
    if x.size == 0:
        raise Declined("nothing to turn")
    if position is None and x.shape[0] > 1 and cos.shape[0] > 1:
        raise Declined("rows that all stand at the first position")
    arrays = [_floats(x), _floats(cos), _floats(sin), _integer(1 if position is None else position)]
    return _call("rope", x.shape, arrays, heads=np.int32(heads))


def swiglu(
    gate: Float[Array, "rows cols"], up: Float[Array, "rows cols"]
) -> Float[Array, "rows cols"]:
    """`silu(gate) * up`."""
    return _call("swiglu", gate.shape, [_floats(gate), _floats(up)])


def plus(a: Float[Array, "#rows cols"], b: Float[Array, "#rows cols"]) -> Float[Array, "_ cols"]:
    """The elementwise sum; a row vector is added to every row."""
    shape = (max(a.shape[0], b.shape[0]), a.shape[1])
    return _call("plus", shape, [_floats(a), _floats(b)])


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
    """The matrix with the rows from `row`, counted from 1, replaced; in place where it can be."""
    count = x.shape[0] if count is None else count
    arrays = [_floats(matrix), _floats(x), _integer(row), _integer(count)]
    return _call("set_rows", matrix.shape, arrays, in_place=True)


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
    """One row of queries over rows 1 to `position` of keys and values; no others are read."""
    position = k.shape[0] if position is None else position
    words = {"last": last, "chunk": chunk, "scale": scale, "cap": cap}
    return causal_attention(q, k, v, sinks, heads=heads, groups=groups, position=position, **words)


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
    if 0 in (q.size, k.size, v.size):
        raise Declined("nothing to attend to")
    if cap is not None and cap <= 0:
        raise Declined(f"a cap of {cap}")
    width = q.shape[1] // heads
    arrays = [
        *map(_floats, (q, k, v)),
        jnp.zeros((1, 1), jnp.float32) if sinks is None else _floats(sinks),
        _integer(position),
        _integer(q.shape[0] if count is None else count),
    ]
    return _call(
        "attention",
        (q.shape[0], v.shape[1] // groups * heads),
        arrays,
        heads=np.int32(heads),
        groups=np.int32(groups),
        scale=np.float32(width**-0.5 if scale is None else scale),
        cap=np.float32(0 if cap is None else cap),
        last=np.int32(0 if last is None else last),
        chunk=np.int32(0 if chunk is None else chunk),
        with_sinks=sinks is not None,
    )


def _tiles(w: Stored) -> Any:
    if not isinstance(w, Packed):
        raise Declined("takes packed weights alone")
    return w.tiles


def _floats(x: Any) -> Any:
    if x.dtype != jnp.float32:
        raise Declined(f"takes float32, not {x.dtype}")
    return x


def _integer(value: Integer) -> Any:
    return jnp.asarray(value, jnp.int32)


def _call(
    handler: str,
    shape: Sequence[int],
    arrays: Sequence[Any],
    *,
    in_place: bool = False,
    **numbers: Any,
) -> Any:
    """The float32 result of a handler, varying over a mesh wherever one of its arrays does.

    Under `vmap` the arrays get a leading axis, of length 1 where they are not batched.
    """
    missing = why_not()
    if missing is not None:
        raise Declined(missing)
    varying = frozenset[Any]().union(*(_varying(a) for a in arrays))
    spread = [jax.lax.pcast(a, tuple(varying - _varying(a)), to="varying") for a in arrays]
    call = jax.ffi.ffi_call(
        target(handler),
        _result(shape, varying),
        vmap_method="expand_dims",
        input_output_aliases={0: 0} if in_place else None,
    )
    return call(*spread, **numbers)


def _varying(array: Any) -> frozenset[Any]:
    return jax.typeof(array).manual_axis_type.varying


def _result(shape: Sequence[int], varying: frozenset[Any]) -> jax.ShapeDtypeStruct:
    mesh = get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    kind = ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding, manual_axis_type=kind)
