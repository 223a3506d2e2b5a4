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
from tests.gguf_of import ARCHITECTURES as WRITTEN
from tests.gguf_of import gguf_of
from tests.test_families_dense import turn
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.engine import load
from tp.source import open_source

CHECKPOINTS = Path(__file__).parent / "checkpoints"
FAMILIES = (
    *("llama", "smollm2", "mixtral", "ministral3", "gemma", "gemma2", "gemma3_text", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "phi3", "granite", "granitemoe", "olmo2"),
    *("olmo3", "olmoe", "smollm3", "cohere2", "glm4", "glm4_moe", "exaone4", "gpt_oss", "dots1"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_noqlora", "minimax_m2"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss", "apertus"),
    "llama4_text",
)
# What no GGUF file can say.
UNSAID = {
    "mistral": "llama.cpp's converter leaves out its window",
    "qwen3_moe_nonorm": "the architecture has no dense layers",
}
CASES = [(family, 2 + i % 2) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "chips"), CASES)
def test_a_gguf_computes_the_logits_of_what_it_was_made_of(tmp_path, family, chips):
    wanted = np.load(CHECKPOINTS / family / "expected.npz")
    path = gguf_of(CHECKPOINTS / family, tmp_path / "x.gguf")
    engine = load(str(path), chips=chips)
    for prompt in (0, 1):
        ids, logits = wanted[f"input_ids_{prompt}"].tolist(), wanted[f"logits_{prompt}"]
        turn(engine, len(ids))
        error = np.abs(engine.logits(ids) - logits).max() / logits.std()
        assert error < 1e-3, f"{error:.1e} of the deviation of prompt {prompt}"


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
