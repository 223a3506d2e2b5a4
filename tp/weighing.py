"""What a split is worth: against the same model on one chip, and within a chip's memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tp.matrices import FLOAT
from tp.outline import Outline
from tp.split import COUNTS, Split, split_of

FARTHEST = 512  # chips that are looked at for a width that fits
SAME = 1.005  # a width that reads less than this much less gains nothing


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A split beside the same model on one chip, and `over` any number of them.

    `memory` is what a chip has, if it was said.
    """

    outline: Outline
    split: Split
    alone: Split
    over: Callable[[int], Split]
    context: int
    cache_bytes: int
    memory: int | None

    @property
    def chips(self) -> int:
        """How many chips there are."""
        return len(self.split.chips)

    @property
    def speed_up(self) -> float:
        """The best that the split allows a decode step, which is bound by what a chip reads.

        All chips read what they are given, padding included.
        """
        return self.alone.given.cost.reads / self.split.given.cost.reads

    @property
    def speed_up_by_operations(self) -> float:
        """The best that it allows where arithmetic is the bound, as in a long prompt."""
        return self.alone.given.cost.operations / self.split.given.cost.operations

    @property
    def folds(self) -> int:
        """The folds of a step."""
        return sum(c.count for c in self.split.collectives if c.kind == "fold")

    @property
    def joins(self) -> int:
        """The joins of a step."""
        return sum(c.count for c in self.split.collectives if c.kind == "join")

    @property
    def sent(self) -> int:
        """The bytes that each chip sends in a step, at the least."""
        return sum(c.count * c.sent for c in self.split.collectives)

    @property
    def fits(self) -> bool | None:
        """Whether a chip's memory holds what it is given; None where no memory was said."""
        return None if self.memory is None else self.split.given.bytes <= self.memory

    @property
    def longest(self) -> int | None:
        """The longest context that fits, as far as the model was made for one."""
        if self.memory is None:
            return None
        found = self.split.longest(self.memory)
        return found if self.outline.context is None else min(found, self.outline.context)


def weigh(
    outline: Outline,
    widths: Sequence[int],
    *,
    context: int,
    cache_bytes: int = FLOAT,
    memory: int | None = None,
) -> tuple[Weighed, ...]:
    """A model on each of so many chips, for a context; raises SpecError where it has no split."""

    def over(chips: int) -> Split:
        return split_of(
            outline.spec,
            chips,
            context=context,
            tied=outline.tied,
            cache_bytes=cache_bytes,
            tables=outline.tables,
        )

    alone = over(1)
    return tuple(
        Weighed(
            outline=outline,
            split=alone if chips == 1 else over(chips),
            alone=alone,
            over=over,
            context=context,
            cache_bytes=cache_bytes,
            memory=memory,
        )
        for chips in widths
    )


# --- Widths against one another


def wasted(widths: Sequence[Weighed]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """The widths that gain nothing over a smaller one of them: that one, and what does not shrink.

    What does not shrink are those of COUNTS of which some chip still has as much; where there are
    none, it is what every chip holds whole.
    """
    found: dict[int, tuple[int, tuple[str, ...]]] = {}
    for one in widths:
        smaller = [other for other in widths if other.chips < one.chips]
        best = max(smaller, key=lambda other: other.speed_up, default=None)
        if best is not None and one.speed_up < SAME * best.speed_up:
            found[one.chips] = best.chips, tuple(_not_less(one.split, best.split))
    return found


def _not_less(split: Split, other: Split) -> Iterator[str]:
    for count in COUNTS:
        if split.given.counts[count] >= other.given.counts[count] > 0:
            yield count


def fewest(weighed: Weighed) -> int | None:
    """The fewest chips whose memory would hold the model, where these do not; None for none.

    Looked for up to FARTHEST, as if more chips never held more each.
    """
    memory = weighed.memory
    if memory is None or weighed.fits or _whole_everywhere(weighed.split) > memory:
        return None

    def fits(chips: int) -> bool:
        return weighed.over(chips).given.bytes <= memory

    fails, works = weighed.chips, FARTHEST
    if fails >= works or not fits(works):
        return None
    while works - fails > 1:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if fits(middle) else (middle, works)
    return works


def _whole_everywhere(split: Split) -> int:
    """The bytes of what every chip holds whole, however many there are."""
    return sum(m.count * m.given_bytes for m in split.matrices if m.replicated)
