"""Lowers a rolled program to what one device runs, its chips a mesh axis, its sequences a batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from author.english import write
from author.forms import Expression, Statement
from author.names import Name
from author.program import ProgramError
from author.statements import (
    CausalAttention,
    Fold,
    Join,
    Let,
    Matmul,
    Number,
    Plus,
    Row,
    Rows,
    Scaled,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
    Tokens,
)
from kernels import table
from tp.interpret import arguments, is_token, operation
from tp.operands import Operand, canonical, operands, tensors
from tp.rolled import Along, Each, Item, Loop, Once, Rolled, runs
from tp.stretch import stacked
from tp.unroll import unroll_layers

CHIP = "chip"

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """One step as a function of what one device holds.

    `run(weights, states, inputs)` gives every name the text binds, and the new states. It is
    to be called inside a `shard_map` over the axis `chip`; `weights` and `states` are the
    device's own slices by canonical name, `inputs` the run-time integers: `tok` and `pos`, or
    `toks` `[1, rows]` and `pos` (one, or one a sequence), and `count` where only the first rows
    are real.
    """

    run: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weights: Mapping[str, Operand]
    states: Mapping[str, Operand]
    kernels: Mapping[str, str]


def lower(rolled: Rolled, *, platform: str, kernels: str = "auto") -> Lowered:
    """The step of a rolled program; `kernels` names the path to take where there are several.

    Raises ProgramError for a statement that cannot be lowered.
    """
    wanted = {str(n): o for n, o in operands(rolled).items()}
    items = unroll_layers(rolled)
    held = dict(_held(items, wanted))
    keys = {str(canonical(t.name)): _key(t.name) for t, _ in tensors(items)}
    paths = _Paths(platform=platform, wanted=kernels)

    def run(weights: Arrays, states: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        lowering = _Lowering(wanted, held, paths, inputs)
        lowering.env.update({keys[k]: array for k, array in {**weights, **states}.items()})
        lowering.items(items, batch=None)
        return lowering.env, {k: lowering.env[keys[k]] for k in states}

    kept = {k: o for k, o in wanted.items() if o.role in ("cache", "state")}
    return Lowered(
        run=run,
        weights={k: o for k, o in wanted.items() if k not in kept},
        states=kept,
        kernels=paths.taken,
    )


def partition(operand: Operand) -> PartitionSpec:
    """How an operand's array is cut over the mesh, in the order in which it is stored."""
    batch = () if operand.sequences is None else (None,)
    if operand.layout is None:
        return PartitionSpec()
    first = (operand.layout.axis == "rows") != (operand.stored == "turned")
    return PartitionSpec(*batch, *((CHIP,) if first else (None, CHIP)))


@dataclass
class _Paths:
    """The kernels of a platform, and which were taken."""

    platform: str
    wanted: str
    taken: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> Callable[..., Any]:
        """An operation by the first path that takes what it is called with."""

        def call(*arrays: Any, **words: Any) -> Any:
            taken, result = table.call(name, self.platform, self.wanted, *arrays, **words)
            others = {part for part in self.taken.get(name, "").split(", ") if part}
            self.taken[name] = ", ".join(sorted({*others, taken}))
            return result

        return call


def _key(name: Name) -> str:
    """Where a name lives while a step is traced, the same for every chip and every sequence."""
    return str(name)


def _batched(name: Name) -> bool:
    return isinstance(name.sequence, Along)


def _each_chip(number: Any) -> Any:
    """An address or a factor that differs from chip to chip, looked up where the program runs."""
    if not isinstance(number, Each):
        return number
    real = any(isinstance(v, float) for v in number.values)
    values = jnp.array([v or 0 for v in number.values], jnp.float32 if real else jnp.int32)
    return values[jax.lax.axis_index(CHIP)]


def _largest(number: Any) -> Any:
    """An extent that differs from chip to chip: all are padded to the largest."""
    return number.largest if isinstance(number, Each) else number


