import json
from itertools import pairwise
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kernels.q8 import dequantise
from tests.making_gguf import KEYS, Kind, make_tiny, normal
from tests.making_safetensors import FLOATS, make_directory, split_bytes
from tp.checkpoint import CheckpointError, open_checkpoint

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def same_bits(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    np.testing.assert_array_equal(
        np.ascontiguousarray(one).view(np.uint8), np.ascontiguousarray(other).view(np.uint8)
    )


def by_the_library(path):
    """Every tensor of a GGUF in float32, as the library reads it, in NumPy's order."""
    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("name", ["llama", "smollm2", "mistral", "qwen3"])
def test_a_directory_reads_as_its_bytes_say(name):
    path = CHECKPOINTS / name
    checkpoint = open_checkpoint(path)
    seen = 0
    for file in path.glob("*.safetensors"):
        header, raw = split_bytes(file.read_bytes())
        header.pop("__metadata__", None)
        for tensor, entry in header.items():
            begin, end = entry["data_offsets"]
            wanted = np.frombuffer(raw[begin:end], FLOATS[entry["dtype"]]).astype(np.float32)
            same_bits(checkpoint.read(tensor), wanted.reshape(entry["shape"]))
            assert checkpoint.tensors[tensor].dtype == entry["dtype"]
            assert checkpoint.tensors[tensor].file == file
            seen += end - begin
    assert len(checkpoint.tensors) > 0
    assert checkpoint.bytes_read == seen


def test_the_configs_of_a_directory_are_its_files():
    path = CHECKPOINTS / "llama"
    checkpoint = open_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == json.loads((path / "config.json").read_text())
    assert checkpoint.generation_config == json.loads((path / "generation_config.json").read_text())


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_gguf_reads_as_the_library_reads_it(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    wanted = by_the_library(tiny_gguf)
    assert set(checkpoint.tensors) == set(wanted)
    for name, array in wanted.items():
        rows = array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array
        same_bits(checkpoint.read(name), rows)
    tensors = gguf.GGUFReader(tiny_gguf).tensors
    for tensor in tensors:
        assert checkpoint.tensors[tensor.name].shape == wanted[tensor.name].shape
        assert checkpoint.tensors[tensor.name].dtype == tensor.tensor_type.name
    assert checkpoint.bytes_read == sum(tensor.n_bytes for tensor in tensors)


def test_the_keys_of_a_gguf_are_python_values(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    assert checkpoint.format == "gguf"
    assert checkpoint.generation_config is None
    assert checkpoint.config == {"general.architecture": "llama"} | KEYS


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_model_in_three_dtypes_and_mixed(tmp_path, dtype):
    tensors = {"w": (normal(5, 7), dtype), "norm": (normal(7, seed=1), "F32")}
    checkpoint = open_checkpoint(make_directory(tmp_path, tensors))
    same_bits(checkpoint.read("w"), normal(5, 7).astype(FLOATS[dtype]).astype(np.float32))
    same_bits(checkpoint.read("norm"), normal(7, seed=1))


def test_every_bfloat16_keeps_its_bits(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    path = make_directory(tmp_path, {"all": (bits.view(ml_dtypes.bfloat16), "BF16")})
    wanted = (bits.astype(np.uint32) << 16).view(np.float32)
    checkpoint = open_checkpoint(path)
    whole = checkpoint.read("all")
    part = checkpoint.read("all", outer=[(250, 6), (1, 2)], inner=[(3, 5), (100, 1)])
    rows, cols = [*range(250, 256), 1, 2], [*range(3, 8), 100]
    # Signalling NaNs may turn quiet on the way through float32; which they are must not change.
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(whole), ~number)
    same_bits(whole[number], wanted[number])
    keep = number[np.ix_(rows, cols)]
    same_bits(part[keep], wanted[np.ix_(rows, cols)][keep])


@pytest.mark.parametrize("before", [1, 2])
def test_data_may_lie_at_an_odd_byte(tmp_path, before):
    tensors = {"odd": (np.zeros(before, np.int8), "I8"), "w": (normal(4, 6), "BF16")}
    checkpoint = open_checkpoint(make_directory(tmp_path, tensors))
    wanted = normal(4, 6).astype(ml_dtypes.bfloat16).astype(np.float32)
    same_bits(checkpoint.read("w"), wanted)
    same_bits(checkpoint.read("w", inner=[(1, 3)]), wanted[:, 1:4])


def chosen(size, ranges):
    ranges = [(0, size)] if ranges is None else ranges
    return [i for start, length in ranges for i in range(start, start + length)]


def ranges_in(size):
    pair = st.tuples(st.integers(0, size), st.integers(0, size))
    return st.none() | st.lists(
        pair.map(lambda p: (min(p), max(p) - min(p))), min_size=0, max_size=3
    )


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "experts", "q4_0", "q5_0", "q4_k"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_slice_is_a_slice_of_the_whole(tiny_gguf, name, data):
    checkpoint = open_checkpoint(tiny_gguf)
    whole = by_the_library(tiny_gguf)[name]
    whole = whole.reshape(-1, whole.shape[-1])
    outer, inner = (data.draw(ranges_in(size)) for size in whole.shape)
    wanted = whole[np.ix_(chosen(whole.shape[0], outer), chosen(whole.shape[1], inner))]
    same_bits(checkpoint.read(name, outer=outer, inner=inner), wanted)


def test_rows_may_be_named_by_an_index(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    whole = by_the_library(tiny_gguf)
    index = np.array([5, 0, 0, 3])
    same_bits(checkpoint.read("f16", outer=index, inner=[(7, 9)]), whole["f16"][index, 7:16])
    same_bits(checkpoint.read("q4_0", outer=index), whole["q4_0"][index])
    same_bits(checkpoint.read("norm", outer=index), whole["norm"][index])
    same_bits(checkpoint.read("norm", outer=[(40, 10), (0, 1)]), whole["norm"][[*range(40, 50), 0]])
    none = np.zeros(0, np.int64)
    assert checkpoint.read("f16", outer=none).shape == (0, 50)
    assert checkpoint.read_q8("q8_0", outer=none).shape == (0, 96)


def test_reads_longer_than_a_piece_are_whole(tiny_gguf, monkeypatch):
    monkeypatch.setattr("tp.stored.ELEMENTS_AT_ONCE", 100)
    checkpoint = open_checkpoint(tiny_gguf)
    whole = by_the_library(tiny_gguf)
    for name in ("f16", "q8_0", "q4_0"):
        same_bits(checkpoint.read(name), whole[name])
        same_bits(
            dequantise(checkpoint.read_q8(name, outer=np.array([4, 1, 5, 0, 2]))),
            np.asarray(dequantise(checkpoint.read_q8(name)))[[4, 1, 5, 0, 2]],
        )


@pytest.mark.parametrize(
    ("name", "outer", "inner", "nbytes"),
    [
        ("norm", None, None, 50 * 4),
        ("norm", [(3, 2), (9, 1)], None, 3 * 4),
        ("f32", [(1, 2)], None, 2 * 50 * 4),
        ("f16", [(1, 2)], [(0, 3), (40, 10)], 2 * 13 * 2),
        ("bf16", [(0, 1), (4, 2)], [(49, 1)], 3 * 2),
        ("q8_0", [(0, 2)], [(32, 32)], 2 * 34),
        ("q8_0", [(0, 2)], [(31, 2)], 2 * 2 * 34),
        ("q4_0", None, [(0, 1)], 6 * 18),
        ("q4_k", [(5, 1)], [(250, 10)], 2 * 144),
        ("f16", [], None, 0),
        ("f16", None, [], 0),
    ],
)
def test_reads_touch_the_bytes_they_need(tiny_gguf, name, outer, inner, nbytes):
    checkpoint = open_checkpoint(tiny_gguf)
    assert checkpoint.bytes_read == 0
    checkpoint.read(name, outer=outer, inner=inner)
    assert checkpoint.bytes_read == nbytes


def test_a_float_read_as_q8_touches_its_enclosing_blocks(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    checkpoint.read_q8("f16", outer=[(1, 2)], inner=[(40, 2)])
    assert checkpoint.bytes_read == 2 * 18 * 2


def test_q8_0_comes_bit_for_bit(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    for tensor in gguf.GGUFReader(tiny_gguf).tensors:
        if tensor.tensor_type == Kind.Q8_0:
            q = checkpoint.read_q8(tensor.name)
            blocks = tensor.data.reshape(q.shape[0], -1, 34)
            same_bits(q.values, blocks[:, :, 2:].view(np.int8).reshape(q.shape))
            same_bits(q.scales, np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0])
            assert q.block == 32


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q4_k"])
def test_other_types_are_dequantised_and_quantised(tiny_gguf, name):
    q = open_checkpoint(tiny_gguf).read_q8(name)
    blocks = gguf.quantize(by_the_library(tiny_gguf)[name], Kind.Q8_0).reshape(q.shape[0], -1, 34)
    same_bits(q.values, blocks[:, :, 2:].view(np.int8).reshape(q.shape))
    same_bits(q.scales, np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "experts", "q4_k"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_q8_slice_is_a_slice_of_the_whole_q8(tiny_gguf, name, data):
    checkpoint = open_checkpoint(tiny_gguf)
    array = by_the_library(tiny_gguf)[name]
    array = array.reshape(-1, array.shape[-1])
    padded = np.pad(array, ((0, 0), (0, -array.shape[1] % 32)))
    whole = gguf.dequantize(gguf.quantize(padded, Kind.Q8_0), Kind.Q8_0)
    outer, inner = (data.draw(ranges_in(size)) for size in array.shape)
    wanted = whole[np.ix_(chosen(array.shape[0], outer), chosen(array.shape[1], inner))]
    same_bits(dequantise(checkpoint.read_q8(name, outer=outer, inner=inner)), wanted)


def test_slices_put_together_are_the_whole():
    checkpoint = open_checkpoint(CHECKPOINTS / "llama")
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) < 2:
            continue
        whole = checkpoint.read_q8(name)
        for chips in (2, 3):
            borders = [tensor.rows * chip // chips for chip in range(chips + 1)]
            parts = [checkpoint.read_q8(name, outer=[(a, b - a)]) for a, b in pairwise(borders)]
            same_bits(np.concatenate([part.values for part in parts]), whole.values)
            same_bits(np.concatenate([part.scales for part in parts]), whole.scales)


def test_q8_survives_in_checkpoints_made_for_it():
    checkpoint = open_checkpoint(CHECKPOINTS / "smollm2")
    stored = load_file(CHECKPOINTS / "smollm2" / "model.safetensors")
    for name, array in stored.items():
        if array.ndim == 2:
            # Equal, and not of the same bits: int8 has no minus zero.
            np.testing.assert_array_equal(dequantise(checkpoint.read_q8(name)), array)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda c: c.read("f61"),
            r"tiny.gguf: has no tensor f61; wanted one of its 9 tensors \(the nearest .* f16",
        ),
        (
            lambda c: c.read("f16", outer=[(0, 1), (5, 2), (-1, 1)]),
            r"tiny.gguf: f16 is \[6, 50\]; rows \[\(5, 2\), \(-1, 1\)\] .*; wanted rows .* 0 to 6",
        ),
        (
            lambda c: c.read_q8("f16", inner=[(40, 11)]),
            r"tiny.gguf: f16 is \[6, 50\]; columns \[\(40, 11\)\] .* outside it; wanted .* 0 to 50",
        ),
        (lambda c: c.read("f16", outer=np.array([0, 6, -1])), r"rows \[6, -1\] lie outside"),
        (lambda c: c.read("norm", inner=[(0, 1)]), r"norm is \[50\] and has no columns; "),
        (lambda c: c.read_q8("norm"), r"norm is \[50\]; q8 wants rows and columns"),
    ],
)
def test_reads_that_cannot_be_are_refused(tiny_gguf, read, message):
    with pytest.raises(CheckpointError, match=message):
        read(open_checkpoint(tiny_gguf))


@pytest.mark.parametrize(
    ("dtype", "array"),
    [("F8_E4M3", np.zeros((2, 2), np.uint8)), ("I64", np.zeros((2, 2), np.int64))],
)
def test_a_dtype_is_refused_only_when_it_is_read(tmp_path, dtype, array):
    path = make_directory(tmp_path, {"bad": (array, dtype), "good": (normal(2, 2), "F32")})
    checkpoint = open_checkpoint(path)
    same_bits(checkpoint.read("good"), normal(2, 2))
    for read in (checkpoint.read, checkpoint.read_q8):
        with pytest.raises(CheckpointError, match=f"bad has dtype {dtype}; F32, F16, BF16 and"):
            read("bad")


def test_numbers_that_are_not_finite_have_no_q8(tmp_path):
    array = normal(2, 40)
    array[1, 35] = np.nan
    checkpoint = open_checkpoint(make_directory(tmp_path, {"w": (array, "F32")}))
    with pytest.raises(CheckpointError, match=r"model.safetensors: w holds NaN or infinity"):
        checkpoint.read_q8("w")


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    path = make_directory(tmp_path, {"w": (normal(2, 40), "F32")})
    checkpoint = open_checkpoint(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model.safetensors: w can no longer be read"):
        checkpoint.read("w")
