"""The parts of a check of devices: logits, products on int8 as compiled, speed, and memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from author.families.model import Model
from author.spec import Moe
from kernels.matmul import PIECE
from tests.device_findings import Finding
from tests.device_models import CHECKPOINTS, fill, model_of, shape_of
from tests.grid import WAYS, cells
from tests.hlo import Floats, floats_of_sizes
from tp.bench.orders import SHORT, random_ids, timed
from tp.bench.reads import step_bytes
from tp.columns import amount
from tp.decoder import Decoder
from tp.engine import load
from tp.launch import Devices, devices
from tp.lower import lower
from tp.operands import Operand
from tp.roll import roll
from tp.sample import Sampling
from tp.step import CACHES, shapes, whole_step
from tp.stretch import stretch

# --- Logits


def logits(family: str, chips: int, kernels: str = "auto") -> Finding:
    """A tiny checkpoint at a width, by every way, against transformers' logits."""
    found = list(cells(CHECKPOINTS / family, chips, WAYS, kernels))
    greedy = f"{sum(c.greedy for c in found)}/{sum(c.of for c in found)}"
    errors = (f"{c.error:.0e}" for c in found)
    return Finding(
        part="logits",
        cells=(family, str(chips), *errors, greedy),
        holds=all(c.holds for c in found),
    )


# --- Products on int8, as they are compiled

# Each program: its kind, its arguments, what it is for, and the most rows it is compiled for.
PROGRAMS: Mapping[str, tuple[str, dict[str, Any], str, int | None]] = {
    "step": ("tp_decode_step", {"tok": 0, "pos": 1}, "logits", None),
    "batch": ("tp_decode_batch", {"seqs": [[0, 1], [0, 1]]}, "blogits", 8),
    "chunk": ("tp_prefill", {"toks": [0, 0], "pos0": 1}, "logits", 128),
}
LONGEST = 512  # rows of a cache


def products(name: str, model: Model, mesh: Devices, program: str) -> Finding:
    """Compile a program of a model with int8 weights, and look for floats as large as one."""
    sizes = weight_sizes(Decoder(model=model, devices=mesh, context=2))
    context = rows_apart(sizes, min(LONGEST, model.context))
    started = time.perf_counter()
    compiled = _compiled(Decoder(model=model, devices=mesh, context=context), program, sizes)
    seconds = time.perf_counter() - started
    found = floats_of_sizes(compiled.as_text(), sizes)
    large = [floats for floats in found if floats.size > PIECE]
    temporary = compiled.memory_analysis()
    return Finding(
        part="products",
        cells=(
            name,
            str(mesh.chips),
            program,
            str(len(large)),
            _largest(found, sizes),
            "not told" if temporary is None else amount(temporary.temp_size_in_bytes),
            f"{seconds:.0f} s",
        ),
        holds=not large,
        problem="; ".join(f"{f.operation} {f.name} makes {f.type}" for f in large),
    )


