"""What a family makes of a config: the spec, its rotations, and where each matrix is found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from author.names import Name
from author.spec import ModelSpec

# --- Rotations


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Every frequency divided."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Long waves stretched, short ones kept, a ramp between."""

    factor: float
    low: float
    high: float
    original: float


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """A ramp from kept to stretched frequencies over the pairs, by their turns in `original`.

    `truncate`: the ends of the ramp are whole pairs.
    """

    factor: float
    original: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """Each frequency divided by its own factor: `long` once a sequence passes `original`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int


Scaling = Linear | Llama3 | Yarn | LongRope


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How a rotary table is computed: its base, and the scaling of its frequencies.

    `attention` is a factor on cosines and sines; `divisors` names a tensor that divides each
    frequency instead of a scaling (GGUF's `rope_freqs`).
    """

    dims: int
    theta: float
    scaling: Scaling | None = None
    attention: float = 1.0
    divisors: str | None = None


# --- Views

Run = tuple[int, int, int]  # (start, length, step)
Function = Literal["softplus", "log_of_negative"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Places along an axis, in the order wanted: runs, and all of them again further on.

    The runs follow one another, `times` over, each time `stride` places on.
    """

    runs: tuple[Run, ...]
    times: int = 1
    stride: int = 0

    @property
    def length(self) -> int:
        """How many places there are."""
        return self.times * sum(length for _, length, _ in self.runs)


@dataclass(frozen=True, kw_only=True)
class View:
    """Where a matrix, outputs first, stands in a tensor whose leading axes are flattened to rows.

    With `turned`, the tensor has its inputs first, in blocks of so many rows: `[blocks * turned,
    n]` is seen as `[blocks * n, turned]` (all rows of a tensor for a plain transpose). Of what is
    seen so, `rows` are the outputs wanted and `cols` the inputs. The entries go through `function`,
    then `plus` is added. A tensor of one axis is a column: its entries are outputs.

    A float matrix is the transpose of its views: in the language, inputs come first.
    """

    tensor: str
    turned: int | None = None
    rows: Order | None = None
    cols: Order | None = None
    function: Function | None = None
    plus: float = 0.0


def part(start: int, length: int) -> Order:
    """A range."""
    return Order(runs=((start, length, 1),))


def of_each(count: int, stride: int, *runs: Run) -> Order:
    """The same runs of each of `count` blocks of `stride` places: a part of every head or expert.

    `(0, n, 2)` and `(1, n, 2)` are the alternate ones.
    """
    return Order(runs=runs, times=count, stride=stride)


def half_split(
    heads: int,
    width: int,
    turned: int,
    *,
    first: int = 0,
    start: int = 0,
    stride: int | None = None,
) -> Order:
    """Heads whose rotary pairs stand side by side, put half-split.

    Of the `width` places of a head, `turned` are in pairs, from its `first` on. The first head
    begins at `start`, the next ones `stride` places on (right behind, if it is not given).
    """
    at, rest = start + first, first + turned
    runs = (
        (start, first, 1),
        (at, turned // 2, 2),
        (at + 1, turned // 2, 2),
        (start + rest, width - rest, 1),
    )
    kept = tuple(run for run in runs if run[1] > 0)
    return Order(runs=kept, times=heads, stride=width if stride is None else stride)


def tiled(
    groups: int, repeat: int, width: int, *, start: int = 0, stride: int | None = None
) -> Order:
    """Heads that stand by group, taken `(repeat, group)`: the first of each group, the second ...

    A group has `repeat` heads of `width` places, the first of them `start` places into it; groups
    begin `stride` places apart (right behind one another, if it is not given).
    """
    apart = repeat * width if stride is None else stride
    runs = tuple((start + group * apart, width, 1) for group in range(groups))
    return Order(runs=runs, times=repeat, stride=width)


# --- Models


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model ready to be authored and loaded; a matrix is the views of it, one after another.

    `tied` says that the head is the embedding. `context` is how long a sequence the model was made
    for. `constants` are matrices, row by row, that follow from the config. `numbers` are tensors
    of one number that the program has written in, and must hold that one. `skipped` gives the
    reason for each tensor that is not used, by a pattern in which `*` stands for anything.
    """

    family: str
    spec: ModelSpec
    rotations: tuple[Rotation, ...]
    views: Mapping[Name, tuple[View, ...]]
    tied: bool
    context: int
    constants: Mapping[Name, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def short_length(self) -> int | None:
        """How long a sequence may get before its rotations take their long factors, if any do."""
        scalings = [r.scaling for r in self.rotations]
        return min((s.original for s in scalings if isinstance(s, LongRope)), default=None)
