"""Reads compiled HLO: which instructions leave floats as large as a weight in memory."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

# The head of a computation, an instruction, and an array's type inside a result.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_FLOATS = re.compile(r"\b(f64|f32|bf16|f16|f8\w*)\[([\d,]*)\]")
_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}  # others have one

# Computations that run by themselves, whose results are memory; a fusion's are not.
_RUN = re.compile(
    r"\b(?:body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|\bbranch_computations=\{([^}]*)\}"
)
_CALLED = re.compile(r"\b(?:to_apply|calls|called_computations)=\{?%?([\w.-]+)")
_CALLS = ("call", "async-start")

# What only hands on what another instruction made.
_HANDS_ON = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "opt-barrier",
    "copy-done",
    "slice-done",
    *_CALLS,
    "async-update",
    "async-done",
}


@dataclass(frozen=True, kw_only=True)
class Floats:
    """A float array that an instruction leaves in memory; `size` counts elements."""

    computation: str
    name: str
    operation: str
    type: str
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes, padding of tiles not counted."""
        return self.size * _BYTES.get(self.type.partition("[")[0], 1)


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    operation: str
    rest: str


def floats_of_sizes(text: str, sizes: Collection[int]) -> list[Floats]:
    """The float arrays of these sizes that the entry computation makes, and what it runs.

    Loops, branches and calls are followed, fusions are not: what stands inside one is never
    whole in memory. `text` is what `compiled.as_text()` says. Raises ValueError where it has no
    entry.
    """
    entry, computations = _computations(text)
    return [
        floats
        for name in _running(entry, computations)
        for instruction in computations[name]
        if instruction.operation not in _HANDS_ON
        for floats in _made(name, instruction)
        if floats.size in sizes
    ]


def _computations(text: str) -> tuple[str, Mapping[str, list[_Instruction]]]:
    """The entry's name, and the instructions of each computation."""
    entry, found = None, {}
    here: list[_Instruction] = []
    for line in text.splitlines():
        head, instruction = _COMPUTATION.match(line), _INSTRUCTION.match(line)
        if head is not None:
            here = found.setdefault(head[2], [])
            entry = head[2] if head[1] is not None else entry
        elif instruction is not None:
            here.append(_Instruction(*instruction.groups()))
    if entry is None:
        raise ValueError("no ENTRY computation: wanted the text of a compiled program")
    return entry, found


def _running(entry: str, computations: Mapping[str, list[_Instruction]]) -> list[str]:
    """The entry and all that is run from it, each once."""
    found, left = [], [entry]
    while left:
        name = left.pop(0)
        if name in found or name not in computations:
            continue
        found.append(name)
        left += [run for instruction in computations[name] for run in _runs(instruction)]
    return found


def _runs(instruction: _Instruction) -> Iterator[str]:
    for one, several in _RUN.findall(instruction.rest):
        yield from ([one] if one else [name.strip().lstrip("%") for name in several.split(",")])
    if instruction.operation in _CALLS:
        yield from _CALLED.findall(instruction.rest)


def _made(computation: str, instruction: _Instruction) -> Iterator[Floats]:
    """Every float array of a result, which may be a tuple."""
    for kind, dimensions in _FLOATS.findall(instruction.result):
        yield Floats(
            computation=computation,
            name=instruction.name,
            operation=instruction.operation,
            type=f"{kind}[{dimensions}]",
            size=math.prod(int(n) for n in dimensions.split(",") if n),
        )
