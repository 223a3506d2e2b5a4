"""One trace of a step: statements become arrays, or parts of a chain of the compiled kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

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
from kernels.arrays import Declined
from kernels.native.chain import INEXACT, INEXACT_BATCH, Chain, Value
from tp.interpret import arguments, is_token, operation
from tp.operands import canonical
from tp.plan import CHIP, Arrays, Flat, Plan, Taken, key_of
from tp.rolled import Along, Each, runs
from tp.stretch import stacked


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


# Operations that write rows into a cache, in its own numbers.
WRITES = ("set_row", "set_rows")


def _is_half(array: Any) -> bool:
    return getattr(array, "dtype", None) == jnp.float16


def traced(plan: Plan, flat: Flat, given: Arrays, inputs: Arrays) -> Arrays:
    """The names that are wanted of a step, from those that are given."""
    plan.taken.clear()
    trace = _Trace(plan, given, inputs)
    for at, (statement, batch) in enumerate(flat):
        trace.at = at
        trace.statement(statement, batch)
    trace.at = len(flat)
    trace.settle()
    return trace.env


class _Trace:
    """One trace of a step: the values of names so far, some of them still to be computed."""

    def __init__(self, plan: Plan, given: Arrays, inputs: Arrays) -> None:
        self.plan = plan
        self.inputs = inputs
        self.env = dict(given)
        self.at = 0
        self.now: Statement | None = None
        self.chain: Chain | None = None
        self.chains = 0
        self.order: Any = None

    def statement(self, statement: Statement, batch: int | None) -> None:
        self.now = statement
        match statement:
            case Tensor(name, rows, cols):
                if key_of(name) not in self.env:
                    self.env[key_of(name)] = self.buffer(name, _largest(rows), _largest(cols))
            case Number(name):
                self.env[key_of(name)] = self.inputs[name.base]
            case Tokens(name):
                self.env[key_of(name)] = self.inputs[name.base]
            case SetItem():
                pass  # token ids come from outside
            case SetRow():
                self.env[key_of(statement.name)] = self.written(statement, batch)
            case SetRows(row, name, x):
                self.env[key_of(name)] = self.call(
                    "set_rows", [name, x], row=self.scalar(row), **self.count()
                )
            case Let(name, value):
                self.env[key_of(name)] = _alike(statement, self.value(value, batch))
            case _:
                raise AssertionError(statement)

    def buffer(self, name: Name, rows: int, cols: int) -> Any:
        if str(canonical(name)) in self.plan.wanted:
            raise ProgramError.of(
                f"'{name}'", found="no array of that name", wanted="one given to the step"
            )
        return jnp.zeros((rows, cols), jnp.float32)

    def count(self) -> Arrays:
        return {"count": self.inputs["count"]} if "count" in self.inputs else {}

    def scalar(self, value: Any) -> Any:
        return self.env[key_of(value)] if isinstance(value, Name) else value

    # --- Chains

    def array(self, name: Name) -> Any:
        """The array of a name, computed by now."""
        if isinstance(self.env[key_of(name)], Value):
            self.settle()
        return self.env[key_of(name)]

    def floats(self, name: Name) -> Any:
        """The same in float32, whatever a cache holds."""
        array = self.array(name)
        return array.astype(jnp.float32) if _is_half(array) else array

    def settle(self) -> None:
        """Close the chain: of what it computes, keep what is still to be read."""
        if self.chain is None or not self.chain.steps:
            self.chain = None
            return
        pending = {key: value for key, value in self.env.items() if isinstance(value, Value)}
        wanted = {key: value for key, value in pending.items() if self.still_read(key)}
        arrays = self.chain.close(list(wanted.values()))
        self.order = self.chain.order
        self.env = {key: value for key, value in self.env.items() if key not in pending}
        self.env.update(zip(wanted, arrays, strict=True))
        self.chain = None

    def still_read(self, key: str) -> bool:
        outputs = self.plan.outputs
        asked = outputs is None or key in outputs or key in self.plan.states
        return asked or self.plan.read_last.get(key, -1) >= self.at

    def chained(self, name: str, *arrays: Any, **words: Any) -> Value:
        """An operation added to the chain at hand; raises Declined."""
        if not self.plan.native:
            raise Declined(f"{self.plan.kernels} was asked for, on {self.plan.platform}")
        if self.chain is None:
            self.chain = self.opened()
        value = self.chain.add(name, *arrays, **words)
        self.note(table.NATIVE, {}, self.chains)
        return value

    def opened(self) -> Chain:
        self.chains += 1
        mesh = jax.sharding.get_abstract_mesh()
        chips = mesh.shape.get(CHIP, 1) if jax.process_count() == 1 else 1
        return Chain(
            rows=self.inputs["toks"].shape[-1] if "toks" in self.inputs else 1,
            count=self.inputs.get("count"),
            inexact=INEXACT if jnp.ndim(self.inputs.get("pos", 0)) == 0 else INEXACT_BATCH,
            chips=chips,
            chip=jax.lax.axis_index(CHIP) if chips > 1 else None,
            axis=CHIP,
            after=self.order,
        )

    def note(self, path: str, declined: Mapping[str, str], chain: int | None = None) -> None:
        assert self.now is not None
        self.plan.taken.append(Taken(statement=self.now, path=path, declined=declined, chain=chain))

    def call(self, name: str, names: Sequence[Name], **words: Any) -> Any:
        """An operation in the chain at hand, or else by the first path that takes it."""
        try:
            return self.chained(name, *(self.env[key_of(n)] for n in names), **words)
        except Declined as declined:
            why = {table.NATIVE: str(declined)}
        if name in WRITES:
            matrix, x = map(self.array, names)
            return self.paths(name, why)(matrix, x.astype(matrix.dtype), **words)
        return self.paths(name, why)(*map(self.floats, names), **words)

    def paths(self, name: str, declined: Mapping[str, str]) -> Callable[..., Any]:
        """An operation by the first path, but for chains, that takes what it is called with."""

        def call(*arrays: Any, **words: Any) -> Any:
            taken, result, others = table.call(
                name, self.plan.platform, self.plan.kernels, *arrays, **words
            )
            self.note(taken, {**declined, **others})
            return result

        return call

    # --- Rows

    def written(self, statement: SetRow, batch: int | None) -> Any:
        stack = self.env[key_of(statement.x)]
        if isinstance(statement.row, Along) and not _batched(statement.name):
            # Every sequence's row: the stack itself.
            return stack.stacked(False) if isinstance(stack, Value) else stack[:, 0]
        names, row = [statement.name, statement.x], self.scalar(statement.row)
        if batch is None or not _batched(statement.name):
            return self.call("set_row", names, row=row)
        try:
            return self.chained("set_row", *(self.env[key_of(n)] for n in names), row=row)
        except Declined as declined:
            call = self.paths("set_row", {table.NATIVE: str(declined)})
        matrix, x = map(self.array, names)
        write = jax.vmap(lambda m, x, row: call(m, x, row=row))
        return write(matrix, x.astype(matrix.dtype), row)

    def row(self, form: Row, batch: int | None) -> Any:
        if isinstance(form.row, Along):
            x = self.env[key_of(form.x)]
            return x.stacked(True) if isinstance(x, Value) else x[:, None]
        if is_token(form.row):
            return self.embedding(jnp.reshape(self.scalar(form.row), (1, 1)), form.x, form.first)
        at = self.scalar(form.row)
        if stacked(form.x) and "count" in self.inputs:
            at = self.inputs["count"]  # the last real row
        return self.call("row", [form.x], row=at)

    def embedding(self, tokens: Any, x: Name, first: Any) -> Any:
        first, table_ = _each_chip(first), self.env[key_of(x)]
        try:
            return self.chained("embedding", tokens, table_, first=first)
        except Declined as declined:
            call = self.paths("embedding", {table.NATIVE: str(declined)})
        return call(tokens, table_, first=first)

    # --- Expressions

    def value(self, form: Expression, batch: int | None) -> Any:
        match form:
            case Row():
                return self.row(form, batch)
            case Rows(tokens, x, first):
                return self.embedding(self.env[key_of(tokens)], x, first)
            case Fold(partial):
                return self.together("fold", form, lambda x: jax.lax.psum(x, CHIP))
            case Join(partial):
                held = self.plan.held[key_of(partial)]
                return self.together("join", form, lambda x: _joined(x, held), held=held)
            case Scaled(x, Each() as factor):
                return self.array(x) * _each_chip(factor)
            case _:
                return self.computed(form, batch)

    def together(
        self, name: str, form: Fold | Join, plain: Callable[[Any], Any], **words: Any
    ) -> Any:
        """A fold or a join, in the chain at hand or as a collective of XLA."""
        partial = self.env[key_of(form.partial)]
        if form.chips == 1 and isinstance(partial, Value):
            return replace(partial, varying=partial.varying - {CHIP})
        try:
            return self.chained(name, partial, **words)
        except Declined as declined:
            self.note("xla", {table.NATIVE: str(declined)})
        return plain(self.array(form.partial))

    def computed(self, form: Expression, batch: int | None) -> Any:
        names, options = arguments(form)
        keywords = {k: _largest(v) for k, v in options.items() if not isinstance(v, Name)}
        named = {k: v for k, v in options.items() if isinstance(v, Name)}
        counts = isinstance(form, CausalAttention) or type(form).UPDATES
        if counts and not runs(form, "sequence"):
            keywords |= self.count()
        try:
            given = {k: self.env[key_of(n)] for k, n in named.items()}
            return self.chained(
                operation(form), *(self.env[key_of(n)] for n in names), **given, **keywords
            )
        except Declined as declined:
            call = self.paths(operation(form), {table.NATIVE: str(declined)})
        arrays = [self.floats(n) for n in names]
        if isinstance(form, Matmul) and not self.quantised(form.w):
            arrays[1] = _outputs_first(arrays[1], keywords.get("heads"))
        scalars = {k: self.array(n) for k, n in named.items()}
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
        operand = self.plan.wanted.get(str(canonical(name)))
        return operand is not None and operand.quantised

    def put_back(self, form: Expression, result: Any) -> Any:
        if not type(form).UPDATES:
            return result
        value, *new = result
        for field_name, matrix in zip(type(form).UPDATES, new, strict=True):
            self.env[key_of(getattr(form, field_name))] = matrix
        return value


def _joined(x: Any, held: Sequence[int]) -> Any:
    """Every chip's columns in chip order, without the padding."""
    gathered = jax.lax.all_gather(x, CHIP, axis=1, tiled=True, to="invarying")
    width = x.shape[1]
    if all(h == width for h in held):
        return gathered
    return jnp.concatenate(
        [gathered[:, c * width : c * width + h] for c, h in enumerate(held)], axis=1
    )


def _alike(statement: Let, value: Any) -> Any:
    """A value that no chip's name claims must be the same on all: a join would hide the rest."""
    varying = (
        value.varying if isinstance(value, Value) else jax.typeof(value).manual_axis_type.varying
    )
    if statement.name.chip is None and CHIP in varying:
        raise ProgramError.at(
            statement,
            found=f"{statement.name} differs from chip to chip",
            wanted="a fold or a join of what the chips have",
        )
    return value


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
