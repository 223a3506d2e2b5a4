"""What a statement of one decode step reads and computes on one chip, from the shapes it meets.

Reads are bytes of weights, tables, caches and states: values on their way are not counted, and
neither is what is written. Operations count two for a multiplication and its addition in a
product, and one for each element that any other form makes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

from author import statements as say
from author.fits import Shape
from author.forms import Expression, Form, Statement
from author.names import Name
from author.program import read_by
from author.shapes import shape_of
from tp.operands import canonical
from tp.rolled import Along, Each, Item, Loop, Once, place


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes read and operations done."""

    reads: int = 0
    operations: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(reads=self.reads + other.reads, operations=self.operations + other.operations)

    def times(self, count: int) -> "Cost":
        """So many of it."""
        return Cost(reads=self.reads * count, operations=self.operations * count)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What one chip has of a matrix, in bytes: all of it, and one of its rows."""

    nbytes: int
    row_bytes: int

    @classmethod
    def of(cls, nbytes: int, rows: int) -> "Stored":
        """So many bytes in equal rows."""
        return cls(nbytes=nbytes, row_bytes=nbytes // rows if rows > 0 else 0)


# --- The statements of one chip


def of_chip(items: tuple[Item, ...], chip: int) -> Iterator[Statement]:
    """The statements that a chip runs, by what it really holds; layers are written out already."""
    for item in items:
        match item:
            case Loop("chip", _, body, absent) if chip in dict(absent):
                # A table that is first used there is declared for all.
                yield from _plain(tuple(inner for inner in body if isinstance(inner, Once)))
                yield from _plain(place(dict(absent)[chip], "chip", chip))
            case Loop("chip", _, body):
                yield from _plain(place(body, "chip", chip))
            case Loop() | Once():
                yield from _plain((item,))
            case _:
                yield item


def padded(items: tuple[Item, ...]) -> Iterator[Statement]:
    """The statements that every chip runs, its extents those of the chip that has most."""
    for item in items:
        match item:
            case Loop("chip", _, body):
                yield from _plain(_widest(body))
            case Loop() | Once():
                yield from _plain((item,))
            case _:
                yield item


def _plain(items: tuple[Item, ...]) -> Iterator[Statement]:
    for item in items:
        match item:
            case Loop():
                raise AssertionError(f"a loop over {item.axis} in a step of one row")
            case Once():
                yield from _plain((item.item,))
            case _:
                yield item


def _widest(value: Any) -> Any:
    """A piece of a chip's body with every extent the largest; its names are those of chip 0."""
    if isinstance(value, Each):
        return max((v for v in value.values if v is not None), default=0)
    if isinstance(value, Name):
        return value._replace(chip=0) if isinstance(value.chip, Along) else value
    if isinstance(value, tuple):
        return tuple(map(_widest, value))
    if isinstance(value, Form | Once):
        fields = {f.name: _widest(getattr(value, f.name)) for f in fields_of(value)}  # type: ignore[arg-type]
        return type(value)(**fields)
    return value


# --- Their costs


@dataclass
class Walk:
    """A walk over the statements of one chip, which knows the shapes of what they name.

    `declared` gives shapes that are other than the text's, by canonical name; `stored` what a
    read of a matrix takes; `visible` how many positions a step reads of a cache; `joined` the
    columns that a join puts together; `chip` is whose names the statements have.
    """

    chip: int
    declared: Mapping[Name, Shape]
    stored: Mapping[Name, Stored]
    visible: int
    joined: int

    def __post_init__(self) -> None:
        self.shapes: dict[Name, Shape] = {}

    def cost(self, statement: Statement) -> Cost:
        """The cost of the next statement."""
        match statement:
            case say.Tensor(name, rows, cols):
                self.shapes[name] = self.declared.get(canonical(name), (rows, cols))
            case say.Let(name, say.Join(partial)):
                self.shapes[name] = self.partial(partial)[0], self.joined
            case say.Let(name, say.Fold(partial)):
                self.shapes[name] = self.partial(partial)
            case say.Let(name, value):
                self.shapes[name] = shape_of(value, self.shapes)
                return Cost(
                    reads=sum(self._reads(value, n) for n in dict.fromkeys(read_by(statement))),
                    operations=self._operations(value, self.shapes[name]),
                )
        return Cost()

    def partial(self, name: Name) -> Shape:
        """The shape of this chip's own partial, as a collective names all chips' by one."""
        return self.shapes[name._replace(chip=self.chip) if name.chip is not None else name]

    def _reads(self, form: Expression, name: Name) -> int:
        """The bytes that a form reads of a matrix; a value is none."""
        stored = self.stored.get(canonical(name))
        if stored is None:
            return 0
        match form:
            case say.Row() | say.Rows():
                return min(stored.row_bytes, stored.nbytes)
            case say.Rope() if name in (form.cos, form.sin):
                return stored.row_bytes
            case say.First() | say.Last():
                return 0  # a part of a cache, read where it is attended to
            case say.Attention() if name in (form.k, form.v):
                return self._positions(form) * stored.row_bytes
            case say.Moe() if name not in (form.router, form.router_bias, form.choice_bias):
                return stored.nbytes * form.chosen // form.experts
            case _:
                return stored.nbytes

    def _positions(self, form: say.Attention) -> int:
        match form.window:
            case say.Sliding(n) | say.Chunked(n):
                return min(self.visible, n)
            case _:
                return self.visible

    def _operations(self, form: Expression, made: Shape) -> int:
        match form:
            case say.Matmul():
                return 2 * made[0] * self._size(form.w)
            case say.Attention():
                return 2 * self._positions(form) * (self._size(form.q) + made[1])
            case say.Moe():
                experts = sum(self._size(n) for n in (form.gate, form.up, form.down))
                chosen = experts // form.experts * form.chosen
                return 2 * (self._size(form.router) + chosen)
            case say.GatedDelta():  # decay, the error, its outer product, the output
                return 7 * self._size(form.state)
            case say.LinearAttention():  # decay, the outer product, the output
                return 5 * self._size(form.state)
            case say.CausalConv():
                return 2 * self._size(form.weight)
            case say.Row() | say.Rows() | say.First() | say.Last() | say.Joined():
                return 0  # places, no arithmetic
            case say.Argmax() | say.SquareSum():
                return self._size(form.x)
            case _:
                return made[0] * made[1]

    def _size(self, name: Name) -> int:
        rows, cols = self.shapes[name]
        return rows * cols
