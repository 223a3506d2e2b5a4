"""The matrices of a split model, each once for all layers alike: who holds which part, in bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from author.english import write
from author.fits import Shape
from author.forms import Statement
from author.manifest import Axis, Ranges
from author.names import Name
from author.program import Role, bound, changed, read_by
from kernels.q8 import BLOCK
from tp.operands import Layout, Operand, canonical
from tp.rolled import Item, Loop, Once, map_names
from tp.slices import block_of, outputs_first, stored_ranges

FLOAT = 4  # bytes
TILE = 34 * BLOCK  # bytes of 32 outputs by 32 inputs, as the native kernels of a CPU hold them


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of the model, as large and as much cut in every layer that has it.

    `kind` counts the distinct layers of the model and says whose matrix it is, None that of no
    layer; `count` is how many layers have it. Shapes are rows by columns, as the language has the
    matrix. Without an `axis` every chip holds all of it. With one, the axis is `blocks` equal
    blocks (experts, say), and `ranges` are those of each chip within every block, (start, length).
    `held` is what a chip really has, `given` what every chip is given, as much as the one that has
    most. Bytes are of one such matrix. `tiles` says whether the native kernels of a CPU take it;
    what they do not take is float32 there. `shared` names the matrix whose bytes it is.
    """

    name: str
    kind: int | None
    count: int
    role: Role
    dtype: str
    whole: Shape
    axis: Axis | None
    blocks: int
    ranges: tuple[Ranges, ...]
    held: tuple[Shape, ...]
    given: Shape
    whole_bytes: int
    held_bytes: tuple[int, ...]
    given_bytes: int
    tiles: bool
    shared: str | None
    used_by: tuple[str, ...]

    @property
    def replicated(self) -> bool:
        """Whether every chip holds all of it."""
        return self.axis is None

    @property
    def is_weight(self) -> bool:
        """Whether it is a weight, and not another one's bytes under a second name."""
        return self.role == "weight" and self.shared is None

    def cpu_bytes(self, *, native: bool) -> int:
        """What a chip is given of it on a CPU, with native kernels or without."""
        rows, cols = self.given
        if self.dtype != "q8":
            return self.given_bytes
        if not (native and self.tiles):
            return FLOAT * rows * cols
        return TILE * -(-rows // BLOCK) * -(-cols // BLOCK)


def matrix_of(
    operand: Operand,
    *,
    chips: int,
    count: int,
    shared: str | None,
    cache_bytes: int,
    used_by: tuple[str, ...],
) -> Matrix:
    """The facts of an operand of a program over so many chips."""
    width = cache_bytes if operand.role == "cache" else FLOAT
    blocks, ranges = _blocks(operand, chips)
    return Matrix(
        name=operand.name.base,
        kind=operand.name.layer,
        count=count,
        role=operand.role,
        dtype="q8" if operand.quantised else f"float{8 * width}",
        whole=operand.whole,
        axis=None if operand.layout is None else operand.layout.axis,
        blocks=blocks,
        ranges=ranges,
        held=tuple(_shape(operand, chip) for chip in range(chips)),
        given=operand.local,
        whole_bytes=_whole_bytes(operand, width),
        held_bytes=_held_bytes(operand, chips, width),
        given_bytes=_given_bytes(operand, width),
        tiles=_takes_tiles(operand),
        shared=shared,
        used_by=used_by,
    )


# --- Ranges


def _blocks(operand: Operand, chips: int) -> tuple[int, tuple[Ranges, ...]]:
    """The ranges of every chip, said once where they are the same in equal blocks of the axis."""
    layout = operand.layout
    if layout is None:
        return 1, ((),) * chips
    blocks, extent = len(layout.widths), _extent(operand, layout)
    stride = extent // blocks if blocks > 0 and extent % blocks == 0 else 0
    if blocks > 1 and stride > 0 and all(_repeats(r, blocks, stride) for r in layout.ranges):
        return blocks, tuple(_real(r[:1]) for r in layout.ranges)
    return 1, tuple(map(_real, layout.ranges))


def _extent(operand: Operand, layout: Layout) -> int:
    return operand.whole[0 if layout.axis == "rows" else 1]


def _repeats(ranges: Ranges, blocks: int, stride: int) -> bool:
    """Whether ranges are the first of them again in each block."""
    if not ranges:
        return True
    first, length = ranges[0]
    inside = first + length <= stride and len(ranges) == blocks
    return inside and all(r == (first + n * stride, length) for n, r in enumerate(ranges))


def _real(ranges: Ranges) -> Ranges:
    return tuple(r for r in ranges if r[1] > 0)


def _shape(operand: Operand, chip: int) -> Shape:
    if operand.layout is None:
        return operand.whole
    rows, cols = operand.whole
    held = operand.layout.held(chip)
    return (held, cols) if operand.layout.axis == "rows" else (rows, held)


# --- Bytes


def _q8_bytes(outputs: int, inputs: Sequence[int], block: int) -> int:
    """A byte a value, and a float16 scale for each block that an output sums over."""
    return outputs * sum(n + 2 * -(-n // block) for n in inputs)


def _whole_bytes(operand: Operand, width: int) -> int:
    if operand.quantised:
        outputs, inputs = outputs_first(operand)
        return _q8_bytes(outputs, [inputs], BLOCK)
    return width * operand.whole[0] * operand.whole[1]


def _held_bytes(operand: Operand, chips: int, width: int) -> tuple[int, ...]:
    shapes = [_shape(operand, chip) for chip in range(chips)]
    if not operand.quantised:
        return tuple(width * rows * cols for rows, cols in shapes)
    block = block_of(operand)
    if operand.layout is None:
        return (_whole_bytes(operand, width),) * chips
    return tuple(_q8_held(operand, chip, block) for chip in range(chips))


def _q8_held(operand: Operand, chip: int, block: int) -> int:
    outer, inner = stored_ranges(operand, chip)
    outputs = sum(length for _, length, _ in outer)
    return _q8_bytes(outputs, [length for _, length, _ in inner], block)


def _padded(operand: Operand) -> tuple[int, int]:
    """The outputs and inputs of every chip's slice as it is stored."""
    outer, inner = stored_ranges(operand, 0)
    return sum(width for *_, width in outer), sum(width for *_, width in inner)


def _given_bytes(operand: Operand, width: int) -> int:
    if not operand.quantised:
        return width * operand.local[0] * operand.local[1]
    outputs, inputs = _padded(operand)
    return _q8_bytes(outputs, [inputs], block_of(operand))


def _takes_tiles(operand: Operand) -> bool:
    """Whether the weight is packed on a CPU, as the loader asks and `kernels.table.pack` grants."""
    wanted = operand.quantised and operand.tiled
    return wanted and block_of(operand) == BLOCK and min(operand.local) > 0


# --- Uses


def uses(
    items: tuple[Item, ...], first_layers: Sequence[int], last_layer: int
) -> Mapping[Name, tuple[str, ...]]:
    """The statements that use each matrix, as they stand in the first layer that has it."""
    found: dict[Name, list[str]] = {}
    for statement in statements(items):
        here = layer_of(statement)

        def real(name: Name, here: int | None = here) -> Name:
            if name.layer is None:
                return name
            first = last_layer if here is None else first_layers[here] + name.layer - here
            return name._replace(layer=first)

        text = f"{write(map_names(statement, real))}."
        for name in dict.fromkeys(map(canonical, (*read_by(statement), *changed(statement)))):
            found.setdefault(name, []).append(text)
    return {name: tuple(texts) for name, texts in found.items()}


def statements(items: tuple[Item, ...]) -> Iterator[Statement]:
    """The statements of items in order, those of a loop once."""
    for item in items:
        match item:
            case Loop():
                yield from statements(item.body)
            case Once():
                yield from statements((item.item,))
            case _:
                yield item


def layer_of(statement: Statement) -> int | None:
    """The layer that a statement stands in; None before the first and after the last."""
    names = (bound(statement), *changed(statement))
    return next((n.layer for n in names if n is not None and n.layer is not None), None)
