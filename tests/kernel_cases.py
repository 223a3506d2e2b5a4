"""Arguments for every operation, and how a path is run and compared."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import attention as blocks
from kernels.arrays import Declined
from kernels.native.packed import Packed, packed, unpacked
from kernels.q8 import Q8, dequantise, quantise
from tests import oracle

NAN = np.float32("nan")
TRACED = ("position", "count")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def on_device(array):
    """A NumPy array, Q8, scalar or None as JAX has it."""
    return jax.tree.map(jnp.asarray, array)


def bound(call, words):
    """The call as a function of its arrays and of the integers that are known at run time."""
    fixed = {k: v for k, v in words.items() if k not in TRACED}
    traced = {k: jnp.int32(v) for k, v in words.items() if k in TRACED}
    return (lambda arrays, traced: call(*arrays, **traced, **fixed)), traced


def run(path, arrays, words):
    """What a path gives; where it declines, the test is skipped with the reason."""
    fixed = tuple((k, v) for k, v in words.items() if k not in TRACED)
    _, traced = bound(path.call, words)
    try:
        return compiled(path.call, fixed, blocks.KEYS)(on_device(arrays), traced)
    except Declined as why:
        pytest.skip(str(why))


@cache
def compiled(call, fixed, keys_at_a_time):
    return jax.jit(lambda arrays, traced: call(*arrays, **traced, **dict(fixed)))


def same(found, wanted, tolerance=5e-5):
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0))
        )


def stored(w, kind):
    """A matrix `[outputs, n]` as it may be stored."""
    if kind == "float":
        return w
    if kind == "tiles":
        return packed(quantise(w))
    return quantise(w) if kind == "q8" else quantise(w).refine(8)


def values(w):
    if isinstance(w, Packed):
        return np.asarray(unpacked(on_device(w)))
    return np.asarray(dequantise(w)) if isinstance(w, Q8) else w


SHAPES = {  # heads, groups, width of keys, width of values
    "one head": (1, 1, 7, 7),
    "9 heads of 3 groups": (9, 3, 8, 8),
    "5 kv heads": (5, 5, 6, 6),
    "narrow values": (4, 1, 20, 16),
    "wide values": (4, 2, 4, 9),
}
OPTIONS = {
    "plain": {},
    "last 1": {"last": 1},
    "last 7": {"last": 7},
    "last 1000": {"last": 1000},
    "chunks of 5": {"chunk": 5},
    "chunks of 64": {"chunk": 64},
    "scale": {"scale": 0.3},
    "cap": {"cap": 1.5, "scale": 2.0},
    "sinks": {"sinks": True},
    "all": {"last": 9, "cap": 2.0, "sinks": True, "scale": 1.0},
}


def attention_case(shape, rows, positions, options, written):
    """Arrays with poison in the rows that were not written, and keywords."""
    heads, groups, width, value_width = SHAPES[shape]
    q = 2 * normal(rows, heads * width)
    k, v = normal(positions, groups * width), normal(positions, groups * value_width)
    k[written:], v[written:] = NAN, np.inf
    sinks = normal(1, heads) if options.get("sinks") else None
    words = {**options, "heads": heads, "groups": groups}
    words.pop("sinks", None)
    return (q, k, v, sinks), words


def delta_case(rows, heads, groups, width, by_channel=False):
    q, k = (normal(rows, groups * width, seed=i) for i in (1, 2))
    v, gate = (normal(rows, heads * width, seed=i) for i in (3, 4))
    decays = groups * width if by_channel else heads
    beta, decay = (oracle.sigmoid(normal(rows, n, seed=i)) for n, i in ((heads, 5), (decays, 6)))
    k = oracle.l2_norm(k, heads=rows * groups)
    state = normal(heads * width, width)
    arrays = (q, k, v, gate, beta, decay, state, normal(1, width))
    words = {"heads": heads, "groups": groups} | ({"by_channel": True} if by_channel else {})
    return tuple(np.float32(a) for a in arrays), words


def linear_case(rows, heads, width):
    q, k, v = (normal(rows, heads * width, seed=i) for i in (1, 2, 3))
    decay = np.float32(oracle.sigmoid(normal(1, heads, seed=4)))
    return (q, k, v, decay, normal(heads * width, width)), {"heads": heads}


ROUTINGS = {
    "softmax": {},
    "not renormalized": {"without_renormalizing": True, "scale": 2.5},
    "sigmoid": {"by_sigmoid": True},
    "biased": {"by_sigmoid": True, "choice_bias": True, "scale": 2.5},
    "softmax biased": {"choice_bias": True, "scale": 2.5},
    "softmax biased groups": {"choice_bias": True, "used_groups": 2, "group_count": 4},
    "groups of scores": {"used_groups": 2, "group_count": 4},
    "groups by sigmoid": {"by_sigmoid": True, "used_groups": 2, "group_count": 4},
    "biased groups": {"by_sigmoid": True, "choice_bias": True, "used_groups": 2, "group_count": 4},
    "weighting the inputs": {"by_sigmoid": True, "weighting_inputs": True, "biases": True},
    "gpt-oss": {"biases": True, "router_bias": True, "limit": 0.8, "slope": 1.7},
}


# In runs of two: the best single ones are not in the runs with the best sums.
CHOICE_BIAS = np.array([[10.0, -10.0, 6.0, 5.0, 7.0, 4.5, 1.0, 0.0]], np.float32)


def moe_case(routing, rows, kind, experts=8, cols=37, inner=5):
    words = {"chosen": 3, "experts": experts, **ROUTINGS[routing]}
    router = stored(normal(experts, cols), kind)
    gate, up = (stored(normal(experts * inner, cols, seed=i), kind) for i in (1, 2))
    down = stored(normal(experts * cols, inner), kind)
    inner_biases = [normal(experts, inner, seed=i) for i in (3, 4)]
    biases = [*inner_biases, normal(experts, cols)] if words.pop("biases", False) else [None] * 3
    router_bias = normal(1, experts) if words.pop("router_bias", False) else None
    choice_bias = CHOICE_BIAS if words.pop("choice_bias", False) else None
    x = normal(rows, cols)
    return (x, router, gate, up, down, router_bias, *biases, choice_bias), words
