"""The compiled handlers on odd shapes, at every level of this CPU's instructions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from kernels.arrays import Declined
from kernels.native import operations
from kernels.native.library import levels, use_level, use_threads, why_not
from kernels.native.packed import Packed, packed, packs, unpacked
from kernels.q8 import dequantise, quantise
from kernels.table import PATHS, choose, pack
from tests import oracle
from tests.kernel_cases import (
    NAN,
    OPTIONS,
    SHAPES,
    attention_case,
    bound,
    normal,
    on_device,
    same,
)
from tests.test_kernels_on_a_mesh import on_two_chips

needs_native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(params=levels() if why_not() is None else ["none"])
def level(request):
    use_level(request.param)
    yield request.param
    use_level(levels()[0])


def ran(call, arrays, words):
    function, traced = bound(call, words)
    return jax.jit(function)(on_device(arrays), traced)


def weight(outputs, n):
    """A weight in tiles, and its values."""
    q = quantise(normal(outputs, n))
    return packed(q), np.asarray(dequantise(q))


# --- Tiles


@pytest.mark.parametrize(("outputs", "n"), [(1, 1), (32, 32), (33, 31), (70, 100), (5, 64)])
def test_a_weight_in_tiles_has_its_values_still(outputs, n):
    tiles, values = weight(outputs, n)
    assert tiles.tiles.shape == (-(-outputs // 32), -(-n // 32), 1088)
    assert tiles.shape == (outputs, n)
    assert np.array_equal(unpacked(on_device(tiles)), values)


def test_finer_blocks_and_experts_have_no_tiles():
    q = quantise(normal(4, 64))
    assert packs(q)
    assert not packs(q.refine(8))
    assert not packs(quantise(normal(2, 4, 64)))


def test_where_nothing_was_compiled_the_reason_is_told(tmp_path: Path):
    assert "they were not compiled; installing anyfold with a C++" in str(why_not(tmp_path))
    (tmp_path / "failed.txt").write_text("no g++\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "failed.txt").write_text("no g++\n")
    assert "no g++" in str(why_not(other))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "handlers.so").write_text("not a library")
    assert "invalid ELF" in str(why_not(broken)) or "installing anyfold again" in str(
        why_not(broken)
    )


@needs_native
def test_a_weight_is_packed_for_the_path_that_reads_it():
    q = quantise(normal(4, 40))
    assert isinstance(pack(q, "cpu"), Packed)
    assert isinstance(pack(q, "cpu", "native"), Packed)
    assert isinstance(pack(q, "cpu", "xla"), np.ndarray)
    assert isinstance(pack(q, "cpu", tiled=False), np.ndarray)
    assert isinstance(pack(q.refine(8), "cpu"), np.ndarray)
    assert isinstance(pack(on_device(q), "cpu").tiles, jax.Array)


# --- Products


@needs_native
@pytest.mark.parametrize(("outputs", "n"), [(1, 7), (32, 32), (33, 100), (100, 33), (576, 1536)])
def test_matmul(level, outputs, n):
    tiles, values = weight(outputs, n)
    for rows in (1, 2, 5, 6, 7, 33, 70):
        x = normal(rows, n)
        same(ran(operations.matmul, (x, tiles), {}), oracle.matmul(x, values.T), tolerance=2e-6)


@needs_native
def test_matmul_of_zeros_and_of_unlike_magnitudes(level):
    tiles, values = weight(40, 96)
    x = normal(3, 96)
    x[0] = 0
    x[1, :32] *= 1e-20
    x[2, 32:64] *= 1e20
    found = np.asarray(ran(operations.matmul, (x, tiles), {}))
    for row in range(3):
        same(found[row], oracle.matmul(x[row : row + 1], values.T)[0], tolerance=2e-6)


@needs_native
def test_threads_share_a_product_and_its_rows(level):
    tiles, values = weight(1030, 515)
    use_threads(3)
    try:
        for rows in (1, 70) * 20:
            x = normal(rows, 515)
            same(ran(operations.matmul, (x, tiles), {}), oracle.matmul(x, values.T), tolerance=2e-6)
    finally:
        use_threads(1)


@needs_native
def test_what_a_product_does_not_take_is_declined():
    tiles, values = weight(4, 8)
    for w, words in ((values, {}), (quantise(values), {}), (tiles, {"heads": 2})):
        with pytest.raises(Declined):
            ran(operations.matmul, (normal(1, 8), w), words)


@needs_native
@pytest.mark.parametrize("first", [None, 0, 10])
def test_embedding(level, first):
    tiles, values = weight(70, 37)
    ids = np.array([0, 69, 33, 70, 9, 79, 80, 10] if first else [0, 69, 33])
    for tokens in (ids, ids[None]):
        found = ran(operations.embedding, (tokens, tiles), {"first": first})
        same(found, oracle.rows(ids, values, first=first), tolerance=0)


# --- Rows


@needs_native
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 576), (3, 37), (70, 100)])
def test_rows_of_any_length(level, rows, cols):
    a, b = normal(rows, cols), 3 * normal(rows, cols, seed=1)
    same(ran(operations.plus, (a, b), {}), a + b, tolerance=1e-7)
    same(ran(operations.plus, (a, b[:1]), {}), a + b[:1], tolerance=1e-7)
    same(ran(operations.plus, (a[:1], b), {}), a[:1] + b, tolerance=1e-7)
    same(
        ran(operations.swiglu, (40 * b, a), {}),
        ran(reference.swiglu, (40 * b, a), {}),
        tolerance=1e-6,
    )
    w = normal(1, cols, seed=2)
    for words in ({}, {"epsilon": 0.5}):
        found = ran(operations.rms_norm, (a, w), words)
        same(found, ran(reference.rms_norm, (a, w), words), tolerance=2e-6)


@needs_native
def test_norms_by_heads(level):
    x, w = normal(6, 5 * 12), normal(1, 12)
    found = ran(operations.rms_norm, (x, w), {"heads": 30})
    same(found, ran(reference.rms_norm, (x, w), {"heads": 30}), tolerance=2e-6)


@needs_native
@pytest.mark.parametrize(("heads", "width", "half"), [(1, 2, 1), (9, 64, 32), (3, 21, 7)])
def test_rope(level, heads, width, half):
    cos, sin = normal(40, half), normal(40, half, seed=1)
    for rows, position in ((1, 1), (1, 40), (1, 45), (7, 3), (70, 2)):
        arrays, words = (normal(rows, heads * width), cos, sin), {"heads": heads}
        words["position"] = position
        found = ran(operations.rope, arrays, words)
        same(found, ran(reference.rope, arrays, words), tolerance=1e-6)
    arrays = (normal(3, heads * width), cos[:1], sin[:1])
    plain = {"heads": heads}
    same(ran(operations.rope, arrays, plain), ran(reference.rope, arrays, plain))


# --- Caches and attention


@needs_native
@pytest.mark.parametrize(("row", "count"), [(1, 3), (8, 3), (8, 2), (9, 3), (4, 0), (12, 3)])
def test_set_rows(row, count):
    matrix, x = normal(9, 5), normal(3, 5)
    words = {"row": row, "count": count}
    found = jax.jit(operations.set_rows)(matrix, x, **words)
    same(found, ran(reference.set_rows, (matrix, x), words), tolerance=0)


@needs_native
def test_a_cache_that_is_given_up_keeps_its_place():
    write = jax.jit(operations.set_row, donate_argnums=0)
    matrix = jnp.zeros((64, 32))
    before = matrix.unsafe_buffer_pointer()
    after = write(matrix, jnp.ones((1, 32)), row=jnp.int32(3))
    assert after.unsafe_buffer_pointer() == before
    assert float(after.sum()) == 32


@needs_native
def test_a_matrix_that_is_wanted_as_it_was_stays_so():
    def both(matrix, x):
        return matrix, operations.set_row(matrix, x, row=2)

    old, new = jax.jit(both, donate_argnums=0)(jnp.zeros((3, 4)), jnp.ones((1, 4)))
    assert (float(old.sum()), float(new.sum())) == (0, 4)


CASES = [("9 heads of 3 groups", options) for options in OPTIONS] + [(s, "all") for s in SHAPES]


@needs_native
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_attention(level, shape, options):
    for position in (1, 16, 17, 37):
        arrays, words = attention_case(shape, 1, 37, OPTIONS[options], position)
        words["position"] = position
        found = ran(operations.attention, arrays, words)
        same(found, oracle.attention(*arrays, **words), tolerance=5e-6)


@needs_native
@pytest.mark.parametrize("options", ["plain", "all", "chunks of 5"])
def test_causal_attention(level, options):
    for rows, count in ((1, 1), (19, 19), (19, 4), (70, 65)):
        arrays, words = attention_case("9 heads of 3 groups", rows, 80, OPTIONS[options], count + 2)
        words["position"] = 3
        found = ran(operations.causal_attention, arrays, {**words, "count": count})
        assert np.isfinite(found).all()
        real = (arrays[0][:count], *arrays[1:])
        wanted = oracle.causal_attention(*real, **words)
        same(found[:count], wanted, tolerance=5e-6)


@needs_native
@pytest.mark.parametrize("width", [64, 128, 80])
def test_attention_of_whole_vectors(level, width):
    q, k, v = normal(5, 6 * width), normal(300, 2 * width), normal(300, 2 * width, seed=1)
    k[290:], v[290:] = NAN, NAN
    words = {"heads": 6, "groups": 2, "position": 286}
    found = ran(operations.causal_attention, (q, k, v), words)
    same(found, oracle.causal_attention(q, k, v, **words), tolerance=5e-6)


# --- Batches and chips


def batch_cases():
    tiles, _ = weight(33, 40)
    heads = {"heads": 3}
    groups = {"heads": 3, "groups": 1}
    table = normal(20, 2)
    yield operations.matmul, (normal(4, 2, 40), tiles), (0, None), {}
    yield operations.rms_norm, (normal(4, 1, 6), normal(1, 6)), (0, None), {}
    yield operations.plus, (normal(4, 2, 5), normal(2, 5)), (0, None), {}
    yield operations.swiglu, (normal(4, 1, 37), normal(4, 1, 37)), (0, 0), {}
    yield operations.rope, (normal(4, 1, 15), table, table), (0, None, None), heads
    yield operations.rope, (normal(4, 1, 15), normal(4, 20, 2), normal(4, 20, 2)), (0, 0, 0), heads
    cache = normal(4, 20, 7)
    yield operations.attention, (normal(4, 1, 21), cache, cache), (0, 0, 0), groups
    yield operations.attention, (normal(4, 1, 21), cache[0], cache), (0, None, 0), groups
    yield operations.set_row, (cache, normal(4, 1, 7)), (0, 0), {}


POSITIONS = np.array([1, 20, 7, 3], np.int32)


@needs_native
@pytest.mark.parametrize("case", list(batch_cases()), ids=lambda case: case[0].__name__)
def test_a_batch_is_as_its_sequences(case):
    call, arrays, axes, words = case
    name = {"rope": "position", "attention": "position", "set_row": "row"}.get(call.__name__)

    def one(arrays, at):
        return call(*arrays, **words, **({} if name is None else {name: at}))

    found = jax.jit(jax.vmap(one, in_axes=(axes, 0)))(on_device(arrays), POSITIONS)
    for i, at in enumerate(POSITIONS):
        each = [a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True)]
        same(found[i], one(on_device(each), jnp.int32(at)), tolerance=1e-6)


@needs_native
@pytest.mark.parametrize("operation", ["matmul", "embedding", "rms_norm", "rope", "set_rows"])
def test_a_handler_varies_as_its_inputs_do(operation):
    tiles, _ = weight(33, 40)
    arrays, words = {
        "matmul": ((normal(3, 40), tiles), {}),
        "embedding": ((np.array([1, 9]), tiles), {"first": 2}),
        "rms_norm": ((normal(3, 40), normal(1, 40)), {}),
        "rope": ((normal(3, 12), normal(9, 2), normal(9, 2)), {"heads": 2, "position": 3}),
        "set_rows": ((normal(9, 4), normal(3, 4)), {"row": 8, "count": 2}),
    }[operation]
    path, _ = choose(operation, "cpu", "native")
    twice = [jax.tree.map(lambda a: jnp.stack([a, a]), a) for a in arrays]
    found = on_two_chips(path.call, twice, words)
    for chip in range(2):
        same(found[chip], ran(path.call, arrays, words), tolerance=0)


@needs_native
def test_every_native_path_comes_first():
    native = [name for name, paths in PATHS.items() if paths[0].name == "native"]
    assert sorted(native) == sorted(
        [
            "attention",
            "causal_attention",
            "embedding",
            "matmul",
            "plus",
            "rms_norm",
            "rope",
            "set_row",
            "set_rows",
            "swiglu",
        ]
    )
