"""Stretches a rolled program to another count of rows or sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from author.forms import Expression
from author.names import Name
from author.statements import L2Norm, Let, Number, RmsNorm, Row, SetItem, Tensor, Tokens
from tp.rolled import Each, Item, Listed, Loop, Rolled


def stretch(
    rolled: Rolled, rows: int, *, tokens: Sequence[int] = (), positions: Sequence[int] = ()
) -> Rolled:
    """The same program for another count of rows or sequences.

    Rolled from a text of at least two. `tokens` and `positions` are the numbers to write where
    the text names run-time integers; without them the first of the authored ones is repeated.
    """
    authored = authored_rows(rolled)
    if authored < 2:
        raise ValueError(f"a text of {authored} rows does not say what runs with them; 2 do")
    to = _Stretch(authored, rows, tuple(tokens), tuple(positions))
    return replace(rolled, items=to.items(rolled.items))


def authored_rows(rolled: Rolled) -> int:
    """How many rows or sequences the text is written for; 1 where it stacks none."""
    return next(
        (i.rows for i in _all(rolled.items) if isinstance(i, Tensor) and stacked(i.name)),
        next((i.cols for i in _all(rolled.items) if isinstance(i, Tokens)), 1),
    )


def _all(items: tuple[Item, ...]) -> Iterator[Item]:
    for item in items:
        yield item
        if isinstance(item, Loop):
            yield from _all(item.body)


@dataclass(frozen=True)
class _Stretch:
    authored: int
    rows: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    def items(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(self.item(item) for item in items)

    def item(self, item: Item) -> Item:
        match item:
            case Loop("sequence", _, body):
                return Loop("sequence", self.rows, self.items(body))
            case Loop():
                return replace(item, body=self.items(item.body))
            case SetItem(token=Listed() as token):
                return replace(item, token=self.listed(token, self.tokens))
            case Number(value=Listed() as value):
                return replace(item, value=self.listed(value, self.positions))
            case Tokens():
                return replace(item, cols=self.rows)
            case Tensor() if stacked(item.name):
                return replace(item, rows=self.rows)
            case Let(value=value):
                return replace(item, value=self.value(value))
            case _:
                return item

    def value(self, value: Expression) -> Expression:
        match value:
            case RmsNorm() | L2Norm() if stacked(value.x) and value.heads is not None:
                return replace(value, heads=self.segments(value.heads))
            case Row(row=int()) if stacked(value.x):
                return replace(value, row=self.rows)
            case _:
                return value

    def segments(self, heads: Any) -> Any:
        """Norms count the segments of the whole matrix, rows and heads together."""
        if isinstance(heads, Each):
            return Each(tuple(None if v is None else self.segments(v) for v in heads.values))
        return heads // self.authored * self.rows

    def listed(self, authored: Listed, given: tuple[int, ...]) -> Listed:
        return Listed(given if given else (authored.values[0],) * self.rows)


def stacked(name: Name) -> bool:
    """Whether a matrix holds stacked rows: the language marks it with a leading `b`."""
    return name.base in ("X", "Xe") or name.base.startswith("b")
