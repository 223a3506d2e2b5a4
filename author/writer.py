"""Collects a program statement by statement, with the tables beside it and who holds what."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from author import statements as say
from author.forms import Expression, Statement
from author.manifest import Axis, Placed, Ranges, TpCollective, TpManifest, TpSlice
from author.names import Name
from author.program import Program
from author.share import WHOLE, Cut, Share
from author.spec import Layer, ModelSpec, rotations

Kind = Literal["q8", "float", "state", "cache"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix that a layer holds, and the part of it that a share holds.

    Weights are quantised (`q8`) or not (`float`); a `state` is filled by the host, a `cache` by
    the steps. Without an `axis` every chip holds all of it.
    """

    base: str
    rows: int
    cols: int
    kind: Kind = "q8"
    axis: Axis | None = None
    ranges: Ranges = ()


def by_cols(base: str, rows: int, cut: Cut, kind: Kind = "q8") -> Matrix:
    """A matrix whose columns are cut."""
    return Matrix(base=base, rows=rows, cols=cut.total, kind=kind, axis="cols", ranges=cut.ranges)


def by_rows(base: str, cut: Cut, cols: int, kind: Kind = "q8") -> Matrix:
    """A matrix whose rows are cut."""
    return Matrix(base=base, rows=cut.total, cols=cols, kind=kind, axis="rows", ranges=cut.ranges)


def uncut(base: str, rows: int, cols: int, kind: Kind = "q8") -> Matrix:
    """A matrix that every chip holds whole."""
    return Matrix(base=base, rows=rows, cols=cols, kind=kind)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a step: how many, with how long a cache, and how they stand in it.

    Without `ctx` the one row is all there is, and nothing is kept. Stacked rows follow one another
    in one shared state, or each has a state and a position of its own.
    """

    count: int = 1
    ctx: int | None = None
    stacked: Literal["shared", "per_sequence"] | None = None


class Writer:
    """A program in the making; `chips` is given for one that is split."""

    def __init__(self, spec: ModelSpec, folder: str, chips: int | None = None) -> None:
        self.spec = spec
        self.folder = folder
        self.chips = chips
        self.statements: list[Statement] = []
        self.f32: dict[Name, tuple[str, int]] = {}
        self.q8: dict[Name, str] = {}
        self.declared: set[Name] = set()
        # A name that is reserved keeps its turn in the manifest, and falls out if never bound.
        self.placed: dict[Name, Placed | None] = {}
        self.collectives: list[TpCollective] = []
        self.rotations = rotations(spec)

    @property
    def epsilon(self) -> float | None:
        """The epsilon of every norm, where it must be said."""
        return said_epsilon(self.spec.rms_eps)

    def stream_norm(self, x: Name, weight: Name) -> Expression:
        """The norm of the stream: before blocks, after them, and at the end."""
        if self.spec.norm == "layer":
            return say.LayerNorm(x, weight, self.epsilon)
        return say.RmsNorm(x, weight, None, self.epsilon)

    def say(self, statement: Statement) -> None:
        """Add a statement that binds nothing, or a run-time integer."""
        self.statements.append(statement)

    def let(self, name: Name, value: Expression) -> Name:
        """Bind a name; one with a chip is placed there."""
        self.statements.append(say.Let(name, value))
        self.place(name)
        return name

    def tensor(self, name: Name, rows: int, cols: int) -> Name:
        """Declare a matrix that nothing outside fills; one with a chip is placed there."""
        self.statements.append(say.Tensor(name, rows, cols))
        self.place(name)
        return name

    def float_matrix(self, name: Name, rows: int, cols: int) -> Name:
        """Declare a matrix of floats, once."""
        if name not in self.declared:
            self.declared.add(name)
            self.f32[name] = (f"{self.folder}/{name}.f", rows * cols)
            self.tensor(name, rows, cols)
        return name

    def q8_matrix(self, name: Name, rows: int, cols: int) -> Name:
        """Declare a quantised matrix, once."""
        if name not in self.declared:
            self.declared.add(name)
            self._quantised(name)
            self.tensor(name, rows, cols)
        return name

    def slice(self, name: Name, piece: TpSlice, *, q8: bool) -> Name:
        """Declare a chip's slice of a whole matrix, once; its chip is in the name."""
        if q8:
            self._quantised(piece.of)
        if name not in self.declared:
            self.declared.add(name)
            self.statements.append(say.Tensor(name, *piece.shape))
            self.place(name, piece)
        return name

    def _quantised(self, whole: Name) -> None:
        self.q8[whole] = f"{self.folder}/{whole}"

    def reserve(self, names: Iterable[Name]) -> None:
        """Give names their turn in the manifest before they are bound."""
        for name in names:
            self.placed.setdefault(name, None)

    def place(self, name: Name, piece: TpSlice | None = None) -> None:
        """Note the chip of a name; a name without one is on every chip."""
        if name.chip is not None:
            self.placed[name] = Placed(name=name, chip=name.chip, slice=piece)

    def program(self) -> Program:
        """What was written."""
        return Program(
            statements=tuple(self.statements),
            f32=self.f32,
            q8=self.q8,
            manifest=None if self.chips is None else self._manifest(self.chips),
        )

    def _manifest(self, chips: int) -> TpManifest:
        return TpManifest(
            chips=chips,
            placed=tuple(p for p in self.placed.values() if p is not None),
            collectives=tuple(self.collectives),
        )


