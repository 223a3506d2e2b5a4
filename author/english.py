"""Writes and reads the English of a form; says where a line fails and what could stand there."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from author.forms import (
    EXPRESSIONS,
    STATEMENTS,
    Clause,
    Form,
    Piece,
    Slot,
    Statement,
    Words,
    slots,
)
from author.names import NUMBER, Name
from author.statements import Let

HEADING = "## Main"

PATTERNS = {
    "name": r"[A-Za-z]\w*",
    "count": NUMBER,
    "real": r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?",
    "scalar": rf"(?:{NUMBER}|[A-Za-z]\w*)",
}
CALLED = {"name": "a name", "count": "a number", "real": "a real", "scalar": "a name or a number"}


@dataclass
class TextError(ValueError):
    """A line that is not of the language: where, what it says, what could stand there."""

    file: str
    line: int
    column: int
    text: str
    expected: tuple[str, ...]

    def __str__(self) -> str:
        wanted = " or ".join(self.expected)
        caret = " " * (self.column - 1) + "^"
        where = f"{self.file}:{self.line}:{self.column}"
        return f"{where}: expected {wanted}\n    {self.text}\n    {caret}"


# --- Writing


def write_program(statements: Iterable[Statement]) -> str:
    """The text of a program, its heading first, a line a statement."""
    return "".join(f"{line}\n" for line in (HEADING, *(write(s) + "." for s in statements)))


def write(form: Form) -> str:
    """The English of one form."""
    return "".join(_written(form, type(form).PIECES))


def write_real(value: float) -> str:
    """A real in the shortest form that reads back the same, as Rust's `{:?}` writes it."""
    if not math.isfinite(value):
        raise ValueError(f"a program holds finite reals only, found {value!r}")
    if value == 0 or 1e-4 <= abs(value) < 1e16:
        return repr(value) if "e" not in repr(value) else f"{value:.1f}"
    mantissa, exponent = repr(value).split("e") if "e" in repr(value) else _scientific(value)
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _scientific(value: float) -> list[str]:
    digits = next(t for p in range(17) if float(t := f"{value:.{p}e}") == value)
    return digits.split("e")


def _written(form: Form, pieces: tuple[Piece, ...]) -> Iterator[str]:
    for piece in pieces:
        match piece:
            case Words(text):
                yield text
            case Slot():
                yield _value(piece.kind, getattr(form, piece.field))
            case Clause():
                if present(getattr(form, piece.field)):
                    yield from _written(form, piece.pieces)


def present(value: object) -> bool:
    """Whether an optional field says something; a real of 0.0 does."""
    return value is not None and value is not False


def _value(kind: str, value: Any) -> str:
    match kind:
        case "real" if isinstance(value, int | float):
            return write_real(value)
        case "part" | "expression":
            return write(value)
        case _:
            return str(value)


# --- Reading


def read_program(text: str, *, file: str = "program") -> tuple[Statement, ...]:
    """The statements of a program's text; raises TextError at the first line that is none."""
    lines = text.split("\n")
    if lines[0] != HEADING:
        column = len(HEADING) + 1 if lines[0].startswith(HEADING) else 1
        wanted = "the end of the line" if column > 1 else f"'{HEADING}'"
        raise TextError(file, 1, column, lines[0][:200], (wanted,))
    while len(lines) > 1 and lines[-1] == "":
        lines.pop()
    return tuple(
        read(line, file=file, line=number) for number, line in enumerate(lines[1:], start=2)
    )


def read(text: str, *, file: str = "program", line: int = 1) -> Statement:
    """The statement of one line, full stop included."""
    try:
        statement = _statement(text)
    except _NoReal as error:
        column = text.index(str(error)) + 1
        raise TextError(file, line, column, text, ("a finite real",)) from None
    if statement is not None:
        return statement
    column, expected = _furthest(text)
    raise TextError(file, line, column, text, expected)


def _statement(text: str) -> Statement | None:
    if not text.endswith("."):
        return None
    matches = (_match(form, text[:-1]) for form in STATEMENTS)
    return next((m for m in matches if isinstance(m, Statement)), None)


def _match(form: type[Form], text: str) -> Form | None:
    found = _regex(form).fullmatch(text)
    if found is None:
        return None
    if form is not Let:
        return _made(form, found, "")
    for expression in EXPRESSIONS:
        value = _match(expression, found["value"])
        if value is not None:
            return Let(Name.of(found["name"]), value)  # type: ignore[arg-type]
    return None


