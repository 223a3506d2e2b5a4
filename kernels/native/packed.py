"""Lays a q8 weight out in the tiles that the native product reads, and back.

A tile is 32 outputs by 32 of the summed axis in 1088 bytes, 17 cache lines: 32 float16 scales,
then `w + 128` as `[of the sum / 4: 8][outputs / 16: 2][output: 16][of the sum: 4]`, the order in
which `vpdpbusd` takes bytes. It is as large as the q8 that it was made from, needs no sums across
lanes, and can be cut along both axes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels.native.memory import room
from kernels.q8 import BLOCK, Q8

SIDE = 32
SCALES = 2 * SIDE  # bytes
TILE = SCALES + SIDE * SIDE  # bytes
_SIGNS = np.uint32(0x80808080)


@partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["outputs", "inputs"])
@dataclass(frozen=True, kw_only=True)
class Packed:
    """A weight of `outputs` by `inputs` in tiles: uint8 `[ceil(outputs / 32), ceil(inputs / 32),
    1088]`, padded with zeros.

    Cut over chips, the sizes are those of one chip's slice, alike on all. Fields are not checked,
    as those of `Q8` are not.
    """

    tiles: Any
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs by inputs, without the padding."""
        return self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return int(self.tiles.nbytes)


def packs(q: Q8) -> bool:
    """Whether an array has tiles: one matrix, whose scales each serve a whole block of 32."""
    return len(q.shape) == 2 and q.block == BLOCK == SIDE and min(q.shape) > 0


def packed(q: Q8) -> Packed:
    """A matrix in tiles; NumPy for a NumPy array, otherwise JAX."""
    outputs, inputs = q.shape
    columns, blocks = -(-outputs // SIDE), -(-inputs // SIDE)
    even = q.padded(outer=columns * SIDE, inner=blocks * SIDE)
    tiles = room((columns, blocks, TILE))
    scales = np.asarray(even.scales).reshape(columns, SIDE, blocks)
    tiles[:, :, :SCALES].view(np.float16)[...] = scales.transpose(0, 2, 1)
    # Four of the summed axis stay side by side, so they move as one.
    fours = np.ascontiguousarray(np.asarray(even.values)).view(np.uint32)
    fours = fours.reshape(columns, 2, SIDE // 2, blocks, SIDE // 4).transpose(0, 3, 4, 1, 2)
    values = tiles[:, :, SCALES:].view(np.uint32).reshape(fours.shape)
    np.bitwise_xor(fours, _SIGNS, out=values)
    made = tiles if isinstance(q.values, np.ndarray) else jnp.asarray(tiles)
    return Packed(tiles=made, outputs=outputs, inputs=inputs)


def unpacked(w: Packed) -> Float[Array, "outputs inputs"]:
    """The float32 values of a packed weight."""
    columns, blocks, _ = w.tiles.shape
    halves = w.tiles[:, :, :SCALES].reshape(columns, blocks, SIDE, 2)
    scales = jax.lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
    fours = w.tiles[:, :, SCALES:].reshape(columns, blocks, SIDE // 4, SIDE, 4)
    values = fours.transpose(0, 3, 1, 2, 4).astype(jnp.float32) - 128
    whole = values.reshape(columns, SIDE, blocks, SIDE) * scales.transpose(0, 2, 1)[..., None]
    return whole.reshape(columns * SIDE, blocks * SIDE)[: w.outputs, : w.inputs]
