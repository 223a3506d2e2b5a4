"""Runs a joint text a statement at a time beside values from elsewhere, and compares each.

Every statement is computed by the reference from what its operands are elsewhere, so that a value
that differs is its own statement's doing and no earlier one's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from author.checks import collected
from author.forms import Statement
from author.manifest import TpCollective, TpManifest
from author.names import Name
from author.program import Program, bound, changed, read_by, roles
from author.statements import (
    Argmax,
    Fold,
    Join,
    Let,
    Number,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
    Tokens,
)
from kernels import reference
from tp.check.parts import Part, made_part
from tp.interpret import cut, interpret

Value = Any  # what a name has: a matrix, or a number
Whole = Callable[[Name], np.ndarray]  # a weight or a table, whole, as the language has it


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a statement makes of one name, and the part of a whole value that this is.

    `chip` is whose statement it is; None where every chip runs it alike.
    """

    statement: Statement
    name: Name
    value: Value
    chip: int | None = None
    part: Part | None = None


Elsewhere = tuple[int | None, np.ndarray]  # a value, and the chip that has it
Others = Callable[[Made], list[Elsewhere]]


class Beside:
    """A joint text on its way.

    `before` are caches and states before the step, by the names that the text declares (empty,
    where it has none of them); `parts` what the chips hold of the matrices that are cut.
    """

    def __init__(
        self,
        program: Program,
        *,
        whole: Whole,
        before: Mapping[Name, Value],
        parts: Mapping[Name, Part],
    ) -> None:
        self.program = program
        self.whole = whole
        self.before = before
        self.parts = dict(parts)
        self.roles = roles(program)
        self.env: dict[Name, Value] = {}
        manifest = program.manifest or TpManifest(chips=1)
        self.collectives = {c.out: c for c in manifest.collectives}

    def run(self, others: Others) -> Iterator[tuple[Made, list[Elsewhere]]]:
        """Every value when it is final, and what stands beside it; the first of these goes on."""
        left = Counter(name for _, s in lines(self.program) for name in targets(s))
        for chip, statement in lines(self.program):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                values = self._values(statement)
            self.env.update(values)
            for name, value in values.items():
                left[name] -= 1
                part = self._part(name, statement)
                made = Made(statement=statement, name=name, value=value, chip=chip, part=part)
                if left[name] > 0 or not _says_something(statement):
                    continue
                found = others(made)
                if found:
                    self.env[name] = found[0][1]
                yield made, found

    def again(self) -> "Beside":
        """The same text, not yet run."""
        return Beside(self.program, whole=self.whole, before=self.before, parts=self.parts)

    def kept(self) -> dict[Name, Value]:
        """Caches and states after the step."""
        return {n: self.env[n] for n, role in self.roles.items() if role in ("cache", "state")}

    def _values(self, statement: Statement) -> dict[Name, Value]:
        """What a statement binds and changes."""
        match statement:
            case Tensor(name) if name in self.before:
                return {name: self.before[name]}
            case Tensor(name):
                return {name: self._declared(statement)}
            case Let(name, Fold() | Join() as form):
                partials = [jnp.asarray(self.env[p]) for p in self.collectives[name].partials]
                gather = reference.fold if isinstance(form, Fold) else reference.join
                return {name: gather(partials)}
            case _:
                return alone(statement, self.env)

    def _declared(self, tensor: Tensor) -> Value:
        """A weight or a table, or the slice of it that the manifest names; else zeros."""
        if self.roles[tensor.name] not in ("weight", "table"):
            return np.zeros((tensor.rows, tensor.cols), np.float32)
        manifest = self.program.manifest
        piece = None if manifest is None else manifest.slice_of(tensor.name)
        if piece is None:
            return self.whole(tensor.name)
        return cut(self.whole(piece.of), piece.axis, piece.ranges)

    def _part(self, name: Name, statement: Statement) -> Part | None:
        """The part that a name is, noted for what will be made from it."""
        match statement:
            case Let(own, form) if own == name:
                part = made_part(name, form, self.parts, lambda n: np.shape(self.env[n])[-1])
            case SetRow(x=x) | SetRows(x=x) if name not in self.parts:
                part = self.parts.get(x)  # a stack of rows
            case _:
                return self.parts.get(name)
        if part is not None:
            self.parts[name] = part
        return part


def lines(program: Program) -> Iterator[tuple[int | None, Statement]]:
    """The statements of a joint text, each with its chip; a collective is one statement."""
    manifest = program.manifest or TpManifest(chips=1)
    collectives = {c.out: c for c in manifest.collectives}
    steps = {s for c in manifest.collectives for s in c.steps}
    for statement in program.statements:
        name = bound(statement)
        if name is not None and name in collectives:
            yield None, on_chip(collectives[name], 0, manifest.chips)
        elif name not in steps:
            named = (*targets(statement), *read_by(statement))
            chips = [manifest.chip_of(n) for n in named]
            yield next((c for c in chips if c is not None), None), statement


def on_chip(collective: TpCollective, chip: int, chips: int) -> Statement:
    """A collective as a chip's text has it."""
    return collected(collective, collective.partials[chip], chips)


def targets(statement: Statement) -> tuple[Name, ...]:
    """What a statement binds, then what it changes."""
    name = bound(statement)
    return (*(() if name is None else (name,)), *changed(statement))


def alone(statement: Statement, env: Mapping[Name, Value]) -> dict[Name, Value]:
    """What a statement by itself binds and changes, its operands given."""
    used = {name: env[name] for name in (*read_by(statement), *changed(statement))}
    given = tuple(_given(name, value) for name, value in used.items())
    made = interpret(Program(statements=(*given, statement)), used, meanings=_COMPILED)
    return {name: made[name] for name in targets(statement)}


class _Compiled(ModuleType):
    """The reference, each operation compiled once for its shapes and options."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arrays: Any, **words: Any) -> Any:
            traced = {k: v for k, v in words.items() if k in PLACES or np.ndim(v) > 0}
            fixed = tuple((k, v) for k, v in words.items() if k not in traced)
            return _operation(name, fixed)(*arrays, **traced)

        return call


PLACES = ("row", "position")  # integers that are others at every step
_COMPILED = _Compiled("compiled reference")


@cache
def _operation(name: str, fixed: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(getattr(reference, name), **dict(fixed)))


def _given(name: Name, value: Value) -> Statement:
    return Number(name, int(value)) if np.ndim(value) == 0 else Tensor(name, *np.shape(value))


def _says_something(statement: Statement) -> bool:
    """Whether there is anything to compare: run-time integers come from outside."""
    return not isinstance(statement, Number | Tokens | SetItem) and not (
        isinstance(statement, Let) and isinstance(statement.value, Argmax)
    )
