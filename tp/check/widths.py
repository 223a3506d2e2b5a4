"""The logits of the same prompts at every width, how far apart they are, and where they part."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from tp.check.bisect import Search
from tp.check.fault import Fault
from tp.check.shown import Way
from tp.check.wholes import Wholes, whole_operands
from tp.decoder import Decoder
from tp.engine import Engine, load_source
from tp.hosts import Alone
from tp.launch import devices
from tp.source import Source

WAYS: tuple[Way, ...] = ("prefill", "steps")
# What a row may be compared with, besides another program.
ONE, PREFILL = "1 chip", "prefill"

Logits = Float32[np.ndarray, "rows vocabulary"]
ByWay = Mapping[Way, Sequence[Logits]]
Said = Callable[[str], None]


class Other(Protocol):
    """Another program that computes the same model; its logits by prompt, before any of ours."""

    name: str
    logits: Sequence[Logits]

    def first_layer(self, decoder: Decoder, prompt: int, limit: float) -> int | None:
        """The first layer whose output differs, as one chip computes it; None where none does."""
        ...


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far the logits of a prompt are from others, at worst.

    `largest` is the largest difference, `over` the same over the standard deviation of the others,
    at a position, which counts from 1, of a token id. `first` is the first position at which a
    difference is not tolerated. `alike` is at how many positions the likeliest token is the same.
    """

    largest: float
    over: float
    position: int
    token: int
    first: int | None
    alike: int
    of: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way of computing at a width, against another: how far apart, prompt by prompt."""

    chips: int
    way: Way
    against: str
    prompts: tuple[Apart, ...]

    @property
    def worst(self) -> int:
        """The number of the prompt that is farthest apart, from 0."""
        return max(range(len(self.prompts)), key=lambda n: self.prompts[n].over)

    @property
    def holds(self) -> bool:
        """Whether no difference is more than is tolerated."""
        return all(prompt.first is None for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """Where a row that differs leads: to a fault at a width, or to none.

    Then no value was off by more than the tolerance, over its root mean square; `nearest` is what
    came nearest. `layer` is the first whose output is not another program's, if that was compared.
    """

    row: Row
    chips: int
    fault: Fault | None
    nearest: Fault | None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    rows: tuple[Row, ...]
    bisected: tuple[Bisected, ...]

    @property
    def holds(self) -> bool:
        """Whether no difference is more than is tolerated."""
        return all(row.holds for row in self.rows)


def apart(found: Logits, wanted: Logits, tolerance: float) -> Apart:
    """How far logits are from those that are wanted; NaN is infinitely far."""
    off = np.abs(found.astype(np.float64) - wanted)
    off = np.where(np.isnan(off), np.inf, off)
    row, token = (int(n) for n in np.unravel_index(int(off.argmax()), off.shape))
    largest, deviation = float(off[row, token]), float(wanted.std())
    beyond = np.flatnonzero(~(off.max(axis=1) <= tolerance * deviation))
    return Apart(
        largest=largest,
        over=largest / deviation if deviation > 0 else float("inf" if largest > 0 else 0),
        position=row + 1,
        token=token,
        first=int(beyond[0]) + 1 if len(beyond) > 0 else None,
        alike=int(np.sum(found.argmax(axis=1) == wanted.argmax(axis=1))),
        of=len(found),
    )


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is to be compared: prompts of token ids, at widths, and how far apart is too far.

    `tolerance` is a part of the standard deviation of a prompt's logits.
    """

    source: Source
    prompts: Sequence[Sequence[int]]
    widths: Sequence[int]
    context: int
    tolerance: float
    other: Other | None = None
    said: Said = lambda text: None
    hosts: Alone = field(default_factory=Alone)

    def report(self) -> Report:
        """Run every width, one chip first, and bisect what differs.

        The weights of a width are given up before those of the next are read. Several processes
        run one chip each by itself, and bisect nothing: the texts of all chips are run by one.
        """
        devices(max(self.widths), self.hosts)  # JAX is told once how many to simulate
        rows: list[Row] = []
        bisected: list[Bisected] = []
        one: ByWay = {}
        for chips in dict.fromkeys((1, *self.widths)):
            engine = self._engine(chips)
            found: ByWay = {way: self._logits(engine, way) for way in WAYS}
            one = one or found
            here = list(self._rows(chips, found, one))
            rows += here
            bad = next((r for r in here if not r.holds and (chips == 1 or r.against == ONE)), None)
            if bad is not None and self.hosts.processes == 1:
                bisected.append(self._bisected(engine.decoder, bad))
            del engine
            gc.collect()
        return Report(rows=tuple(rows), bisected=tuple(self._explained(bisected)))

    def _engine(self, chips: int) -> Engine:
        self.said(f"{_chips(chips)}: loading")
        hosts = None if chips == 1 else self.hosts
        return load_source(self.source, chips=chips, context=self.context, hosts=hosts)

    def _logits(self, engine: Engine, way: Way) -> list[Logits]:
        self.said(f"{_chips(engine.decoder.devices.chips)}: {way}")
        by = engine.logits if way == "prefill" else engine.logits_by_steps
        return [by(ids) for ids in self.prompts]

    def _rows(self, chips: int, found: ByWay, one: ByWay) -> Iterator[Row]:
        for way in WAYS:
            if chips > 1:
                yield self._row(chips, way, ONE, found[way], one[way])
            elif way != PREFILL:
                yield self._row(chips, way, PREFILL, found[way], one["prefill"])
            if self.other is not None:
                yield self._row(chips, way, self.other.name, found[way], self.other.logits)

    def _row(
        self, chips: int, way: Way, against: str, found: Sequence[Logits], wanted: Sequence[Logits]
    ) -> Row:
        pairs = zip(found, wanted, strict=True)
        each = tuple(apart(a, b, self.tolerance) for a, b in pairs)
        return Row(chips=chips, way=way, against=against, prompts=each)

    # --- Bisecting

    def _bisected(self, decoder: Decoder, row: Row) -> Bisected:
        """Where a row leads at the width of a decoder, its own or one chip."""
        chips = decoder.devices.chips
        number = row.worst
        ids, last = self.prompts[number], row.prompts[number].first
        assert last is not None
        self.said(f"{_chips(chips)}: looking for the statement that differs")
        wholes = Wholes(
            source=self.source,
            operands=whole_operands(self.source, decoder.context),
            long=decoder.is_long(len(ids)),
        )
        search = Search(
            decoder=decoder,
            whole=wholes,
            limit=self.tolerance,
            said=lambda text: self.said(f"{_chips(chips)}: {text}"),
        )
        ways = WAYS[::-1] if row.against == PREFILL else (row.way,)
        faults = (search.first_fault(ids, way, last) for way in ways)
        fault = next((f for f in faults if f is not None), None)
        layer = None
        if fault is None and self.other is not None and row.against == self.other.name:
            layer = self.other.first_layer(decoder, number, self.tolerance)
        return Bisected(
            row=row,
            chips=chips,
            fault=fault,
            nearest=search.nearest,
            layer=layer,
        )

    def _explained(self, bisected: Sequence[Bisected]) -> Iterator[Bisected]:
        """What leads to nothing at its own width is looked for on the one chip beside it."""
        lost = [b for b in bisected if b.fault is None and b.chips > 1]
        engine = self._engine(1) if lost else None
        for found in bisected:
            if engine is None or found not in lost:
                yield found
                continue
            on_one = self._bisected(engine.decoder, found.row)
            yield found if on_one.fault is None else on_one


def _chips(count: int) -> str:
    return f"{count} chip{'' if count == 1 else 's'}"
