"""Families with mixtures, latent attention or recurrent layers give the logits of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.making_safetensors import FLOATS, make_directory, split_bytes
from tp.engine import load

FOLDER = Path(__file__).parent / "checkpoints"
# By family: the width that logits are compared at, so that all of them meet all kinds of cuts.
CHIPS = {
    "deepseek_v2": 3,
    "deepseek_v2_lite": 5,
    "deepseek_v3": 2,
    "deepseek_v3_noqlora": 3,
    "dots1": 3,
    "ernie4_5_moe": 5,
    "glm4_moe": 2,
    "gpt_oss": 5,
    "granitemoe": 3,
    "hunyuan_v1_moe": 2,
    "kimi_linear": 3,
    "llama4_text": 5,
    "minimax": 3,
    "minimax_m2": 5,
    "mixtral": 5,
    "olmoe": 3,
    "qwen2_moe": 3,
    "qwen3_5": 3,
    "qwen3_5_moe": 2,
    "qwen3_moe": 2,
    "qwen3_moe_nonorm": 3,
    "qwen3_next": 5,
}


def close(found, wanted):
    """Within a thousandth of how far logits differ from one another."""
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-3 * wanted.std())


def expected(family, prompt):
    with np.load(FOLDER / family / "expected.npz") as file:
        return file[f"input_ids_{prompt}"].tolist(), file[f"logits_{prompt}"]


@pytest.mark.parametrize(("family", "chips"), CHIPS.items())
def test_logits_are_those_of_transformers_by_chunks_and_by_steps(family, chips):
    engine = load(str(FOLDER / family), chips=chips, context=128)
    engine.decoder.chunks = (16,)
    ids, wanted = expected(family, 1)
    close(engine.logits(ids), wanted)
    ids, wanted = expected(family, 0)
    close(engine.logits_by_steps(ids), wanted)
    # Every tensor was used, but for those that follow from a layer's number.
    assert all(".self_attn." in name for name in engine.receipt.skipped)
    assert len(engine.receipt.skipped) == (4 if family == "minimax" else 0)


def stored(family):
    """The tensors of a checkpoint of one file, each with its dtype."""
    header, data = split_bytes((FOLDER / family / "model.safetensors").read_bytes())
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            flat = np.frombuffer(data[start:end], FLOATS[entry["dtype"]])
            found[name] = (flat.reshape(entry["shape"]), entry["dtype"])
    return found


def test_experts_may_be_fused_and_later_layers_are_not_used(tmp_path):
    family, prefix = "dots1", "model.layers.1.mlp.experts"
    tensors = stored(family)
    parts = {
        part: np.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight")[0] for e in range(8)])
        for part in ("gate", "up", "down")
    }
    gate_up = np.concatenate([parts["gate"], parts["up"]], axis=1)
    tensors |= {f"{prefix}.gate_up_proj": (gate_up, "BF16")}
    tensors |= {f"{prefix}.down_proj": (parts["down"], "BF16")}
    later = ("model.layers.2.mlp.gate.weight", "mtp.fc.weight")
    tensors |= {name: (np.ones((2, 2), np.float32), "F32") for name in later}
    make_directory(tmp_path / "fused", tensors)
    config = json.loads((FOLDER / family / "config.json").read_text())
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    engine = load(str(tmp_path / "fused"), chips=2, context=32)
    ids, wanted = expected(family, 0)
    close(engine.logits(ids), wanted)
    assert set(engine.receipt.skipped) == set(later)
