"""What a q8 store will hold, shard by shard and byte by byte, before anything is read for it."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from author.families.model import View
from kernels.q8 import BLOCK
from tp.authored import step_of
from tp.checkpoint import Checkpoint
from tp.fitting import check_tensors
from tp.operands import operands
from tp.roll import roll
from tp.slices import outputs_first
from tp.source import Source
from tp.store_file import FORMAT, Q8_DTYPE, SCALES, VALUES
from tp.stored import FLOATS

_SIZES = {"I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # bytes a number
# So many numbers of a matrix are converted at a time: their temporaries stay in a cache.
_NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix as a store will have it, outputs by inputs; of dtype `Q8`, or of floats."""

    name: str
    views: tuple[View, ...]
    outputs: int
    inputs: int
    dtype: str

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors it becomes, in the order of their bytes: dtype and shape of each."""
        if self.dtype == Q8_DTYPE:
            return {
                self.name + VALUES: ("I8", (self.outputs, self.inputs)),
                self.name + SCALES: ("F16", (self.outputs, -(-self.inputs // BLOCK))),
            }
        shape = (self.outputs,) if self.inputs == 1 else (self.outputs, self.inputs)
        return {self.name: (self.dtype, shape)}

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return sum(_nbytes(*tensor) for tensor in self.tensors.values())

    @property
    def bands(self) -> list[tuple[int, int]]:
        """Its outputs in ranges `(first, count)` of bounded size."""
        at_once = max(1, _NUMBERS_AT_ONCE // max(1, self.inputs))
        starts = range(0, max(1, self.outputs), at_once)
        return [(first, min(at_once, self.outputs - first)) for first in starts]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a store: its name, and the matrices in it."""

    file: str
    matrices: tuple[Matrix, ...]

    @property
    def header(self) -> bytes:
        """What stands before the data, as safetensors has it."""
        entries: dict[str, object] = {"__metadata__": {"format": FORMAT}}
        at = 0
        for matrix in self.matrices:
            for name, (dtype, shape) in matrix.tensors.items():
                end = at + _nbytes(dtype, shape)
                entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
                at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """How long the file will be."""
        return len(self.header) + sum(matrix.nbytes for matrix in self.matrices)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All shards of a store, and why tensors of the source are in none of them."""

    shards: tuple[Shard, ...]
    skipped: dict[str, str]

    @property
    def nbytes(self) -> int:
        """How long all files will be together."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """A digest of every name, shape, type and place."""
        found = hashlib.sha256()
        for shard in self.shards:
            found.update(shard.file.encode() + shard.header)
        return found.hexdigest()


def plan_of(source: Source, shard_size: int) -> Plan:
    """The store of a source in shards of about so many bytes, a matrix more where one is larger.

    Raises CheckpointError where a tensor is missing, has another shape than the model says, or
    belongs to nothing.
    """
    rolled = roll(step_of(source.model.spec, chips=1, context=1))
    wanted = {str(n): o for n, o in operands(rolled).items() if o.role == "weight"}
    if source.model.tied:
        wanted.pop("Wout", None)
    skipped = check_tensors(source.model, wanted, source.checkpoint)
    matrices = [
        _matrix(
            source.checkpoint,
            key,
            source.model.views[operand.name],
            outputs_first(operand),
            quantised=operand.quantised,
        )
        for key, operand in wanted.items()
        if operand.name not in source.model.constants
    ]
    matrices += [_kept(source.checkpoint, tensor) for tensor in _needed(source)]
    runs = list(_runs(matrices, shard_size))
    files = [f"q8-{number:05}-of-{len(runs):05}.safetensors" for number in range(1, len(runs) + 1)]
    shards = tuple(Shard(file=f, matrices=tuple(r)) for f, r in zip(files, runs, strict=True))
    return Plan(shards=shards, skipped=skipped)


def _matrix(
    checkpoint: Checkpoint,
    name: str,
    views: Sequence[View],
    shape: tuple[int, int],
    *,
    quantised: bool,
) -> Matrix:
    outputs, inputs = shape
    return Matrix(
        name=name,
        views=tuple(views),
        outputs=outputs,
        inputs=inputs,
        dtype=Q8_DTYPE if quantised else _float_type(checkpoint, views),
    )


def _float_type(checkpoint: Checkpoint, views: Sequence[View]) -> str:
    """The type that floats have in the source; float32 where something is done to them."""
    dtypes = {checkpoint.tensors[view.tensor].dtype for view in views}
    changed = any(view.function is not None or view.plus != 0 for view in views)
    return dtypes.pop() if not changed and len(dtypes) == 1 and dtypes <= set(FLOATS) else "F32"


def _needed(source: Source) -> list[str]:
    """Small tensors that are in no matrix: of rotations, and beside the config."""
    divisors = (r.divisors for r in source.model.rotations if r.divisors is not None)
    return sorted({*source.described_by, *divisors})


def _kept(checkpoint: Checkpoint, tensor: str) -> Matrix:
    """Such a tensor, as it was."""
    found = checkpoint.tensors[tensor]
    shape = (found.rows, found.cols)
    return _matrix(checkpoint, tensor, [View(tensor=tensor)], shape, quantised=False)


def _runs(matrices: Sequence[Matrix], size: int) -> Iterator[list[Matrix]]:
    """The matrices in runs of about so many bytes; one at the least."""
    run, held = [], 0
    for matrix in matrices:
        if run and held + matrix.nbytes > size:
            yield run
            run, held = [], 0
        run.append(matrix)
        held += matrix.nbytes
    yield run


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _SIZES[dtype] * prod(shape)
