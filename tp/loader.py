"""Fills operands from a checkpoint: each device gets its own slices, read once, and a receipt."""

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from author.families.model import Model, View
from author.manifest import Ranges
from author.names import Name
from kernels.q8 import BLOCK, Q8, concatenate
from kernels.table import pack
from tp.checkpoint import Checkpoint, CheckpointError
from tp.launch import Devices
from tp.lower import partition
from tp.operands import Operand
from tp.tables import host_table

Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(kw_only=True)
class Held:
    """What one device was given; what all hold alike is read once, and not counted here."""

    bytes_read: int = 0
    bytes_held: int = 0
    bytes_padding: int = 0


@dataclass(kw_only=True)
class Receipt:
    """What a load read and where it went; bytes are counted at the file and on the devices."""

    chips: list[Held]
    seconds: float = 0.0
    peak_host_bytes: int = 0
    shared_bytes_read: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        """All bytes that were read from the checkpoint."""
        return self.shared_bytes_read + sum(c.bytes_read for c in self.chips)


def load(
    model: Model,
    operands: Mapping[str, Operand],
    checkpoint: Checkpoint,
    devices: Devices,
    *,
    progress: Progress = lambda what, done, of: None,
) -> tuple[dict[str, Any], Receipt]:
    """The weights and tables of a program on its devices.

    Raises CheckpointError, before anything reaches a device, where a tensor is missing, has
    another shape than the model says, or is not used.
    """
    started = time.perf_counter()
    wanted = {k: o for k, o in operands.items() if o.role in ("weight", "table")}
    if model.tied:
        wanted.pop("Wout", None)
    receipt = Receipt(chips=[Held() for _ in range(devices.chips)])
    receipt.skipped = check_tensors(model, wanted, checkpoint)
    filling = _Filling(model, checkpoint, devices, receipt)
    weights: dict[str, Any] = {}
    with ThreadPoolExecutor(max_workers=4) as pool:
        for done, (key, array) in enumerate(pool.map(filling.fill, wanted.items()), start=1):
            weights[key] = array
            progress(key, done, len(wanted))
    if model.tied and "Wout" in operands:
        weights["Wout"] = weights["Emb"]
    receipt.seconds = time.perf_counter() - started
    receipt.peak_host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return weights, receipt


def check_tensors(
    model: Model, operands: Mapping[str, Operand], checkpoint: Checkpoint
) -> dict[str, str]:
    """Refuse a checkpoint whose tensors are not just those of the model; why others are skipped."""
    problems: list[str] = []
    used: set[str] = set()
    for key, operand in operands.items():
        if operand.role != "weight":
            continue
        views = model.views[Name.of(key)]
        used |= {v.tensor for v in views}
        problems += _misfits(operand, views, checkpoint)
    used |= {r.divisors for r in model.rotations if r.divisors is not None}
    skipped: dict[str, str] = {}
    for name in checkpoint.tensors:
        reason = next((r for s, r in model.skipped.items() if name.endswith(s)), None)
        if name in used:
            continue
        if reason is None:
            problems.append(f"{name} belongs to nothing that a {model.family} model computes")
        else:
            skipped[name] = reason
    if problems:
        raise CheckpointError(
            file=str(checkpoint.path),
            tensor=None,
            found="; ".join(problems),
            wanted="the tensors that its config describes",
        )
    return skipped


def _misfits(operand: Operand, views: Sequence[View], checkpoint: Checkpoint) -> Iterator[str]:
    rows, cols = operand.whole
    outputs, inputs = (cols, rows) if operand.stored == "turned" else (rows, cols)
    missing = [v.tensor for v in views if v.tensor not in checkpoint.tensors]
    if missing:
        yield f"{', '.join(missing)} is missing"
        return
    found = [checkpoint.tensors[v.tensor] for v in views]
    if not operand.quantised:
        (tensor,) = found
        if tensor.shape != (inputs,):
            yield f"{tensor.name} is {list(tensor.shape)}, wanted [{inputs}]"
        return
    total = sum(t.rows if v.rows is None else v.rows[1] for v, t in zip(views, found, strict=True))
    for tensor in found:
        if len(tensor.shape) < 2 or tensor.cols != inputs or total != outputs:
            yield f"{tensor.name} is {list(tensor.shape)}, wanted [{outputs}, {inputs}]"


