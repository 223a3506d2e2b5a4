"""Runs a text beside what the chips hold and what they do with it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from author.names import Name
from author.program import read_by
from author.statements import Tensor
from tp.check.beside import Beside, Elsewhere, Made, Value
from tp.check.fault import Difference, Fault, of_partials, slipped
from tp.check.parts import beyond, unpadded
from tp.check.shown import Piece, Shown, Step
from tp.lower import Arrays

# What is no kernel of our own to look into.
PLAIN = ("xla", "reference")


@dataclass(kw_only=True)
class Execution:
    """What chips make of a prompt of `length` tokens; their weights are compared once."""

    shown: Shown
    length: int
    _compared: set[tuple[Name, int]] = field(default_factory=set)

    def step(self, piece: Piece, states: Arrays) -> Step:
        """Read a piece."""
        return self.shown.step(piece, states, self.length)

    def differences(self, beside: Beside, step: Step) -> Iterator[Difference]:
        """Every value of a text as the chips have it; of several, the farthest off."""
        chips = range(self.shown.decoder.devices.chips)

        def others(made: Made) -> list[Elsewhere]:
            holders = chips if made.chip is None else [made.chip]
            found = [(chip, self._there(made, chip, step)) for chip in holders]
            return [(chip, value) for chip, value in found if value is not None]

        for made, found in beside.run(others):
            if not found:
                continue
            each = [
                Difference(beside=beside, made=made, chip=chip, found=value, wanted=made.value)
                for chip, value in found
            ]
            alike = all(np.array_equal(d.found, each[0].found, equal_nan=True) for d in each)
            worst = max(each, key=lambda d: d.off)
            of_all = made.chip is None and alike
            yield replace(worst, chip=None) if of_all else worst

    def _there(self, made: Made, chip: int, step: Step) -> Value | None:
        """What a chip has of a name, without its padding; None where that is not to be seen."""
        value = step.value(made.name, chip)
        if isinstance(made.statement, Tensor):
            if (made.name, chip) in self._compared:
                return None
            self._compared.add((made.name, chip))
            value = self.shown.held(made.name, chip)
        return None if value is None else unpadded(value, made.part, np.shape(made.value))

    def fault(
        self, difference: Difference, seen: Name | None, piece: Piece, states: Arrays
    ) -> Fault:
        """A difference as a fault, and what it looks like; `seen` is the last value before it."""
        if isinstance(difference.made.statement, Tensor):
            return difference.fault("weights", piece.position, [*slipped(difference)])
        because = [*of_partials(difference), *self._padding(difference)]
        if self.shown.names is not None:
            because.append(
                f"with all from {seen} on to this run as one, as it is when nobody looks"
            )
        because += self._path(difference, piece, states)
        return difference.fault("execution", piece.position, because)

    def _padding(self, difference: Difference) -> Iterator[str]:
        """The operands whose padding, which is to be zero, is not."""
        chip, parts = difference.chip, difference.beside.parts
        if chip is None:
            return
        for name in read_by(difference.made.statement):
            held = self.shown.held(name, chip) if name in parts else None
            if held is not None and np.any(beyond(held, parts[name]) != 0):
                yield f"the padding of {name} is not zero"

    def _path(self, difference: Difference, piece: Piece, states: Arrays) -> Iterator[str]:
        """Whether it is the kernels that differ: XLA's own are asked too."""
        path = self.shown.path(difference.made.name, piece)
        if path is None or path in PLAIN:
            return
        names = (difference.made.name, *read_by(difference.made.statement))
        plain = Execution(shown=self.shown.plainly(names), length=self.length)
        step, text = plain.step(piece, states), difference.beside.again()
        same = (d for d in plain.differences(text, step) if d.made.name == difference.made.name)
        off = next((d.off for d in same), None)
        if off is not None:
            yield f"by the {path} kernels; XLA's are off by {off:.1e} there"