def weight_sizes(decoder: Decoder) -> dict[int, str]:
    """How many numbers a chip's slice of each int8 weight has, and of one expert of several."""
    found: dict[int, str] = {}
    for key, operand in decoder.operands.items():
        if operand.quantised:
            size = operand.local[0] * operand.local[1]
            found.setdefault(size, key)
            found.setdefault(size // _experts(decoder.model, operand), f"an expert of {key}")
    return found


def _experts(model: Model, operand: Operand) -> int:
    layer = operand.name.layer
    ffn = None if layer is None else model.spec.layers[layer].ffn
    of_experts = operand.experts and operand.name.base != "Wr"
    return ffn.experts if isinstance(ffn, Moe) and of_experts else 1


def rows_apart(sizes: Mapping[int, str], most: int) -> int:
    """The largest number of rows of which no array, whatever its columns, has a weight's size."""
    return next(rows for rows in range(most, 0, -1) if rows == 1 or all(s % rows for s in sizes))


def _compiled(decoder: Decoder, program: str, sizes: Mapping[int, str]) -> Any:
    kind, args, output, most = PROGRAMS[program]
    mesh = decoder.devices.mesh
    rolled = roll(decoder.authored(kind, args))
    rows = None if most is None else rows_apart(sizes, most)
    rolled = rolled if rows is None else stretch(rolled, rows)
    lowered = lower(rolled, platform=decoder.devices.platform, kernels="xla", outputs=(output,))
    weights = {key: shape_of(operand, mesh) for key, operand in lowered.weights.items()}
    step: Any = whole_step(lowered, mesh, (output,))
    return step.lower(weights, shapes(lowered.states, mesh), _inputs(program, rows)).compile()


def _inputs(program: str, rows: int | None) -> dict[str, Any]:
    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    if rows is None:
        return {"tok": integers(), "pos": integers()}
    if program == "batch":
        return {"toks": integers(1, rows), "pos": integers(rows)}
    return {"toks": integers(1, rows), "pos": integers(), "count": integers()}


def _largest(found: list[Floats], sizes: Mapping[int, str]) -> str:
    if not found:
        return "none"
    largest = max(found, key=lambda floats: floats.nbytes)
    return f"{amount(largest.nbytes)}, as {sizes[largest.size]}"


# --- Speed and memory


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its devices, and the bytes that each was given of it."""

    name: str
    decoder: Decoder
    held: list[int]


def loaded(path: str, chips: int, kernels: str = "auto") -> Loaded:
    """A model of the user's; what was given to each device is in its receipt."""
    engine = load(path, chips=chips, kernels=kernels)
    held = [chip.bytes_held for chip in engine.receipt.chips]
    return Loaded(name=engine.source.path.name, decoder=engine.decoder, held=held)


def made_up(family: str, chips: int, *, larger: bool) -> Loaded:
    """A model whose weights mean nothing."""
    model = model_of(family, larger=larger)
    decoder = Decoder(
        model=model, devices=devices(chips), context=min(1024, model.context), kernels="xla"
    )
    fill(decoder)
    name = f"{family}, larger" if larger else family
    return Loaded(name=name, decoder=decoder, held=_given(decoder))


def _given(decoder: Decoder) -> list[int]:
    held = dict.fromkeys(decoder.devices.mesh.devices.flat, 0)
    unique = {id(leaf): leaf for leaf in jax.tree.leaves(decoder.weights)}
    for array in unique.values():
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def speed(model: Loaded, memory: float | None, *, tokens: int = 64, repeats: int = 3) -> Finding:
    """Tokens a second, the best of some turns; `memory` is what a device reads a second."""
    decoder = model.decoder
    ids = random_ids(min(512, decoder.context // 2), decoder.model.spec.vocab)
    tokens = min(tokens, decoder.context // 4)
    turns = [(_prefill(decoder, ids), _decode(decoder, tokens)) for _ in range(repeats + 1)]
    read, made = (min(seconds) for seconds in zip(*turns[1:], strict=True))  # the first compiles
    bytes_read = tokens / made * _step_bytes(decoder, SHORT + tokens // 2)
    chips = decoder.devices.chips
    return Finding(
        part="speed",
        cells=(
            model.name,
            str(chips),
            f"{tokens / made:,.1f}",
            f"{len(ids) / read:,.1f}",
            f"{bytes_read / 1e9:,.1f}",
            "" if memory is None else f"{bytes_read / memory / chips:.0%}",
        ),
        holds=None,
    )


def _prefill(decoder: Decoder, ids: list[int]) -> float:
    """The seconds that reading a prompt takes, until its logits are there."""
    states = jax.block_until_ready(decoder.fresh())
    return timed(lambda: np.asarray(decoder.prefill(states, ids)[0]))[0]


def _decode(decoder: Decoder, tokens: int) -> float:
    """The seconds that so many greedy tokens take, after a short prompt and one more."""
    ids, greedy = random_ids(SHORT, decoder.model.spec.vocab), Sampling()
    logits, states = decoder.prefill(decoder.fresh(), ids)
    first = decoder.first_token(logits, SHORT, greedy)
    made = decoder.generate(
        states, first, SHORT + 1, limit=tokens, sampling=greedy, stops=frozenset()
    )
    return timed(lambda: sum(len(part) for part, _ in made))[0]


def _step_bytes(decoder: Decoder, position: int) -> int:
    """What a token at a position cannot but read."""
    operands = {**decoder.operands, **decoder.decode.states}
    item = jnp.dtype(CACHES[decoder.cache]).itemsize
    return step_bytes(decoder.model, operands, position, item_bytes=item)


@cache
def memory_speed(device: Any, *, size: int = 256 << 20, passes: int = 16) -> float:
    """The bytes a second that a sum over a large array reads on a device."""
    numbers = jax.device_put(jnp.ones(size // 4, jnp.float32), device)

    def all_passes(x: jax.Array) -> jax.Array:
        # Each pass needs the one before, so none is left out.
        def one(_: Any, total: jax.Array) -> jax.Array:
            return jnp.sum(x + jnp.minimum(total, 1))

        return jax.lax.fori_loop(0, passes, one, jnp.float32(0))

    add = jax.jit(all_passes)
    seconds = [timed(lambda: add(numbers).block_until_ready())[0] for _ in range(4)]
    return numbers.nbytes * passes / min(seconds[1:])


def memory(model: Loaded) -> Finding:
    """What the device that is worst off had in use at most, beside what it was given."""
    decoder = model.decoder
    caches = _cache_bytes(decoder)
    chips = decoder.devices.mesh.devices.flat
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in chips]
    where = (model.name, str(decoder.devices.chips))
    told = [peak for peak in peaks if peak is not None]
    if len(told) < len(peaks):
        cells = (*where, "", amount(max(model.held)), amount(caches), "not told")
        return Finding(part="memory", cells=cells, holds=None)
    return worst_off(where, model.held, caches, told)


def worst_off(where: tuple[str, str], held: list[int], caches: int, peaks: list[int]) -> Finding:
    """The finding about the device whose peak is the most over what it was given."""
    needed = [given + caches for given in held]
    chip = max(range(len(peaks)), key=lambda i: peaks[i] - needed[i])
    return Finding(
        part="memory",
        cells=(
            *where,
            str(chip),
            amount(held[chip]),
            amount(caches),
            amount(peaks[chip]),
            f"{peaks[chip] / needed[chip]:.2f}",
        ),
        holds=peaks[chip] <= 1.2 * needed[chip] + 256e6,
    )


def _cache_bytes(decoder: Decoder) -> int:
    """The caches and states of one chip."""
    made = shapes(decoder.decode.states, decoder.devices.mesh, decoder.cache).values()

    def here(like: Any) -> int:
        local = jax.ShapeDtypeStruct(like.sharding.shard_shape(like.shape), like.dtype)
        return local.size * local.dtype.itemsize

    return sum(map(here, made))
