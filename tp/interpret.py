"""Runs written-out texts a statement at a time: slow, plain, the oracle of the executor."""

import dataclasses
import re
from collections.abc import Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from author.forms import Expression, Form, Part, Statement
from author.manifest import TpManifest
from author.names import Name
from author.program import Program, ProgramError, bound, read_by
from author.statements import (
    Fold,
    Join,
    Let,
    Number,
    Row,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
    Tokens,
)
from kernels import reference

Values = Mapping[Name, Any]


def interpret(
    program: Program, values: Values, *, meanings: ModuleType = reference
) -> dict[Name, Any]:
    """Every name of a program after one step.

    `values` holds whole matrices by name (weights logical, not stored; caches and states too);
    a slice is cut from the whole that the manifest names. What nobody gives is zeros.
    `meanings` is a module with a function a form, as `kernels.reference`.
    """
    run = _Run(program, values, meanings)
    for partials in run.steps():
        raise ProgramError.of(
            f"a collective of {partials}",
            found="one chip's text by itself",
            wanted="the texts of all chips, through interpret_chips",
        )
    return run.env


def interpret_chips(
    programs: Sequence[Program], values: Values, *, meanings: ModuleType = reference
) -> tuple[dict[Name, Any], ...]:
    """Every chip's names after one step of the per-chip texts, their collectives in lockstep."""
    runs = [_Run(program, values, meanings) for program in programs]
    steps = [run.steps() for run in runs]
    arrived = [next(step, None) for step in steps]
    while any(a is not None for a in arrived):
        kinds = {type(a.form) if a is not None else None for a in arrived}
        if len(kinds) > 1 or None in kinds:
            raise ProgramError.of(
                "the per-chip texts",
                found=f"chips wait at different collectives: {arrived}",
                wanted="the same folds and joins, in the same order, on every chip",
            )
        gathered = [a.value for a in arrived if a is not None]
        name = "fold" if kinds == {Fold} else "join"
        total = getattr(meanings, name)(gathered)
        arrived = [_advance(step, total) for step in steps]
    return tuple(run.env for run in runs)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A chip at a collective, with its partial."""

    form: Fold | Join
    value: Any


def _advance(step: Generator[_Waiting, Any, None], total: Any) -> _Waiting | None:
    try:
        return step.send(total)
    except StopIteration:
        return None


class _Run:
    """One text on its way."""

    def __init__(self, program: Program, values: Values, meanings: ModuleType) -> None:
        self.program = program
        self.values = values
        self.meanings = meanings
        self.array = jnp.asarray if meanings is reference else np.asarray
        self.env: dict[Name, Any] = {}

    def steps(self) -> Generator[_Waiting, Any, None]:
        """Run to the end, stopping at each collective for its result."""
        for statement in self.program.statements:
            match statement:
                case Let(name, Fold() | Join() as form) if form.chips > 1:
                    self.env[name] = yield _Waiting(form, self.env[form.partial])
                case Let(name, Fold() | Join() as form):
                    self.env[name] = self.env[form.partial]
                case _:
                    self.statement(statement)

    def statement(self, statement: Statement) -> None:
        match statement:
            case Tensor():
                self.env[statement.name] = self.declared(statement)
            case Tokens(name, cols):
                self.env[name] = self.array(np.zeros((1, cols), np.int32))
            case SetItem(item, name, token):
                self.env[name] = self.array(_with_item(self.env[name], item - 1, token))
            case Number(name, value):
                self.env[name] = value
            case SetRow() | SetRows():
                self.env[statement.name] = self.call(statement)
            case Let(name, value):
                self.env[name] = self.bind(value)
            case _:
                raise AssertionError(statement)

    def declared(self, tensor: Tensor) -> Any:
        manifest: TpManifest | None = self.program.manifest
        piece = None if manifest is None else manifest.slice_of(tensor.name)
        if piece is None or tensor.name in self.values:
            whole = self.values.get(tensor.name)
        else:
            whole = self.values.get(piece.of)
            whole = None if whole is None else cut(whole, piece.axis, piece.ranges)
        if whole is None:
            return self.array(np.zeros((tensor.rows, tensor.cols), np.float32))
        if whole.shape != (tensor.rows, tensor.cols):
            raise ProgramError.at(
                tensor, found=f"a value of shape {whole.shape}", wanted="the declared shape"
            )
        return self.array(whole)

    def bind(self, form: Expression) -> Any:
        """The value of an expression; what it changes in place is put back under its name."""
        result = self.call(form)
        if not type(form).UPDATES:
            return result
        value, *new = result
        self.env.update({getattr(form, f): n for f, n in zip(type(form).UPDATES, new, strict=True)})
        return value

    def call(self, form: Form) -> Any:
        arrays, options = arguments(form)
        name = operation(form)
        return getattr(self.meanings, name)(
            *(self.env[n] for n in arrays),
            **{k: self.env[v] if isinstance(v, Name) else v for k, v in options.items()},
        )


def cut(whole: Any, axis: str, ranges: Sequence[tuple[int, int]]) -> Any:
    """The slice of a logical matrix."""
    index = np.concatenate([np.arange(s, s + n) for s, n in ranges] or [np.arange(0)]).astype(int)
    return whole[index] if axis == "rows" else whole[:, index]


def operation(form: Form) -> str:
    """The name of the function that computes a form."""
    if isinstance(form, Row) and is_token(form.row):
        return "embedding_row"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(form).__name__).lower()


def is_token(row: Any) -> bool:
    """Whether a row is named by a token id, which counts from 0 where all else counts from 1."""
    return isinstance(row, Name) and row.base == "tok"


def arguments(form: Form) -> tuple[tuple[Name, ...], dict[str, Any]]:
    """What a form hands to its function: matrices in order, then everything else by name.

    Matrices that a form may do without go by name; a part is flattened to its own fields.
    """
    arrays: list[Name] = []
    options: dict[str, Any] = {}
    scalars = {"row", "position"}
    for field in dataclasses.fields(form):  # type: ignore[arg-type]
        value = getattr(form, field.name)
        required = field.default is dataclasses.MISSING
        if isinstance(value, Name) and required and field.name not in scalars:
            arrays.append(value)
        elif isinstance(value, Part):
            options.update({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})  # type: ignore[arg-type]
        elif value is not None:
            options[field.name] = value
    return tuple(arrays), options


def _with_item(tokens: Any, index: int, token: int) -> Any:
    changed = np.array(tokens)
    changed[0, index] = token
    return changed


def results(program: Program, env: Values) -> dict[Name, Any]:
    """The values that a program binds and nothing in it reads: what it is for."""
    read = {n for s in program.statements for n in read_by(s)}
    made = [bound(s) for s in program.statements if isinstance(s, Let)]
    return {n: env[n] for n in made if n is not None and n not in read}
