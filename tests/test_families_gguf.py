"""Families in GGUF files: their logits against references, and what is made of metadata."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from author.families.config import ConfigError
from author.families.gguf_architectures import ARCHITECTURES
from author.families.model import LongRope
from author.families.registry import READERS, from_gguf
from tests import gguf_recurrent, gguf_tensors
from tests.gguf_of import ARCHITECTURES as WRITTEN
from tests.gguf_of import gguf_of
from tests.making_safetensors import make_directory
from tests.test_families_dense import turn
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.engine import load
from tp.gguf_file import read_header
from tp.source import open_source

CHECKPOINTS = Path(__file__).parent / "checkpoints"
FAMILIES = (
    *("llama", "smollm2", "mixtral", "ministral3", "gemma", "gemma2", "gemma3_text", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "phi3", "granite", "granitemoe", "olmo2"),
    *("olmo3", "olmoe", "smollm3", "cohere2", "glm4", "glm4_moe", "exaone4", "gpt_oss", "dots1"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_noqlora", "minimax_m2"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss", "apertus"),
    *("llama4_text", "qwen3_5", "qwen3_5_moe", "kimi_linear"),
)
# What no GGUF file can say.
UNSAID = {
    "mistral": "llama.cpp's converter leaves out its window",
    "qwen3_moe_nonorm": "the architecture has no dense layers",
}
CASES = [(family, 2 + i % 2) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "chips"), CASES)
def test_a_gguf_computes_the_logits_of_what_it_was_made_of(tmp_path, family, chips):
    path = gguf_of(CHECKPOINTS / family, tmp_path / "x.gguf")
    check_logits(load(str(path), chips=chips), family)


def check_logits(engine, family):
    wanted = np.load(CHECKPOINTS / family / "expected.npz")
    for prompt in (0, 1):
        ids, logits = wanted[f"input_ids_{prompt}"].tolist(), wanted[f"logits_{prompt}"]
        turn(engine, len(ids))
        error = np.abs(engine.logits(ids) - logits).max() / logits.std()
        assert error < 1e-3, f"{error:.1e} of the deviation of prompt {prompt}"


OTHERS = {
    "in one projection": ("qwen3_next", "qwen3next", gguf_recurrent.first_qwen3next),
    "with gates and ups joined": ("qwen3_5_moe", "qwen35moe", gguf_recurrent.joined_qwen35),
    "with keys and values joined": (
        *("kimi_linear", "kimi-linear"),
        gguf_recurrent.other_kimi_linear,
    ),
}


@pytest.mark.parametrize(("family", "architecture", "convert"), OTHERS.values(), ids=OTHERS)
def test_other_layouts_compute_the_same(tmp_path, monkeypatch, family, architecture, convert):
    monkeypatch.setitem(gguf_tensors.SPECIAL, architecture, convert)
    path = gguf_of(CHECKPOINTS / family, tmp_path / "x.gguf")
    check_logits(load(str(path), chips=2), family)


def with_later_layer(path):
    """Qwen 3.5 with a layer for predicting several tokens, as its releases have one."""
    stored, last = open_checkpoint(CHECKPOINTS / "qwen3_5"), "model.layers.3."
    tensors = {t.name: stored.read(t.name).reshape(t.shape) for t in stored.tensors.values()}
    later = {
        name.replace(last, "mtp.layers.0."): array
        for name, array in tensors.items()
        if name.startswith(last)
    }
    later["mtp.fc.weight"] = np.ones((64, 128))
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        later[f"mtp.{norm}.weight"] = np.ones(64)
    make_directory(path, {name: (array, "F32") for name, array in (tensors | later).items()})
    config = json.loads((CHECKPOINTS / "qwen3_5/config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return path


def test_a_layer_for_predicting_several_tokens_is_left_out_and_said_to_be(tmp_path):
    path = gguf_of(with_later_layer(tmp_path / "hf"), tmp_path / "x.gguf")
    engine = load(str(path), chips=2)
    check_logits(engine, "qwen3_5")
    there = {name for name in open_checkpoint(path).tensors if name.startswith("blk.4.")}
    assert {"blk.4.attn_q.weight", "blk.4.nextn.eh_proj.weight"} <= there
    assert engine.receipt.skipped == dict.fromkeys(there, "a layer for predicting several tokens")


def test_every_checkpoint_of_an_architecture_is_here():
    types = {
        path.parent.name: json.loads(path.read_text())["model_type"]
        for path in CHECKPOINTS.glob("*/config.json")
    }
    assert {name for name, kind in types.items() if kind in WRITTEN} == {*FAMILIES, *UNSAID}
    assert set(WRITTEN.values()) == set(ARCHITECTURES)
    assert {a.family for a in ARCHITECTURES.values()} <= set(READERS)


# --- Metadata

PLAIN = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
}
SHAPES = {"token_embd.weight": (50, 32), "output.weight": (50, 32)}


def read(shapes=SHAPES, **keys):
    changed = PLAIN | {key.replace("__", "."): value for key, value in keys.items()}
    return from_gguf({k: v for k, v in changed.items() if v is not None}, shapes, "x.gguf")


def refusal(**keys):
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    return str(caught.value)


def test_an_architecture_nobody_reads_is_refused_with_those_known():
    said = refusal(general__architecture="rwkv7")
    assert said.startswith("x.gguf: general.architecture 'rwkv7' is of no family we know")
    assert all(name in said for name in ARCHITECTURES)


def test_all_that_is_wrong_with_metadata_is_said_at_once():
    said = refusal(
        llama__block_count=None, llama__tilt=3, llama__attention__causal=False, llama__vocab_size=9
    )
    assert "llama.block_count is missing" in said
    assert "nothing is known of llama.tilt" in said
    assert "llama.attention.causal False is not supported (True is)" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention__value_length", 16, "attention.value_length is 16, wanted the head width, 8"),
        ("attention__head_count_kv", [2, 1], "head_count_kv is [2, 1]: layers that differ"),
        ("rope__scaling__type", "spiral", "rope.scaling.type 'spiral' is not supported"),
        ("expert_weights_scale", 2.0, "nothing is known of llama.expert_weights_scale"),
    ],
)
def test_what_would_compute_otherwise_is_refused(key, value, said):
    assert said in refusal(**{f"llama__{key}": value})


RECURRENT = {
    "too few layers": (
        *("qwen3_5_moe", "attention.recurrent_layers", [True]),
        "qwen35moe.attention.recurrent_layers is [True], wanted a value for each of 2 layers",
    ),
    "which are recurrent": (
        *("kimi_linear", "attention.head_count_kv", 4),
        "kimi-linear.attention.head_count_kv is 4, wanted a value for each of 3 layers",
    ),
    "another gating": (
        *("kimi_linear", "expert_gating_func", 1),
        "kimi-linear.expert_gating_func 1 is not supported (2 is)",
    ),
    "weights as they are": (
        *("qwen3_5_moe", "expert_weights_norm", False),
        "qwen35moe.expert_weights_norm False is not supported (True is)",
    ),
    "wider values": (
        *("qwen3_5", "ssm.inner_size", 96),
        "qwen35.ssm.inner_size 96 is not supported (64 is)",
    ),
}


@pytest.mark.parametrize(("family", "key", "value", "said"), RECURRENT.values(), ids=RECURRENT)
def test_what_recurrent_layers_would_compute_otherwise_is_refused(
    tmp_path, family, key, value, said
):
    header = read_header(gguf_of(CHECKPOINTS / family, tmp_path / "x.gguf"))
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    changed = header.keys | {f"{header.keys['general.architecture']}.{key}": value}
    from_gguf(header.keys, shapes, "x.gguf")
    with pytest.raises(ConfigError) as caught:
        from_gguf(changed, shapes, "x.gguf")
    assert str(caught.value) == f"x.gguf: {said}"


def test_a_list_that_says_one_thing_is_that_thing():
    assert read(llama__attention__head_count_kv=[2, 2]).spec == read().spec


def test_divisors_of_another_width_are_refused():
    with pytest.raises(ConfigError, match=re.escape("rope_freqs.weight is [8], wanted [4]")):
        read({**SHAPES, "rope_freqs.weight": (8,)})


def test_a_gguf_is_tied_where_it_has_no_head():
    assert read({"token_embd.weight": (50, 32)}).tied
    assert not read().tied


def test_factors_of_the_rotation_are_read_from_their_tensors(tmp_path):
    model = open_source(str(gguf_of(CHECKPOINTS / "phi3", tmp_path / "x.gguf"))).model
    scaling = model.rotations[0].scaling
    assert isinstance(scaling, LongRope)
    assert scaling.long == (1.5, 2.0, 3.0, 4.5, 6.0, 8.0)
    assert (scaling.original, model.short_length) == (32, 32)


def test_windows_come_by_period_or_layer_by_layer(tmp_path):
    def sliding(**changes):
        path = gguf_of(CHECKPOINTS / "gemma3_text", tmp_path / "x.gguf", **changes)
        model = open_source(str(path)).model
        return [layer.mixer.window is not None for layer in model.spec.layers]

    assert sliding() == [True, True, False, True]
    assert sliding(sliding_window_pattern=6) == [True] * 4


def test_a_file_that_lacks_a_tensor_and_holds_another_is_refused(tmp_path):
    path = gguf_of(CHECKPOINTS / "qwen3", tmp_path / "x.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_z_norm.weight"))
    assert "blk.1.attn_z_norm.weight" in open_checkpoint(path).tensors
    with pytest.raises(CheckpointError) as caught:
        load(str(path), chips=1)
    assert "blk.1.attn_q_norm.weight is missing" in str(caught.value)
    assert "blk.1.attn_z_norm.weight belongs to nothing" in str(caught.value)
