"""Runs the text of a width beside the text of one chip."""

from collections.abc import Iterator, Mapping

import numpy as np

from author.checks import MANIFEST_RULES
from author.names import Name
from author.program import Program, roles
from author.statements import Tensor
from tp.check.beside import Beside, Elsewhere, Made, Value, Whole
from tp.check.fault import Difference, Fault, added_by_each, of_partials
from tp.check.parts import Part, cut_out


def differences(
    text: Program, one: Beside, *, whole: Whole, parts: Mapping[Name, Part]
) -> Iterator[Difference]:
    """Every value of a text that is a whole one, or a part of one, of the text of one chip.

    `one` is that text, not yet run; states before the step are those that it starts with.
    """
    for _ in one.run(lambda made: []):
        pass

    def others(made: Made) -> list[Elsewhere]:
        if isinstance(made.statement, Tensor):
            return []  # a slice is what the manifest says
        value = _part_of_one(one.env, made.name, made.part, np.shape(made.value))
        return [] if value is None else [(made.chip, value)]

    before = dict(_states(text, one.before, parts))
    beside = Beside(text, whole=whole, before=before, parts=parts)
    for made, found in beside.run(others):
        for chip, wanted in found:
            yield Difference(beside=beside, made=made, chip=chip, found=made.value, wanted=wanted)


def fault(difference: Difference, position: int) -> Fault:
    """A difference between two texts as a fault, and what it looks like."""
    because = [*_unsound(difference), *of_partials(difference)]
    added = added_by_each(difference)
    if added is not None:
        said, statement, chip = added
        difference = difference.laid_to(statement, chip)
        because.append(said)
    return difference.fault("text", position, because)


def _unsound(difference: Difference) -> Iterator[str]:
    """What the manifest has amiss, in the layer of a difference."""
    layer, program = difference.made.name.layer, difference.beside.program
    for complaint in (c for rule in MANIFEST_RULES for c in rule(program)):
        if layer in {name.layer for name in complaint.names}:
            yield str(complaint)


def _part_of_one(
    env: Mapping[Name, Value], name: Name, part: Part | None, shape: tuple[int, ...]
) -> Value | None:
    """The value of a name out of the text of one chip, where everything is on chip 0."""
    if name.chip is None:
        value = env.get(name)
        return value if value is not None and np.shape(value) == shape else None
    whole = env.get(name._replace(chip=0))
    return None if whole is None or part is None else cut_out(whole, part, shape)


def _states(
    text: Program, of_one: Mapping[Name, Value], parts: Mapping[Name, Part]
) -> Iterator[tuple[Name, Value]]:
    """Caches and states before a step, the parts that the chips have."""
    shapes = {s.name: (s.rows, s.cols) for s in text.statements if isinstance(s, Tensor)}
    for name, role in roles(text).items():
        if role in ("cache", "state"):
            value = _part_of_one(of_one, name, parts.get(name), shapes[name])
            if value is not None:
                yield name, value
