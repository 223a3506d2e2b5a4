"""Writes a rolled program out again, in whole or along one axis."""

from collections.abc import Iterator
from dataclasses import replace

from author.forms import Statement
from author.names import Name
from author.statements import Fold, Join, Joined, Let, Plus
from tp.rolled import Axis, Item, Loop, Once, Rolled, place


def unroll(rolled: Rolled) -> tuple[Statement, ...]:
    """The statements of a rolled program, written out in full in their first order."""
    return tuple(i for i in _write_out(rolled.items) if isinstance(i, Statement))


def unroll_layers(rolled: Rolled) -> tuple[Item, ...]:
    """The items with layers written out: straight-line code, still rolled over chips."""
    return tuple(_write_out(rolled.items, only="layer"))


def collective_steps(statement: Let) -> Iterator[Statement]:
    """The additions, or the joins, that a joint text spells out."""
    form = statement.value
    assert isinstance(form, Fold | Join)
    partials = [place(form.partial, "chip", chip) for chip in range(form.chips)]
    if form.chips == 1:
        yield Let(statement.name, type(form)(partials[0], 1))
        return
    step, letter = (Plus, "f") if isinstance(form, Fold) else (Joined, "j")
    total = partials[0]
    for index, partial in enumerate(partials[1:], start=1):
        last = index == form.chips - 1
        name = statement.name if last else Name.of(f"{statement.name}_{letter}{index}")
        yield Let(name, step(total, partial))
        total = name


def _write_out(items: tuple[Item, ...], only: Axis | None = None) -> Iterator[Item]:
    for item in items:
        if isinstance(item, Loop) and only in (None, item.axis):
            absent = dict(item.absent)
            first = next((i for i in range(item.count) if i not in absent), 0)
            for index in range(item.count):
                copy = absent.get(index, item.body) if item.axis == "chip" else item.body
                copy = _first_only(copy, item.axis, index == first)
                yield from _write_out(place(copy, item.axis, index), only)
        elif isinstance(item, Let) and isinstance(item.value, Fold | Join) and only is None:
            yield from collective_steps(item)
        else:
            yield item


def _first_only(items: tuple[Item, ...], axis: Axis, first: bool) -> tuple[Item, ...]:
    """A copy of a loop's body: declarations made once stand in the first copy alone."""
    out: list[Item] = []
    for item in items:
        match item:
            case Once() if item.axis == axis:
                out.extend((item.item,) if first else ())
            case Once():
                out.extend(replace(item, item=i) for i in _first_only((item.item,), axis, first))
            case Loop():
                out.append(replace(item, body=_first_only(item.body, axis, first)))
            case _:
                out.append(item)
    return tuple(out)
