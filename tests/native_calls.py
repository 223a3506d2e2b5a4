"""Writes random chains, as the handler is called with them, to a file for the driver in C++.

    python -m tests.native_calls FILE SEED

Shapes are multiples of nothing. The file is int64 throughout but for the arrays' bytes: groups,
each of so many chips with so many calls; of a call its code, then arrays as `_array` says, those
given with their bytes, those made with which of the given ones they take the place of, or -1.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels.native.chain import Chain
from kernels.native.packed import packed
from kernels.q8 import quantise

KINDS = (np.float32, np.float16, np.uint8, np.int32)  # as native_driver.cc counts them

Random = np.random.Generator


@dataclass(kw_only=True)
class Recorded(Chain):
    """A chain that is written down instead of run; its results are zeros."""

    calls: list[bytes] = field(default_factory=list)

    def _call(self, results: Any, values: Any, integers: np.ndarray) -> dict[int, Any]:
        arrays = dict(zip(self.arguments, map(np.asarray, self.arrays), strict=True))
        places = {n: i for i, n in enumerate(self.arguments)}
        made = {
            n: arrays[self.changed[n]]
            if n in self.changed
            else np.zeros(values[n].shape, values[n].dtype)
            for n in results
        }
        out = [
            _numbers(len(integers)),
            np.asarray(integers, np.int64).tobytes(),
            _numbers(len(arrays)),
        ]
        for array in arrays.values():
            out += [_array(array), array.tobytes()]
        out.append(_numbers(len(made) + 1))
        for n, array in made.items():
            out += [_array(array), _numbers(places[self.changed[n]] if n in self.changed else -1)]
        out += [_array(np.zeros(1, np.int32)), _numbers(-1)]
        self.calls.append(b"".join(out))
        self.order = jnp.zeros(1, jnp.int32)
        return {n: jnp.asarray(array) for n, array in made.items()}


def _numbers(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def _array(array: np.ndarray) -> bytes:
    """Its type, by number, its rank and its sizes."""
    return _numbers(KINDS.index(array.dtype.type), array.ndim, *array.shape)


# --- Arrays


def normal(random: Random, *shape: int) -> Any:
    return jnp.asarray(random.standard_normal(shape), jnp.float32)


def size(random: Random, most: int) -> int:
    """Often 1."""
    return 1 if random.random() < 0.25 else int(random.integers(1, most + 1))


def weight(random: Random, outputs: int, n: int) -> Any:
    q = quantise(random.standard_normal((outputs, n)).astype(np.float32))
    return packed(q)


def cache(random: Random, shape: Sequence[int], written: int, kind: Any) -> Any:
    """Poison in the rows that were not written."""
    a = random.standard_normal(shape).astype(kind)
    a[..., written:, :] = np.nan
    return jnp.asarray(a)


# --- Chains of one operation or two: how many rows, or sequences, and whether it is a batch


def products(chain: Chain, random: Random, x: Any) -> list[Any]:
    n, outputs = x.shape[-1], size(random, 150)
    weights = [weight(random, outputs, n) for _ in range(random.integers(1, 4))]
    if random.random() < 0.1 and x.ndim == 2:
        x = x.at[0, 0].set(1e4)  # a row that keeps all its bits
    made = [chain.add("matmul", x, w) for w in weights]
    if len(made) == 2:
        gate = made[0] if random.random() < 0.5 else chain.add("gelu", made[0])
        return [chain.add("swiglu" if gate is made[0] else "hadamard", gate, made[1])]
    return made


def embedded(chain: Chain, random: Random, x: Any) -> list[Any]:
    held, cols = size(random, 90), size(random, 90)
    ids = jnp.asarray(random.integers(-5, held + 8, len(x)), jnp.int32)
    return [chain.add("embedding", ids, weight(random, held, cols), first=jnp.int32(3))]


def normed(chain: Chain, random: Random, x: Any) -> list[Any]:
    cols = x.shape[-1]
    width = next(w for w in (4, 3, 2, cols) if cols % w == 0)
    heads = None if width == cols else x.size // width
    return [chain.add("rms_norm", x, normal(random, 1, width), heads=heads)]


def positions(random: Random, x: Any, last: int) -> Any:
    """Up to `last`, of the last row where rows follow one another."""
    if x.ndim == 3:
        return jnp.asarray(random.integers(1, last + 1, len(x)), jnp.int32)
    return jnp.int32(random.integers(1, last - len(x) + 2))


def turned(chain: Chain, random: Random, x: Any) -> list[Any]:
    heads = next(h for h in (5, 4, 3, 2, 1) if x.shape[-1] % h == 0)
    if x.shape[-1] // heads < 2:
        return [chain.add("silu", x)]
    half = int(random.integers(1, x.shape[-1] // heads // 2 + 1))
    last = len(x) + size(random, 50)
    own = (len(x),) if x.ndim == 3 and random.random() < 0.5 else ()
    tables = (normal(random, *own, last, half), normal(random, *own, last, half))
    return [chain.add("rope", x, *tables, heads=heads, position=positions(random, x, last))]


def elementwise(chain: Chain, random: Random, x: Any) -> list[Any]:
    y = normal(random, *((1, x.shape[-1]) if random.random() < 0.3 else x.shape))
    one = chain.add(
        "capped", chain.add(str(random.choice(["silu", "sigmoid", "gelu"])), x), cap=2.5
    )
    two = chain.add(str(random.choice(["plus", "hadamard", "swiglu"])), one, y)
    if x.ndim == 3:
        return [two]
    row = chain.add("row", two, row=jnp.int32(random.integers(1, len(x) + 1)))
    return [two, row, chain.add("argmax", row)]


def attended(chain: Chain, random: Random, x: Any) -> list[Any]:
    """Writes what it then reads."""
    groups, shared = int(random.integers(1, 4)), int(random.integers(1, 7))
    width = 64 * int(random.integers(1, 3)) if random.random() < 0.4 else size(random, 90)
    last = len(x) + (int(random.integers(500, 2500)) if random.random() < 0.2 else size(random, 90))
    kind = np.float16 if random.random() < 0.5 else np.float32
    at = positions(random, x, last)
    before, each = int(jnp.max(at)) - 1, x.shape[:1] if x.ndim == 3 else ()
    caches = []
    for cols in (groups * width, groups * size(random, 90)):
        old = cache(random, (*each, last, cols), before, kind)
        caches.append(chain.add("set_rows", old, normal(random, *x.shape[:-1], cols), row=at))
    q = normal(random, *x.shape[:-1], groups * shared * width)
    sinks = normal(random, 1, groups * shared) if random.random() < 0.5 else None
    words: dict[str, Any] = {"heads": groups * shared, "groups": groups, "position": at}
    if random.random() < 0.5:
        words["last" if random.random() < 0.5 else "chunk"] = int(random.integers(1, 40))
    if random.random() < 0.3:
        words["cap"] = 3.0
    return [chain.add("causal_attention", q, *caches, sinks, **words), *caches]


OPERATIONS = (products, embedded, normed, turned, elementwise, attended)


def alone(random: Random) -> Iterator[list[bytes]]:
    """A call of every operation: of a stack, some of its rows not real, or of a batch."""
    for operation in OPERATIONS:
        rows, cols = size(random, 9 if random.random() < 0.7 else 70), size(random, 200)
        batch = random.random() < 0.3
        stack = operation is embedded or not batch
        count = jnp.int32(random.integers(0, rows + 1)) if stack and random.random() < 0.5 else None
        chain = Recorded(
            rows=rows if stack else 1, count=count, inexact=int(random.choice([1, 5, 1000]))
        )
        x = normal(random, rows, cols) if stack else normal(random, rows, 1, cols)
        chain.close(operation(chain, random, x))
        yield chain.calls


def together(seed: Sequence[int], chips: int, chip: int) -> list[bytes]:
    """What a chip runs in one step: many meetings, none, then one more."""
    shapes, own = np.random.default_rng(seed), np.random.default_rng((*seed, chip))
    rows, cols = int(shapes.integers(1, 4)), size(shapes, 700)
    calls, after = [], None
    for meetings in (15, 0, 1):
        chain = Recorded(
            rows=rows, chips=chips, chip=jnp.int32(chip), axis="chip", after=after, calls=calls
        )
        x = given = normal(own, rows, cols)
        x = total = chain.add("scaled", x, factor=0.5)
        for _ in range(meetings):
            total = chain.add("fold", x)
            x = chain.add("plus", chain.add("scaled", total, factor=0.5 / chips), given)
        wanted = [total]
        if meetings > 0:
            held = (max(cols - 1, 1), *(cols,) * (chips - 1))
            wanted.append(chain.add("join", x, held=held))
        chain.close(wanted if meetings > 0 else [x])
        after = chain.order
    return calls


def groups(seed: int) -> Iterator[Sequence[list[bytes]]]:
    """Each the calls of every chip."""
    for turn in range(30):
        for calls in alone(np.random.default_rng((seed, turn))):
            yield [calls]
    for chips in (2, 3, 5):
        for turn in range(4):
            yield [together((seed, chips, turn), chips, chip) for chip in range(chips)]


def main(path: str, seed: str) -> None:
    written = list(groups(int(seed)))
    with Path(path).open("wb") as file:
        file.write(_numbers(len(written)))
        for group in written:
            file.write(_numbers(len(group), len(group[0])))
            file.writelines(call for calls in group for call in calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
