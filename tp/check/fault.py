"""A statement whose value is not what it should be: where, by how much, what it looks like."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from author.english import write
from author.forms import Statement
from author.names import Name
from author.program import read_by
from author.statements import Fold, Let
from tp.check.beside import Beside, Made, Value, lines, on_chip, targets
from tp.check.parts import cut_out
from tp.stretch import stacked

Of = Literal["text", "weights", "execution"]

FURTHEST = 64  # places by which a slice is tried to have slipped


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first statement that differs, as its chip's program has it.

    `of` says where to look: the text of this width is at fault, or the weights that a chip holds,
    or what it does with them. `chip` is None where all chips run it alike. `off` is the largest
    difference over the root mean square of what is wanted; `found` and `wanted` are what stands
    there, `row` and `col` counted from 0 in the chip's own value.
    """

    of: Of
    statement: str
    name: Name
    chip: int | None
    position: int
    off: float
    row: int
    col: int
    found: float
    wanted: float
    because: tuple[str, ...] = ()

    @property
    def layer(self) -> int | None:
        """The layer of the statement; None before the first and after the last."""
        return self.name.layer


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value as a statement of a text should make it, and as it was found."""

    beside: Beside
    made: Made
    chip: int | None
    found: Value
    wanted: Value

    @property
    def off(self) -> float:
        """The largest difference over the root mean square of what is wanted; NaN is infinite."""
        found, wanted = (np.asarray(v, np.float64) for v in (self.found, self.wanted))
        largest = float(np.abs(found - wanted).max(initial=0.0))
        if largest == 0.0:
            return 0.0
        scale = float(np.sqrt(np.mean(np.square(wanted))))
        return largest / scale if np.isfinite(largest) and scale > 0 else float("inf")

    @property
    def statement(self) -> Statement:
        """The statement as the chip's own program has it."""
        collective = self.beside.collectives.get(self.made.name)
        if collective is None:
            return self.made.statement
        return on_chip(collective, self.chip or 0, len(collective.partials))

    def laid_to(self, statement: Statement, chip: int) -> "Difference":
        """The same difference, which another statement, of a chip, brings in."""
        name = targets(statement)[0]
        return replace(self, made=replace(self.made, statement=statement, name=name), chip=chip)

    def fault(self, of: Of, first: int, because: Sequence[str] = ()) -> Fault:
        """The difference as it is told; `first` is the position of the first row of the step."""
        found, wanted = np.asarray(self.found), np.asarray(self.wanted)
        apart = np.abs(found.astype(np.float64) - wanted)
        worst = np.where(np.isnan(apart), np.inf, apart)
        row, col = (int(i) for i in np.unravel_index(int(worst.argmax()), worst.shape))
        return Fault(
            of=of,
            statement=write(self.statement) + ".",
            name=self.made.name,
            chip=self.chip,
            position=first + (row if stacked(self.made.name) else self.made.name.sequence or 0),
            off=self.off,
            row=row,
            col=col,
            found=float(found[row, col]),
            wanted=float(wanted[row, col]),
            because=tuple(because),
        )


# --- What a difference looks like


def slipped(difference: Difference) -> Iterator[str]:
    """Where what a chip holds stands in the whole matrix, if it is the right slice but for that."""
    beside, made = difference.beside, difference.made
    piece = None
    if beside.program.manifest is not None:
        piece = beside.program.manifest.slice_of(made.name)
    if piece is None or made.part is None:
        return
    whole = beside.whole(piece.of)
    for shift in sorted(range(-FURTHEST, FURTHEST + 1), key=abs):
        other = cut_out(whole, made.part, np.shape(difference.found), shift=shift)
        if other is not None and np.array_equal(other, difference.found):
            way = "further on" if shift > 0 else "earlier"
            yield f"it is what stands {abs(shift)} {piece.axis} {way} in {piece.of}"
            return


def of_partials(difference: Difference) -> Iterator[str]:
    """Which of the chips' partials a sum lacks, or has twice, if it is only that."""
    beside, name = difference.beside, difference.made.name
    if not _is_fold(difference):
        return
    apart = np.asarray(difference.found, np.float64) - np.asarray(difference.wanted)
    for partial in beside.collectives[name].partials:
        value = np.asarray(beside.env[partial], np.float64)
        if _is(difference.found, value, apart):
            yield f"it is {partial} alone"
            return
        if _is(-apart, value, apart):
            yield f"{partial} is missing from it"
            return
        if _is(apart, value, apart):
            yield f"{partial} is in it twice"
            return


def added_by_each(difference: Difference) -> tuple[str, Statement, int] | None:
    """What chips have alike and add to their partials, if a sum is off by some times it.

    With it come a statement that adds it, and its chip: the last.
    """
    if not _is_fold(difference):
        return None
    beside = difference.beside
    apart = np.asarray(difference.found, np.float64) - np.asarray(difference.wanted)
    adding = list(_adding(beside, difference.made.name, apart.shape))
    for name in dict.fromkeys(name for name, *_ in adding):
        times = _times(apart, beside.env[name])
        if times != 0:
            found = [(statement, chip) for n, statement, chip in adding if n == name]
            chips = ", ".join(str(chip) for _, chip in found)
            said = (
                f"{difference.made.name} is off by {times:+d} times {name}, added on chips {chips}"
            )
            return said, *found[-1]
    return None


def _is_fold(difference: Difference) -> bool:
    statement = difference.made.statement
    return isinstance(statement, Let) and isinstance(statement.value, Fold)


def _is(found: Any, wanted: np.ndarray, apart: np.ndarray) -> bool:
    """Whether two values are the same, measured by a difference that this is to explain."""
    return bool(np.abs(np.asarray(found) - wanted).max() < 0.01 * np.abs(apart).max())


def _times(apart: np.ndarray, value: Value) -> int:
    """How many times a value a difference is; 0 if it is no multiple."""
    value = np.broadcast_to(np.asarray(value, np.float64), apart.shape)
    square = float(np.sum(value * value))
    times = 0 if square == 0 else round(float(np.sum(apart * value)) / square)
    return times if times != 0 and _is(apart, times * value, apart) else 0


def _adding(
    beside: Beside, out: Name, shape: tuple[int, ...]
) -> Iterator[tuple[Name, Statement, int]]:
    """What all chips have alike and some read on the way to a fold, in the order of the text."""
    wanted = {*beside.collectives[out].partials}
    found: list[tuple[Name, Statement, int]] = []
    for chip, statement in reversed([*lines(beside.program)]):
        if chip is None or not wanted.intersection(targets(statement)):
            continue
        wanted.update(read_by(statement))
        alike = [n for n in read_by(statement) if n.chip is None and n in beside.env]
        fitting = [n for n in alike if _fits(beside.env[n], shape)]
        found += [(name, statement, chip) for name in fitting]
    yield from reversed(found)


def _fits(value: Value, shape: tuple[int, ...]) -> bool:
    return np.ndim(value) == 2 and np.shape(value) in (shape, (1, shape[1]))
