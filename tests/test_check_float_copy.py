"""A copy in float32 has the tensors of the checkpoint, with the values that anyfold holds."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.gguf_of import gguf_of
from tests.making_checkpoints import FOLDER, keys, tensors, write
from tp.check import float_copy
from tp.check.float_copy import size_of, write_copy
from tp.check.wholes import whole_operands
from tp.source import open_source


def copy_of(path: Path, folder: Path) -> Path:
    source = open_source(str(path))
    folder.mkdir()
    return write_copy(source, whole_operands(source, 4), folder)


def copied(folder: Path) -> dict[str, np.ndarray]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(folder / file)[name] for name, file in index.items()}
    assert {*index.values()} == {path.name for path in folder.glob("*.safetensors")}
    return found


# Plain, with fused and turned experts, with rotary pairs side by side, with tiled heads. Their
# matrices are made so that quantising changes nothing: all is to be back in its place.
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "glm4", "qwen3_next", "minimax"])
def test_what_survives_quantising_comes_back_as_it_was(family, tmp_path):
    found = copied(copy_of(FOLDER / family, tmp_path / "copy"))
    wanted = tensors(family)
    assert {*found} == {*wanted}
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def test_what_does_not_survive_is_as_q8_0_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(float_copy, "SHARD", 100_000)
    random = np.random.default_rng(0)
    made = {n: random.normal(size=a.shape).astype(np.float32) for n, a in tensors("llama").items()}
    path = write(tmp_path / "model", keys("llama"), made)
    found = copied(copy_of(path, tmp_path / "copy"))
    assert size_of(open_source(str(path)).checkpoint) == 4 * sum(a.size for a in made.values())
    name = "model.layers.1.mlp.gate_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.dequantize(gguf.quantize(made[name], kind), kind)
    assert not np.array_equal(wanted, made[name])
    np.testing.assert_array_equal(found[name], wanted)
    norm = "model.layers.1.input_layernorm.weight"
    np.testing.assert_array_equal(found[norm], made[norm])


def test_a_copy_of_a_gguf_file_is_one(tmp_path):
    path = gguf_of(FOLDER / "qwen2", tmp_path / "model.gguf")
    copy = copy_of(path, tmp_path / "copy")
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(copy)
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert after.fields[name].contents() == field.contents()
    wanted = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in before.tensors}
    assert {tensor.name for tensor in after.tensors} == {*wanted}
    for tensor in after.tensors:
        np.testing.assert_array_equal(tensor.data, wanted[tensor.name])
