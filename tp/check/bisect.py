"""Finds the first statement that makes a width differ: by its text, its weights or its execution.

Two walks over each piece of a prompt. One runs the joint text beside what the chips hold and do: a
weight that is not the slice the manifest names, a value that is not what its statement gives. The
other runs it beside the text of one chip: a value that is not that part of the whole one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from author.names import Name
from author.program import Program
from author.statements import Let, Tensor
from tp.check import written
from tp.check.beside import Beside, Value, Whole
from tp.check.executed import Execution
from tp.check.fault import Difference, Fault, Of
from tp.check.parts import parts_of
from tp.check.shown import Piece, Shown, Way, pieces, text_of
from tp.decoder import Decoder
from tp.operands import operands
from tp.roll import roll
from tp.rolled import Along


@dataclass(kw_only=True)
class Search:
    """A search for what makes one width differ.

    `limit` is how far a value may be off, over its root mean square; weights may not at all. Where
    nothing is beyond it, `nearest` is what came nearest.
    """

    decoder: Decoder
    whole: Whole
    limit: float
    said: Callable[[str], None] = lambda text: None
    nearest: Fault | None = None

    def first_fault(self, ids: Sequence[int], way: Way, last: int) -> Fault | None:
        """The first fault as a prompt is read one way, up to a position, which counts from 1."""
        upto = [p for p in pieces(ids, way, self.decoder.chunks) if p.position <= last]
        joint = _joint(text_of(self.decoder, upto[0], self.decoder.devices.chips))
        for names in (None, joint):
            shown = Shown(decoder=self.decoder, names=names)
            execution = Execution(shown=shown, length=len(ids))
            fault = self._first(execution, upto, texts=names is None)
            if fault is not None:
                return fault
        return None

    def _first(self, execution: Execution, upto: Sequence[Piece], *, texts: bool) -> Fault | None:
        chips, states = self.decoder.devices.chips, self.decoder.fresh()
        kept: dict[Name, Value] = {}
        of_one: dict[Name, Value] = {}
        for piece in upto:
            self.said(f"position {piece.position} of {upto[-1].last}")
            text = text_of(self.decoder, piece, chips)
            parts = parts_of(operands(roll(text)).values())
            beside = Beside(text, whole=self.whole, before=kept, parts=parts)
            step = execution.step(piece, states)
            found, seen = self._beyond(execution.differences(beside, step), piece, "execution")
            if found is not None:
                return execution.fault(found, seen, piece, states)
            states, kept = step.states, beside.kept()
            if texts and chips > 1:
                alone = text_of(self.decoder, piece, 1)
                one = Beside(alone, whole=self.whole, before=of_one, parts={})
                differences = written.differences(text, one, whole=self.whole, parts=parts)
                found, _ = self._beyond(differences, piece, "text")
                if found is not None:
                    return written.fault(found, piece.position)
                of_one = one.kept()
        return None

    def _beyond(
        self, differences: Iterable[Difference], piece: Piece, of: Of
    ) -> tuple[Difference | None, Name | None]:
        """The first difference beyond the limit, and the last value before it that was seen."""
        seen: Name | None = None
        for difference in differences:
            off = difference.off
            of_weight = isinstance(difference.made.statement, Tensor)
            if off > (0.0 if of_weight else self.limit):
                return difference, seen
            if off > (0.0 if self.nearest is None else self.nearest.off):
                self.nearest = difference.fault(of, piece.position)
            seen = seen if of_weight else difference.made.name
        return None, seen


def _joint(text: Program) -> set[str]:
    """The names that every chip has alike: with these alone, a step runs much as it does unseen."""
    names = [s.name for s in text.statements if isinstance(s, Let) and s.name.chip is None]
    stacks: list[object] = [n._replace(sequence=Along("sequence", 0)) for n in names]  # type: ignore[arg-type]
    return {str(name) for name in (*names, *stacks)}