class _Lowering:
    """One trace of a step: the values of names so far."""

    def __init__(
        self,
        wanted: Mapping[str, Operand],
        held: Mapping[str, tuple[int, ...]],
        paths: _Paths,
        inputs: Arrays,
    ) -> None:
        self.wanted = wanted
        self.held = held
        self.paths = paths
        self.inputs = inputs
        self.env: Arrays = {}

    def items(self, items: tuple[Item, ...], batch: int | None) -> None:
        for item in items:
            match item:
                case Loop("sequence", count, body):
                    self.items(body, count)
                case Loop():
                    self.items(item.body, batch)
                case Once():
                    self.items((item.item,), batch)
                case _:
                    self.statement(item, batch)

    def statement(self, statement: Statement, batch: int | None) -> None:
        match statement:
            case Tensor(name, rows, cols):
                if _key(name) not in self.env:
                    self.env[_key(name)] = self.buffer(name, _largest(rows), _largest(cols))
            case Number(name):
                self.env[_key(name)] = self.inputs[name.base]
            case Tokens(name):
                self.env[_key(name)] = self.inputs[name.base]
            case SetItem():
                pass  # token ids come from outside
            case SetRow():
                self.env[_key(statement.name)] = self.written(statement, batch)
            case SetRows(row, name, x):
                call = self.paths("set_rows")
                self.env[_key(name)] = call(
                    self.env[_key(name)], self.env[_key(x)], row=self.scalar(row), **self.count()
                )
            case Let(name, value):
                self.env[_key(name)] = _alike(statement, self.value(value, batch))
            case _:
                raise AssertionError(statement)

    def buffer(self, name: Name, rows: int, cols: int) -> Any:
        if str(canonical(name)) in self.wanted:
            raise ProgramError.of(
                f"'{name}'", found="no array of that name", wanted="one given to the step"
            )
        return jnp.zeros((rows, cols), jnp.float32)

    def count(self) -> Arrays:
        return {"count": self.inputs["count"]} if "count" in self.inputs else {}

    def scalar(self, value: Any) -> Any:
        return self.env[_key(value)] if isinstance(value, Name) else value

    # --- Rows

    def written(self, statement: SetRow, batch: int | None) -> Any:
        matrix, x = self.env[_key(statement.name)], self.env[_key(statement.x)]
        if isinstance(statement.row, Along) and not _batched(statement.name):
            return x[:, 0]  # every sequence's row: the stack itself
        call = self.paths("set_row")
        if batch is None or not _batched(statement.name):
            return call(matrix, x, row=self.scalar(statement.row))
        return jax.vmap(lambda m, x, row: call(m, x, row=row))(
            matrix, x, self.scalar(statement.row)
        )

    def row(self, form: Row, batch: int | None) -> Any:
        x = self.env[_key(form.x)]
        if isinstance(form.row, Along):
            return x[:, None]
        if is_token(form.row):
            tokens = jnp.reshape(self.scalar(form.row), (1, 1))
            return self.paths("embedding")(tokens, x, first=_each_chip(form.first))
        at = self.scalar(form.row)
        if stacked(form.x) and "count" in self.inputs:
            at = self.inputs["count"]  # the last real row
        return self.paths("row")(x, row=at)

    # --- Expressions

    def value(self, form: Expression, batch: int | None) -> Any:
        match form:
            case Row():
                return self.row(form, batch)
            case Rows(tokens, x, first):
                ids, w = self.env[_key(tokens)], self.env[_key(x)]
                return self.paths("embedding")(ids, w, first=_each_chip(first))
            case Fold(partial):
                return jax.lax.psum(self.env[_key(partial)], CHIP)
            case Join(partial):
                return self.join(partial)
            case Scaled(x, Each() as factor):
                return self.env[_key(x)] * _each_chip(factor)
            case _:
                return self.computed(form, batch)

    def join(self, partial: Name) -> Any:
        """Every chip's columns in chip order, without the padding."""
        x = self.env[_key(partial)]
        gathered = jax.lax.all_gather(x, CHIP, axis=1, tiled=True, to="invarying")
        held = self.held[_key(partial)]
        width = x.shape[1]
        if all(h == width for h in held):
            return gathered
        return jnp.concatenate(
            [gathered[:, c * width : c * width + h] for c, h in enumerate(held)], axis=1
        )

    def computed(self, form: Expression, batch: int | None) -> Any:
        names, options = arguments(form)
        keywords = {k: _largest(v) for k, v in options.items() if not isinstance(v, Name)}
        named = {k: v for k, v in options.items() if isinstance(v, Name)}
        counts = isinstance(form, CausalAttention) or type(form).UPDATES
        if counts and not runs(form, "sequence"):
            keywords |= self.count()
        call = self.paths(operation(form))
        arrays = [self.env[_key(n)] for n in names]
        if isinstance(form, Matmul) and not self.quantised(form.w):
            arrays[1] = _outputs_first(arrays[1], keywords.get("heads"))
        scalars = {k: self.env[_key(n)] for k, n in named.items()}
        if batch is None or not runs(form, "sequence"):
            result = call(*arrays, **scalars, **keywords)
        elif operation(form) in BY_ROWS:
            result = _by_rows(call, names, arrays, scalars, keywords)
        else:
            axes = (
                [_axis(n, a) for n, a in zip(names, arrays, strict=True)],
                {k: _axis(n, scalars[k]) for k, n in named.items()},
            )
            result = jax.vmap(lambda a, s: call(*a, **s, **keywords), in_axes=axes)(arrays, scalars)
        return self.put_back(form, result)

    def quantised(self, name: Name) -> bool:
        """Whether a matrix is a weight as the loader stores it."""
        operand = self.wanted.get(str(canonical(name)))
        return operand is not None and operand.quantised

    def put_back(self, form: Expression, result: Any) -> Any:
        if not type(form).UPDATES:
            return result
        value, *new = result
        for field_name, matrix in zip(type(form).UPDATES, new, strict=True):
            self.env[_key(getattr(form, field_name))] = matrix
        return value


