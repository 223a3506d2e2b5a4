"""One suite for every path of every operation, against float64."""

import jax
import numpy as np
import pytest

from kernels import attention as blocks
from kernels.table import PATHS, choose
from tests import oracle
from tests.kernel_cases import (
    OPTIONS,
    ROUTINGS,
    SHAPES,
    attention_case,
    delta_case,
    linear_case,
    moe_case,
    normal,
    on_device,
    run,
    same,
    stored,
    values,
)


def paths(operation):
    return pytest.mark.parametrize("path", PATHS[operation], ids=lambda path: path.name)


kinds = pytest.mark.parametrize("kind", ["float", "q8", "fine q8", "tiles"])


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

# Every option on one shape, and every shape under most options.
PAIRS = [("9 heads of 3 groups", options) for options in OPTIONS]
PAIRS += [(shape, "all") for shape in SHAPES if shape != "9 heads of 3 groups"]
pairs = pytest.mark.parametrize(("shape", "options"), PAIRS)


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
    path, _ = choose("causal_attention", "cpu", "xla")
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


# Rows, and how many of them are real.
COUNTS = [(1, None), (70, None), (7, 0), (7, 1), (7, 4), (7, 7)]


@paths("gated_delta")
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("heads", "groups", "width"), [(1, 1, 5), (4, 2, 8), (6, 3, 7), (3, 2, 4)])
def test_gated_delta(path, heads, groups, width, by_channel):
    for rows, count in COUNTS:
        arrays, words = delta_case(rows, heads, groups, width, by_channel)
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


@paths("linear_attention")
@pytest.mark.parametrize(("heads", "width"), [(1, 5), (3, 8), (4, 1)])
def test_linear_attention(path, heads, width):
    for rows, count in COUNTS:
        arrays, words = linear_case(rows, heads, width)
        words |= {} if count is None else {"count": count}
        found, wanted = run(path, arrays, words), oracle.linear_attention(*arrays, **words)
        same((found[0][:count], found[1]), (wanted[0][:count], wanted[1]))
        assert np.isfinite(found[0]).all()


@paths("linear_attention")
@pytest.mark.parametrize("counts", [None, [2, 5]])
def test_linear_attention_of_a_batch_with_one_decay(path, counts):
    (*each, decay, state), words = linear_case(5 if counts else 1, 3, 4)
    batch = [np.stack([a, np.flip(a, 1)]) for a in (*each, state)]
    counted = [] if counts is None else [np.array(counts, np.int32)]

    def one(q, k, v, state, *count):
        named = {"count": count[0]} if count else {}
        return path.call(q, k, v, on_device(decay), state, **words, **named)

    found = jax.jit(jax.vmap(one))(*on_device([*batch, *counted]))
    for i in range(2):
        q, k, v, state = (a[i] for a in batch)
        named = {"count": counts[i]} if counts else {}
        wanted = oracle.linear_attention(q, k, v, decay, state, **words, **named)
        count = counts[i] if counts else None
        same((found[0][i, :count], found[1][i]), (wanted[0][:count], wanted[1]))


# --- Mixtures


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
@pytest.mark.parametrize("kind", ["float", "q8", "fine q8"])
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
