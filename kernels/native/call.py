"""One call of the compiled handler: what goes in, the steps, and what comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from kernels.arrays import Declined
from kernels.native.code import Kind, Layout, Made, Part, Read, Step, code, together
from kernels.native.library import target
from kernels.native.packed import Packed

Varying = frozenset[Any]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A float32 matrix that a call is still to compute; `batched` has a sequence a row.

    A cache that the call writes has the shape and type of the array that it was.
    """

    call: "Call"
    number: int
    shape: tuple[int, ...]
    varying: Varying
    batched: bool = False
    dtype: Any = jnp.float32

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array that it will be."""
        rows, cols = self.shape
        return (rows, 1, cols) if self.batched else self.shape

    def stacked(self, batched: bool) -> "Value":
        """The same rows, as sequences or as the rows of a stack."""
        return replace(self, batched=batched)


@dataclass(kw_only=True)
class Call:
    """Steps that become one call.

    `rows` is how many rows a stack has, of which only the first `count` are real where that is
    given. From `inexact` rows on a product may take its inputs in 16 bits, not 24. With several
    chips, `chip` is the number of the one that runs, `axis` the mesh axis over which they fold;
    `after` is the `order` of the call before, so that all chips meet in the same order.
    """

    rows: int = 1
    count: Any = None
    inexact: int = 1 << 30
    chips: int = 1
    chip: Any = None
    axis: str | None = None
    after: Any = None
    steps: list[Step] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    varies: dict[int, Varying] = field(default_factory=dict)  # of what is changed
    order: Any = None
    _values: dict[int, int] = field(default_factory=dict)  # by the identity of an array
    _alive: list[Any] = field(default_factory=list)  # so that no other array has its identity

    # --- Values

    def given(self, array: Any, *, as_rows: bool = False) -> int:
        """The number of an argument; `as_rows` lays one row a sequence out as a matrix."""
        key = id(array)
        if key not in self._values:
            number = self._values[key] = len(self.shapes)
            self.shapes[number] = (0, 0)
            held = array.tiles if isinstance(array, Packed) else array
            self.arrays.append(held[:, 0] if as_rows else held)
            self.arguments.append(number)
            self._alive.append(array)
        return self._values[key]

    def rows_of(self, x: Any) -> tuple[Read, tuple[int, int], Varying, bool]:
        """A matrix whose rows count, as a step reads it: with its shape, and how it varies."""
        if isinstance(x, Value):
            if x.number in self.changed:
                raise Declined("takes no cache")
            return Read(x.number), (x.shape[0], x.shape[1]), x.varying, x.batched
        if isinstance(x, Packed) or x.dtype != jnp.float32:
            raise Declined(f"takes float32, not {getattr(x, 'dtype', 'a packed weight')}")
        if x.size == 0:
            raise Declined("nothing to compute")
        batched = x.ndim == 3
        if batched and x.shape[1] != 1:
            raise Declined(f"takes one row a sequence, not {x.shape[1]}")
        rows, cols = x.shape[0], x.shape[-1]
        if not batched and x.shape[0] not in (1, self.rows):
            raise Declined(f"takes one row or {self.rows}, not {x.shape[0]}")
        return Read(self.given(x, as_rows=batched)), (rows, cols), varying_of(x), batched

    def cache(self, x: Any) -> tuple[Read, Varying]:
        """Keys or values as they lie in a cache, which this call may have written."""
        if isinstance(x, Value):
            if x.number not in self.changed:
                raise Declined("takes keys and values from a cache")
            return Read(x.number), x.varying
        return self.whole(x, jnp.float32, jnp.float16)

    def partial(self, x: Any) -> tuple[Read, tuple[int, int], Varying, bool]:
        """What a chip shows the others."""
        if self.chips == 1:
            raise Declined("there are no other chips in this process")
        return self.rows_of(x)

    def whole(self, x: Any, *kinds: Any) -> tuple[Read, Varying]:
        """A matrix as it is given, one for each sequence or one for all."""
        if isinstance(x, Value):
            raise Declined("takes a matrix that is given")
        if x.dtype not in (kinds or (jnp.float32,)):
            raise Declined(f"takes float32, not {x.dtype}")
        if x.size == 0:
            raise Declined("nothing to read")
        return Read(self.given(x)), varying_of(x)

    def integers(self, value: Any) -> Read:
        """A number, or one for each sequence."""
        return Read(self.given(jnp.asarray(value, jnp.int32)))

    def positions(self, value: Any, rows: int, batched: bool) -> tuple[Read, Varying]:
        """Where rows stand: one position from which on, or one for each sequence."""
        value = jnp.asarray(value, jnp.int32)
        if batched and value.ndim == 0:
            value = jnp.broadcast_to(value, (rows,))
        return Read(self.given(value)), varying_of(value)

    def tiles(self, w: Any) -> tuple[Read, Varying]:
        """A packed weight."""
        if not isinstance(w, Packed):
            raise Declined("takes packed weights alone")
        return Read(self.given(w)), varying_of(w.tiles)

    def made(
        self,
        kind: Kind,
        parts: Sequence[Part],
        shape: tuple[int, int],
        varying: Varying,
        batched: bool = False,
        *,
        after: Sequence[Part] = (),
    ) -> Value:
        """What one more step makes."""
        number = len(self.shapes)
        self.shapes[number] = shape
        self.steps.append(Step(kind, (*parts, Made(number), *after)))
        return Value(call=self, number=number, shape=shape, varying=varying, batched=batched)

    # --- The call

    def close(self, wanted: Sequence[Value]) -> list[Any]:
        """The arrays of the values that are wanted; all else is forgotten."""
        results = list(dict.fromkeys([v.number for v in wanted]))
        results += [n for n in self.changed if n not in results]
        count = None if self.count is None else self.integers(self.count).value
        chip = None if self.chips == 1 else self.integers(self.chip).value
        if self.after is not None:
            self.given(self.after)
        layout = Layout(
            arguments=self.arguments,
            results=results,
            changed=self.changed,
            shapes=self.shapes,
            counted=self.rows,
            inexact=self.inexact,
            count=count,
            chips=self.chips,
            chip=chip,
        )
        steps = together(self.steps, results)
        found = self._call(results, {v.number: v for v in wanted}, code(steps, layout))
        return [
            found[v.number] if v.number in self.changed else found[v.number].reshape(v.array_shape)
            for v in wanted
        ]

    def _call(
        self, results: Sequence[int], values: Mapping[int, Value], integers: np.ndarray
    ) -> dict[int, Any]:
        arrays = dict(zip(self.arguments, self.arrays, strict=True))
        places = {n: i for i, n in enumerate(self.arguments)}
        varying = Varying().union(*(varying_of(a) for a in self.arrays))
        spread = [
            jax.lax.pcast(a, tuple(varying - varying_of(a)), to="varying") for a in self.arrays
        ]
        shapes = [
            _like(arrays[self.changed[n]], self.varies[n])
            if n in self.changed
            else _struct(values[n].shape, values[n].dtype, values[n].varying)
            for n in results
        ]
        shapes.append(_struct((1,), jnp.int32, varying))
        aliases = {places[given]: results.index(n) for n, given in self.changed.items()}
        call = jax.ffi.ffi_call(target(), shapes, input_output_aliases=aliases)
        *found, self.order = call(*spread, code=integers)
        return dict(zip(results, found, strict=True))


def varying_of(array: Any) -> Varying:
    """The mesh axes along which an array differs from device to device."""
    return jax.typeof(array).manual_axis_type.varying


def _like(array: Any, varying: Varying) -> jax.ShapeDtypeStruct:
    return _struct(array.shape, array.dtype, varying)


def _struct(shape: Any, dtype: Any, varying: Varying) -> jax.ShapeDtypeStruct:
    mesh = get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    kind = ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind)
