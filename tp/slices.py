"""Which outputs and inputs of a matrix a chip holds, in the order in which they are stored."""

import math
from collections.abc import Sequence

import numpy as np

from kernels.q8 import BLOCK
from tp.operands import Operand

Padded = tuple[int, int, int]  # (start, length, padded length)


def outputs_first(operand: Operand) -> tuple[int, int]:
    """The outputs and inputs of an operand's views; floats are in the language's order."""
    rows, cols = operand.whole
    match operand.stored if operand.quantised else "turned":
        case "plain":
            return rows, cols
        case "turned":
            return cols, rows
        case "heads":
            return operand.heads * cols, rows // operand.heads


def cut(operand: Operand, whole: np.ndarray, chip: int) -> np.ndarray:
    """A chip's slice of a float matrix, padded."""
    if operand.layout is None:
        return whole
    axis = 0 if operand.layout.axis == "rows" else 1
    found = np.zeros(operand.local, np.float32)
    ranges = _padded(operand, chip)
    for (start, length, _), at in zip(ranges, begins(ranges), strict=True):
        here, there = [slice(None)] * 2, [slice(None)] * 2
        here[axis], there[axis] = slice(at, at + length), slice(start, start + length)
        found[tuple(here)] = whole[tuple(there)]
    return found


def begins(ranges: Sequence[Padded]) -> list[int]:
    """Where each padded range begins in a slice."""
    return [sum(width for *_, width in ranges[:number]) for number in range(len(ranges))]


def _padded(operand: Operand, chip: int) -> list[Padded]:
    """The ranges that a chip holds of the axis that is cut."""
    assert operand.layout is not None
    ranges = (*operand.layout.ranges[chip], *((0, 0) for _ in operand.layout.widths))
    pairs = zip(ranges, operand.layout.widths, strict=False)
    return [(start, length, width) for (start, length), width in pairs]


def stored_ranges(operand: Operand, chip: int) -> tuple[list[Padded], list[Padded]]:
    """The ranges of a chip along outputs and inputs."""
    outputs, inputs = outputs_first(operand)
    outer, inner = [(0, outputs, outputs)], [(0, inputs, inputs)]
    if operand.layout is None:
        return outer, inner
    ranges, by_rows = _padded(operand, chip), operand.layout.axis == "rows"
    match operand.stored if operand.quantised else "turned":
        case "heads":
            assert by_rows, f"{operand.name} is cut inside its heads"
            return [_of_heads(operand, piece) for piece in ranges], inner
        case "turned":
            return (outer, ranges) if by_rows else (ranges, inner)
        case "plain":
            return (ranges, inner) if by_rows else (outer, ranges)


def _of_heads(operand: Operand, piece: Padded) -> Padded:
    """A range of the rows of whole heads, as one of the outputs of these heads."""
    outputs, inputs = outputs_first(operand)
    height = outputs // operand.heads
    start, length, width = (n // inputs * height for n in piece)
    return start, length, width


def block_of(operand: Operand) -> int:
    """The scale block of every chip's slice: fine enough that no chip's cut falls inside one."""
    block = BLOCK
    chips = 0 if operand.layout is None else len(operand.layout.ranges)
    _, end = outputs_first(operand)
    for chip in range(chips):
        _, inner = stored_ranges(operand, chip)
        for start, length, width in inner:
            block = math.gcd(block, start)
            if start + length != end or len(inner) > 1:
                block = math.gcd(block, length)
            if len(inner) > 1:
                block = math.gcd(block, width)
    return block
