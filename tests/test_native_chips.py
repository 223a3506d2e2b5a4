"""Simulated chips of one process, which meet inside their chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kernels.native.chain import INEXACT, Chain
from tests import oracle
from tests.kernel_cases import normal, on_device
from tests.native_cases import at_levels, hold, needs_native, on_chips, threads, weight

pytestmark = needs_native

widths = pytest.mark.parametrize("chips", [2, 3, 5])


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def shared(request):
    """What chips do is done by so many threads."""
    with threads(request.param):
        yield


def alike(copies):
    """What the first chip has, if all have the same."""
    for copy in copies[1:]:
        assert np.array_equal(copy, copies[0])
    return copies[0]


# --- Meetings


@widths
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 576), (3, 37)])
def test_a_fold_is_the_sum_of_what_all_chips_have(chips, rows, cols):
    def step(opened, x):
        chain = opened(rows=rows)
        return chain.close([chain.add("fold", x)])[0]

    x = normal(chips * rows, cols)
    for level, copies in at_levels(on_chips(chips, step), x).items():
        hold({level: alike(copies)}, oracle.fold(np.split(x, chips)), 1e-6)


@widths
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_join_has_the_columns_of_all_chips_without_their_padding(chips, rows):
    held = (7, 4, 0, 7, 1)[:chips]

    def step(opened, x):
        chain = opened(rows=rows)
        return chain.close([chain.add("join", x, held=held)])[0]

    x = normal(chips * rows, 7)
    wanted = oracle.join([part[:, :n] for part, n in zip(np.split(x, chips), held, strict=True)])
    hold({"": alike(on_chips(chips, step)(x))}, wanted, 0)


@widths
def test_rows_that_are_not_real_are_not_shown(chips):
    def step(opened, x):
        chain = opened(rows=4, count=jnp.int32(3))
        partial = chain.add("scaled", x, factor=2.0)
        words = {"held": (5,) * chips}
        return chain.close([chain.add("fold", partial), chain.add("join", partial, **words)])

    x = normal(chips * 4, 5)
    each = 2 * x.reshape(chips, 4, 5)
    each[:, 3] = 0
    copies = on_chips(chips, step)(x)
    hold({"fold": alike([fold for fold, _ in copies])}, oracle.fold(each), 1e-6)
    hold({"join": alike([join for _, join in copies])}, oracle.join(each), 0)


@widths
def test_a_fold_of_a_batch_is_a_batch(chips):
    def step(opened, x):
        chain = opened()
        return chain.close([chain.add("fold", x)])[0]

    x = normal(chips * 2, 1, 9)
    copy = alike(on_chips(chips, step)(x))
    hold({"": copy}, oracle.fold(x[..., 0, :].reshape(chips, 2, 9))[:, None], 1e-6)


@widths
@pytest.mark.usefixtures("shared")
def test_many_meetings_one_after_another(chips):
    """What a chip has must stay until all have read it, and no longer than that."""

    def step(opened, x):
        chain = opened()
        held = (5,) * chips
        for _ in range(50):
            total = chain.add("fold", x)
            x = chain.add("plus", chain.add("scaled", x, factor=0.7), total)
            x = chain.add("scaled", x, factor=1 / chips)
        return chain.close([total, chain.add("join", x, held=held)])

    x = normal(chips, 5)
    run, each = on_chips(chips, step), list(np.float64(x)[:, None])
    for _ in range(50):
        total = oracle.fold(each)
        each = [(0.7 * one + total) / chips for one in each]
    for _ in range(10):
        copies = run(x)
        hold({"fold": alike([fold for fold, _ in copies])}, total, 1e-4)
        hold({"join": alike([join for _, join in copies])}, oracle.join(each), 1e-4)


@widths
@pytest.mark.usefixtures("shared")
def test_two_steps_in_turn(chips):
    """Steps of unlike many meetings and calls, on numbers of their own each time."""

    def one(opened, x):
        chain = opened()
        return chain.close([chain.add("fold", x)])[0]

    def two(opened, x):
        first = opened()
        (total,) = first.close([first.add("fold", x)])
        apart = opened(after=first.order)
        (x,) = apart.close([apart.add("plus", x, total)])
        last = opened(after=apart.order)
        return last.close([last.add("join", x, held=(3,) * chips)])[0]

    runs = on_chips(chips, one), on_chips(chips, two)
    for turn in range(20):
        x = normal(chips, 3, seed=turn)
        total = oracle.fold(list(x))
        hold({"one": alike(runs[0](x))}, total, 1e-6)
        hold({"two": alike(runs[1](x))}, oracle.join(list(x + total)), 1e-6)


# --- What differs from chip to chip


def varying_cases():
    tiles, _ = weight(33, 40)
    cache = normal(9, 6)
    yield "matmul", (normal(3, 40), tiles), {}
    yield "embedding", (np.array([1, 9, 4], np.int32), tiles), {}
    yield "rms_norm", (normal(3, 40), normal(1, 40)), {}
    yield "rope", (normal(3, 12), normal(9, 2), normal(9, 2)), {"heads": 2, "position": 3}
    yield "set_rows", (cache, normal(3, 6)), {"row": 2}
    words = {"heads": 2, "groups": 1, "position": 3}
    yield "causal_attention", (normal(3, 12), cache, cache, normal(1, 2)), words
    yield "silu", (normal(3, 4),), {}
    yield "swiglu", (normal(3, 4), normal(3, 4)), {}


def each_that_varies():
    for operation, arrays, words in varying_cases():
        yield from ((operation, arrays, words, which) for which in range(len(arrays)))


@pytest.mark.parametrize("case", list(each_that_varies()), ids=lambda case: f"{case[0]} {case[3]}")
def test_one_varying_input_is_enough(case):
    """Else a fold that is missing would pass for one that is not needed."""
    operation, arrays, words, which = case
    mesh = Mesh(np.array(jax.devices()[:2]), ("chip",))
    varying = []

    def step(own, *others):
        own = jax.tree.map(lambda a: a[0], own)
        chain = Chain(rows=3, chips=2, chip=jax.lax.axis_index("chip"), axis="chip")
        value = chain.add(operation, *others[:which], own, *others[which:], **words)
        varying.append(value.varying)
        return chain.close([value])[0]

    own = jax.tree.map(lambda a: jnp.stack([a, a]), on_device(arrays[which]))
    others = [on_device(a) for i, a in enumerate(arrays) if i != which]
    cut, alike = PartitionSpec("chip"), PartitionSpec()
    in_specs = (cut, *[alike] * len(others))
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=cut), own, *others)
    assert varying == [{"chip"}]


@pytest.mark.parametrize("case", list(varying_cases()), ids=lambda case: case[0])
def test_what_is_given_alike_comes_out_alike(case):
    operation, arrays, words = case

    def step(opened, _):
        chain = opened(rows=3)
        value = chain.add(operation, *on_device(arrays), **words)
        assert value.varying == set()
        return chain.close([value])[0]

    alike(on_chips(2, step)(np.zeros(2)))


def test_a_missing_fold_is_refused():
    tiles, values = weight(33, 40)

    def step(opened, x, folded):
        chain = opened(inexact=INEXACT)
        partial = chain.add("matmul", x, tiles)
        return chain.close([chain.add("fold", partial) if folded else partial])[0]

    x = normal(3, 40)
    copies = on_chips(3, lambda opened, x: step(opened, x, folded=True))(x)
    hold({"": alike(copies)}, oracle.matmul(x.sum(0)[None], values.T), 1e-5)
    with pytest.raises(ValueError, match="chip"):
        on_chips(3, lambda opened, x: step(opened, x, folded=False))(x)
