"""Which part of a whole value one chip's value is, read off the forms that made it.

A matrix that is cut over chips has its part from the manifest; what is computed from it keeps the
part, runs of columns stretched or shrunk as the form does with them. So a chip's value can be cut
out of the whole one, and taken out of the padding that an executor puts round it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from author.forms import Expression
from author.manifest import Axis
from author.names import Name
from author.program import read_by
from author.statements import (
    Argmax,
    Attention,
    CausalAttention,
    Fold,
    GatedDelta,
    Join,
    Joined,
    Let,
    LinearAttention,
    Matmul,
    Moe,
    SquareSum,
)
from tp.operands import Operand
from tp.slices import Padded


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a chip has of one axis of a whole `extent`: runs of it, each with its padded length."""

    axis: Axis
    extent: int
    runs: tuple[Padded, ...]

    @property
    def length(self) -> int:
        """How much of the axis the chip has."""
        return sum(length for _, length, _ in self.runs)

    def times(self, of: int, to: int) -> "Part | None":
        """The columns of a value that has `to` for each `of` here; None where one would break."""
        ratio = Fraction(to, of)
        scaled = [[n * ratio for n in run] for run in (*self.runs, (self.extent, 0, 0))]
        if any(n.denominator != 1 for run in scaled for n in run):
            return None
        *runs, (extent, _, _) = [(int(start), int(n), int(width)) for start, n, width in scaled]
        return Part(axis="cols", extent=extent, runs=tuple(runs))


Parts = Mapping[Name, Part]


def parts_of(operands: Iterable[Operand]) -> dict[Name, Part]:
    """What every chip holds of the matrices that are cut, by their names there."""
    found: dict[Name, Part] = {}
    for operand in operands:
        layout = operand.layout
        if layout is None:
            continue
        extent = operand.whole[0 if layout.axis == "rows" else 1]
        for chip, ranges in enumerate(layout.ranges):
            lacking = ((0, 0),) * (len(layout.widths) - len(ranges))
            pairs = zip((*ranges, *lacking), layout.widths, strict=True)
            runs = tuple((start, length, width) for (start, length), width in pairs)
            name = operand.name._replace(chip=chip)
            found[name] = Part(axis=layout.axis, extent=extent, runs=runs)
    return found


def made_part(
    name: Name, form: Expression, parts: Parts, columns: Callable[[Name], int]
) -> Part | None:
    """The part that the value `name` of a form is; None where it is not cut, or nobody knows."""
    match form:
        case Fold() | Join() | SquareSum() | Argmax() | Moe():
            return None
        case Matmul(w=w, heads=None):
            return _by_cols(parts.get(w))
        case Matmul(w=w, heads=int(heads)):
            part = parts.get(w)
            of_head = 0 if part is None else part.length // heads
            return None if part is None or of_head == 0 else part.times(of_head, columns(w))
        case Joined(x, y, None):
            return _joined(parts.get(x), parts.get(y))
        case Attention(q=x) | CausalAttention(q=x) | Joined(x=x):
            return _stretched(parts.get(x), columns(x), columns(name))
        case GatedDelta(v=x) | LinearAttention(v=x):
            return _by_cols(parts.get(x))
        case _:
            cut = [n for n in read_by(Let(name, form)) if _by_cols(parts.get(n)) is not None]
            return _stretched(parts[cut[0]], columns(cut[0]), columns(name)) if cut else None


def _by_cols(part: Part | None) -> Part | None:
    return part if part is not None and part.axis == "cols" else None


def _joined(x: Part | None, y: Part | None) -> Part | None:
    if x is None or y is None or _by_cols(x) is None or _by_cols(y) is None:
        return None
    behind = tuple((x.extent + start, n, width) for start, n, width in y.runs)
    return Part(axis="cols", extent=x.extent + y.extent, runs=(*x.runs, *behind))


def _stretched(part: Part | None, of: int, to: int) -> Part | None:
    return None if part is None or _by_cols(part) is None or of == 0 else part.times(of, to)


# --- Using a part


def cut_out(whole: Any, part: Part, shape: tuple[int, ...], *, shift: int = 0) -> Any:
    """A chip's value out of the whole one; None where that has another shape.

    With a `shift` it is what lies so many places further on.
    """
    places = [range(start + shift, start + shift + length) for start, length, _ in part.runs]
    return _taken(whole, part.axis, places, shape)


def unpadded(value: Any, part: Part | None, shape: tuple[int, ...]) -> Any:
    """A chip's value out of its padding; None where what is left has another shape."""
    if np.shape(value) == shape:
        return np.asarray(value)
    return None if part is None else _taken(value, part.axis, _held(part), shape)


def beyond(value: Any, part: Part) -> np.ndarray:
    """What stands in the padding."""
    places = [i for span in _held(part) for i in span]
    return np.delete(np.asarray(value), places, 0 if part.axis == "rows" else 1)


def _held(part: Part) -> list[range]:
    """Where the runs stand in the padded value."""
    found, at = [], 0
    for _, length, width in part.runs:
        found.append(range(at, at + length))
        at += width
    return found


def _taken(value: Any, axis: Axis, places: Iterable[range], shape: tuple[int, ...]) -> Any:
    value, index = np.asarray(value), np.array([i for span in places for i in span], int)
    along = 0 if axis == "rows" else 1
    if value.ndim != 2 or index.min(initial=0) < 0 or index.max(initial=-1) >= value.shape[along]:
        return None
    found = value[index] if axis == "rows" else value[:, index]
    return found if found.shape == shape else None
