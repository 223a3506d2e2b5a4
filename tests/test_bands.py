"""A matrix is put together band by band as if at once, in memory that a CPU device takes over."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.q8 import Q8, quantise
from tp.bands import bands, put_together

RANGES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 200), st.integers(0, 40)), min_size=1, max_size=4
)


def written_out(ranges):
    """Each place of padded ranges: the output that stands there, or None."""
    return [
        start + i if i < length else None for start, length, width in ranges for i in range(width)
    ]


@given(RANGES, st.sampled_from([1, 1 << 14, 1 << 15, 1 << 20]))
def test_bands_are_the_ranges_cut_at_whole_blocks(drawn, inputs):
    ranges = [(start, length, length + padding) for start, length, padding in drawn]
    found = list(bands(ranges, inputs))
    assert [place for band in found for place in written_out(band)] == written_out(ranges)
    sizes = [sum(width for *_, width in band) for band in found]
    assert all(size % 32 == 0 for size in sizes[:-1])
    assert all(size * inputs <= 1 << 20 or size <= 32 for size in sizes)


@pytest.mark.parametrize("cuts", [[5], [2, 3], [1, 0, 4]])
def test_bands_put_together_are_the_whole(cuts):
    whole = quantise(np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32))
    ends = np.cumsum([0, *cuts])
    slices = [slice(a, b) for a, b in pairwise(ends)]
    found = put_together((Q8(values=whole.values[s], scales=whole.scales[s]) for s in slices), 5)
    np.testing.assert_array_equal(found.values, whole.values)
    np.testing.assert_array_equal(found.scales, whole.scales)
    floats = put_together((whole.scales[s] for s in slices), 5)
    np.testing.assert_array_equal(floats, whole.scales)


def test_a_device_takes_over_what_was_put_together():
    (array,) = (put_together(iter([np.ones((n, 3), np.float32)]), n) for n in [1000])
    held = jax.device_put(array, jax.devices()[1])
    assert held.unsafe_buffer_pointer() == array.ctypes.data
