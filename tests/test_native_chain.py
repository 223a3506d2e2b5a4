"""Chains: operations one after another as one call, and what is declined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.arrays import Declined
from kernels.native import chain as chains
from kernels.native.chain import INEXACT, Chain, likeliest
from kernels.q8 import quantise
from tests import oracle
from tests.kernel_cases import normal, on_device
from tests.native_cases import at_levels, hold, needs_native, threads, weight

# --- Operations one after another


def layer(add, x, w, caches, position, *, heads, gate):
    """A layer of the llama type; `add` is given one operation after another."""
    normed = add("rms_norm", x, w["norm"])
    q, k, v = (add("matmul", normed, w[name]) for name in "qkv")
    q = add("rope", q, w["cos"], w["sin"], heads=heads, position=position)
    k = add("rope", k, w["cos"], w["sin"], heads=2, position=position)
    keys, values = (
        add("set_rows", c, new, row=position) for c, new in zip(caches, (k, v), strict=True)
    )
    words = {"heads": heads, "groups": 2, "position": position}
    context = add("causal_attention", q, keys, values, **words)
    x = add("plus", x, add("matmul", context, w["o"]))
    one, two = (add("matmul", x, w[name]) for name in ("gate", "up"))
    act = add("swiglu", one, two) if gate == "swiglu" else add("hadamard", add("gelu", one), two)
    return add("plus", x, add("matmul", act, w["down"])), keys, values


def layer_weights():
    shapes = {"q": (48, 40), "k": (16, 40), "v": (16, 40), "o": (40, 48)}
    shapes |= {"gate": (70, 40), "up": (70, 40), "down": (40, 70)}
    tables = {"norm": normal(1, 40), "cos": normal(20, 3), "sin": normal(20, 3, seed=1)}
    return tables | {n: weight(*s, seed=i)[0] for i, (n, s) in enumerate(shapes.items())}


LAYERS = {  # rows or sequences, position, count
    "one row": ((1, 40), (20, 16), np.int32(9), None),
    "a chunk": ((7, 40), (20, 16), np.int32(9), np.int32(5)),
    "a batch": ((3, 1, 40), (3, 20, 16), np.array([1, 20, 6], np.int32), None),
}


@needs_native
@pytest.mark.parametrize("gate", ["swiglu", "geglu"])
@pytest.mark.parametrize("case", LAYERS)
def test_a_chain_computes_what_its_operations_do_one_by_one(case, gate):
    shape, cached, position, count = LAYERS[case]
    rows = shape[0] if len(shape) == 2 else 1
    words = {"heads": 6, "gate": gate}

    def chained(x, w, caches, position, count):
        chain = Chain(rows=rows, count=count)
        return chain.close(layer(chain.add, x, w, caches, position, **words))

    def apart(x, w, caches, position, count):
        def add(operation, *arrays, **words):
            chain = Chain(rows=rows, count=count)
            return chain.close([chain.add(operation, *arrays, **words)])[0]

        return layer(add, x, w, caches, position, **words)

    caches = [normal(*cached), normal(*cached, seed=1)]
    arguments = (on_device(normal(*shape)), layer_weights(), caches, position, count)
    one, other = (at_levels(jax.jit(call), *arguments) for call in (chained, apart))
    for level in one:
        for a, b in zip(one[level], other[level], strict=True):
            hold({level: a}, b, 1e-6)


@needs_native
def test_values_from_the_middle_are_given_too():
    (w, values), (v, others), x = weight(70, 40), weight(70, 40, seed=1), normal(3, 40)

    def step(x, w, v):
        chain = Chain(rows=3, inexact=INEXACT)
        gate, up = chain.add("matmul", x, w), chain.add("matmul", x, v)
        out = chain.add("swiglu", gate, up)
        return chain.close([out, up, out])

    gate, up = oracle.matmul(x, values.T), oracle.matmul(x, others.T)
    for level, found in at_levels(jax.jit(step), x, w, v).items():
        for one, wanted in zip(found, (oracle.swiglu(gate, up), up) * 2, strict=False):
            hold({level: one}, wanted, 1e-6)


@needs_native
def test_the_row_that_is_wanted_of_a_stack():
    a, b = normal(5, 7), normal(5, 7, seed=1)

    def step(a, b, row, count):
        chain = Chain(rows=5, count=count)
        return chain.close([chain.add("row", chain.add("plus", a, b), row=row)])[0]

    for row, count in ((1, 5), (5, 5), (3, 3)):
        found = at_levels(jax.jit(step), a, b, jnp.int32(row), jnp.int32(count))
        hold(found, oracle.row(a + b, row=row), 1e-6)


@needs_native
def test_the_largest_of_one_row():
    """The index of the first of equals, wherever in a vector it stands."""

    def step(x):
        chain = Chain()
        return chain.close([chain.add("argmax", chain.add("scaled", x, factor=1.0))])[0]

    for cols, largest in ((1, (0,)), (37, (36,)), (100, (99, 70)), (100, (31, 32)), (49152, (7,))):
        x = normal(1, cols)
        x[0, list(largest)] = 9
        found = at_levels(jax.jit(step), x)
        assert {one.dtype for one in found.values()} == {np.dtype(np.int32)}
        hold(found, [[oracle.argmax(x)]], 0)
        hold(at_levels(jax.jit(step), x - 100), [[oracle.argmax(x - 100)]], 0)


@needs_native
@pytest.mark.parametrize("cols", [1, 7, 64, 1003])
def test_the_likeliest_of_each_row(cols):
    x = normal(9, cols)
    x[3] = x[4] = 2.5
    x[5, cols // 2] = x[6, -1] = x[7] = np.nan
    wanted = [int(np.argmax(row)) for row in x]
    for count in (1, 3):
        with threads(count):
            hold(at_levels(jax.jit(likeliest), x), wanted, 0)


@needs_native
def test_a_sequence_a_row_or_rows_of_a_stack():
    a, b = normal(4, 1, 7), normal(4, 7, seed=1)

    def step(a, b):
        chain = Chain(rows=4)
        both = chain.add("plus", a, a)
        stack = chain.add("plus", both.stacked(False), b)
        return chain.close([both, stack, stack.stacked(True)])

    both, stack, batch = jax.jit(step)(a, b)
    assert (both.shape, stack.shape, batch.shape) == ((4, 1, 7), (4, 7), (4, 1, 7))
    np.testing.assert_allclose(both, 2 * a, rtol=1e-6)
    np.testing.assert_allclose(stack, 2 * a[:, 0] + b, rtol=1e-6)
    assert np.array_equal(stack, batch[:, 0])


@needs_native
def test_a_chain_comes_after_the_one_before():
    def step(x):
        one = Chain()
        one.close([one.add("silu", x)])
        two = Chain(after=one.order)
        return two.close([two.add("silu", x)])

    calls = [e for e in jax.make_jaxpr(step)(normal(1, 4)).eqns if "ffi_call" in str(e.primitive)]
    assert len(calls) == 2
    assert calls[0].outvars[-1] in calls[1].invars


# --- What is declined

TILES, MATRIX = weight(4, 8)
CACHE, CAUSAL = normal(9, 4), {"heads": 2, "groups": 1, "position": 3}


def declined_cases():
    x, q = normal(2, 8), normal(2, 8)
    yield "softmax", (x,), {}, "the compiled kernels have no such operation"
    yield "matmul", (x, MATRIX), {}, "takes packed weights alone"
    yield "matmul", (x, quantise(MATRIX)), {}, "takes packed weights alone"
    yield "matmul", (x, TILES), {"heads": 2}, "takes no block-diagonal weights"
    yield "matmul", (x.astype(np.float16), TILES), {}, "takes float32, not float16"
    yield "matmul", (TILES, TILES), {}, "takes float32, not a packed weight"
    yield "matmul", (normal(3, 8), TILES), {}, "takes one row or 2, not 3"
    yield "matmul", (normal(2, 3, 8), TILES), {}, "takes one row a sequence, not 3"
    yield "silu", (normal(2, 0),), {}, "nothing to compute"
    yield "embedding", (np.array([1, 2]), MATRIX), {}, "takes packed weights alone"
    yield "row", (x,), {"row": 1}, "a row of a matrix that is there already"
    yield "rms_norm", (x, normal(1, 4)), {}, "segments of 4 do not fill rows of 8"
    yield "rms_norm", (x, normal(1, 3)), {"heads": 4}, "segments of 3 do not fill rows of 8"
    yield "rope", (x, CACHE, CACHE), {"heads": 2}, "rows that all stand at the first position"
    yield "rope", (x, CACHE, CACHE), {"heads": 2, "position": 1}, "2 heads of 4 pairs do not fit"
    yield "rope", (x, CACHE[:, :1], CACHE[:, :1]), {"heads": 3, "position": 1}, "3 heads of 1"
    yield "set_rows", (CACHE, normal(2, 4)), {"row": 1, "count": 1}, "a count of rows of its own"
    yield "set_rows", (np.int32(CACHE), normal(2, 4)), {"row": 1}, "takes float32, not int32"
    yield "set_rows", (CACHE[:0], normal(2, 4)), {"row": 1}, "nothing to read"
    yield "causal_attention", (q, CACHE, CACHE), {**CAUSAL, "count": 1}, "a count of rows of its"
    yield "causal_attention", (q, CACHE, np.float16(CACHE)), CAUSAL, "keys of float32 and values"
    yield "causal_attention", (q, CACHE, CACHE), {**CAUSAL, "cap": 0.0}, "a cap of 0.0"
    yield "scaled", (x,), {"factor": jnp.float32(2)}, "a number that is not known before"
    yield "plus", (x, normal(2, 7)), {}, "rows of 8 and 7"
    yield "argmax", (x,), {}, "takes one row"
    yield "argmax", (normal(1, 1, 8),), {}, "takes one row"
    yield "fold", (x,), {}, "there are no other chips in this process"
    yield "join", (x,), {"held": (8,)}, "there are no other chips in this process"


@needs_native
@pytest.mark.parametrize("case", list(declined_cases()), ids=lambda case: f"{case[0]}: {case[3]}")
def test_what_a_chain_does_not_take_is_declined(case):
    operation, arrays, words, reason = case
    chain = Chain(rows=2)
    with pytest.raises(Declined, match=reason):
        chain.add(operation, *on_device(arrays), **words)
    assert chain.steps == []


PENDING = {  # of x and of a cache, both still to be computed
    "rms_norm": (lambda x, cache: (x, x), {}, "takes a matrix that is given"),
    "set_row": (lambda x, cache: (x, x), {"row": 1}, "takes a matrix that is given"),
    "attention": (lambda x, cache: (x, x, cache), CAUSAL, "takes keys and values from a cache"),
    "silu": (lambda x, cache: (cache,), {}, "takes no cache"),
}


@needs_native
@pytest.mark.parametrize("operation", PENDING)
def test_what_is_still_to_be_computed_is_not_taken_for_what_is_there(operation):
    arrays, words, reason = PENDING[operation]
    chain = Chain()
    x = chain.add("silu", jnp.ones((1, 8)))
    cache = chain.add("set_row", jnp.ones((9, 8)), x, row=1)
    steps = list(chain.steps)
    with pytest.raises(Declined, match=reason):
        chain.add(operation, *arrays(x, cache), **words)
    assert chain.steps == steps


def test_without_compiled_kernels_all_is_declined(monkeypatch):
    monkeypatch.setattr(chains, "why_not", lambda: "no native kernels: no g++")
    with pytest.raises(Declined, match="no native kernels: no g"):
        Chain().add("silu", jnp.ones((1, 8)))
