"""Models for devices: their weights stay int8 whatever the platform, by shape alone or filled."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from author.families.model import Model
from author.families.registry import from_config
from kernels.q8 import Q8
from tp.decoder import Decoder
from tp.launch import everywhere
from tp.lower import partition
from tp.operands import Operand
from tp.outline import BARE
from tp.tables import host_table
from tp.unfilled import stored

CHECKPOINTS = Path(__file__).parent / "checkpoints"

# What makes a tiny config one whose matrices are as large as those of models of some size: four
# layers of 8 billion parameters' worth, latent attention, experts.
LARGER: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
    },
    "deepseek_v3": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "vocab_size": 32000,
    },
    "mixtral": {
        "hidden_size": 2048,
        "intermediate_size": 3584,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32000,
    },
}


def model_of(family: str, *, larger: bool) -> Model:
    """The model of a checkpoint's config, its matrices made larger where that is asked for."""
    config = json.loads((CHECKPOINTS / family / "config.json").read_text())
    return from_config({**config, **(LARGER[family] if larger else {})}, "config.json", BARE)


@contextmanager
def int8_kept() -> Iterator[None]:
    """Load weights on a CPU as accelerators have them: `kernels.table.pack` leaves those alone."""
    with patch("tp.loader.pack", lambda q, *_, **__: q):
        yield


def shape_of(operand: Operand, mesh: Mesh) -> Any:
    """An operand over all chips with nothing there; a quantised one is the `Q8` it was read as."""
    sharding = NamedSharding(mesh, partition(operand))
    local = jax.ShapeDtypeStruct(operand.local, jnp.float32)

    def whole(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = (*sharding.spec, None, None)
        pairs = zip(leaf.shape, axes, strict=False)
        shape = tuple(n if axis is None else n * mesh.size for n, axis in pairs)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(whole, stored(operand, "tpu") if operand.quantised else local)


def fill(decoder: Decoder) -> None:
    """Give a decoder weights that have the right shapes, places and sizes, and mean nothing."""
    decoder.weights = {key: _filled(decoder, operand) for key, operand in decoder.operands.items()}
    if decoder.model.tied:
        decoder.weights["Wout"] = decoder.weights["Emb"]


def _filled(decoder: Decoder, operand: Operand) -> Any:
    model, mesh = decoder.model, decoder.devices.mesh
    if operand.role == "table":
        made = host_table(operand.name, operand.whole, spec=model.spec, rotations=model.rotations)
        return everywhere(made, mesh)
    like = shape_of(operand, mesh)
    if not isinstance(like, Q8):
        return _ones(like.shape, like.sharding)()
    values = _integers(like.values.shape, like.values.sharding)()
    # What they are multiplied with, summed, comes to about as much.
    size = 1 / (73 * like.shape[-1] ** 0.5)
    scales = _ones(like.scales.shape, like.scales.sharding, jnp.float16, size)()
    return Q8(values=values, scales=scales, block=like.block)


@cache
def _ones(shape: tuple[int, ...], sharding: Any, dtype: Any = jnp.float32, size: float = 1.0):
    return jax.jit(lambda: jnp.full(shape, size, dtype), out_shardings=sharding)


@cache
def _integers(shape: tuple[int, ...], sharding: Any):
    """From -127 to 127, each about as often, and neighbours unlike."""

    def make() -> jax.Array:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return ((row * 97 + column * 61) % 255 - 127).astype(jnp.int8)

    return jax.jit(make, out_shardings=sharding)
