"""How a form is declared: a dataclass, its English template, and what a template is made of.

A template is English with `{field}` where a field's value stands and `[...]` round a clause that
is written when the field in it is present. `{!field}` stands for nothing: it ties a clause of
plain words to a flag.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from author.names import Name

Scalar = Name | int  # the name of a run-time integer, or a number


@dataclass(frozen=True)
class Words:
    """Literal English."""

    text: str


@dataclass(frozen=True)
class Slot:
    """Where a field's value stands; `kind` is name, count, real, scalar, part or expression."""

    field: str
    kind: str
    parts: tuple[type["Part"], ...] = ()


@dataclass(frozen=True)
class Clause:
    """Pieces that are there when `field` is neither None nor False."""

    pieces: tuple["Piece", ...]
    field: str
    flag: bool


Piece = Words | Slot | Clause


class Form:
    """Something the language can say; its template is its only syntax."""

    TEMPLATE: ClassVar[str]
    PIECES: ClassVar[tuple[Piece, ...]]
    # Fields that name matrices which the form changes in place.
    UPDATES: ClassVar[tuple[str, ...]] = ()


class Expression(Form):
    """What may stand after `Let OUT be`."""


class Statement(Form):
    """A line of a program, without its full stop."""


class Part(Form):
    """English that stands for one field of several forms."""


STATEMENTS: list[type[Statement]] = []
EXPRESSIONS: list[type[Expression]] = []

F = TypeVar("F", bound=type[Form])


@typing.dataclass_transform(frozen_default=True)
def form(template: str) -> Callable[[F], F]:
    """Make a class a form: a frozen dataclass that `template` writes and reads."""

    def declare(cls: F) -> F:
        made = dataclass(frozen=True)(cls)
        made.TEMPLATE = template
        made.PIECES = _pieces(template, typing.get_type_hints(made))
        if issubclass(made, Statement):
            STATEMENTS.append(made)
        if issubclass(made, Expression):
            EXPRESSIONS.append(made)
        return made

    return declare


def field_names(cls: type[Form]) -> tuple[str, ...]:
    """The fields of a form, in the order of its class."""
    return tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]


def slots(cls: type[Form]) -> Iterator[Slot]:
    """Every slot of a form, clauses included, in the order of the English."""
    yield from _slots(cls.PIECES)


def _slots(pieces: tuple[Piece, ...]) -> Iterator[Slot]:
    for piece in pieces:
        match piece:
            case Slot():
                yield piece
            case Clause():
                yield from _slots(piece.pieces)


_TOKEN = re.compile(r"\[|\]|\{(?P<flag>!?)(?P<field>\w+)\}|[^\[\]{}]+")


def _pieces(template: str, hints: dict[str, Any]) -> tuple[Piece, ...]:
    """Parse a template once, at declaration."""
    stack: list[tuple[list[Piece], list[tuple[str, bool]]]] = [([], [])]
    for token in _TOKEN.finditer(template):
        pieces, fields = stack[-1]
        if token[0] == "[":
            stack.append(([], []))
        elif token[0] == "]":
            stack.pop()
            field, flag = fields[0]
            stack[-1][0].append(Clause(tuple(pieces), field, flag))
        elif token["field"] is None:
            pieces.append(Words(token[0]))
        else:
            fields.append((token["field"], token["flag"] == "!"))
            if token["flag"] != "!":
                pieces.append(_slot(token["field"], hints[token["field"]]))
    return tuple(stack[0][0])


def _slot(field: str, hint: Any) -> Slot:
    if hint is Expression:
        return Slot(field, "expression")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [o for o in options if o is not type(None)]
    if issubclass(kinds[0], Part):
        return Slot(field, "part", tuple(kinds))
    if kinds == [Name, int]:
        return Slot(field, "scalar")
    (kind,) = kinds
    return Slot(field, {Name: "name", int: "count", float: "real"}[kind])
