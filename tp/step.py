"""Runs lowered steps on a mesh: places states, and compiles one program a kind and size."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tp.lower import CHIP, Lowered, partition
from tp.operands import Operand

Arrays = dict[str, Any]
Body = Callable[[Arrays, Arrays, Arrays], tuple[Any, Arrays]]


def compiled(lowered: Lowered, mesh: Mesh, body: Body) -> Callable[..., tuple[Any, Arrays]]:
    """A function of global arrays, run by every chip on its slices.

    `body(weights, states, inputs)` is what one chip does, by way of `lowered.run`; what it
    returns first must be the same on every chip. States are donated: they keep their place.
    """
    weights = {k: partition(o) for k, o in lowered.weights.items()}
    states = {k: partition(o) for k, o in lowered.states.items()}
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(weights, states, everywhere),
        out_specs=(everywhere, states),
    )
    return jax.jit(mapped, donate_argnums=1)


def whole_step(lowered: Lowered, mesh: Mesh, outputs: tuple[str, ...]):
    """The plain step of a program: the named values, and the new states."""

    def body(weights: Arrays, states: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        values, new = lowered.run(weights, states, inputs)
        return {name: values[name] for name in outputs}, new

    return compiled(lowered, mesh, body)


# What a cache may hold, by the name a user gives it; states are float32.
CACHES = {"f32": jnp.float32, "f16": jnp.float16}


def shapes(states: Mapping[str, Operand], mesh: Mesh, cache: str = "f32") -> Arrays:
    """What caches and states look like, with none there."""
    return {
        key: jax.ShapeDtypeStruct(
            global_shape(operand, mesh),
            CACHES[cache] if operand.role == "cache" else jnp.float32,
            sharding=NamedSharding(mesh, partition(operand)),
        )
        for key, operand in states.items()
    }


def zeros(states: Mapping[str, Operand], mesh: Mesh, cache: str = "f32") -> Callable[[], Arrays]:
    """What makes fresh caches and states, each chip's slice on its own device."""
    like = shapes(states, mesh, cache)

    def make() -> Arrays:
        return {key: jnp.zeros(s.shape, s.dtype) for key, s in like.items()}

    return jax.jit(make, out_shardings={key: s.sharding for key, s in like.items()})


def global_shape(operand: Operand, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a float operand over all chips, padding included."""
    rows, cols = operand.local
    if operand.layout is not None:
        chips = mesh.shape[CHIP]
        rows, cols = (rows * chips, cols) if operand.layout.axis == "rows" else (rows, cols * chips)
    batch = () if operand.sequences is None else (operand.sequences,)
    return (*batch, rows, cols)
