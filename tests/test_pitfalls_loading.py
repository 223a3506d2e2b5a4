"""Pitfalls of loading: what is missing or strange is refused in one message; what is cut fits.

docs/PITFALLS.md says which public report each test answers.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from author.families.config import ConfigError
from author.families.registry import from_config
from kernels.q8 import Q8, dequantise, quantise
from tests.making_checkpoints import (
    CONTEXT,
    FOLDER,
    apart,
    close,
    decoder,
    expected,
    ids,
    kept_layers,
    keys,
    logits,
    redrawn,
    tensors,
    weights,
    write,
)
from tests.making_safetensors import FLOATS, make_directory
from tests.oracle_models import forward
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.engine import load

REFUSED = ("gpt2", "starcoder2", "falcon_h1", "mamba2")
FAMILIES = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and p.name not in REFUSED)


def test_the_oracle_of_these_tests_computes_what_transformers_does():
    told = ("smollm2", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2")
    told += ("olmo2", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5", "minimax_m2")
    for family in told:
        prompt, wanted = expected(family, 0)
        found = forward(keys(family), tensors(family), prompt)
        close(found, wanted, 1e-5)


# --- As a stranger would: one thing is wrong

KNOWN = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next")


def copied(tmp_path, family, **changes):
    """A copy of a checkpoint with some keys of its config changed."""
    path = tmp_path / family
    shutil.copytree(FOLDER / family, path, copy_function=shutil.copyfile)
    (path / "config.json").write_text(json.dumps(keys(family, **changes)))
    return path


def refusal(path):
    """What loading says, in one message: it ends before anything is on a device."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(str(path), chips=3, context=16)
    return str(caught.value)


@pytest.mark.parametrize("family", KNOWN)
def test_a_key_nobody_knows_and_a_value_that_is_not_supported_are_named_at_once(tmp_path, family):
    said = refusal(copied(tmp_path, family, attention_twist=3, rope_scaling={"type": "spiral"}))
    assert said.startswith("config.json: ")
    assert "nothing is known of attention_twist" in said
    assert "rope_type 'spiral' is not supported (default, linear, " in said


@pytest.mark.parametrize("family", KNOWN)
def test_a_missing_tensor_and_one_that_belongs_to_nothing_are_named_at_once(tmp_path, family):
    made, lost = tensors(family), "model.layers.1.input_layernorm.weight"
    del made[lost]
    made["model.layers.1.self_attn.twist"] = np.ones(3, np.float32)
    said = refusal(write(tmp_path / family, keys(family), made))
    assert str(tmp_path / family) in said
    assert f"{lost} is missing" in said
    assert f"model.layers.1.self_attn.twist belongs to nothing that a {family} model" in said
    assert "wanted the tensors that its config describes" in said


@pytest.mark.parametrize("family", KNOWN)
def test_a_file_cut_short_is_named_with_both_sizes(tmp_path, family):
    path = copied(tmp_path, family)
    file = sorted(path.glob("*.safetensors"))[-1]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1024])
    said = refusal(path)
    assert said.startswith(
        f"{file.name}: has {size - 1024} bytes where its header describes {size}"
    )
    assert said.endswith("fetch it again")


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_a_shard_that_is_not_there_is_named(tmp_path, family):
    path = copied(tmp_path, family)
    file = sorted(path.glob("*.safetensors"))[1]
    file.unlink()
    assert file.name in refusal(path)


# --- L3 and S1: tied heads, and vocabularies that no width divides


def tied(tmp_path):
    """SmolLM2 with 101 tokens, tied and without a head: plain, and inside a package."""
    made, config = tensors("smollm2"), keys("smollm2", vocab_size=101)
    made = redrawn(made, 3, embed_tokens=(101, 72))
    assert "lm_head.weight" not in made
    names = {name: name.replace("model.", "model.language_model.", 1) for name in made}
    text = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
    package = {"model_type": "smolvlm", "tie_word_embeddings": True, "text_config": text}
    plain = write(tmp_path / "plain", config, made)
    nested = write(tmp_path / "nested", package, {names[n]: a for n, a in made.items()})
    return plain, nested, forward(config, made, ids(101, 17))


def test_a_tied_model_without_a_head_has_the_logits_of_its_embedding_at_any_width(tmp_path):
    plain, nested, wanted = tied(tmp_path)
    for chips in (2, 4):
        found = logits(plain, chips, ids(101, 17))
        assert found.shape == (17, 101)
        close(found, wanted)
        np.testing.assert_array_equal(logits(nested, chips, ids(101, 17)), found)


# --- L5 and Q6: one model in several types


