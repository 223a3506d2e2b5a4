"""Caches and attention over them by the compiled handlers, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.native.chain import Chain
from tests import oracle
from tests.kernel_cases import NAN, OPTIONS, SHAPES, attention_case, normal
from tests.native_cases import at_levels, hold, needs_native, ran, threads

pytestmark = needs_native

# --- Caches


@pytest.mark.parametrize(("row", "count"), [(1, 3), (7, 3), (7, 2), (4, 0), (9, 1)])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_set_rows(kind, row, count):
    matrix, x = normal(9, 5).astype(kind), normal(3, 5)
    x[count:] = NAN
    found = ran("set_rows", (matrix, x), {"row": row}, rows=3, count=count)
    wanted = oracle.set_rows(matrix, x.astype(kind), row=row, count=count)
    assert all(one.dtype == kind for one in found.values())
    hold(found, wanted, 0)


def test_rows_past_the_end_of_a_cache_are_not_written():
    matrix, x = normal(9, 5), normal(3, 5)
    hold(ran("set_rows", (matrix, x), {"row": 8}, rows=3), oracle.set_rows(matrix, x[:2], row=8), 0)
    for row in (0, 10, 12, -5):
        hold(ran("set_row", (matrix, x[:1]), {"row": row}, rows=1), matrix, 0)


def test_what_a_half_cannot_hold_is_rounded_as_ieee_says():
    x = np.float32([[1 / 3, 2049, 2051, 65519, 65520, -1e9, 6e-8, 3e-5, -5e-5, 2**-14, 0, -0.0]])
    x = np.concatenate([x, normal(1, 12), normal(1, 12) * np.float32(1e-6)], axis=1)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    found = ran("set_row", (np.zeros((1, 36), np.float16), x), {"row": 1}, rows=1)
    for level, one in found.items():
        assert np.array_equal(one.view(np.uint16), wanted.view(np.uint16)), level


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_each_sequence_writes_its_own_row_of_its_own_cache(kind):
    matrix, x = normal(4, 20, 7).astype(kind), normal(4, 1, 7)
    rows = np.array([1, 20, 7, 21])
    wanted = matrix.copy()
    for i, row in enumerate(rows[:3]):
        wanted[i, row - 1] = x[i, 0]
    hold(ran("set_row", (matrix, x), {"row": rows}, rows=1), wanted, 0)


# --- One row

CASES = [("9 heads of 3 groups", options) for options in OPTIONS]
CASES += [(shape, options) for shape in SHAPES for options in ("plain", "all")]


@pytest.mark.parametrize(("shape", "options"), dict.fromkeys(CASES))
def test_attention(shape, options):
    for position in (1, 16, 17, 37):
        arrays, words = attention_case(shape, 1, 37, OPTIONS[options], position)
        words["position"] = position
        hold(ran("attention", arrays, words), oracle.attention(*arrays, **words), 3e-6)


@pytest.mark.parametrize(("shape", "options"), [("5 kv heads", "all"), ("wide values", "plain")])
def test_attention_over_halves(shape, options):
    """What lies in the cache is taken as it is: the same tolerance as over float32."""
    (q, k, v, sinks), words = attention_case(shape, 1, 37, OPTIONS[options], 21)
    k, v = k.astype(np.float16), v.astype(np.float16)
    words["position"] = 21
    wanted = oracle.attention(q, k, v, sinks, **words)
    hold(ran("attention", (q, k, v, sinks), words), wanted, 3e-6)


def test_attention_without_a_position_reads_all():
    arrays, words = attention_case("9 heads of 3 groups", 1, 37, {}, 37)
    hold(ran("attention", arrays, words), oracle.attention(*arrays, **words), 3e-6)


LONG = {"plain": {}, "sinks": {"sinks": True}, "window": {"last": 1500, "cap": 4.0}}


@pytest.mark.parametrize("options", LONG)
@pytest.mark.parametrize(("shape", "kind"), [("one head", np.float32), ("wide values", np.float16)])
def test_a_long_context_is_cut_in_spans(shape, kind, options):
    with threads(3):
        for position in (255, 512, 513, 1024, 3000):
            (q, k, v, sinks), words = attention_case(shape, 1, 3000, LONG[options], position)
            arrays = (q, k.astype(kind), v.astype(kind), sinks)
            words["position"] = position
            wanted = oracle.attention(*arrays, **words)
            hold(ran("attention", arrays, words), wanted, 3e-6)


def test_scores_of_very_unlike_size_in_the_spans_of_a_long_context():
    """Where all of a span's weights vanish beside another's, and where they grow without end."""
    q, k, v = np.ones((1, 8), np.float32), normal(2000, 8), normal(2000, 8, seed=1)
    words = {"heads": 1, "groups": 1, "position": 2000}
    with threads(3):
        for slope in (-0.05, 0.05):
            k[:] = slope * np.arange(2000, dtype=np.float32)[:, None]
            wanted = oracle.attention(q, k, v, **words)
            hold(ran("attention", (q, k, v), words), wanted, 1e-5)


@pytest.mark.parametrize(
    "lost", [slice(0, 1), slice(0, 900), slice(1000, 2000), slice(None)], ids=str
)
def test_keys_that_are_not_numbers_are_not_lost_in_a_span(lost):
    q, k, v = normal(1, 8), normal(2000, 8, seed=1), normal(2000, 8, seed=2)
    k[lost] = np.nan
    words = {"heads": 1, "groups": 1, "position": 2000}
    for count in (1, 3):
        with threads(count):
            for level, found in ran("attention", (q, k, v), words).items():
                assert np.isnan(found).all(), (level, count)


# --- Many rows


@pytest.mark.parametrize("options", ["plain", "all", "chunks of 5"])
def test_causal_attention(options):
    for rows, count in ((1, 1), (19, 19), (19, 4), (70, 65), (19, 0)):
        arrays, words = attention_case("9 heads of 3 groups", rows, 80, OPTIONS[options], count + 2)
        arrays[0][count:] = NAN
        words["position"] = 3
        found = ran("causal_attention", arrays, words, count=count)
        wanted = np.zeros((rows, 9 * 8))
        if count > 0:
            real = (arrays[0][:count], *arrays[1:])
            wanted[:count] = oracle.causal_attention(*real, **words)
        hold(found, wanted, 3e-6)


@pytest.mark.parametrize("width", [64, 128, 80])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_attention_of_whole_vectors(width, kind):
    q, k, v = normal(5, 6 * width), normal(300, 2 * width), normal(300, 2 * width, seed=1)
    k[290:], v[290:] = NAN, NAN
    k, v = k.astype(kind), v.astype(kind)
    words = {"heads": 6, "groups": 2, "position": 286}
    wanted = oracle.causal_attention(q, k, v, **words)
    hold(ran("causal_attention", (q, k, v), words), wanted, 3e-6)


def test_causal_attention_of_a_long_chunk_by_several_threads():
    arrays, words = attention_case("narrow values", 300, 700, {"last": 40}, 700)
    words["position"] = 401
    wanted = oracle.causal_attention(*arrays, **words)
    with threads(3):
        hold(ran("causal_attention", arrays, words), wanted, 3e-6)


# --- Batches


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_each_sequence_attends_to_its_own_cache(kind, options):
    positions = np.array([1, 30, 8, 19])
    cases = [attention_case("9 heads of 3 groups", 1, 30, OPTIONS[options], p) for p in positions]
    q, k, v = (np.stack(each) for each in zip(*[case[0][:3] for case in cases], strict=True))
    k, v = k.astype(kind), v.astype(kind)
    (*_, sinks), words = cases[0]
    found = ran("attention", (q, k, v, sinks), {**words, "position": positions}, rows=1)
    wanted = [
        oracle.attention(q[i], k[i], v[i], sinks, position=int(p), **words)
        for i, p in enumerate(positions)
    ]
    hold(found, np.stack(wanted), 3e-6)


def test_sequences_may_share_keys():
    q, k, v = normal(2, 1, 21), normal(20, 7), normal(2, 20, 7, seed=1)
    words = {"heads": 3, "groups": 1}
    found = ran("attention", (q, k, v), {**words, "position": np.array([20, 3])}, rows=1)
    wanted = [oracle.attention(q[i], k, v[i], position=p, **words) for i, p in enumerate((20, 3))]
    hold(found, np.stack(wanted), 3e-6)


def test_sequences_that_all_stand_at_one_position():
    q, cache, words = normal(3, 1, 21), normal(3, 20, 7), {"heads": 3, "groups": 1}
    wanted = np.stack(
        [oracle.attention(q[i], *[cache[i]] * 2, position=9, **words) for i in range(3)]
    )
    found = ran("attention", (q, cache, cache), {**words, "position": 9}, rows=1)
    hold(found, wanted, 3e-6)
    written = ran("set_row", (cache, q[..., :7]), {"row": 9}, rows=1)
    cache[:, 8] = q[:, 0, :7]
    hold(written, cache, 0)


# --- Where caches lie


def write(matrix, x, row):
    chain = Chain()
    return chain.close([chain.add("set_row", matrix, x, row=row)])[0]


def test_a_cache_that_is_given_up_keeps_its_place_and_is_not_copied():
    matrix, x, row = jnp.zeros((64, 32)), jnp.ones((1, 32)), jnp.int32(3)
    compiled = jax.jit(write, donate_argnums=0).lower(matrix, x, row).compile()
    before = matrix.unsafe_buffer_pointer()
    after = compiled(matrix, x, row)
    assert after.unsafe_buffer_pointer() == before
    assert float(after.sum()) == 32
    assert " copy(" not in compiled.as_text()


def test_a_matrix_that_is_wanted_as_it_was_stays_so():
    def both(matrix, x):
        return matrix, write(matrix, x, 2)

    old, new = jax.jit(both, donate_argnums=0)(jnp.zeros((3, 4)), jnp.ones((1, 4)))
    assert (float(old.sum()), float(new.sum())) == (0, 4)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_chain_reads_what_it_wrote(kind):
    q, new = normal(7, 12), normal(7, 6)
    cache = np.full((2, 30, 6), NAN, kind)
    cache[:, :4] = normal(2, 4, 6)

    def step(keys, values, q, new, position, count):
        chain = Chain(rows=7, count=count)
        keys = chain.add("set_rows", keys, new, row=position, count=count)
        values = chain.add("set_rows", values, new, row=position, count=count)
        words = {"heads": 2, "groups": 1, "position": position, "count": count}
        out = chain.add("causal_attention", q, keys, values, **words)
        return chain.close([out, keys, values])

    found = at_levels(jax.jit(step), *cache, q, new, jnp.int32(5), jnp.int32(6))
    keys, values = (oracle.set_rows(c, new.astype(kind), row=5, count=6) for c in cache)
    words = {"heads": 2, "groups": 1, "position": 5}
    wanted = np.zeros((7, 12))
    wanted[:6] = oracle.causal_attention(q[:6], keys, values, **words)
    for level, (out, *caches) in found.items():
        hold({level: out}, wanted, 3e-6)
        assert np.array_equal(caches[0], keys, equal_nan=True), level
        assert np.array_equal(caches[1], values, equal_nan=True), level
