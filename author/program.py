"""A program: its statements, the tables beside them, and what each name is to the outside."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from author.english import write, write_program
from author.forms import Expression, Form, Statement, slots
from author.manifest import TpManifest, manifest_to_json
from author.names import Name
from author.statements import (
    Let,
    Number,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
    Tokens,
)

Role = Literal["weight", "table", "state", "cache", "input", "buffer"]


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that does not hold: where, about which names, what was found, what would do."""

    where: str
    found: str
    wanted: str
    names: tuple[Name, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.wanted}"


@dataclass
class ProgramError(ValueError):
    """What does not hold in a program, every complaint of it."""

    complaints: tuple[Complaint, ...]

    @classmethod
    def of(cls, where: str, *, found: str, wanted: str) -> "ProgramError":
        """A single complaint."""
        return cls((Complaint(where=where, found=found, wanted=f"wanted {wanted}"),))

    @classmethod
    def at(cls, statement: Statement, *, found: str, wanted: str) -> "ProgramError":
        """A single complaint about a statement."""
        return cls.of(f"'{write(statement)}.'", found=found, wanted=wanted)

    def __str__(self) -> str:
        return "\n".join(str(c) for c in self.complaints)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One step of a model, written out in full.

    `f32` names the float matrices that the host fills, each with its path and its count of
    floats; `q8` the quantised ones, each with its path. Under tensor parallelism both name whole
    matrices, and `manifest` says which slices of them the program declares.
    """

    statements: tuple[Statement, ...]
    f32: Mapping[Name, tuple[str, int]] = field(default_factory=dict)
    q8: Mapping[Name, str] = field(default_factory=dict)
    manifest: TpManifest | None = None

    @property
    def text(self) -> str:
        """The English of the program."""
        return write_program(self.statements)


def program_to_json(program: Program) -> dict[str, Any]:
    """A program in the form of the golden cases."""
    return {
        "text": program.text,
        "f32w": {str(n): [path, count] for n, (path, count) in program.f32.items()},
        "q8w": {str(n): path for n, path in program.q8.items()},
        "manifest": None if program.manifest is None else manifest_to_json(program.manifest),
    }


def bound(statement: Statement) -> Name | None:
    """The name that a statement binds; None for one that writes into a matrix."""
    if isinstance(statement, Tensor | Tokens | Number | Let):
        return statement.name
    return None


def changed(statement: Statement) -> tuple[Name, ...]:
    """The matrices that a statement changes in place."""
    if isinstance(statement, SetItem):
        return (statement.name,)
    form: Form = statement.value if isinstance(statement, Let) else statement
    return tuple(getattr(form, f) for f in type(form).UPDATES)


def read_by(statement: Statement) -> tuple[Name, ...]:
    """The names that a statement reads, in the order of its English."""
    form: Form = statement.value if isinstance(statement, Let) else statement
    if isinstance(form, Tensor | Tokens | Number | SetItem):
        return ()
    written = {"name"} if isinstance(form, SetRow | SetRows) else set()
    return tuple(
        value
        for slot in slots(type(form))
        if slot.kind in ("name", "scalar") and slot.field not in written
        for value in [getattr(form, slot.field)]
        if isinstance(value, Name)
    )


def expressions(program: Program) -> Iterator[tuple[Name, Expression]]:
    """Every binding of a name to an expression, in order."""
    for statement in program.statements:
        if isinstance(statement, Let):
            yield statement.name, statement.value


TABLE_BASES = ("cos", "sin", "tcos", "tsin", "ones")


def roles(program: Program) -> dict[Name, Role]:
    """What each declared matrix is: who fills it, and whether it outlives the step.

    A cache is written at a position, a buffer at numbered rows; a state is changed by the form
    that names it. What nobody fills is an input.
    """
    found: dict[Name, Role] = {}
    for statement in program.statements:
        if isinstance(statement, Tensor):
            found[statement.name] = _declared_role(program, statement.name)
        elif isinstance(statement, SetRow):
            at_position = isinstance(statement.row, Name)
            found[statement.name] = "cache" if at_position else "buffer"
        elif isinstance(statement, SetRows):
            found[statement.name] = "cache"
        else:
            found.update({n: "state" for n in changed(statement) if n in found})
    return found


def _declared_role(program: Program, name: Name) -> Role:
    piece = None if program.manifest is None else program.manifest.slice_of(name)
    whole = name if piece is None else piece.of
    if whole in program.q8 or piece is not None:
        return "weight"
    if whole not in program.f32:
        return "input"
    table = name.layer is None and name.base.rstrip("0123456789").removesuffix("c") in TABLE_BASES
    return "table" if table else "weight"
