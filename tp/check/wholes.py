"""Whole matrices of a checkpoint, as the language has them: read anew, and kept for a while."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from author.names import Name
from tp.authored import step_of
from tp.loader import read_table, read_whole
from tp.operands import Operand, operands
from tp.roll import roll
from tp.source import Source

ROOM = 1 << 30  # bytes that are kept


@dataclass(kw_only=True)
class Wholes:
    """Weights and tables by name, in float32, inputs by outputs; `operands` says what they are.

    `long` says that the tables are those of a long sequence, where there are two kinds.
    """

    source: Source
    operands: Mapping[Name, Operand]
    long: bool = False
    _kept: dict[Name, np.ndarray] = field(default_factory=dict)

    def __call__(self, name: Name) -> np.ndarray:
        """A matrix by its name in the text."""
        model = self.source.model
        if model.tied and name == Name("Wout"):
            return self(Name("Emb")).T
        if name not in self._kept:
            found = self._read(self.operands[name])
            while self._kept and sum(a.nbytes for a in self._kept.values()) + found.nbytes > ROOM:
                self._kept.pop(next(iter(self._kept)))
            self._kept[name] = found
        return self._kept[name]

    def _read(self, operand: Operand) -> np.ndarray:
        model, checkpoint = self.source.model, self.source.checkpoint
        if operand.role == "table":
            return read_table(model, checkpoint, operand, long=self.long)
        return read_whole(model, checkpoint, operand)


def whole_operands(source: Source, context: int) -> dict[Name, Operand]:
    """The matrices of a model as one chip would have them, with tables for so many positions."""
    return operands(roll(step_of(source.model.spec, chips=1, context=context)))