def _alike(statement: Let, value: Any) -> Any:
    """A value that no chip's name claims must be the same on all: a join would hide the rest."""
    if statement.name.chip is None and CHIP in jax.typeof(value).manual_axis_type.varying:
        raise ProgramError.at(
            statement,
            found=f"{statement.name} differs from chip to chip",
            wanted="a fold or a join of what the chips have",
        )
    return value


def _held(
    items: tuple[Item, ...], wanted: Mapping[str, Operand]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """How many columns each chip really has of what a join puts together."""
    made = {_key(i.name): i.value for i in _statements(items) if isinstance(i, Let)}
    for value in made.values():
        if not isinstance(value, Join):
            continue
        form = made.get(_key(value.partial))
        if isinstance(form, Plus):  # a product and its bias
            form = made.get(_key(form.a))
        operand = wanted.get(str(canonical(form.w))) if isinstance(form, Matmul) else None
        if operand is None or operand.layout is None or operand.layout.axis != "cols":
            raise ProgramError.of(
                f"'{write(value)}'",
                found="a partial whose columns are not those of a weight",
                wanted="a product with a matrix that is cut by columns",
            )
        layout = operand.layout
        yield _key(value.partial), tuple(map(layout.held, range(len(layout.ranges))))


def _statements(items: tuple[Item, ...]) -> Iterator[Statement]:
    for item in items:
        match item:
            case Loop():
                yield from _statements(item.body)
            case Once():
                yield from _statements((item.item,))
            case _:
                yield item


def _outputs_first(matrix: Any, heads: int | None) -> Any:
    """A float matrix as a weight is stored, head by head where it is block-diagonal."""
    by_head = matrix.reshape(heads or 1, -1, matrix.shape[1])
    return jnp.swapaxes(by_head, 1, 2).reshape(-1, by_head.shape[1])


# Forms whose rows are independent, and that know how to do many at once.
BY_ROWS = ("matmul", "moe")


def _axis(name: Name, value: Any) -> int | None:
    """The axis of sequences; a table may have one too, where sequences turn differently."""
    return 0 if _batched(name) or jnp.ndim(value) == 3 else None


def _by_rows(
    call: Callable[..., Any],
    names: tuple[Name, ...],
    arrays: list[Any],
    scalars: Arrays,
    keywords: Arrays,
) -> Any:
    """One call for the rows of all sequences."""
    rows = [a[:, 0] if _batched(n) else a for n, a in zip(names, arrays, strict=True)]
    return call(*rows, **scalars, **keywords)[:, None]
