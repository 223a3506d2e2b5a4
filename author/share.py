"""Which units of a block a chip holds: runs of columns, and heads that stay with their groups."""

from dataclasses import dataclass

from author.manifest import Ranges
from author.spec import Attention, GatedDelta

Run = tuple[int, int]  # (first, count)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One chip's part of a block; without a chip, all of it.

    Columns are cut at multiples of `align`.
    """

    chip: int | None = None
    chips: int = 1
    align: int = 1

    @property
    def whole(self) -> bool:
        """Whether this is the share that has everything."""
        return self.chip is None

    def run(self, n: int) -> Run:
        """The run of `n` columns that this share holds."""
        return run_of(n, self.chips, self.chip or 0, self.align)


WHOLE = Share()


def run_of(n: int, chips: int, chip: int, align: int = 1) -> Run:
    """The run of `n` things that a chip holds, cut at multiples of `align`; it may be empty.

    The runs of all chips cover everything once, in order; only the last piece may be short.
    """
    units = -(-n // align)
    first, end = (min(c * units // chips * align, n) for c in (chip, chip + 1))
    return first, end - first


def share(units: int, parts: int, chips: int, chip: int) -> tuple[Run, Run]:
    """The units that a chip holds, and the parts of each of them.

    Whole units while there are at least as many as chips; else each unit has several holders,
    which divide its parts among them. A holder that is left without a part holds no unit.
    """
    if chips <= units:
        return run_of(units, chips, chip), (0, parts)
    unit = chip * units // chips
    first = _ceil(unit * chips, units)
    holders = _ceil((unit + 1) * chips, units) - first
    held = run_of(parts, holders, chip - first)
    return (unit, int(held[1] > 0)), held


def attention_heads(a: Attention, part: Share) -> tuple[Run, Run]:
    """The query heads and the key/value heads of a share."""
    repeat = a.heads // a.kv_heads
    groups, (first, count) = share(a.kv_heads, repeat, part.chips, part.chip or 0)
    return (groups[0] * repeat + first, groups[1] * count), groups


def lone_heads(heads: int, part: Share) -> Run:
    """The heads of a share, where each has queries, keys and values of its own."""
    return run_of(heads, part.chips, part.chip or 0)


def counts_keys(a: Attention, part: Share) -> bool:
    """Whether a share is the first that holds its key heads: the one with their first queries."""
    (first, count), _ = attention_heads(a, part)
    return count > 0 and first % (a.heads // a.kv_heads) == 0


def shares_keys(a: Attention, part: Share) -> bool:
    """Whether a key head may be on several chips."""
    return part.chips > a.kv_heads and a.heads > a.kv_heads


def delta_heads(g: GatedDelta, part: Share) -> tuple[Run, Ranges]:
    """The key heads of a share and its value heads.

    Value heads are tiled `(repeat, key head)`, so that those of a run of key heads stand in as
    many ranges as a key head has of them.
    """
    repeat = g.v_heads // g.k_heads
    keys, (first, count) = share(g.k_heads, repeat, part.chips, part.chip or 0)
    return keys, tuple((r * g.k_heads + keys[0], keys[1]) for r in range(first, first + count))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A whole extent of rows or columns, and the ranges of it that a share holds."""

    total: int
    ranges: Ranges

    @property
    def held(self) -> int:
        """How much of the extent the share holds."""
        return sum(length for _, length in self.ranges)


def by_head(heads: int, width: int, *runs: Run) -> Cut:
    """The cut of heads of equal width, by runs of heads."""
    ranges = tuple((first * width, count * width) for first, count in runs)
    return Cut(total=heads * width, ranges=ranges)


def by_run(n: int, part: Share) -> Cut:
    """The cut of `n` columns that may part anywhere `align` allows."""
    return Cut(total=n, ranges=(part.run(n),))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
