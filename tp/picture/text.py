"""The text of every chip in one: like chips and like layers share a line with holes in it.

A hole is `{c}` for the chip, `{l}`, `{l+1}` or `{2*l+1}` for a layer, and `{64/128/-}` for a
number of each chip's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from author.english import write
from author.forms import Statement
from author.names import Name
from author.program import bound, changed, read_by
from author.statements import Tensor
from tp.rolled import Along, Item, Loop, Once, Rolled, map_names

CHIP = Along("chip", 0)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A statement of the chips that have it; `chips` is None for all of them.

    A line that is `once` stands in the first of its layers alone. `names` are what it binds, reads
    and changes, the chip left out: `Wq{l}` for `Wq{l}_c{c}`.
    """

    text: str
    chips: tuple[int, ...] | None = None
    once: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The lines of a layer and of those like it, or with no layers what stands between them.

    The hole `{l}` counts the layers of a part from 0.
    """

    layers: tuple[int, ...]
    lines: tuple[Line, ...]


def parts_of(rolled: Rolled, chips: int) -> tuple[Part, ...]:
    """The parts of a step of one token, in the order in which their first layers run."""
    found: list[Part] = []
    straight: list[Item] = []
    for item in rolled.items:
        if isinstance(item, Loop) and item.axis == "layer":
            found.extend(_written(straight, chips))
            straight = []
            found.extend(_written(item.body, chips, item.count))
        else:
            straight.append(item)
    return (*found, *_written(straight, chips))


def _written(items: Iterable[Item], chips: int, count: int = 1) -> Iterator[Part]:
    """Items that stand `count` times, as a part for each of their layers."""
    lines: list[Line] = []
    held: list[Item] = []
    here: Along | int | None = None
    for item in items:
        layer = _layer_of(item)
        if layer is None and _declares(item):
            held.append(item)  # a table between two layers belongs to the one that uses it
            continue
        if layer != here and lines:
            if here is None:
                lines.extend(line for each in held for line in _lines(each, chips))
                held = []
            yield Part(layers=_layers(here, count), lines=tuple(lines))
            lines = []
        here = layer
        lines.extend(line for each in (*held, item) for line in _lines(each, chips))
        held = []
    lines.extend(line for each in held for line in _lines(each, chips))
    if lines:
        yield Part(layers=_layers(here, count), lines=tuple(lines))


def _layer_of(item: Item) -> Along | int | None:
    """The layer of an item, as the loops of `tp.roll` have it."""
    match item:
        case Loop():
            return _layer_of(item.body[0])
        case Once():
            return None
        case _:
            names = (bound(item), *changed(item))
            return next((n.layer for n in names if n is not None and n.layer is not None), None)


def _declares(item: Item) -> bool:
    return isinstance(item, Tensor) or (isinstance(item, Once) and _declares(item.item))


def _layers(layer: Along | int | None, count: int) -> tuple[int, ...]:
    match layer:
        case None:
            return ()
        case Along():
            return tuple(layer.at(copy) for copy in range(count))
        case _:
            return (layer,)


# --- Lines


def _lines(item: Item, chips: int) -> Iterator[Line]:
    match item:
        case Loop("chip"):
            yield from _of_chips(item, chips)
        case Loop():
            raise AssertionError(f"a loop over {item.axis} in a step of one token")
        case Once("layer", inner):
            yield from (replace(line, once=True) for line in _lines(inner, chips))
        case Once(_, inner):
            yield from _lines(inner, chips)
        case _:
            yield _line(item)


def _of_chips(loop: Loop, chips: int) -> Iterator[Line]:
    """The lines of the chips that have the body, and those of the absent ones.

    What the first chip declares for all, the chips after it have before their own lines, and the
    chips before it after theirs.
    """
    absent = dict(loop.absent)
    present = tuple(chip for chip in range(chips) if chip not in absent)
    first = present[0]
    once = tuple(item.item for item in loop.body if isinstance(item, Once))
    yield from _for(once, tuple(range(first + 1, chips)), chips)
    for item in loop.body:
        if isinstance(item, Once):
            yield from _for((item.item,), (first,), chips)
        else:
            yield from _for((item,), present if absent else None, chips)
    alike: dict[tuple[Item, ...], list[int]] = {}
    for chip, items in absent.items():
        alike.setdefault(map_names(items, _of_any_chip), []).append(chip)
    for items, those in alike.items():
        yield from _for(items, tuple(those), chips)
    yield from _for(once, tuple(range(first)), chips)


def _of_any_chip(name: Name) -> Name:
    return name if name.chip is None else name._replace(chip=CHIP)


def _for(items: tuple[Item, ...], those: tuple[int, ...] | None, chips: int) -> Iterator[Line]:
    """The lines of items, for some chips alone."""
    if those != ():
        for item in items:
            yield from (replace(line, chips=those) for line in _lines(item, chips))


def _line(statement: Statement) -> Line:
    named = (bound(statement), *read_by(statement), *changed(statement))
    keys = (str(n._replace(chip=None)) for n in named if n is not None)
    return Line(text=f"{write(statement)}.", names=tuple(dict.fromkeys(keys)))
