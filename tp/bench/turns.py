"""Measures several things in turns, so that a machine that drifts drifts for all alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tp.bench.machine import Watch


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One thing that is measured each turn: whose it is, and the numbers it gives, by name.

    `workers` are the contenders that work meanwhile; all others should be waiting.
    """

    who: str
    measure: Callable[[], Mapping[str, float]]
    workers: tuple[str, ...]


Series = dict[str, dict[str, list[float]]]  # who: name: a number a turn


def in_turns(
    things: Sequence[Thing],
    repeats: int,
    watch: Watch,
    *,
    warm: bool = True,
    told: Callable[[int], None] = lambda turn: None,
) -> Series:
    """Each thing's numbers, turn by turn; with `warm`, after a turn 0 that is not counted.

    `told` hears the number of each turn as it begins.
    """
    found: Series = {thing.who: {} for thing in things}
    for turn in range(0 if warm else 1, repeats + 1):
        told(turn)
        for thing in things:
            if turn == 0:
                thing.measure()
                continue
            with watch.turn_of(thing.workers):
                numbers = thing.measure()
            for name, number in numbers.items():
                found[thing.who].setdefault(name, []).append(number)
    return found


def joined(series: Series, more: Series) -> Series:
    """Two parts of a measurement as one."""
    return {
        who: {**series.get(who, {}), **more.get(who, {})} for who in dict.fromkeys([*series, *more])
    }


def medians(numbers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each number over its turns."""
    return {name: median(values) for name, values in numbers.items()}


def spreads(numbers: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """The least and the largest of each number that was measured more than once."""
    return {name: (min(v), max(v)) for name, v in numbers.items() if len(v) > 1}


def times(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """How many times another's speed ours is, for each that both have.

    Each turn is compared by itself before the median: what it met, both met.
    """
    return {
        name: median(a / b for a, b in zip(ours[name], theirs[name], strict=True))
        for name in ours
        if name in theirs and name.endswith("_per_second")
    }
