import contextlib
import shutil
import struct

import gguf
import numpy as np
import pytest

from tests.making_gguf import make_gguf, make_tiny, normal
from tests.making_safetensors import complaint
from tp.checkpoint import CheckpointError, open_checkpoint


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_an_integer_tensor_of_a_gguf_is_refused_when_read(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("ids", np.zeros((2, 2), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="ids has dtype I32; F32, F16, BF16 and"):
        open_checkpoint(path).read("ids")


def u64(number):
    return struct.pack("<Q", number)


BROKEN = {
    "data cut": (lambda raw: raw[:-2000], "cutting off"),
    "header cut": (lambda raw: raw[:200], "ends at byte 200, within its header"),
    "magic cut": (lambda raw: raw[:3], "ends at byte 3, within its header"),
    "empty": (lambda raw: b"", "is empty"),
    "magic": (lambda raw: b"GGML" + raw[4:], "begins with b'GGML'; a GGUF file begins with"),
    "version": (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "is a GGUF of version 1; "),
    "endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "is a big-endian GGUF; "),
    "tensors": (lambda raw: raw[:8] + u64(2**60) + raw[16:], ""),
    "keys": (lambda raw: raw[:16] + u64(2**60) + raw[24:], ""),
    "key length": (lambda raw: raw[:24] + u64(2**60) + raw[32:], "within its header"),
}


@pytest.mark.parametrize(("edit", "found"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_gguf_is_refused(tmp_path, tiny_gguf, edit, found):
    path = tmp_path / "broken.gguf"
    path.write_bytes(edit(tiny_gguf.read_bytes()))
    said = complaint(path)
    assert said.startswith("broken.gguf: ")
    assert found in said


def test_a_cut_gguf_names_what_it_lacks(tmp_path, tiny_gguf):
    last = max(gguf.GGUFReader(tiny_gguf).tensors, key=lambda tensor: tensor.data_offset)
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[: last.data_offset + 1])
    end = last.data_offset + last.n_bytes
    said = f"cut.gguf: ends at byte {last.data_offset + 1} of {end}, cutting off {last.name}; "
    assert complaint(path) == said + "wanted a whole GGUF file: fetch it again"


def test_any_cut_is_noticed(tmp_path, tiny_gguf):
    raw = tiny_gguf.read_bytes()
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(tiny_gguf).tensors)
    path = tmp_path / "cut.gguf"
    for size in [*range(1, 700, 7), *range(700, end, 501), end - 1]:
        path.write_bytes(raw[:size])
        assert complaint(path).startswith("cut.gguf: ")
    path.write_bytes(raw[:end])
    open_checkpoint(path)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_header_is_refused_or_read_but_never_trips(tmp_path, tiny_gguf, seed):
    random = np.random.default_rng(seed)
    header = min(tensor.data_offset for tensor in gguf.GGUFReader(tiny_gguf).tensors)
    path = tmp_path / "damaged.gguf"
    for _ in range(40):
        raw = bytearray(tiny_gguf.read_bytes())
        for at in random.integers(0, header, 3):
            raw[at] = random.choice([0, 1, 255, raw[at] ^ 1 << random.integers(8)])
        path.write_bytes(raw)
        with contextlib.suppress(CheckpointError):
            checkpoint = open_checkpoint(path)
            for name in checkpoint.tensors:
                with contextlib.suppress(CheckpointError), np.errstate(all="ignore"):
                    checkpoint.read(name)


def test_an_array_longer_than_the_file_is_refused(tmp_path, tiny_gguf):
    raw = tiny_gguf.read_bytes()
    at = raw.index(b"kinds") + len(b"kinds") + 4 + 4
    for length in (2**40, 2**63):
        path = tmp_path / "long.gguf"
        path.write_bytes(raw[:at] + struct.pack("<Q", length) + raw[at + 8 :])
        assert "within its header" in complaint(path)


def test_a_part_of_a_split_gguf_is_refused(tmp_path, tiny_gguf):
    path = tmp_path / "model-00002-of-00003.gguf"
    shutil.copy(tiny_gguf, path)
    said = complaint(path)
    assert "model-00002-of-00003.gguf: is part 2 of 3 of a split GGUF; join the parts" in said
    path = make_gguf(tmp_path / "x.gguf", {"w": (normal(2, 2), "F32")}, {"split.count": 3})
    assert "x.gguf: is one of 3 parts of a split GGUF; join the parts" in complaint(path)


def test_a_gguf_split_into_one_is_whole(tmp_path, tiny_gguf):
    path = tmp_path / "model-00001-of-00001.gguf"
    shutil.copy(tiny_gguf, path)
    assert len(open_checkpoint(path).tensors) == 9


def test_overlapping_tensors_are_refused(tmp_path):
    path = make_gguf(tmp_path / "x.gguf", {n: (normal(8, 8), "F32") for n in ("one", "other")})
    raw = path.read_bytes()
    at = raw.index(b"other") + len(b"other") + 4 + 2 * 8 + 4
    assert struct.unpack("<Q", raw[at : at + 8]) == (256,)
    path.write_bytes(raw[:at] + struct.pack("<Q", 128) + raw[at + 8 :])
    assert "has the bytes of one and other overlap" in complaint(path)


def test_a_type_of_the_future_is_refused_when_read(tmp_path):
    path = make_gguf(tmp_path / "x.gguf", {n: (normal(8, 8), "F32") for n in ("one", "other")})
    raw = path.read_bytes()
    at = raw.index(b"other") + len(b"other") + 4 + 2 * 8
    path.write_bytes(raw[:at] + struct.pack("<I", 9999) + raw[at + 4 :])
    checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint.read("one"), normal(8, 8))
    with pytest.raises(CheckpointError, match="other has dtype type 9999; F32"):
        checkpoint.read("other")