def _made(form: type[Form], found: re.Match[str], prefix: str) -> Form:
    """An instance from the groups of a match; absent fields keep their defaults."""
    fields: dict[str, Any] = {}
    for slot in slots(form):
        if slot.kind == "part":
            for part in slot.parts:
                group = f"{prefix}{slot.field}__{part.__name__}"
                if found[group] is not None:
                    fields[slot.field] = _made(part, found, group + "__")
        elif found[prefix + slot.field] is not None:
            fields[slot.field] = _read_value(slot.kind, found[prefix + slot.field])
    for flag in _flags(form.PIECES):
        if found[prefix + flag] is not None:
            fields[flag] = True
    return form(**fields)


def _read_value(kind: str, text: str) -> Name | int | float:
    if kind == "real":
        return _finite(text)
    if kind == "count" or text[0].isdigit():
        return int(text)
    return Name.of(text)


class _NoReal(ValueError):
    """A number that no finite real is as large as."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NoReal(text)
    return value


def _flags(pieces: tuple[Piece, ...]) -> Iterator[str]:
    for piece in pieces:
        if isinstance(piece, Clause):
            if piece.flag:
                yield piece.field
            yield from _flags(piece.pieces)


@cache
def _regex(form: type[Form]) -> re.Pattern[str]:
    return re.compile(_pattern(form.PIECES, ""))


def _pattern(pieces: tuple[Piece, ...], prefix: str) -> str:
    out = ""
    for piece in pieces:
        match piece:
            case Words(text):
                out += re.escape(text)
            case Slot(field, "part", parts):
                options = (
                    f"(?P<{prefix}{field}__{p.__name__}>"
                    f"{_pattern(p.PIECES, f'{prefix}{field}__{p.__name__}__')})"
                    for p in parts
                )
                out += f"(?:{'|'.join(options)})"
            case Slot(field, "expression"):
                out += f"(?P<{field}>.+)"
            case Slot(field, kind):
                out += f"(?P<{prefix}{field}>{PATTERNS[kind]})"
            case Clause():
                group = f"?P<{prefix}{piece.field}>" if piece.flag else "?:"
                out += f"({group}{_pattern(piece.pieces, prefix)})?"
    return out


# --- Explaining: the same templates walked a piece at a time, keeping every way to go on.


class _Walk:
    """How far any form gets along a line, and what each wanted where it stopped."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.column = 0
        self.expected: dict[str, None] = {}

    def wanted(self, at: int, what: str) -> None:
        if at > self.column:
            self.column, self.expected = at, {}
        if at == self.column:
            self.expected[what] = None

    def pieces(self, pieces: tuple[Piece, ...], at: int) -> set[int]:
        ends = {at}
        for piece in pieces:
            ends = {end for start in ends for end in self.piece(piece, start)}
        return ends

    def piece(self, piece: Piece, at: int) -> set[int]:
        match piece:
            case Words(text):
                return self.words(text, at)
            case Clause():
                return {at} | self.pieces(piece.pieces, at)
            case Slot(_, "expression"):
                return {end for e in EXPRESSIONS for end in self.pieces(e.PIECES, at)}
            case Slot(_, "part", parts):
                return {end for p in parts for end in self.pieces(p.PIECES, at)}
            case Slot(_, kind):
                return self.value(kind, at)

    def words(self, text: str, at: int) -> set[int]:
        for word in re.finditer(r"\s*\S+|\s+", text):
            here = at + word.start()
            if not self._stands(word[0], here):
                space = len(word[0]) - len(word[0].lstrip())
                if self.text[here : here + space].isspace():
                    here += space
                self.wanted(here, f"'{word[0].strip()}'" if word[0].strip() else "a space")
                return set()
        return {at + len(text)}

    def _stands(self, word: str, at: int) -> bool:
        """Whether a whole word of the template stands here: `of` does not in `off`."""
        after = self.text[at + len(word) : at + len(word) + 1]
        cut = re.fullmatch(r".*\w", word) and re.fullmatch(r"\w", after)
        return self.text.startswith(word, at) and not cut

    def value(self, kind: str, at: int) -> set[int]:
        found = re.compile(rf"(?:{PATTERNS[kind]})(?!\w)").match(self.text, at)
        if found is None:
            self.wanted(at, CALLED[kind])
            return set()
        return {found.end()}


def _furthest(text: str) -> tuple[int, tuple[str, ...]]:
    walk = _Walk(text)
    for form in STATEMENTS:
        for end in walk.pieces(form.PIECES, 0):
            walk.words(".", end)
            if end < len(text) and text[end] == ".":
                walk.wanted(end + 1, "the end of the line")
    return walk.column + 1, tuple(walk.expected)
