from itertools import pairwise

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernels.q8 import Q8, concatenate, dequantise, quantise

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_the_library(array):
    """Values and scales as the gguf library quantises them; rows of whole blocks only."""
    blocks = gguf.quantize(array, Q8_0).reshape(*array.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return blocks[..., 2:].view(np.int8).reshape(array.shape), scales


def same_bits(one, other):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def random_q8(rows, n, *, block=32, seed=0):
    """Any values and scales, made without quantising."""
    random = np.random.default_rng(seed)
    return Q8(
        values=random.integers(-127, 128, (rows, n), dtype=np.int8),
        scales=random.uniform(0.001, 2, (rows, -(-n // block))).astype(np.float16),
        block=block,
    )


def by_hand(q):
    """The float32 values, an element at a time."""
    out = np.zeros(q.values.shape, np.float32)
    for row, col in np.ndindex(out.shape):
        scale = np.float32(q.scales[row, col // q.block])
        out[row, col] = np.float32(q.values[row, col]) * scale
    return out


def test_a_block_by_hand():
    row = np.zeros((1, 32), np.float32)
    row[0, :6] = [127, -126.5, 0.5, -0.5, 1.5, 2.4]
    q = quantise(row)
    assert q.scales.tolist() == [[1.0]]
    assert q.values[0, :6].tolist() == [127, -127, 1, -1, 2, 2]


def test_just_below_a_half_rounds_to_zero():
    row = np.zeros((1, 32), np.float32)
    row[0, :2] = [127, np.nextafter(np.float32(0.5), np.float32(0))]
    assert quantise(row).values[0, 1] == 0


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([32, 96])),
        elements=st.floats(-1e6, 1e6, width=32),
    )
)
def test_quantises_as_the_library_does_bit_for_bit(array):
    # Scales that float16 cannot hold are another test's.
    largest = np.abs(array.reshape(-1, 32)).max(axis=1)
    scales = (largest / np.float32(127)).astype(np.float16)
    array.reshape(-1, 32)[(scales == 0) & (largest > 0)] = 0
    values, scales = by_the_library(array)
    q = quantise(array)
    same_bits(q.values, values)
    same_bits(q.scales, scales)


@pytest.mark.parametrize("exponent", [-5, -4, -2, 0, 2, 5])
def test_quantises_many_rows_as_the_library_does(exponent):
    array = normal(300, 1024, seed=exponent + 6) * np.float32(10.0**exponent)
    values, scales = by_the_library(array)
    q = quantise(array)
    same_bits(q.values, values)
    same_bits(q.scales, scales)


@pytest.mark.parametrize("n", [1, 31, 33, 50])
def test_a_short_last_block_is_one_padded_with_zeros(n):
    array = normal(3, n)
    padded = np.zeros((3, 64), np.float32)
    padded[:, :n] = array
    values, scales = by_the_library(padded)
    q = quantise(array)
    same_bits(q.values, values[:, :n])
    same_bits(q.scales, scales[:, : -(-n // 32)])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats_are_quantised_as_float32(dtype):
    array = normal(2, 3, 64).astype(dtype)
    values, scales = by_the_library(array.astype(np.float32))
    q = quantise(array)
    same_bits(q.values, values)
    same_bits(q.scales, scales)


BLOCKS = {
    "all zero": np.zeros(32),
    "minus zero": np.full(32, -0.0),
    "one float32 denormal": np.eye(1, 32)[0] * 1e-45,
    "scale below float16": np.linspace(-3e-6, 3e-6, 32),
    "scale at the edge of float16": np.linspace(-1, 1, 32) * 127 * 2.0**-25,
    "scale denormal": np.linspace(-1e-3, 1e-3, 32),
    "float16 max": np.full(32, 65504.0),
    "one huge, 31 tiny": np.array([8.3e6] + [1e-8] * 31),
    "all huge": np.full(32, 3e38),
    "huge and ordinary": np.array([3e38, -3e38, 65504.0, 1.0] * 8),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_hard_blocks_stay_finite_and_close(block):
    array = block.astype(np.float32)[None]
    q = quantise(array)
    back = by_hand(q).astype(np.float64)
    assert np.isfinite(q.scales).all()
    assert np.isfinite(back).all()
    assert (back[array == 0] == 0).all()
    largest, scale = np.abs(array).max(), float(q.scales[0, 0])
    exact = largest / 127
    # Half a step, and what float16 rounds off the scale, which the largest value sees 127 times.
    allowed = scale / 2 + 127 * abs(scale - exact) + 1e-6 * largest
    held = np.abs(array) <= 127 * 65504.0
    assert (np.abs(back - array)[held] <= allowed + (0 if held.all() else 65504)).all()
    assert (np.abs(back)[~held] == 127 * 65504.0).all()


def test_a_scale_below_float16_is_the_smallest_there_is():
    array = np.linspace(-3e-6, 3e-6, 32, dtype=np.float32)[None]
    q = quantise(array)
    assert q.scales.tolist() == [[2.0**-24]]
    assert (np.abs(by_hand(q) - array) <= 2.0**-25).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    array = normal(4, 64)
    array[2, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise(array)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 5)])
def test_nothing_is_quantised_to_nothing(shape):
    q = quantise(np.zeros(shape, np.float32))
    assert q.values.shape == shape
    assert q.scales.shape == (*shape[:-1], -(-shape[-1] // 32))
    assert dequantise(q).shape == shape


@pytest.mark.parametrize("n", [64, 50])
@pytest.mark.parametrize("block", [32, 8])
def test_dequantises_on_host_and_device_alike(n, block):
    q = random_q8(3, n, block=block)
    wanted = by_hand(q)
    on_device = jax.tree.map(jnp.asarray, q)
    same_bits(dequantise(q), wanted)
    same_bits(dequantise(on_device), wanted)
    same_bits(jax.jit(dequantise)(on_device), wanted)


def test_float16_denormal_scales_survive_the_device():
    scales = np.array([[1], [2], [1023]], np.uint16).view(np.float16)
    q = Q8(values=np.full((3, 32), 127, np.int8), scales=scales)
    wanted = np.repeat(
        np.array([[127 * 2.0**-24], [127 * 2.0**-23], [127 * 1023 * 2.0**-24]], np.float32), 32, 1
    )
    same_bits(jax.jit(dequantise)(jax.tree.map(jnp.asarray, q)), wanted)


def test_block_is_no_leaf():
    leaves, structure = jax.tree.flatten(random_q8(2, 40, block=8))
    assert [leaf.shape for leaf in leaves] == [(2, 40), (2, 5)]
    assert jax.tree.unflatten(structure, ["v", "s"]) == Q8(values="v", scales="s", block=8)


def test_bytes_are_those_of_values_and_scales():
    assert random_q8(3, 40).nbytes == 3 * 40 + 3 * 2 * 2


def joined(array, ranges, axis):
    return np.concatenate([array.take(range(s, s + n), axis=axis) for s, n in ranges], axis=axis)


@st.composite
def sizes_and_cuts(draw):
    rows, n = draw(st.integers(1, 4)), draw(st.integers(1, 150))
    axis = draw(st.sampled_from(["outer", "inner"]))
    size = rows if axis == "outer" else n
    starts = draw(st.lists(st.integers(0, size), min_size=1, max_size=4))
    ranges = [(start, draw(st.integers(0, size - start))) for start in starts]
    return rows, n, axis, ranges


@settings(max_examples=200, deadline=None)
@given(sizes_and_cuts(), st.sampled_from([32, 16, 8]), st.integers(0, 99))
def test_a_cut_loses_no_bit(case, block, seed):
    rows, n, axis, ranges = case
    q = random_q8(rows, n, block=block, seed=seed)
    cut = q.cut(axis, ranges)
    same_bits(by_hand(cut), joined(by_hand(q), ranges, 0 if axis == "outer" else 1))
    same_bits(dequantise(cut), by_hand(cut))
    assert cut.scales.shape[-1] == -(-cut.shape[-1] // cut.block)
    assert q.block % cut.block == 0


@pytest.mark.parametrize(
    ("ranges", "block"),
    [
        ([(0, 64)], 32),
        ([(32, 40)], 32),
        ([(64, 36)], 32),
        ([(0, 40), (64, 32)], 8),
        ([(64, 36), (0, 32)], 4),
        ([(0, 32), (96, 4)], 32),
        ([(48, 16)], 16),
        ([(3, 1)], 1),
        ([(0, 0), (5, 0), (32, 32)], 32),
    ],
)
def test_a_cut_is_no_finer_than_it_must_be(ranges, block):
    assert random_q8(2, 100).cut("inner", ranges).block == block


def test_a_cut_can_be_traced():
    q = random_q8(4, 100)
    ranges = [(4, 40), (96, 4)]
    cut = jax.jit(lambda q: dequantise(q.cut("inner", ranges).cut("outer", [(2, 2), (0, 1)])))
    wanted = joined(joined(by_hand(q), ranges, 1), [(2, 2), (0, 1)], 0)
    same_bits(cut(jax.tree.map(jnp.asarray, q)), wanted)


def test_axes_before_the_outer_one_stay():
    q = quantise(normal(2, 3, 64))
    cut = q.cut("outer", [(1, 2)]).cut("inner", [(16, 32)])
    same_bits(dequantise(cut), dequantise(q)[:, 1:3, 16:48])


@pytest.mark.parametrize("ranges", [[(0, 101)], [(-1, 2)], [(3, -1)], [(100, 1)]])
def test_a_range_outside_is_refused(ranges):
    with pytest.raises(ValueError, match=r"ranges \[.*\] leave the inner axis, which has 100"):
        random_q8(2, 100).cut("inner", ranges)


@pytest.mark.parametrize("block", [16, 4, 1])
def test_refining_changes_no_value(block):
    q = random_q8(2, 50)
    fine = q.refine(block)
    assert fine.scales.shape == (2, -(-50 // block))
    same_bits(by_hand(fine), by_hand(q))


@pytest.mark.parametrize("block", [0, 5, 64])
def test_refining_to_what_does_not_divide_is_refused(block):
    with pytest.raises(ValueError, match="does not divide 32"):
        random_q8(2, 50).refine(block)


@pytest.mark.parametrize("device", [False, True])
def test_padding_adds_zeros_at_the_ends(device):
    q = random_q8(2, 50)
    wanted = np.zeros((3, 100), np.float32)
    wanted[:2, :50] = by_hand(q)
    padded = (jax.tree.map(jnp.asarray, q) if device else q).padded(outer=3, inner=100)
    assert padded.scales.shape == (3, 4)
    same_bits(dequantise(padded), wanted)
    assert q.padded(inner=50) == q


def test_padding_to_less_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 50\] does not fit into \[2, 49\]"):
        random_q8(2, 50).padded(inner=49)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from([32, 16, 8])), min_size=1, max_size=4)
)
def test_parts_of_any_lengths_are_joined(parts):
    arrays = [random_q8(2, n, block=block, seed=i) for i, (n, block) in enumerate(parts)]
    whole = concatenate(arrays, "inner")
    same_bits(by_hand(whole), np.concatenate([by_hand(part) for part in arrays], axis=1))


def test_joining_outer_takes_the_common_block():
    parts = [random_q8(2, 50, block=32), random_q8(0, 50, block=16), random_q8(3, 50, block=8)]
    whole = concatenate(parts, "outer")
    assert whole.block == 8
    same_bits(by_hand(whole), np.concatenate([by_hand(part) for part in parts]))


def test_joining_nothing_is_refused():
    with pytest.raises(ValueError, match="no parts"):
        concatenate([], "outer")


@pytest.mark.parametrize("chips", [2, 3, 4])
def test_29_blocks_are_shared_without_cutting_one(chips):
    q = random_q8(2, 928)
    borders = [29 * chip // chips * 32 for chip in range(chips + 1)]
    shares = [q.cut("inner", [(a, b - a)]) for a, b in pairwise(borders)]
    assert {share.block for share in shares} == {32}
    same_bits(concatenate(shares, "inner").scales, q.scales)
    same_bits(concatenate(shares, "inner").values, q.values)
