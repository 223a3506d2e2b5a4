"""Fills operands from a checkpoint: each device gets its own slices, read once, and a receipt."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from author.families.model import Model, View
from kernels.q8 import Q8, concatenate, dequantise
from kernels.table import pack
from tp.bands import bands, put_together
from tp.checkpoint import Checkpoint
from tp.fitting import check_tensors
from tp.launch import Devices, everywhere
from tp.lower import partition
from tp.operands import Operand
from tp.receipt import Books, Held, Receipt
from tp.slices import Padded, begins, block_of, cut, outputs_first, stored_ranges
from tp.tables import host_table
from tp.views import read_floats, read_q8

Progress = Callable[[str, int, int], None]  # what, done, of


def load(
    model: Model,
    operands: Mapping[str, Operand],
    checkpoint: Checkpoint,
    devices: Devices,
    *,
    kernels: str = "auto",
    progress: Progress = lambda what, done, of: None,
) -> tuple[dict[str, Any], Receipt]:
    """The weights and tables of a program on its devices, laid out for the path `kernels`.

    Raises CheckpointError, before anything reaches a device, where a tensor is missing, has
    another shape than the model says, or is not used.
    """
    wanted = {k: o for k, o in operands.items() if o.role in ("weight", "table")}
    if model.tied:
        wanted.pop("Wout", None)
    books = Books(Receipt(chips=[Held() for _ in range(devices.chips)]), checkpoint)
    books.receipt.skipped = check_tensors(model, wanted, checkpoint)
    filling = _Filling(model, checkpoint, devices, kernels, books)
    weights: dict[str, Any] = {}
    with ThreadPoolExecutor(max_workers=4) as pool:
        for done, (key, array) in enumerate(pool.map(filling.fill, wanted.items()), start=1):
            weights[key] = array
            progress(key, done, len(wanted))
    if model.tied and "Wout" in operands:
        weights["Wout"] = weights["Emb"]
    return weights, books.done()


class _Filling:
    """A load on its way."""

    def __init__(
        self,
        model: Model,
        checkpoint: Checkpoint,
        devices: Devices,
        kernels: str,
        books: Books,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.devices = devices
        self.kernels = kernels
        self.books = books

    def fill(self, item: tuple[str, Operand]) -> tuple[str, Any]:
        key, operand = item
        if operand.role == "table":
            return key, self.spread(
                operand, lambda chip: read_table(self.model, self.checkpoint, operand)
            )
        constant = self.model.constants.get(operand.name)
        if constant is not None:
            whole = np.array(constant, np.float32)
            return key, self.spread(operand, lambda chip: cut(operand, whole, chip))
        views = self.model.views[operand.name]
        make = self.quantised if operand.quantised else self.floats
        return key, self.spread(operand, lambda chip: make(operand, views, chip))

    def spread(self, operand: Operand, local: Callable[[int], Any]) -> Any:
        """One global array of what each chip holds; what all hold is read once a process."""
        sharding = NamedSharding(self.devices.mesh, partition(operand))
        if operand.layout is None:
            with self.books.work_for_all():
                whole = local(0)
            self.books.given([chip for chip, _ in self.devices.here], whole)
            return jax.tree.map(lambda leaf: everywhere(leaf, self.devices.mesh), whole)
        parts = []
        for chip, device in self.devices.here:
            with self.books.work_for(chip):
                part = local(chip)
                parts.append(jax.device_put(part, device))
            padding = 1 - operand.layout.held(chip) / max(operand.layout.length, 1)
            self.books.given([chip], part, padding)
        return jax.tree.map(lambda *leaves: _assembled(leaves, sharding), *parts)

    def floats(self, operand: Operand, views: Sequence[View], chip: int) -> np.ndarray:
        """A float matrix as the language has it, inputs first."""
        outer, inner = stored_ranges(operand, chip)
        found = np.zeros((sum(w for *_, w in outer), sum(w for *_, w in inner)), np.float32)
        for (first, count, _), row in zip(outer, begins(outer), strict=True):
            for (start, length, _), col in zip(inner, begins(inner), strict=True):
                part = read_floats(self.checkpoint, views, first, count, start, length)
                found[row : row + count, col : col + length] = part
        return np.ascontiguousarray(found.T)

    def quantised(self, operand: Operand, views: Sequence[View], chip: int) -> Any:
        outer, inner = stored_ranges(operand, chip)
        block, inputs = block_of(operand), sum(width for *_, width in inner)
        outputs = sum(width for *_, width in outer)
        tiled = operand.tiled

        def packed(q: Q8) -> Any:
            return pack(q, self.devices.platform, self.kernels, tiled=tiled)

        made = (self.band(views, band, inner, block) for band in bands(outer, inputs))
        if tiled:
            return packed(put_together(made, outputs))
        # In floats it is several times as large: never whole as both.
        return put_together(map(packed, made), outputs)

    def band(
        self, views: Sequence[View], outer: list[Padded], inner: list[Padded], block: int
    ) -> Q8:
        """Some ranges of outputs, with every range of inputs."""
        parts = [self.columns(views, outer, *piece) for piece in inner]
        joined = concatenate(
            [
                p.refine(min(block, p.block)).padded(inner=width)
                for p, (_, _, width) in zip(parts, inner, strict=True)
            ],
            "inner",
        )
        return joined.refine(min(block, joined.block))

    def columns(
        self,
        views: Sequence[View],
        outer: list[Padded],
        start: int,
        length: int,
        _: int,
    ) -> Q8:
        """Every output range of one range of inputs, padded and put one below the other."""
        parts = [
            read_q8(self.checkpoint, views, first, count, ((start, length),)).padded(outer=width)
            for first, count, width in outer
        ]
        return concatenate(parts, "outer")


# --- Matrices and tables as the checkpoint has them


def load_tables(
    model: Model,
    operands: Mapping[str, Operand],
    checkpoint: Checkpoint,
    devices: Devices,
    *,
    long: bool,
) -> dict[str, Any]:
    """The tables of a program on its devices, for short sequences or for long ones."""
    return {
        key: everywhere(read_table(model, checkpoint, operand, long=long), devices.mesh)
        for key, operand in operands.items()
        if operand.role == "table"
    }


def read_table(
    model: Model, checkpoint: Checkpoint, operand: Operand, *, long: bool = False
) -> np.ndarray:
    """A host table of the model, float32."""
    bare = operand.name.base.rstrip("0123456789")
    rotary = bare.removesuffix("c") in ("cos", "sin")
    number = int(operand.name.base[len(bare) :])
    tensor = model.rotations[number].divisors if rotary else None
    divisors = None if tensor is None else checkpoint.read(tensor).astype(np.float64)
    return host_table(
        operand.name,
        operand.whole,
        spec=model.spec,
        rotations=model.rotations,
        divisors=divisors,
        long=long,
    )


def read_whole(model: Model, checkpoint: Checkpoint, operand: Operand) -> np.ndarray:
    """A weight whole and in float32, as the language has it: inputs by outputs."""
    if operand.name in model.constants:
        return np.array(model.constants[operand.name], np.float32)
    views, (outputs, inputs) = model.views[operand.name], outputs_first(operand)
    if not operand.quantised:
        return read_floats(checkpoint, views, 0, outputs, 0, inputs).T
    stored = np.asarray(dequantise(read_q8(checkpoint, views, 0, outputs, None)))
    if operand.stored == "plain":
        return stored
    by_head = stored.reshape(operand.heads, -1, inputs).transpose(0, 2, 1)
    return by_head.reshape(operand.whole)


def _assembled(leaves: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    local = leaves[0].shape
    shape = tuple(
        n * (sharding.mesh.size if axis is not None else 1)
        for n, axis in zip(local, (*sharding.spec, *(None,) * len(local)), strict=False)
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))
