"""Fast paths on two chips, each with its own arrays, under the check of what varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kernels.arrays import full
from kernels.q8 import quantise
from kernels.table import Path, choose
from tests.kernel_cases import (
    NAN,
    OPTIONS,
    attention_case,
    bound,
    delta_case,
    moe_case,
    normal,
    on_device,
    run,
    same,
)

if jax.config.jax_num_cpu_devices < 2:
    jax.config.update("jax_num_cpu_devices", 2)


def on_two_chips(call, arrays, words):
    """The call with each array cut in two on a first axis, under the replication check."""
    mesh = jax.make_mesh((2,), ("chip",), axis_types=(AxisType.Auto,))
    function, traced = bound(call, words)

    def chip(arrays, traced):
        out = function(jax.tree.map(lambda a: a[0], arrays), traced)
        return jax.tree.map(lambda a: a[None], out)

    one = PartitionSpec("chip")
    mapped = jax.shard_map(chip, mesh=mesh, in_specs=(one, PartitionSpec()), out_specs=one)
    return jax.jit(mapped)(arrays, traced)


def mesh_cases():
    q, words = attention_case("9 heads of 3 groups", 20, 40, OPTIONS["all"], 25)
    yield "causal_attention", q, {**words, "position": 6}
    yield "causal_attention", q, {**words, "position": 6, "count": 11}
    yield "attention", (q[0][:1], *q[1:3]), {**words, "position": 25}
    yield "causal_conv", (normal(9, 5), normal(4, 5), normal(4, 5)), {"taps": 4, "count": 3}
    yield "gated_delta", *delta_case(7, 4, 2, 3)
    yield "gated_delta", delta_case(7, 4, 2, 3)[0], {"heads": 4, "groups": 2, "count": 3}
    yield "gated_delta", *delta_case(1, 4, 2, 3)
    for rows in (1, 20):
        yield "moe", *moe_case("gpt-oss", rows, "q8")
        yield "moe", *moe_case("biased groups", rows, "float")
    yield "matmul", (normal(3, 40), quantise(normal(7, 40))), {}
    yield "matmul", (normal(1, 40), quantise(normal(7, 40))), {}
    yield "matmul", (normal(3, 40), normal(4 * 3, 10)), {"heads": 4}
    yield "embedding", (np.array([1, 9]), quantise(normal(7, 40))), {"first": 2}
    yield "embedding", (np.array([1, 9]), np.zeros((0, 40), np.float32)), {"first": 2}
    yield "set_rows", (normal(9, 4), normal(3, 4)), {"row": 8, "count": 2}


@pytest.mark.parametrize("case", list(mesh_cases()), ids=lambda case: case[0])
def test_a_fast_path_varies_as_its_inputs_do(case):
    operation, arrays, words = case
    path, _ = choose(operation, "cpu", "xla")
    twice = [jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), a) for a in arrays]
    found = on_two_chips(path.call, twice, words)
    for chip in range(2):
        each = jax.tree.map(lambda a, chip=chip: a[chip], twice)
        same(jax.tree.map(lambda a, chip=chip: a[chip], found), run(path, each, words))


def varying_cases():
    delta, words = delta_case(7, 4, 2, 3)
    yield from (("gated_delta", delta, words, which) for which in (0, 2, 4, 5, 6, 7))
    q, words = attention_case("5 kv heads", 20, 25, OPTIONS["sinks"], 25)
    yield from (("causal_attention", q, {**words, "position": 6}, which) for which in range(4))
    mixture, words = moe_case("gpt-oss", 20, "float")
    yield from (("moe", mixture, words, which) for which in (0, 2, 4, 8))


@pytest.mark.parametrize("case", list(varying_cases()), ids=lambda case: f"{case[0]} {case[3]}")
def test_one_varying_input_is_enough(case):
    operation, arguments, words, which = case
    call = choose(operation, "cpu", "xla")[0].call
    rest = [a for i, a in enumerate(arguments) if i != which]
    mesh = jax.make_mesh((2,), ("chip",), axis_types=(AxisType.Auto,))

    def chip(varying, *rest):
        out = call(*rest[:which], varying[0], *rest[which:], **words)
        return jax.tree.map(lambda a: a[None], out)

    one, alike = PartitionSpec("chip"), PartitionSpec()
    specs = (one, *[alike] * len(rest))
    mapped = jax.shard_map(chip, mesh=mesh, in_specs=specs, out_specs=one)
    found = jax.jit(mapped)(jnp.stack([jnp.asarray(arguments[which])] * 2), *on_device(rest))
    wanted = run(Path(name="", call=call), arguments, words)
    same(jax.tree.map(lambda a: a[1], found), wanted)


def test_a_constant_is_not_poisoned_by_what_stands_beside_it():
    assert np.array_equal(
        full((2, 3), 1.5, jnp.array([NAN]), None, jnp.int8(3)), np.full((2, 3), 1.5)
    )
