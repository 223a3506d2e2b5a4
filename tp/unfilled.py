"""Weights by shape and place alone, enough to trace and compile a step with none of them there."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from kernels.native.packed import SIDE, TILE, Packed
from kernels.q8 import Q8
from kernels.table import packing
from tp.lower import CHIP, Lowered, partition
from tp.operands import Operand
from tp.slices import block_of, stored_ranges
from tp.step import global_shape, shapes

Arrays = dict[str, Any]


def arguments(lowered: Lowered, mesh: Mesh) -> tuple[Arrays, Arrays, Arrays]:
    """The weights, states and inputs of a step of one row, as a loader would lay them out."""
    weights = {key: unfilled(operand, mesh) for key, operand in lowered.weights.items()}
    inputs = {"tok": _integer(), "pos": _integer()}
    return weights, shapes(lowered.states, mesh), inputs


def unfilled(operand: Operand, mesh: Mesh) -> Any:
    """An operand over all chips."""
    sharding = NamedSharding(mesh, partition(operand))
    if not operand.quantised:
        return jax.ShapeDtypeStruct(global_shape(operand, mesh), jnp.float32, sharding=sharding)
    local = stored(operand, mesh.devices.flat[0].platform)
    chips = mesh.shape[CHIP]

    def whole(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = (*sharding.spec, *(None,) * len(leaf.shape))
        pairs = zip(leaf.shape, axes, strict=False)
        shape = tuple(n if axis is None else n * chips for n, axis in pairs)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(whole, local)


def stored(operand: Operand, platform: str) -> Any:
    """One chip's slice of a quantised weight, as `kernels.table.pack` makes it there."""
    ranges = stored_ranges(operand, 0)
    outputs, inputs = (sum(width for *_, width in pieces) for pieces in ranges)
    block = block_of(operand)
    q = Q8(
        values=jax.ShapeDtypeStruct((outputs, inputs), jnp.int8),
        scales=jax.ShapeDtypeStruct((outputs, -(-inputs // block)), jnp.float16),
        block=block,
    )
    match packing(q, platform, tiled=operand.tiled):
        case "q8":
            return q
        case "tiles":
            tiles = (-(-outputs // SIDE), -(-inputs // SIDE), TILE)
            whole = jax.ShapeDtypeStruct(tiles, jnp.uint8)
            return Packed(tiles=whole, outputs=outputs, inputs=inputs)
        case "floats":
            return jax.ShapeDtypeStruct((outputs, inputs), jnp.float32)


def _integer() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.int32)