def said_epsilon(epsilon: float) -> float | None:
    """An epsilon where it must be said: None for the one that a norm has anyway."""
    return None if epsilon == 1e-6 else epsilon


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where a block's statements stand: a layer, a chip's share of it, and the rows they speak of.

    A scope speaks of all rows of the step, or with a `sequence` of one row out of a stack.
    """

    writer: Writer
    number: int
    rows: Rows
    share: Share = WHOLE
    sequence: int | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.writer.spec

    @property
    def layer(self) -> Layer:
        """The layer that is written."""
        return self.spec.layers[self.number]

    @property
    def stacked(self) -> bool:
        """Whether values here are matrices of several rows, named with a leading `b`."""
        return self.rows.stacked is not None and self.sequence is None

    @property
    def height(self) -> int:
        """The rows of a value here."""
        return self.rows.count if self.stacked else 1

    @property
    def position(self) -> Name | None:
        """The position of the first row; None where nothing is cached."""
        if self.rows.ctx is None:
            return None
        return (
            Name("pos") if self.rows.stacked is None else Name("pos", sequence=self.sequence or 0)
        )

    @property
    def everywhere(self) -> "Scope":
        """The scope of what every chip computes alike; on one device, of everything."""
        return replace(self, share=WHOLE)

    def split(self) -> Iterator["Scope"]:
        """One scope for each row of a stack, in order; a lone row is its own."""
        if not self.stacked:
            yield self
            return
        for sequence in range(self.rows.count):
            yield replace(self, sequence=sequence)

    def holders(self) -> Iterator["Scope"]:
        """One scope for each state that this step changes."""
        return self.split() if self.rows.stacked == "per_sequence" else iter((self,))

    # --- Names

    def value(self, base: str) -> Name:
        """The name of a value that is computed here."""
        stem = f"b{base}" if self.stacked else base
        return Name(stem, self.number, self.sequence, self.share.chip)

    def weight(self, base: str) -> Name:
        """The name of a weight, or of this share's slice of it."""
        return Name(base, self.number, None, self.share.chip)

    def state(self, base: str) -> Name:
        """The name of a state, a cache or a view of one."""
        return Name(base, self.number, self.sequence, self.share.chip)

    # --- Statements

    def let(self, base: str, value: Expression) -> Name:
        """Bind a value of this scope."""
        return self.writer.let(self.value(base), value)

    def declare(self, matrix: Matrix) -> Name:
        """Declare a matrix: whole, or this share's slice of it."""
        kept = matrix.kind in ("state", "cache")
        name = self.state(matrix.base) if kept else self.weight(matrix.base)
        shape = (matrix.rows, matrix.cols)
        if self.share.whole or matrix.axis is None:
            return self._declare_whole(name._replace(chip=None), shape, matrix.kind)
        piece = TpSlice(
            of=name._replace(chip=None), of_shape=shape, axis=matrix.axis, ranges=matrix.ranges
        )
        return self.writer.slice(name, piece, q8=matrix.kind == "q8")

    def _declare_whole(self, name: Name, shape: tuple[int, int], kind: Kind) -> Name:
        if kind == "cache":
            return self.writer.tensor(name, *shape)
        if kind == "q8":
            return self.writer.q8_matrix(name, *shape)
        return self.writer.float_matrix(name, *shape)

    def reserve(self, *bases: str) -> None:
        """Give this share's values their turn in the manifest."""
        if not self.share.whole:
            self.writer.reserve(self.value(base) for base in bases)

    def norm(self, base: str, x: Name, weight: Name, heads: int | None = None) -> Name:
        """Norm a value, in so many heads a row where a row has several."""
        segments = None if heads is None else heads * self.height
        return self.let(base, say.RmsNorm(x, weight, segments, self.writer.epsilon))

    def zero(self, base: str, like: Name) -> Name:
        """A value that adds nothing, shaped like another."""
        return self.let(base, say.Scaled(like, 0.0))

    def project(self, base: str, x: Name, weight: str, bias: Matrix | None = None) -> Name:
        """A product with a weight, and its bias added."""
        product = say.Matmul(x, self.weight(weight))
        if bias is None:
            return self.let(base, product)
        added = self.declare(bias)
        raw = self.writer.let(derived(self.value(base), "_r"), product)
        return self.let(base, say.Plus(raw, added))


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What the chips add up halfway through a block, before any of them can go on.

    `partial` writes a share's part of it, `cols` wide, and all that it is made from; `after`
    writes what every chip makes of the sum.
    """

    base: str
    cols: int
    partial: Callable[[Scope, Name], Name]
    after: Callable[[Scope], object] | None = None


def derived(name: Name, tail: str) -> Name:
    """The name of a value that comes from the one named, `tail` behind it."""
    return Name.of(f"{name}{tail}")
