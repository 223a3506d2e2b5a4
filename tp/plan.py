"""What is known of a step before it is traced, and what a trace tells of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from author.forms import Statement
from author.names import Name
from kernels.table import NATIVE
from tp.operands import Operand

CHIP = "chip"

Arrays = dict[str, Any]
# Statements in order, each with how many sequences it stands for, if it stands for each.
Flat = tuple[tuple[Statement, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The path that a statement took; those of one chain are one call of the compiled kernels."""

    statement: Statement
    path: str
    declined: Mapping[str, str]
    chain: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a program before it is traced, and which paths a trace took."""

    wanted: Mapping[str, Operand]
    held: Mapping[str, tuple[int, ...]]
    read_last: Mapping[str, int]
    outputs: Collection[str] | None
    states: frozenset[str]
    platform: str
    kernels: str
    taken: list[Taken]

    @property
    def native(self) -> bool:
        """Whether statements may go into chains."""
        return self.platform == "cpu" and self.kernels in ("auto", NATIVE)


def key_of(name: Name) -> str:
    """Where a name lives while a step is traced, the same for every chip and every sequence."""
    return str(name)
