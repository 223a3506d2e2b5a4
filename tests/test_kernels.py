"""One suite for every path of every operation, against float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kernels import attention as blocks
from kernels.arrays import full
from kernels.q8 import Q8, dequantise, quantise
from kernels.table import PATHS, Declined, Path, choose, pack
from tests import oracle

if jax.config.jax_num_cpu_devices < 2:
    jax.config.update("jax_num_cpu_devices", 2)

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
    fixed = tuple((k, v) for k, v in words.items() if k not in TRACED)
    _, traced = bound(path.call, words)
    return compiled(path.call, fixed, blocks.KEYS)(on_device(arrays), traced)


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


def paths(operation):
    return pytest.mark.parametrize("path", PATHS[operation], ids=lambda path: path.name)


def stored(w, kind):
    """A matrix `[outputs, n]` as it may be stored."""
    if kind == "float":
        return w
    return quantise(w) if kind == "q8" else quantise(w).refine(8)


def values(w):
    return np.asarray(dequantise(w)) if isinstance(w, Q8) else w


kinds = pytest.mark.parametrize("kind", ["float", "q8", "fine q8"])


# --- Products


@paths("matmul")
@kinds
@pytest.mark.parametrize(
    ("rows", "n", "outputs"), [(1, 37, 5), (1, 64, 33), (3, 7, 1), (70, 100, 9)]
)
def test_matmul(path, kind, rows, n, outputs):
    x, w = normal(rows, n), stored(normal(outputs, n), kind)
    same(run(path, (x, w), {}), oracle.matmul(x, values(w).T))


@paths("matmul")
@kinds
@pytest.mark.parametrize(("rows", "heads", "a", "b"), [(1, 5, 12, 40), (3, 1, 33, 2), (7, 9, 3, 5)])
def test_matmul_by_heads(path, kind, rows, heads, a, b):
    x, w = normal(rows, heads * a), stored(normal(heads * b, a), kind)
    logical = values(w).reshape(heads, b, a).transpose(0, 2, 1).reshape(heads * a, b)
    same(run(path, (x, w), {"heads": heads}), oracle.matmul(x, logical, heads=heads))


@paths("embedding")
@kinds
@pytest.mark.parametrize("first", [None, 0, 10])
def test_embedding(path, kind, first):
    w = stored(normal(6, 37), kind)
    ids = np.array([0, 5, 3] if first is None else [0, 5, 10, 15, 16, 3])
    found = run(path, (ids, w), {"first": first})
    same(found, oracle.rows(ids, values(w), first=first), tolerance=0)


@paths("embedding")
def test_an_embedding_of_no_rows_reads_as_zeros(path):
    found = run(path, (np.array([0, 3]), np.zeros((0, 5), np.float32)), {"first": 3})
    same(found, np.zeros((2, 5)))


# --- Attention

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
# Every option on one shape, and every shape under most options.
PAIRS = [("9 heads of 3 groups", options) for options in OPTIONS]
PAIRS += [(shape, "all") for shape in SHAPES if shape != "9 heads of 3 groups"]
pairs = pytest.mark.parametrize(("shape", "options"), PAIRS)


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


@pytest.fixture
def small_blocks(monkeypatch):
    for name in ("KEYS", "KEYS_OF_MANY", "QUERIES"):
        monkeypatch.setattr(blocks, name, 8)


@paths("attention")
@pairs
@pytest.mark.usefixtures("small_blocks")
def test_attention(path, shape, options):
    for position in (1, 7, 8, 9, 16, 19, 36, 37):
        arrays, words = attention_case(shape, 1, 37, OPTIONS[options], position)
        words["position"] = position
        same(run(path, arrays, words), oracle.attention(*arrays, **words))


@paths("attention")
@pytest.mark.parametrize("positions", [1, 150, 300])
def test_attention_without_a_position_reads_all(path, positions):
    arrays, words = attention_case("9 heads of 3 groups", 1, positions, OPTIONS["sinks"], positions)
    same(run(path, arrays, words), oracle.attention(*arrays, **words))


@paths("causal_attention")
@pairs
@pytest.mark.usefixtures("small_blocks")
def test_causal_attention(path, shape, options):
    for position in (1, 4, 11):
        arrays, words = attention_case(shape, 19, 29, OPTIONS[options], position + 18)
        words["position"] = position
        same(run(path, arrays, words), oracle.causal_attention(*arrays, **words))


@paths("causal_attention")
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_causal_attention_of_some_rows(path, rows):
    arrays, words = attention_case("5 kv heads", rows, 75, {}, rows + 2)
    words["position"] = 3
    same(run(path, arrays, words), oracle.causal_attention(*arrays, **words))


@paths("causal_attention")
@pytest.mark.usefixtures("small_blocks")
def test_causal_attention_of_padded_rows(path):
    for count in (1, 5, 17):
        arrays, words = attention_case("5 kv heads", 19, 20, {"last": 6}, 4 + count - 1)
        words["position"] = 4
        found = run(path, arrays, {**words, "count": count})
        assert np.isfinite(found).all()
        real = (arrays[0][:count], *arrays[1:])
        same(found[:count], oracle.causal_attention(*real, **words))


def test_causal_attention_of_more_rows_than_a_block():
    path, _ = choose("causal_attention", "cpu")
    arrays, words = attention_case("one head", 300, 330, {"last": 200}, 303)
    words["position"] = 4
    same(run(path, arrays, words), oracle.causal_attention(*arrays, **words))


@paths("attention")
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.usefixtures("small_blocks")
def test_attention_of_a_batch(path, options):
    positions = np.array([1, 19, 8, 30], np.int32)
    cases = [attention_case("9 heads of 3 groups", 1, 30, OPTIONS[options], p) for p in positions]
    arrays = [np.stack(each) for each in zip(*[case[0][:3] for case in cases], strict=True)]
    sinks, words = cases[0][0][3], cases[0][1]
    one = jax.vmap(lambda q, k, v, p: path.call(q, k, v, on_device(sinks), position=p, **words))
    found = jax.jit(one)(*on_device(arrays), positions)
    for i, p in enumerate(positions):
        each = [a[i] for a in arrays]
        same(found[i], oracle.attention(*each, sinks, position=int(p), **words))


# --- Recurrent


@paths("causal_conv")
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_causal_conv(path, taps):
    for rows, count in [(1, None), (70, None), (9, 0), (9, 1), (9, 3), (9, 9)]:
        arrays = (normal(rows, 5), normal(taps, 5), normal(taps, 5, seed=1))
        words = {"taps": taps} if count is None else {"taps": taps, "count": count}
        found, wanted = run(path, arrays, words), oracle.causal_conv(*arrays, **words)
        same((found[0][:count], found[1]), (wanted[0][:count], wanted[1]))
        assert np.isfinite(found[0]).all()


def delta_case(rows, heads, groups, width):
    q, k = (normal(rows, groups * width, seed=i) for i in (1, 2))
    v, gate = (normal(rows, heads * width, seed=i) for i in (3, 4))
    beta, decay = (oracle.sigmoid(normal(rows, heads, seed=i)) for i in (5, 6))
    k = oracle.l2_norm(k, heads=rows * groups)
    state = normal(heads * width, width)
    arrays = (q, k, v, gate, beta, decay, state, normal(1, width))
    return tuple(np.float32(a) for a in arrays), {"heads": heads, "groups": groups}


@paths("gated_delta")
@pytest.mark.parametrize(("heads", "groups", "width"), [(1, 1, 5), (4, 2, 8), (6, 3, 7), (3, 2, 4)])
def test_gated_delta(path, heads, groups, width):
    for rows, count in [(1, None), (70, None), (7, 0), (7, 1), (7, 4), (7, 7)]:
        arrays, words = delta_case(rows, heads, groups, width)
        words |= {"sigmoid_gate": True, "epsilon": 0.25} if heads == 6 else {}
        words |= {} if count is None else {"count": count}
        found, wanted = run(path, arrays, words), oracle.gated_delta(*arrays, **words)
        same((found[0][:count], found[1]), (wanted[0][:count], wanted[1]))
        assert np.isfinite(found[0]).all()


@paths("gated_delta")
def test_gated_delta_of_a_batch_with_counts(path):
    cases = [delta_case(5, 4, 2, 3), delta_case(5, 4, 2, 3)]
    arrays = [np.stack([a, np.flip(b, 0)]) for a, b in zip(*[c[0] for c in cases], strict=True)]
    counts = np.array([2, 5], np.int32)
    one = jax.vmap(lambda *a: path.call(*a[:-1], **cases[0][1], count=a[-1]))
    found = jax.jit(one)(*on_device(arrays), counts)
    for i, count in enumerate(counts):
        wanted = oracle.gated_delta(*(a[i] for a in arrays), **cases[0][1], count=int(count))
        same((found[0][i, :count], found[1][i]), (wanted[0][:count], wanted[1]))


# --- Mixtures

ROUTINGS = {
    "softmax": {},
    "not renormalized": {"without_renormalizing": True, "scale": 2.5},
    "sigmoid": {"by_sigmoid": True},
    "biased": {"by_sigmoid": True, "choice_bias": True, "scale": 2.5},
    "groups of scores": {"used_groups": 2, "group_count": 4},
    "groups by sigmoid": {"by_sigmoid": True, "used_groups": 2, "group_count": 4},
    "biased groups": {"by_sigmoid": True, "choice_bias": True, "used_groups": 2, "group_count": 4},
    "weighting the inputs": {"by_sigmoid": True, "weighting_inputs": True, "biases": True},
    "gpt-oss": {"biases": True, "router_bias": True, "limit": 0.8, "slope": 1.7},
}


def moe_case(routing, rows, kind, experts=8, cols=37, inner=5):
    words = {"chosen": 3, "experts": experts, **ROUTINGS[routing]}
    router = stored(normal(experts, cols), kind)
    gate, up = (stored(normal(experts * inner, cols, seed=i), kind) for i in (1, 2))
    down = stored(normal(experts * cols, inner), kind)
    inner_biases = [normal(experts, inner, seed=i) for i in (3, 4)]
    biases = [*inner_biases, normal(experts, cols)] if words.pop("biases", False) else [None] * 3
    router_bias = normal(1, experts) if words.pop("router_bias", False) else None
    choice_bias = 12 * normal(1, experts) if words.pop("choice_bias", False) else None
    x = normal(rows, cols)
    return (x, router, gate, up, down, router_bias, *biases, choice_bias), words


def moe_by_rows(arrays, words):
    x, router, *experts = (None if a is None else values(a) for a in arrays)
    each = [oracle.moe(row[None], router.T, *experts, **words) for row in x]
    return np.concatenate(each)


@paths("moe")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("rows", [2, 70])
def test_moe(path, routing, rows):
    arrays, words = moe_case(routing, rows, "float")
    same(run(path, arrays, words), moe_by_rows(arrays, words))


@paths("moe")
@kinds
def test_moe_of_stored_weights(path, kind):
    for rows in (1, 9):
        arrays, words = moe_case("gpt-oss", rows, kind)
        same(run(path, arrays, words), moe_by_rows(arrays, words))


@paths("moe")
def test_moe_of_many_experts_and_of_one(path):
    for experts, chosen in [(33, 2), (5, 5), (1, 1)]:
        arrays, words = moe_case("softmax", 9, "float", experts=experts)
        words["chosen"] = chosen
        same(run(path, arrays, words), moe_by_rows(arrays, words))


@paths("moe")
def test_of_equal_experts_the_first_are_chosen(path):
    arrays, words = moe_case("biased groups", 2, "float")
    arrays = (arrays[0], np.zeros_like(arrays[1]), *arrays[2:9], np.zeros((1, 8), np.float32))
    same(run(path, arrays, words), moe_by_rows(arrays, words))


@paths("moe")
def test_a_large_choice_bias_leaves_the_weights_alone(path):
    arrays, words = moe_case("biased", 3, "float")
    arrays = (*arrays[:5], np.full((1, 8), -16, np.float32), *arrays[6:])
    same(run(path, arrays, words), moe_by_rows(arrays, words))


@paths("moe")
def test_scores_that_all_underflow_weigh_nothing(path):
    arrays, words = moe_case("biased", 3, "float")
    arrays = (*arrays[:5], np.full((1, 8), -200, np.float32), *arrays[6:])
    same(run(path, arrays, words), np.zeros((3, 37)))


@paths("moe")
def test_an_expert_that_overflows_stays_in_its_rows(path):
    arrays, words = moe_case("softmax", 20, "float")
    found = run(path, arrays, words)
    arrays[0][4] *= 1e30
    broken = np.asarray(run(path, arrays, words))
    same(np.delete(broken, 4, axis=0), np.delete(np.asarray(found), 4, axis=0), tolerance=1e-6)


# --- On a mesh


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
    path, _ = choose(operation, "cpu")
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
    call = choose(operation, "cpu")[0].call
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


# --- The table


def picky(x):
    raise Declined("wants an even count of rows")


PICKY = Path(name="picky", call=picky, platforms=("cpu",))


def test_the_first_path_that_takes_it_is_chosen_and_the_others_say_why(monkeypatch):
    monkeypatch.setitem(PATHS, "silu", (PICKY, *PATHS["silu"]))
    path, declined = choose("silu", "tpu")
    assert (path.name, declined) == ("xla", {"picky": "runs on cpu, not on tpu"})
    assert choose("silu", "cpu")[0].name == "picky"
    path, declined = choose("silu", "cpu", example=([jnp.ones((3, 2))], {}))
    assert (path.name, declined) == ("xla", {"picky": "wants an even count of rows"})


def test_a_path_wanted_by_name_never_falls_back(monkeypatch):
    monkeypatch.setitem(PATHS, "silu", (PICKY, *PATHS["silu"]))
    assert choose("silu", "cpu", "reference")[0].name == "reference"
    with pytest.raises(Declined, match="silu on tpu: picky: runs on cpu, not on tpu"):
        choose("silu", "tpu", "picky")
    with pytest.raises(
        ValueError, match="silu has no path 'native': there are auto, picky, xla, ref"
    ):
        choose("silu", "cpu", "native")
    with pytest.raises(ValueError, match="no operation 'softmax': there are argmax, attention"):
        choose("softmax", "cpu")


def test_an_example_may_be_shapes():
    shape = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    words = {"heads": 2, "groups": 1, "position": jax.ShapeDtypeStruct((), jnp.int32)}
    cache = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    assert choose("attention", "cpu", example=([shape, cache, cache], words))[0].name == "xla"


def test_a_weight_is_packed_as_floats_on_a_cpu_alone():
    q = quantise(normal(4, 40))
    assert pack(q, "tpu") is q
    assert np.array_equal(pack(q, "cpu"), dequantise(q))
    assert isinstance(pack(on_device(q), "cpu"), jax.Array)
