"""A rolled program: statements in loops over chips, sequences and layers, and its written form."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from author.english import write
from author.forms import Form, Statement
from author.names import Name
from author.program import Program

Axis = Literal["chip", "sequence", "layer"]


@dataclass(frozen=True)
class Along:
    """An integer that runs evenly with an index: `start + step * index`."""

    axis: Axis
    start: int
    step: int = 1

    def at(self, index: int) -> int:
        """Its value in one copy."""
        return self.start + self.step * index

    def __str__(self) -> str:
        term = self.axis[0] if self.step == 1 else f"{self.step}*{self.axis[0]}"
        return "{" + (f"{term}+{self.start}" if self.start else term) + "}"


@dataclass(frozen=True)
class Each:
    """A number of its own on each chip; None on a chip that has no part in the statement.

    Integers are extents or addresses; a real is the factor of a multiple.
    """

    values: tuple[int | None, ...] | tuple[float | None, ...]

    def at(self, index: int) -> int | float | None:
        """Its value on one chip."""
        return self.values[index]

    @property
    def largest(self) -> int:
        """What every chip is padded to, of an extent."""
        return max(v for v in self.values if isinstance(v, int))

    def __str__(self) -> str:
        return "{" + "/".join("-" if v is None else str(v) for v in self.values) + "}"


@dataclass(frozen=True)
class Listed:
    """A run-time integer of each sequence: what the text happened to be authored for."""

    values: tuple[int, ...]

    def at(self, index: int) -> int:
        """Its value for one sequence."""
        return self.values[index]

    def __str__(self) -> str:
        return "{" + ",".join(map(str, self.values)) + "}"


@dataclass(frozen=True)
class Loop:
    """A body that stands once for each index; `absent` chips have statements of their own."""

    axis: Axis
    count: int
    body: tuple["Item", ...]
    absent: tuple[tuple[int, tuple["Item", ...]], ...] = ()


@dataclass(frozen=True)
class Once:
    """A declaration that stands in one copy of a loop's body only: the first that has a body."""

    axis: Axis
    item: "Item"


Item = Statement | Loop | Once


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A program with its copies merged; `program` is what it came from, tables and all."""

    items: tuple[Item, ...]
    program: Program


def place(value: Any, axis: Axis, index: int) -> Any:
    """A piece of a rolled program as it stands in one copy."""
    if isinstance(value, Along):
        return value.at(index) if value.axis == axis else value
    if isinstance(value, Each):
        return value.at(index) if axis == "chip" else value
    if isinstance(value, Listed):
        return value.at(index) if axis == "sequence" else value
    if isinstance(value, Name):
        return Name(*(place(part, axis, index) for part in value))
    if isinstance(value, tuple):
        return tuple(place(v, axis, index) for v in value)
    if isinstance(value, Form | Loop | Once):
        return _rebuilt(value, lambda v: place(v, axis, index))
    return value


def _rebuilt(value: Any, change: Any) -> Any:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    changed = {name: change(v) for name, v in fields.items()}
    if all(changed[name] is fields[name] for name in fields):
        return value
    return type(value)(**changed)


def map_names(value: Any, change: Callable[[Name], Name]) -> Any:
    """A piece with every name replaced."""
    if isinstance(value, Name):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_names(v, change) for v in value)
    if isinstance(value, Form | Loop | Once):
        return _rebuilt(value, lambda v: map_names(v, change))
    return value


def runs(value: Any, axis: Axis) -> bool:
    """Whether a piece differs from copy to copy along an axis."""
    if isinstance(value, Along):
        return value.axis == axis
    if isinstance(value, Each):
        return axis == "chip"
    if isinstance(value, Listed):
        return axis == "sequence"
    if isinstance(value, Name | tuple):
        return any(runs(v, axis) for v in value)
    if isinstance(value, Form | Loop | Once):
        return any(runs(getattr(value, f.name), axis) for f in dataclasses.fields(value))  # type: ignore[arg-type]
    return False


def write_rolled(rolled: Rolled) -> str:
    """The rolled program to read: loops indented, integers that differ in braces."""
    return "".join(f"{line}\n" for line in ("## Main", *_lines(rolled.items, 0)))


def _lines(items: tuple[Item, ...], depth: int) -> Iterator[str]:
    for item in items:
        if isinstance(item, Statement):
            yield "  " * depth + write(item) + "."
            continue
        if isinstance(item, Once):
            yield from _lines((item.item,), depth)
            continue
        missing = "".join(f", chip {chip} has no part" for chip, _ in item.absent)
        last = item.count - 1
        yield "  " * depth + f"For each {item.axis} {item.axis[0]} of 0 to {last}{missing}:"
        yield from _lines(item.body, depth + 1)
