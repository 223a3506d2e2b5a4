import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.making_gguf import make_tiny, normal
from tests.making_safetensors import complaint, make_directory, safetensors_bytes, split_bytes
from tp.checkpoint import open_checkpoint


def test_a_path_that_is_not_there(tmp_path):
    said = complaint(tmp_path / "nowhere")
    assert said.startswith(f"{tmp_path / 'nowhere'}: is not there; wanted a directory with")


def test_an_empty_directory(tmp_path):
    assert complaint(tmp_path).startswith(f"{tmp_path}: is empty; wanted a directory with")


def test_a_directory_without_config(tmp_path):
    path = make_directory(tmp_path / "m", {"w": (normal(2, 2), "F32")})
    (path / "config.json").unlink()
    assert "has no config.json; it holds model.safetensors; wanted" in complaint(path)


def test_only_pytorch_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    said = complaint(tmp_path)
    assert "holds config.json, pytorch_model.bin; wanted model.safetensors, or" in said
    assert "convert them: model.save_pretrained(directory, safe_serialization=True)" in said


def test_a_directory_with_a_gguf_names_it(tmp_path):
    make_tiny(tmp_path / "tiny.gguf")
    assert f"give the GGUF file itself, {tmp_path / 'tiny.gguf'}" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "config.json: is not JSON (Expecting property name"),
        ("[1]", "config.json: holds a JSON list; wanted a JSON object"),
        ("", "config.json: is not JSON (Expecting value: line 1 column 1"),
        ("\xff", "config.json: is not JSON ('utf-8' codec"),
    ],
)
def test_a_config_that_is_no_object(tmp_path, text, found):
    path = make_directory(tmp_path, {"w": (normal(2, 2), "F32")})
    (path / "config.json").write_bytes(text.encode("latin-1"))
    assert found in complaint(path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_the_directory_asks_for_the_directory(tmp_path, name):
    path = make_directory(tmp_path, {"w": (normal(2, 2), "F32")})
    assert f"{name}: is neither a directory nor a GGUF; give its directory, {path}" in complaint(
        path / name
    )


def test_another_file_is_neither(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"xxxxxxxx")
    assert "x.bin: is neither a directory nor a GGUF; wanted a directory" in complaint(
        tmp_path / "x.bin"
    )


TENSORS = {"a": (normal(64, 40), "F32"), "b": (normal(3, 40, seed=1), "F16")}


def break_file(path, edit):
    file = path / "model.safetensors"
    file.write_bytes(edit(file.read_bytes()))


def overlapping(raw):
    header, data = split_bytes(raw)
    header["b"]["data_offsets"] = [0, 240]
    return safetensors_bytes(header, data)


def unknown_dtype(raw):
    header, data = split_bytes(raw)
    header["b"]["dtype"] = "F77"
    return safetensors_bytes(header, data)


BROKEN = {
    "data cut": (lambda raw: raw[:-1024], "bytes where its header describes"),
    "header cut": (lambda raw: raw[:50], "has 50 bytes, and a header that should take"),
    "length cut": (lambda raw: raw[:4], "has 4 bytes, and a header"),
    "empty": (lambda raw: b"", "has 0 bytes, and a header"),
    "2^60": (lambda raw: struct.pack("<Q", 2**60) + raw[8:], f"should take {2**60} of them"),
    "trailing": (lambda raw: raw + bytes(16), "bytes where its header describes"),
    "overlap": (overlapping, "invalid offset for tensor"),
    "dtype": (unknown_dtype, "unknown variant `F77`"),
    "no JSON": (lambda raw: raw[:8] + b"x" * (len(raw) - 8), "a header that cannot be read"),
}


@pytest.mark.parametrize(("edit", "found"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused(tmp_path, edit, found):
    path = make_directory(tmp_path, TENSORS)
    assert set(open_checkpoint(path).tensors) == {"a", "b"}
    break_file(path, edit)
    said = complaint(path)
    assert said.startswith("model.safetensors: ")
    assert found in said
    assert said.endswith("; wanted a whole safetensors file: fetch it again")


def test_sizes_are_told_when_data_is_cut(tmp_path):
    path = make_directory(tmp_path, TENSORS)
    size = (path / "model.safetensors").stat().st_size
    break_file(path, lambda raw: raw[:-1024])
    assert f"has {size - 1024} bytes where its header describes {size} (" in complaint(path)


def test_a_name_twice_in_a_header_is_refused(tmp_path):
    path = make_directory(tmp_path, {"w": (normal(1), "F32")})
    entry = b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    break_file(path, lambda raw: struct.pack("<Q", len(header)) + header + b"0000")
    assert "names w twice in its header" in complaint(path)


def make_shards(path, shards, weight_map=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if weight_map is None:
        weight_map = {tensor: name for name, held in shards.items() for tensor in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


SHARDS = {f"{i}.safetensors": {f"w{i}": normal(2, 3, seed=i)} for i in range(3)}


def test_shards_are_read_as_one(tmp_path):
    checkpoint = open_checkpoint(make_shards(tmp_path, SHARDS))
    for i in range(3):
        np.testing.assert_array_equal(checkpoint.read(f"w{i}"), normal(2, 3, seed=i))
        assert checkpoint.tensors[f"w{i}"].file == tmp_path / f"{i}.safetensors"


def test_all_missing_shards_are_named(tmp_path):
    path = make_shards(tmp_path, SHARDS)
    (path / "0.safetensors").unlink()
    assert "names 0.safetensors, which is not there; fetch what is missing" in complaint(path)
    (path / "2.safetensors").unlink()
    assert "names 0.safetensors, 2.safetensors, which are not there" in complaint(path)


def test_a_broken_shard_is_named(tmp_path):
    path = make_shards(tmp_path, SHARDS)
    shard = path / "1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert complaint(path).startswith("1.safetensors: has ")


def test_an_index_that_names_what_its_shard_lacks_is_refused(tmp_path):
    weight_map = {"w0": "0.safetensors", "w1": "2.safetensors", "w2": "2.safetensors"}
    weight_map["w9"] = "1.safetensors"
    said = complaint(make_shards(tmp_path, SHARDS, weight_map))
    assert said.startswith("model.safetensors.index.json: and the shards do not agree: ")
    assert "w1 is not in 2.safetensors; w9 is not in 1.safetensors; wanted" in said


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path):
    shards = SHARDS | {"0.safetensors": {"w0": normal(2, 3), "new": normal(1)}}
    weight_map = {f"w{i}": f"{i}.safetensors" for i in range(3)}
    said = complaint(make_shards(tmp_path, shards, weight_map))
    assert "new is in 0.safetensors and not in the index; wanted" in said


def test_a_file_that_the_index_does_not_name_is_left_alone(tmp_path):
    path = make_shards(tmp_path, SHARDS)
    save_file({"w0": normal(9)}, path / "consolidated.safetensors")
    assert set(open_checkpoint(path).tensors) == {"w0", "w1", "w2"}


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = SHARDS | {"0.safetensors": {"w0": normal(2, 3), "w1": normal(2, 3)}}
    assert "w1 is in 0.safetensors and in 1.safetensors" in complaint(make_shards(tmp_path, shards))


@pytest.mark.parametrize("weight_map", [{"w": "../w.safetensors"}, {"w": 3}, [], {"w": ""}])
def test_an_index_without_a_sound_weight_map(tmp_path, weight_map):
    assert "has no weight_map of tensor names to file names" in complaint(
        make_shards(tmp_path, {}, weight_map)
    )