class _Filling:
    """A load on its way."""

    def __init__(
        self, model: Model, checkpoint: Checkpoint, devices: Devices, receipt: Receipt
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.devices = devices
        self.receipt = receipt
        self.writing = Lock()

    def fill(self, item: tuple[str, Operand]) -> tuple[str, Any]:
        key, operand = item
        if operand.role == "table":
            return key, self.spread(
                operand, lambda chip: read_table(self.model, self.checkpoint, operand)
            )
        views = self.model.views[operand.name]
        make = self.quantised if operand.quantised else self.plain
        return key, self.spread(operand, lambda chip: make(operand, views, chip))

    def spread(self, operand: Operand, local: Callable[[int], Any]) -> Any:
        """One global array of what each chip holds; what all hold is read once."""
        sharding = NamedSharding(self.devices.mesh, partition(operand))
        if operand.layout is None:
            before = self.checkpoint.bytes_read_here
            whole = local(0)
            self.note(range(self.devices.chips), whole, 0, shared=before)
            return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), whole)
        parts = []
        for chip, device in enumerate(self.devices.mesh.devices.flat):
            before = self.checkpoint.bytes_read_here
            part = local(chip)
            padding = 1 - operand.layout.held(chip) / max(operand.layout.length, 1)
            self.note([chip], part, padding, read=self.checkpoint.bytes_read_here - before)
            parts.append(jax.device_put(part, device))
        return jax.tree.map(lambda *leaves: _assembled(leaves, sharding), *parts)

    def note(
        self,
        chips: Iterable[int],
        part: Any,
        padding: float,
        *,
        read: int = 0,
        shared: int | None = None,
    ) -> None:
        """Enter into the receipt what chips were given; `padding` is a share of it."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(part))
        with self.writing:
            if shared is not None:
                self.receipt.shared_bytes_read += self.checkpoint.bytes_read_here - shared
            for chip in chips:
                held = self.receipt.chips[chip]
                held.bytes_read += read
                held.bytes_held += size
                held.bytes_padding += round(size * padding)

    def plain(self, operand: Operand, views: Sequence[View], chip: int) -> np.ndarray:
        """A float vector, whole on every chip."""
        (view,) = views
        return self.checkpoint.read(view.tensor).reshape(operand.whole)

    def quantised(self, operand: Operand, views: Sequence[View], chip: int) -> Any:
        outer, inner = _stored_ranges(operand, chip)
        block = _block(operand)
        parts = [self.columns(views, outer, *piece) for piece in inner]
        joined = concatenate(
            [
                p.refine(min(block, p.block)).padded(inner=width)
                for p, (_, _, width) in zip(parts, inner, strict=True)
            ],
            "inner",
        )
        return pack(joined.refine(min(block, joined.block)), self.devices.platform)

    def columns(
        self,
        views: Sequence[View],
        outer: list[tuple[int, int, int]],
        start: int,
        length: int,
        _: int,
    ) -> Q8:
        """Every output range of one range of inputs, padded and put one below the other."""
        parts = [
            read_rows(self.checkpoint, views, first, count, ((start, length),)).padded(outer=width)
            for first, count, width in outer
        ]
        return concatenate(parts, "outer")


# --- Matrices and tables as the checkpoint has them


def read_table(model: Model, checkpoint: Checkpoint, operand: Operand) -> np.ndarray:
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
    )


def read_rows(
    checkpoint: Checkpoint, views: Sequence[View], first: int, count: int, inner: Ranges | None
) -> Q8:
    """A range of outputs of a quantised matrix, through its views."""
    parts: list[Q8] = []
    at = 0
    for view in views:
        start, rows = view.rows or (0, checkpoint.tensors[view.tensor].rows)
        low, high = max(first, at), min(first + count, at + rows)
        if low < high or not parts:
            local = (low - at, max(high - low, 0))
            parts.append(_read_view(checkpoint, view, start, local, inner))
        at += rows
    return concatenate(parts, "outer")


def _read_view(
    checkpoint: Checkpoint, view: View, start: int, local: tuple[int, int], inner: Ranges | None
) -> Q8:
    first, count = local
    if view.paired is None:
        outer: Any = [(start + first, count)]
    else:
        outer = start + half_split(np.arange(first, first + count), view.paired)
    return checkpoint.read_q8(view.tensor, outer=outer, inner=inner)


def half_split(rows: np.ndarray, width: int) -> np.ndarray:
    """Where half-split rows stand in a tensor whose rotary pairs are side by side."""
    head, at = np.divmod(rows, width)
    half = width // 2
    return head * width + np.where(at < half, 2 * at, 2 * (at - half) + 1)


def _stored_ranges(
    operand: Operand, chip: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The (start, length, padded length) of a chip along outputs and inputs."""
    rows, cols = operand.whole
    whole_rows, whole_cols = [(0, rows, rows)], [(0, cols, cols)]
    if operand.layout is not None:
        ranges = operand.layout.ranges[chip]
        padded = [
            (*(ranges[i] if i < len(ranges) else (0, 0)), width)
            for i, width in enumerate(operand.layout.widths)
        ]
        if operand.layout.axis == "rows":
            whole_rows = padded
        else:
            whole_cols = padded
    if operand.stored == "turned":
        return whole_cols, whole_rows
    return whole_rows, whole_cols


def _block(operand: Operand) -> int:
    """The scale block of every chip's slice: fine enough that no chip's cut falls inside one."""
    block = BLOCK
    chips = 0 if operand.layout is None else len(operand.layout.ranges)
    end = operand.whole[0] if operand.stored == "turned" else operand.whole[1]
    for chip in range(chips):
        _, inner = _stored_ranges(operand, chip)
        for start, length, width in inner:
            block = math.gcd(block, start)
            if start + length != end or len(inner) > 1:
                block = math.gcd(block, length)
            if len(inner) > 1:
                block = math.gcd(block, width)
    return block


def _assembled(leaves: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    local = leaves[0].shape
    shape = tuple(
        n * (sharding.mesh.size if axis is not None else 1)
        for n, axis in zip(local, (*sharding.spec, *(None,) * len(local)), strict=False)
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))
