"""How chains of the compiled handlers are run, at every level of this CPU's instructions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kernels.native.chain import INEXACT, Chain
from kernels.native.library import levels, use_level, use_threads, why_not
from kernels.native.packed import Packed, packed
from kernels.q8 import dequantise, quantise
from tests.kernel_cases import normal, on_device

needs_native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TRACED = ("position", "row")
ULP = 2.0**-24  # what rounding to float32 may change, relatively

LARGEST_24, LARGEST_16 = 127 * 2**16, 127 * 2**8  # what a block's largest is rounded to


def weight(outputs: int, n: int, seed: int = 0) -> tuple[Packed, np.ndarray]:
    """A weight in tiles, and its values."""
    q = quantise(normal(outputs, n, seed=seed))
    return packed(q), np.asarray(dequantise(q))


# --- Running


def at_levels(call: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """What a compiled function gives at each level, as NumPy arrays."""
    try:
        found = {}
        for level in levels():
            use_level(level)
            found[level] = jax.tree.map(np.array, call(*arguments))
        return found
    finally:
        use_level(levels()[0])


def ran(
    operation: str,
    arrays: Sequence[Any],
    words: dict[str, Any] | None = None,
    *,
    rows: int | None = None,
    count: int | None = None,
    inexact: int = INEXACT,
) -> dict[str, np.ndarray]:
    """One operation as a chain of its own, at each level; positions and counts are traced.

    A stack has as many rows as the first array, unless `rows` says otherwise.
    """
    words = {} if words is None else words
    fixed = {k: v for k, v in words.items() if k not in TRACED}
    traced = {k: jnp.asarray(v, jnp.int32) for k, v in words.items() if k in TRACED}
    rows = len(arrays[0]) if rows is None else rows

    def step(arrays: Any, traced: Any, count: Any) -> Any:
        chain = Chain(rows=rows, count=count, inexact=inexact)
        return chain.close([chain.add(operation, *arrays, **traced, **fixed)])[0]

    counted = None if count is None else jnp.int32(count)
    return at_levels(jax.jit(step), on_device(tuple(arrays)), traced, counted)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads work on one call."""
    use_threads(count)
    try:
        yield
    finally:
        use_threads(1)


def on_chips(chips: int, call: Callable[..., Any]) -> Callable[..., list[Any]]:
    """`call(opened, *arrays)` on simulated chips, compiled: what each of them has in the end.

    `opened(**words)` is a chain of one chip. Each array is cut over the chips along its first
    axis, and what is returned must be alike on all.
    """
    mesh = Mesh(np.array(jax.devices()[:chips]), ("chip",))

    def one(*arrays: Any) -> Any:
        chip = jax.lax.axis_index("chip")
        return call(partial(Chain, chips=chips, chip=chip, axis="chip"), *arrays)

    cut, alike = PartitionSpec("chip"), PartitionSpec()
    mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=cut, out_specs=alike))

    def run(*arrays: Any) -> list[Any]:
        found = jax.block_until_ready(mapped(*arrays))
        return [
            jax.tree.map(lambda a, chip=chip: np.array(a.addressable_shards[chip].data), found)
            for chip in range(chips)
        ]

    return run


# --- Comparing


def hold(found: dict[str, np.ndarray], wanted: Any, tolerance: float | np.ndarray) -> None:
    """Every level's result is as wanted, to a tolerance.

    A number is relative, to each entry and to the largest one (or 1); an array is absolute.
    """
    wanted = np.asarray(wanted)
    if isinstance(tolerance, float | int):
        most = max(1.0, float(np.abs(wanted).max(initial=0)))
        tolerance = tolerance * (np.abs(wanted) + most)
    for level, one in found.items():
        assert one.shape == wanted.shape, level
        off = np.abs(one - wanted.astype(np.float64))
        assert (off <= tolerance).all(), f"{level}: off by {off.max()}, {_worst(off, tolerance)}"


def _worst(off: np.ndarray, tolerance: np.ndarray) -> str:
    at = np.unravel_index(np.argmax(np.nan_to_num(off - tolerance, nan=np.inf)), off.shape)
    wanted = np.broadcast_to(tolerance, off.shape)[at]
    return f"at {[int(i) for i in at]} by {off[at]}, wanted at most {wanted}"


def slack(x: np.ndarray, values: np.ndarray, *, inexact: int = INEXACT) -> np.ndarray:
    """How far the products of `x` with `values` `[outputs, n]` may be from the exact ones.

    Activations are rounded to half a step of their block of 32, a step being the block's largest
    over the largest integer; the integers' products are exact; blocks are summed in float32. Of
    many rows a block is rounded to 16 bits unless one value is 2% of its row's energy.
    """
    a, w = _blocks(x), _blocks(values)
    tops = np.abs(a).max(-1)
    outlying = tops**2 > 0.0201 * (a**2).sum((-1, -2))[:, None]
    largest = np.where(outlying | (len(x) < inexact), LARGEST_24, LARGEST_16)
    step = 0.5 / largest + 1.5 * ULP
    rounding = step * tops @ np.abs(w).sum(-1).T
    each = np.einsum("rbk,nbk->rnb", a, w, optimize=True)
    summing = 2 * np.abs(np.cumsum(each, axis=-1)).sum(-1) + 4 * np.abs(each).sum(-1)
    return rounding + ULP * summing


def _blocks(matrix: np.ndarray) -> np.ndarray:
    rows, n = matrix.shape
    blocks = -(-n // 32)
    return np.pad(matrix.astype(np.float64), ((0, 0), (0, 32 * blocks - n))).reshape(
        rows, blocks, 32
    )