def test_a_model_is_the_same_bits_in_whatever_type_it_is_stored(tmp_path):
    family, made = "qwen3", tensors("qwen3")
    paths = [write(tmp_path / dtype, keys(family), made, dtype) for dtype in ("F32", "BF16")]
    # Its numbers fit bfloat16, and float16 but for the smallest: scaled, these do too.
    small = {
        n: (a if a.ndim > 1 else a.astype(np.float16).astype(np.float32)) for n, a in made.items()
    }
    halves = [write(tmp_path / f"{d}h", keys(family), small, d) for d in ("F32", "F16")]
    norms = {n: (a, "F32" if a.ndim < 2 else "BF16") for n, a in made.items()}
    mixed = make_directory(tmp_path / "mixed", norms)
    shutil.copyfile(FOLDER / family / "config.json", mixed / "config.json")
    for first, *others in ([*paths, mixed, FOLDER / family], halves):
        wanted = jax.tree.leaves(weights(first, 3))
        for other in others:
            for a, b in zip(wanted, jax.tree.leaves(weights(other, 3)), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_read_by_slices_as_their_bytes_say(tmp_path, dtype):
    array = np.random.default_rng(1).normal(size=(9, 70)).astype(FLOATS[dtype])
    checkpoint = open_checkpoint(make_directory(tmp_path / "c", {"w": (array, dtype)}))
    wide = array.astype(np.float32)
    np.testing.assert_array_equal(checkpoint.read("w"), wide)
    found = checkpoint.read("w", outer=[(2, 5)], inner=[(33, 7), (0, 3)])
    np.testing.assert_array_equal(found, wide[2:7, [*range(33, 40), 0, 1, 2]])


# --- L7 and R1: the chips' slices make up the whole, every tensor of every family


def local(array, operand):
    """What a chip holds of a matrix, as the language has it."""
    if not operand.quantised or operand.stored == "plain":
        return array
    if operand.stored == "turned":
        return array.T
    rows = operand.local[0]
    return (
        array.reshape(-1, operand.whole[1], operand.whole[0] // operand.heads)
        .swapaxes(1, 2)
        .reshape(rows, -1)
    )


def whole_again(leaf, operand, chips):
    """A matrix put back together from its chips; what two hold must agree, padding be zeros."""
    by_rows = operand.layout.axis == "rows"
    turned = operand.quantised and operand.stored == "turned"
    found = np.full(operand.whole, np.nan, np.float32)
    target = found if by_rows else found.T
    for chip, held in enumerate(np.split(np.asarray(leaf), chips, int(by_rows == turned))):
        piece = local(held, operand)
        piece, at = piece if by_rows else piece.T, 0
        ranges = [*operand.layout.ranges[chip]]
        ranges += [(0, 0)] * (len(operand.layout.widths) - len(ranges))
        for (start, length), width in zip(ranges, operand.layout.widths, strict=True):
            before, here = target[start : start + length], piece[at : at + length]
            assert (np.isnan(before) | (before == here)).all()
            target[start : start + length] = here
            assert not piece[at + length : at + width].any()
            at += width
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_three_chips_make_up_the_matrices_of_one(family):
    alone, split = (decoder(FOLDER / family, chips, context=16) for chips in (1, 3))
    for key, operand in split.operands.items():
        if operand.role == "weight":
            wanted = local(np.asarray(alone.weights[key]), alone.operands[key])
            found = split.weights[key]
            if operand.layout is None:
                found = local(np.asarray(found), operand)
            else:
                found = whole_again(found, operand, 3)
            np.testing.assert_array_equal(found, wanted, err_msg=key)


# --- L9: tensors past the last layer, and buffers, under any prefix


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_later_layers_and_buffers_are_skipped_under_any_prefix_and_nothing_else(
    tmp_path, family, prefix
):
    made, config = tensors(family), keys(family)
    last, ones = config["num_hidden_layers"], np.ones((2, 2), np.float32)
    later = [f"model.layers.{last}.mlp.experts.0.up_proj.weight", "mtp.layers.0.fc.weight"]
    later += ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    made |= dict.fromkeys(later, ones)
    bare = prefix == "model."

    def named(name):
        name = name.replace("model.", prefix, 1) if name.startswith("model.") else name
        return f"language_model.{name}" if prefix[0] == "l" and name[0] != "l" else name

    config = config if bare else {"model_type": "a_package", "text_config": config}
    found = load(
        str(write(tmp_path / "c", config, {named(n): a for n, a in made.items()})),
        chips=2,
        context=CONTEXT,
    )
    assert set(found.receipt.skipped) == {named(name) for name in later}
    wanted = weights(FOLDER / family, 2)
    for key, leaf in found.decoder.weights.items():
        np.testing.assert_array_equal(leaf, wanted[key])
    made |= {"model.layers.0.twist": ones}
    strange = write(tmp_path / "d", config, {named(n): a for n, a in made.items()})
    assert f"{named('model.layers.0.twist')} belongs to nothing" in refusal(strange)


# --- C1 and C2: what a config says in several ways

THETA = 5e5
WRITTEN = {
    "at the top": {"rope_theta": THETA},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "both": {"rope_theta": THETA, "rope_parameters": {"rope_theta": THETA}},
}


def test_a_base_written_in_any_way_turns_three_hundred_positions_as_it_should(tmp_path):
    made, config = tensors("smollm2"), keys("smollm2", max_position_embeddings=320)
    del config["rope_parameters"]
    prompt, found = ids(160, 300), []
    for name, said in WRITTEN.items():
        path = write(tmp_path / name, config | said, made)
        found.append(decoder(path, 2, context=320))
    for other in found[1:]:
        for key in ("cosc0", "sinc0"):
            np.testing.assert_array_equal(found[0].weights[key], other.weights[key])
    close(found[0].score(prompt), forward(config | WRITTEN["nested"], made, prompt))
    apart(forward(config | {"rope_theta": 1e4}, made, prompt), found[0].score(prompt))
    unlike = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": THETA}}
    said = refusal(write(tmp_path / "unlike", config | unlike, made))
    assert "rope_theta is 10000.0 at the top and 500000.0 among the parameters" in said


def test_a_base_written_for_each_type_of_layer_is_that_of_the_plain_one():
    plain = {"rope_theta": THETA, "rope_type": "default"}
    by_type = {"full_attention": plain, "sliding_attention": plain}
    nested = from_config(keys("olmo3", rope_parameters=by_type), "config.json")
    old = from_config(keys("olmo3", rope_parameters=None, rope_theta=THETA), "config.json")
    assert nested.rotations == old.rotations
    assert [r.theta for r in nested.rotations] == [THETA]


HEADS = {
    "given": {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 32},
    "given, and no divisor": {"hidden_size": 104, "num_attention_heads": 3, "head_dim": 32},
    "null": {"hidden_size": 96, "num_attention_heads": 4},
}


@pytest.mark.parametrize("said", HEADS.values(), ids=HEADS)
def test_the_width_of_a_head_is_what_the_config_says_or_the_division(tmp_path, said):
    config = keys("smollm2", num_key_value_heads=1, head_dim=None) | said
    d, heads = config["hidden_size"], config["num_attention_heads"]
    width = said.get("head_dim", d // heads)
    made = redrawn(
        kept_layers(tensors("smollm2"), 0),
        5,
        q_proj=(heads * width, d),
        k_proj=(width, d),
        v_proj=(width, d),
        o_proj=(d, heads * width),
        gate_proj=(120, d),
        up_proj=(120, d),
        down_proj=(d, 120),
        embed_tokens=(160, d),
        norm=(d,),
    )
    config |= {"num_hidden_layers": 1, **({} if "head_dim" in said else {"head_dim": None})}
    prompt = ids(160, 12)
    path = write(tmp_path / "c", config, made)
    close(logits(path, 2, prompt), forward(config, made, prompt))


# --- Q1 and Q5: blocks that do not divide, and blocks that are hard

WIDE = {"intermediate_size": 928}  # 29 blocks


def wide(tmp_path):
    made = redrawn(
        kept_layers(tensors("smollm2"), 0),
        6,
        gate_proj=(928, 72),
        up_proj=(928, 72),
        down_proj=(72, 928),
    )
    config = keys("smollm2", num_hidden_layers=1, **WIDE)
    return write(tmp_path / "wide", config, made), config, made


@pytest.mark.parametrize("chips", [2, 3, 4])
def test_29_blocks_are_cut_between_blocks_scales_and_all(tmp_path, chips, monkeypatch):
    path, _, made = wide(tmp_path)
    monkeypatch.setattr("tp.loader.pack", lambda q, platform: q)  # as an accelerator has them
    held = weights(path, chips)["Wd0"]
    whole = quantise(made["model.layers.0.mlp.down_proj.weight"])
    ranges = decoder(path, chips).operands["Wd0"].layout.ranges
    assert isinstance(held, Q8) and held.block == 32
    lengths = [length for ((_, length),) in ranges]
    assert all(n % 32 == 0 for n in lengths) and max(lengths) - min(lengths) <= 32
    values, scales = (np.split(np.asarray(a), chips, 1) for a in (held.values, held.scales))
    for chip, ((start, length),) in enumerate(ranges):
        np.testing.assert_array_equal(values[chip][:, :length], whole.values[:, start:][:, :length])
        blocks = whole.scales[:, start // 32 :][:, : length // 32]
        np.testing.assert_array_equal(scales[chip][:, : length // 32], blocks)


def test_29_blocks_on_four_chips_have_the_logits_of_the_whole(tmp_path):
    path, config, made = wide(tmp_path)
    close(logits(path, 4, ids(160, 12)), forward(config, made, ids(160, 12)))


def test_rows_of_zeros_of_denormals_and_of_huge_numbers_stay_finite(tmp_path):
    _, _, made = wide(tmp_path)
    embedding = made["model.embed_tokens.weight"].copy()
    embedding[3] = 0
    embedding[4] = 1e-45
    embedding[5] = 3e4
    embedding[6] = [3e4, *[1e-6] * 71]
    made["model.embed_tokens.weight"] = embedding
    back = np.asarray(dequantise(quantise(embedding)))
    config = keys("smollm2", num_hidden_layers=1, **WIDE)
    prompt = [9, 3, 4, 5, 6, 10]
    found = logits(write(tmp_path / "hard", config, made), 4, prompt)
    assert np.isfinite(found).all()
    assert not found[:, 3].any()
    close(found, forward(config, made | {"model.embed_tokens.weight": back}, prompt), 1e-3)
