"""Rolls a written-out program up: chips, then sequences, then layers become loops; and back."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from author.english import write
from author.forms import Form, Statement
from author.manifest import TpCollective, TpManifest
from author.names import Name
from author.program import Program, ProgramError, bound, changed, read_by
from author.statements import (
    First,
    Fold,
    Join,
    Let,
    Number,
    Scaled,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
)
from tp.rolled import Along, Axis, Each, Item, Listed, Loop, Once, Rolled, map_names, place
from tp.unroll import collective_steps

CHIP = Along("chip", 0)


class Uneven(Exception):
    """Two copies differ in more than integers that run evenly."""


def roll(program: Program) -> Rolled:
    """Merge the copies of a program that differ only in integers; `unroll` is its inverse.

    Raises ProgramError where chips or sequences do not run alike.
    """
    items: tuple[Item, ...] = program.statements
    if program.manifest is not None:
        items = _roll_chips(items, program.manifest)
    items = _roll_sequences(items)
    return Rolled(items=_roll_layers(items), program=program)


# --- Merging copies


def merge(axis: Axis, copies: Sequence[Any], indices: Sequence[int], chips: int = 0) -> Any:
    """One piece that stands for all of its copies along an axis; raises Uneven."""
    first = copies[0]
    if all(c == first for c in copies):
        return first
    if any(type(c) is not type(first) for c in copies):
        raise Uneven
    if isinstance(first, int) and not isinstance(first, bool):
        return _merge_integers(axis, copies, indices, chips)
    if isinstance(first, Name):
        return _merge_names(axis, copies, indices, chips)
    if isinstance(first, tuple):
        if len({len(c) for c in copies}) > 1:
            raise Uneven
        return tuple(merge(axis, parts, indices, chips) for parts in zip(*copies, strict=True))
    if isinstance(first, Form | Loop | Once):
        return _merge_fields(axis, copies, indices, chips)
    raise Uneven


def _merge_names(axis: Axis, names: Sequence[Name], indices: Sequence[int], chips: int) -> Name:
    if axis == "chip" and [n.chip for n in names] == list(indices):
        return merge(axis, [n._replace(chip=None) for n in names], indices, chips)._replace(
            chip=CHIP
        )
    return Name(*(merge(axis, parts, indices, chips) for parts in zip(*names, strict=True)))


def _merge_fields(axis: Axis, copies: Sequence[Any], indices: Sequence[int], chips: int) -> Any:
    first = copies[0]
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values = [getattr(c, field.name) for c in copies]
        if axis == "sequence" and (type(first), field.name) in RUN_TIME:
            fields[field.name] = Listed(tuple(values))
        elif axis == "chip" and (type(first), field.name) in BY_CHIP and len(set(values)) > 1:
            fields[field.name] = _each(values, indices, chips)
        else:
            fields[field.name] = merge(axis, values, indices, chips)
    return type(first)(**fields)


# Integers that a step takes from outside: no rule says how they run.
RUN_TIME = {(Number, "value"), (SetItem, "token")}

# Reals that may differ from chip to chip: what several chips hold alike counts on one of them.
BY_CHIP = {(Scaled, "factor")}


def _merge_integers(axis: Axis, values: Sequence[int], indices: Sequence[int], chips: int) -> Any:
    if axis == "chip":
        return _each(values, indices, chips)  # numbers that count like chips are no chips
    step = values[1] - values[0]
    if any(v != values[0] + step * i for i, v in enumerate(values)):
        raise Uneven
    return Along(axis, values[0], step)


def _each(values: Sequence[Any], indices: Sequence[int], chips: int) -> Each:
    by_chip = dict(zip(indices, values, strict=True))
    return Each(tuple(by_chip.get(chip) for chip in range(chips)))


# --- Chips


def _roll_chips(items: tuple[Item, ...], manifest: TpManifest) -> tuple[Item, ...]:
    steps = {step: c for c in manifest.collectives for step in (*c.steps, c.out)}
    out: list[Item] = []
    at = 0
    while at < len(items):
        statement = items[at]
        assert isinstance(statement, Statement)
        collective = steps.get(bound(statement) or Name(""))
        if collective is not None:
            length = max(len(collective.steps), 1)
            out.append(_collective(collective, items[at : at + length]))
        elif _chip_of(statement) is None:
            length = 1
            out.append(statement)
        else:
            run = _run(items[at:], "chip", lambda s: None if bound(s) in steps else _chip_of(s))
            length = run.length
            out.append(_chip_loop(run.blocks, manifest.chips))
        at += length
    return tuple(out)


def _chip_of(statement: Statement) -> int | None:
    names = (bound(statement), *changed(statement), *read_by(statement))
    chips = {n.chip for n in names if n is not None and n.chip is not None}
    if len(chips) > 1:
        raise ProgramError.at(
            statement,
            found=f"it reads across chips {sorted(chips)} outside a collective",
            wanted="a fold or a join that the manifest names",
        )
    return chips.pop() if chips else None


@dataclass(frozen=True)
class _Run:
    """Consecutive statements by their index along an axis, and how many items they take."""

    blocks: dict[int, tuple[Item, ...]]
    length: int


def _run(items: Sequence[Item], axis: Axis, index_of: Callable[[Statement], int | None]) -> _Run:
    """The run at the start of `items`, as long as indices do not fall.

    A declaration without an index that stands within a block (a host table where it is first
    used) belongs to that block, once.
    """
    blocks: dict[int, list[Item]] = {}
    held: list[Item] = []
    length, last = 0, -1
    for at, item in enumerate(items):
        index = index_of(item) if isinstance(item, Statement) else None
        if index is None and blocks and _is_declaration(item):
            held.append(Once(axis, item))
            continue
        if index is None or index < last or (held and index != last):
            break
        blocks.setdefault(index, []).extend((*held, item))
        held, length, last = [], at + 1, index
    return _Run({i: tuple(b) for i, b in blocks.items()}, length)


def _is_declaration(item: Item) -> bool:
    return isinstance(item, Tensor) or (isinstance(item, Once) and _is_declaration(item.item))


def _merge_blocks(axis: Axis, blocks: dict[int, tuple[Item, ...]], chips: int = 0) -> Any:
    """The body that stands for every block; raises Uneven."""
    first, *others = blocks.values()
    once = [(at, item) for at, item in enumerate(first) if isinstance(item, Once)]
    alike = tuple(item for item in first if not isinstance(item, Once))
    body = list(merge(axis, [alike, *others], list(blocks), chips))
    for at, item in once:
        body.insert(at, item)
    return tuple(body)


def _chip_loop(blocks: dict[int, tuple[Item, ...]], chips: int) -> Loop:
    first = next(iter(blocks.values()))[0]
    assert isinstance(first, Statement)
    if sorted(blocks) != list(range(chips)):
        raise ProgramError.at(
            first,
            found=f"only chips {sorted(blocks)} of {chips} have a part here",
            wanted="a zero partial for each chip that has none",
        )
    absent = {c: b for c, b in blocks.items() if _is_zero_partial(b)}
    present = {c: b for c, b in blocks.items() if c not in absent} or blocks
    if present is blocks:
        absent = {}
    try:
        body = _merge_chips(present, chips)
    except Uneven:
        raise ProgramError.at(
            first,
            found="the chips' statements differ in more than integers",
            wanted="the same statements on every chip that has a part",
        ) from None
    return Loop("chip", chips, body, tuple(absent.items()))


def _merge_chips(present: dict[int, tuple[Item, ...]], chips: int) -> Any:
    if len(present) > 1:
        return _merge_blocks("chip", present, chips)
    (block,) = present.values()
    return map_names(block, lambda n: n if n.chip is None else n._replace(chip=CHIP))


def _is_zero_partial(block: tuple[Item, ...]) -> bool:
    """A zero is a multiple by 0.0, of a value at hand or of some columns of one."""
    match block:
        case (Let(value=Scaled(factor=0.0)),) | (Let(value=First()), Let(value=Scaled(factor=0.0))):
            return True
        case _:
            return False


def _collective(collective: TpCollective, written: Sequence[Item]) -> Statement:
    """The one statement that stands for the steps of a collective."""
    chips = len(collective.partials)
    partial = collective.partials[0]._replace(chip=CHIP)
    form = Fold if collective.kind == "fold" else Join
    rolled = Let(collective.out, form(partial, chips))
    if tuple(collective_steps(rolled)) != tuple(written):
        first = written[0]
        assert isinstance(first, Statement)
        raise ProgramError.at(
            first,
            found=f"it is not how {collective.out} is put together from its partials",
            wanted=write(next(collective_steps(rolled))),
        )
    return rolled


# --- Sequences


def _roll_sequences(items: tuple[Item, ...]) -> tuple[Item, ...]:
    out: list[Item] = []
    at = 0
    while at < len(items):
        item = items[at]
        run = _run(items[at:], "sequence", _sequence_of)
        if isinstance(item, Loop):
            out.append(replace(item, body=_roll_sequences(item.body)))
            at += 1
        elif len(run.blocks) < 2:
            out.append(item)
            at += 1
        else:
            out.append(_sequence_loop(run.blocks))
            at += run.length
    return tuple(out)


def _sequence_of(statement: Statement) -> int | None:
    match statement:
        case SetItem():
            return statement.item - 1
        case SetRow():
            sequence = statement.x.sequence
            return statement.name.sequence if sequence is None else sequence
        case SetRows():
            return statement.name.sequence
        case _:
            name = bound(statement)
            return None if name is None else name.sequence


def _sequence_loop(blocks: dict[int, tuple[Item, ...]]) -> Loop:
    try:
        if list(blocks) != list(range(len(blocks))):
            raise Uneven
        body = _merge_blocks("sequence", blocks)
    except Uneven:
        first = next(iter(blocks.values()))[0]
        assert isinstance(first, Statement)
        raise ProgramError.at(
            first,
            found=f"sequences {sorted(blocks)} differ in more than integers that run evenly",
            wanted="the same statements for every sequence, from 0 on",
        ) from None
    return Loop("sequence", len(blocks), body)


# --- Layers


def _roll_layers(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Like layers that follow one another become loops, the longest run first found."""
    layers = _layers(items)
    first, last = min(layers.values(), default=(0, 0)), max(layers.values(), default=(0, 0))
    out, layer = list(items[: first[0]]), 0
    while layer < len(layers):
        best: tuple[int, int, tuple[Item, ...]] = (1, 1, items[slice(*layers[layer])])
        for period in range(1, (len(layers) - layer) // 2 + 1):
            count, body = _repeats(items, layers, layer, period)
            if count > 1 and count * period > best[0] * best[1]:
                best = (count, period, body)
        count, period, body = best
        out.extend(body if count == 1 else (Loop("layer", count, body),))
        layer += count * period
    return (*out, *items[last[1] :])


def _layers(items: tuple[Item, ...]) -> dict[int, tuple[int, int]]:
    """Where each layer starts and ends; a host table declared in between belongs to its layer."""
    starts: dict[int, int] = {}
    end = 0
    for at, item in enumerate(items):
        layer = _layer_of(item)
        if layer is not None:
            starts.setdefault(layer, at)
            end = at + 1
    edges = [*starts.values(), end]
    if list(starts) != list(range(len(starts))) or edges != sorted(edges):
        return {}  # a layer by itself, or text in an order of its own: nothing to roll
    return {layer: (edges[layer], edges[layer + 1]) for layer in starts}


def _layer_of(item: Item) -> int | None:
    if isinstance(item, Loop):
        return _layer_of(item.body[0])
    if isinstance(item, Once):
        return None
    return next((n.layer for n in (bound(item), *changed(item)) if n is not None), None)


def _repeats(
    items: tuple[Item, ...], layers: dict[int, tuple[int, int]], layer: int, period: int
) -> tuple[int, tuple[Item, ...]]:
    """How often a run of `period` layers stands in a row from `layer` on, and its merged body."""

    def block(copy: int) -> tuple[Item, ...]:
        start = layer + copy * period
        return items[layers[start][0] : layers[start + period - 1][1]]

    if layer + 2 * period > len(layers):
        return 1, block(0)
    try:
        body = merge("layer", [block(0), block(1)], range(2))
    except Uneven:
        return 1, block(0)
    count = 2
    while layer + (count + 1) * period <= len(layers):
        if place(body, "layer", count) != block(count):
            break
        count += 1
    return count, body
