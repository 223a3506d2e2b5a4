"""What a program wants from outside: each matrix, how it lies over chips, how it is stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from author.forms import Expression
from author.manifest import Axis, Ranges, TpManifest
from author.names import Name
from author.program import Role, roles
from author.statements import Let, Matmul, Moe, Tensor
from tp.rolled import Each, Item, Loop, Once, Rolled, place
from tp.unroll import unroll_layers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one axis of a whole matrix lies over the chips.

    JAX arrays are even, so every chip holds as much as the one that holds most: each range is
    padded with zeros to its longest over the chips (`widths`), and a chip with fewer ranges has
    empty ones. Zeros add nothing to a fold, so uneven and empty chips need no branch.
    """

    axis: Axis
    ranges: tuple[Ranges, ...]  # one list of (start, length) a chip
    widths: tuple[int, ...]

    @property
    def length(self) -> int:
        """The extent of every chip's slice, padding included."""
        return sum(self.widths)

    def held(self, chip: int) -> int:
        """The extent of what a chip really holds."""
        return sum(length for _, length in self.ranges[chip])


Stored = Literal["plain", "turned", "heads"]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One matrix that a step takes from outside.

    `stored` says how a quantised weight lies in memory: outputs by inputs, so that the axis
    summed over is last. `plain` is that already; `turned` is the transpose; `heads` is turned
    head by head. Float matrices stay as the language has them. `experts` says that a mixture reads
    it, which takes no tiles.
    """

    name: Name
    role: Role
    whole: tuple[int, int]
    layout: Layout | None = None
    sequences: int | None = None
    quantised: bool = False
    stored: Stored = "plain"
    heads: int = 1
    experts: bool = False

    @property
    def tiled(self) -> bool:
        """Whether all that reads a quantised weight takes it in tiles."""
        return self.stored != "heads" and not self.experts

    @property
    def local(self) -> tuple[int, int]:
        """Rows and columns of the slice of one chip, padding included."""
        rows, cols = self.whole
        if self.layout is None:
            return rows, cols
        length = self.layout.length
        return (length, cols) if self.layout.axis == "rows" else (rows, length)


def canonical(name: Name) -> Name:
    """A matrix's name whatever the chip or sequence: `Kc0` for `Kc0_s1_c2`."""
    return name._replace(chip=None, sequence=None)


def operands(rolled: Rolled) -> dict[Name, Operand]:
    """The matrices of a program that outlive a step or come from outside, in its order."""
    manifest = rolled.program.manifest or TpManifest(chips=1)
    role = roles(rolled.program)
    items = unroll_layers(rolled)
    uses = {canonical(name): use for name, use in _uses(items)}
    of_experts = {canonical(name) for name in _of_experts(items)}
    found: dict[Name, Operand] = {}
    for tensor, sequences in tensors(items):
        first = _first_copy(tensor.name)
        copies = [place(first, "chip", chip) for chip in range(manifest.chips)]
        named: list[Role] = [role[c] for c in copies if c in role]
        if not named or named[0] == "buffer":
            continue
        here: Role = named[0]
        layout, whole = _layout(tensor, copies, manifest)
        name = canonical(tensor.name)
        pieces = [manifest.slice_of(c) for c in copies]
        of = next((p.of for p in pieces if p is not None), first)
        quantised = here == "weight" and of in rolled.program.q8
        stored, heads = uses.get(name, ("plain", None)) if quantised else ("plain", None)
        found[name] = Operand(
            name=name,
            role=here,
            whole=whole,
            layout=layout,
            sequences=sequences,
            quantised=quantised,
            stored=stored,
            heads=1 if heads is None else whole[0] * _largest(heads) // _local_rows(layout, whole),
            experts=name in of_experts,
        )
    return found


def tensors(
    items: tuple[Item, ...], sequences: int | None = None
) -> Iterator[tuple[Tensor, int | None]]:
    """Every declaration, with how many sequences it stands for."""
    for item in items:
        match item:
            case Loop("sequence", count, body):
                yield from tensors(body, count)
            case Loop():
                yield from tensors(item.body, sequences)
            case Once(axis, inner):  # what stands in the first sequence alone serves all
                yield from tensors((inner,), None if axis == "sequence" else sequences)
            case Tensor():
                yield item, sequences


def _first_copy(name: Name) -> Name:
    """The name for sequence 0; the tables and the manifest know no loops."""
    return place(name, "sequence", 0)


def _layout(
    tensor: Tensor, copies: list[Name], manifest: TpManifest
) -> tuple[Layout | None, tuple[int, int]]:
    pieces = [manifest.slice_of(copy) for copy in copies]
    piece = next((p for p in pieces if p is not None), None)
    if piece is None:
        return None, (tensor.rows, tensor.cols)
    ranges = tuple(() if p is None else p.ranges for p in pieces)
    longest = max(len(r) for r in ranges)
    widths = tuple(max(r[index][1] for r in ranges if index < len(r)) for index in range(longest))
    return Layout(axis=piece.axis, ranges=ranges, widths=widths), piece.of_shape


def _largest(heads: object) -> int:
    return heads.largest if isinstance(heads, Each) else int(heads)  # type: ignore[call-overload]


def _local_rows(layout: Layout | None, whole: tuple[int, int]) -> int:
    return layout.length if layout is not None and layout.axis == "rows" else whole[0]


def _uses(items: tuple[Item, ...]) -> Iterator[tuple[Name, tuple[Stored, object]]]:
    """How each weight is used where that asks for another order in memory than its own."""
    for item in items:
        match item:
            case Loop():
                yield from _uses(item.body)
            case Let(value=Expression() as value):
                yield from _uses_of(value)


def _uses_of(value: Expression) -> Iterator[tuple[Name, tuple[Stored, object]]]:
    match value:
        case Matmul(heads=None):
            yield value.w, ("turned", None)
        case Matmul():
            yield value.w, ("heads", value.heads)
        case Moe():
            yield value.router, ("turned", None)


def _of_experts(items: tuple[Item, ...]) -> Iterator[Name]:
    """The weights that mixtures read."""
    for item in items:
        match item:
            case Loop():
                yield from _of_experts(item.body)
            case Let(value=Moe() as moe):
                yield from (moe.router, moe.gate, moe.up, moe.down)
