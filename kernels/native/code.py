"""Writes the steps of a chain as the integers that the handler reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

ALIGN = 16  # floats; scratch begins at whole cache lines


class Kind(IntEnum):
    """What a step does, as `handlers.cc` counts them."""

    PRODUCTS = 0
    EMBED = 1
    NORM = 2
    TURN = 3
    WRITE = 4
    ATTEND = 5
    UNARY = 6
    BINARY = 7
    FOLD = 8
    JOIN = 9
    ROW = 10
    ARGMAX = 11


class Unary(IntEnum):
    """Elementwise functions of one matrix."""

    SILU = 0
    SIGMOID = 1
    GELU = 2
    SCALED = 3
    CAPPED = 4


class Binary(IntEnum):
    """Elementwise functions of two."""

    PLUS = 0
    HADAMARD = 1
    SWIGLU = 2
    GEGLU = 3


class Read(NamedTuple):
    """A value that a step reads, by number."""

    value: int


class Made(NamedTuple):
    """A value that a step makes, by number."""

    value: int


Part = Read | Made | int | float


@dataclass(frozen=True)
class Step:
    """One operation: what follows its kind in the code, values by number."""

    kind: Kind
    parts: tuple[Part, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The values it reads."""
        return tuple(p.value for p in self.parts if isinstance(p, Read))

    @property
    def makes(self) -> tuple[int, ...]:
        """The values it makes."""
        return tuple(p.value for p in self.parts if isinstance(p, Made))


# --- What is done together: each rewrite leaves what is computed as it was


def together(steps: Sequence[Step], wanted: Sequence[int]) -> list[Step]:
    """The steps after every rewrite; `wanted` values are results, and are made whatever else is."""
    out = list(steps)
    for rewrite in REWRITES:
        out = rewrite(out, wanted)
    return out


def _products(steps: Sequence[Step], wanted: Sequence[int]) -> list[Step]:
    """Products of the same rows that follow one another share their input, and the threads."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        alike = last is not None and last.kind == step.kind == Kind.PRODUCTS
        if not alike or last is None or last.parts[0] != step.parts[0]:
            out.append(step)
            continue
        x, gate, count, *rest = last.parts
        assert isinstance(count, int)
        weights, made = rest[:count], rest[count:]
        parts = (x, gate, count + 1, *weights, step.parts[3], *made, step.parts[4])
        out[-1] = Step(Kind.PRODUCTS, parts)
    return out


def _geglu(steps: Sequence[Step], wanted: Sequence[int]) -> list[Step]:
    """A gelu that is read once, by a product, is a gate."""
    return _pairs(steps, wanted, _as_geglu)


def _as_geglu(first: Step, second: Step) -> Step | None:
    if first.kind != Kind.UNARY or first.parts[0] != Unary.GELU or second.kind != Kind.BINARY:
        return None
    kind, a, b, out = second.parts
    if kind != Binary.HADAMARD or a != Read(first.makes[0]) or b == a:
        return None
    return Step(Kind.BINARY, (Binary.GEGLU, Read(first.reads[0]), b, out))


def _gated(steps: Sequence[Step], wanted: Sequence[int]) -> list[Step]:
    """A gate and what it gates, read by nobody else, are made column by column and put together."""
    return _pairs(steps, wanted, _as_gated)


def _as_gated(first: Step, second: Step) -> Step | None:
    if first.kind != Kind.PRODUCTS or second.kind != Kind.BINARY or len(first.makes) != 2:
        return None
    kind, a, b, out = second.parts
    if kind not in (Binary.SWIGLU, Binary.GEGLU) or (a, b) != tuple(map(Read, first.makes)):
        return None
    x, _, count, *rest = first.parts
    return Step(Kind.PRODUCTS, (x, kind, count, *rest[:2], out))


def _pairs(steps: Sequence[Step], wanted: Sequence[int], merged) -> list[Step]:
    """Each pair of neighbours that can be one step is, if nobody else reads the first's values."""
    uses = [value for step in steps for value in step.reads] + list(wanted)
    out: list[Step] = []
    for step in steps:
        one = merged(out[-1], step) if out else None
        if one is not None and all(uses.count(value) == 1 for value in out[-1].makes):
            out[-1] = one
        else:
            out.append(step)
    return out


