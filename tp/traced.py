"""A step traced on this machine with no weights there: the path of each statement, and its HLO."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax

from author.english import write
from author.forms import Statement
from author.names import Name
from author.statements import Number, Tensor
from tp.columns import plural
from tp.launch import devices
from tp.lower import Taken, lower
from tp.matrices import layer_of, statements
from tp.rolled import Rolled, map_names
from tp.step import whole_step
from tp.unfilled import arguments
from tp.unroll import unroll_layers


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A step as JAX has it: its statements in order, the path of each, and what XLA is to compile.

    A statement without a path is XLA's: a fold by `psum`, say.
    """

    platform: str
    chips: int
    statements: tuple[Statement, ...]
    taken: Mapping[Statement, Taken]
    step: Any

    def compiled_text(self) -> str:
        """The HLO of the compiled step, a program that every chip runs."""
        return self.step.compile().as_text()


def traced(rolled: Rolled, chips: int, result: str) -> Traced:
    """Trace a step for the value that it is for.

    Raises LaunchError where there are too few devices.
    """
    mesh = devices(chips).mesh
    platform = mesh.devices.flat[0].platform
    lowered = lower(rolled, platform=platform, outputs=(result,))
    whole: Any = whole_step(lowered, mesh, (result,))
    with _nameless():
        step = whole.lower(*arguments(lowered, mesh))
    said = (s for s in statements(unroll_layers(rolled)) if not isinstance(s, Tensor | Number))
    return Traced(
        platform=platform,
        chips=chips,
        statements=tuple(said),
        taken={taken.statement: taken for taken in lowered.taken},
        step=step,
    )


@contextmanager
def _nameless() -> Iterator[None]:
    """Trace without noting where: the same step gives the same HLO wherever it is traced from."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


# --- Paths, to read


@dataclass(frozen=True)
class _Line:
    """A statement, its path, and who declined; `joins` the call of the statement before it."""

    path: str
    joins: bool
    text: str
    declined: tuple[tuple[str, str], ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.path:10}{'+' if self.joins else ' '} {self.text}"
        yield from (f"{'':14}{path}: {why}" for path, why in self.declined)


def paths(found: Traced) -> str:
    """The path of each statement, and why those before it declined; layers alike are shown once."""
    chips = plural(found.chips, "chip")
    lines = [f"On {chips} ({found.platform}). '+' is part of the same call as the line before it."]
    blocks = list(_blocks(found))
    for (first, block), runs in _repeated(blocks):
        last = first if first is None else first + runs - 1
        if last is not None:
            lines.append(
                f"For each layer l of {first} to {last}:" if runs > 1 else f"Layer {last}:"
            )
        lines += [text for line in block for text in line.lines()]
    return "".join(f"{line}\n" for line in lines)


def _blocks(found: Traced) -> Iterator[tuple[int | None, tuple[_Line, ...]]]:
    """The lines of each layer, and of what stands before and after them."""
    chain: int | None = None
    for layer, group in groupby(found.statements, key=layer_of):
        block = []
        for statement in group:
            taken = found.taken.get(statement)
            here = None if taken is None else taken.chain
            block.append(_line(statement, taken, layer, joins=here is not None and here == chain))
            chain = here
        yield layer, tuple(block)


def _line(statement: Statement, taken: Taken | None, layer: int | None, *, joins: bool) -> _Line:
    def by_index(name: Name) -> Name:
        if layer is None or name.layer is None:
            return name
        index = "{l}" if name.layer == layer else f"{{l{name.layer - layer:+}}}"
        return name._replace(layer=index)  # type: ignore[arg-type]

    return _Line(
        path="xla" if taken is None else taken.path,
        joins=joins,
        text=f"{write(map_names(statement, by_index))}.",
        declined=() if taken is None else tuple(taken.declined.items()),
    )


def _repeated(
    blocks: Sequence[tuple[int | None, tuple[_Line, ...]]],
) -> Iterator[tuple[tuple[int | None, tuple[_Line, ...]], int]]:
    """Blocks with how many of them that are alike stand in a row."""
    for _, run in groupby(blocks, key=lambda block: (block[0] is None, block[1])):
        alike = list(run)
        yield alike[0], len(alike)