def _looking_ahead(steps: Sequence[Step], wanted: Sequence[int]) -> list[Step]:
    """Products that say which weights come next, and whether chips meet before that.

    After the last come those of the next token.
    """
    products = [i for i, step in enumerate(steps) if step.kind == Kind.PRODUCTS]
    out = list(steps)
    for i, following in zip(products, products[1:] + products[:1], strict=True):
        weights, gated = _weights(steps[following]), steps[following].parts[1] != -1
        between = steps[i:following] if i < following else (*steps[i:], *steps[:following])
        meets = any(step.kind in (Kind.FOLD, Kind.JOIN) for step in between)
        out[i] = Step(
            Kind.PRODUCTS, (*steps[i].parts, int(meets), int(gated), len(weights), *weights)
        )
    return out


REWRITES = (_products, _geglu, _gated, _looking_ahead)


def _weights(step: Step) -> tuple[Part, ...]:
    count = step.parts[2]
    assert isinstance(count, int)
    return step.parts[3 : 3 + count]


# --- Integers


@dataclass(kw_only=True)
class Layout:
    """What the code says of a call but for its steps.

    `arguments` and `results` are values in the order of the call; `changed` those results that are
    an argument changed in place, by the argument; `shapes` rows and columns of every value. Of
    `counted` rows a stack has, only as many as the value `count` says are real. From `inexact` rows
    on a product may take its inputs in 16 bits.
    """

    arguments: Sequence[int]
    results: Sequence[int]
    changed: Mapping[int, int] = field(default_factory=dict)
    shapes: Mapping[int, tuple[int, int]]
    counted: int = 1
    inexact: int = 0
    count: int | None = None
    chips: int = 1
    chip: int | None = None


def code(steps: Sequence[Step], layout: Layout) -> np.ndarray:
    """The integers of a chain, int32."""
    slots = {value: slot for slot, value in enumerate(layout.arguments)}
    at = len(layout.arguments)
    slots.update({value: at + i for i, value in enumerate(layout.results)})
    # A value changed in place is its argument's memory under the result's number.
    slots.update({layout.changed[r]: slots[r] for r in layout.results if r in layout.changed})
    scratch, floats = _scratch(steps, slots, layout.shapes)
    at += len(layout.results) + 1  # and the result that only says which chain comes first
    slots.update({value: at + i for i, value in enumerate(scratch)})
    given = {value: slot for slot, value in enumerate(layout.arguments)}
    padded = [r for r in layout.results if r not in layout.changed]
    pairs = [(given[layout.changed[r]], slots[r]) for r in layout.changed]
    out: list[int] = [
        -1 if layout.count is None else slots[layout.count],
        layout.counted,
        layout.inexact,
        layout.chips,
        -1 if layout.chip is None else slots[layout.chip],
        len(pairs),
        *(slot for pair in pairs for slot in pair),
        len(padded),
        *(slots[r] for r in padded),
        len(scratch),
        floats,
        *(n for value, begin in scratch.items() for n in (begin, *layout.shapes[value])),
    ]
    for step in steps:
        out.append(step.kind)
        out.extend(_integer(part, slots) for part in step.parts)
    return np.array(out, np.int32)


def _integer(part: Part, slots: Mapping[int, int]) -> int:
    match part:
        case Read(value) | Made(value):
            return slots[value]
        case float():
            return int(np.float32(part).view(np.int32))
        case _:
            return int(part)


def _scratch(
    steps: Sequence[Step], slots: Mapping[int, int], shapes: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """Where each value that is not a result begins, and how many floats there are in all.

    A place is taken again as soon as nobody reads what stands in it.
    """
    last = {value: i for i, step in enumerate(steps) for value in (*step.makes, *step.reads)}
    begins: dict[int, int] = {}
    free: list[tuple[int, int]] = []  # sizes and begins
    taken: dict[int, tuple[int, int]] = {}
    end = 0
    for i, step in enumerate(steps):
        for value in step.makes:
            if value in slots:
                continue
            rows, cols = shapes[value]
            size = -(-max(rows * cols, 1) // ALIGN) * ALIGN
            fitting = min((place for place in free if place[0] >= size), default=None)
            if fitting is None:
                fitting, end = (size, end), end + size
            else:
                free.remove(fitting)
            taken[value], begins[value] = fitting, fitting[1]
        free.extend(taken.pop(value) for value in list(taken) if last[value] <= i)
    return begins, end
