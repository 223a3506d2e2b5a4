"""Pitfalls of loading: what is missing or strange is refused in one message; what is cut fits.

docs/PITFALLS.md says which public report each test answers.
"""

import json
import shutil
from contextlib import suppress

import jax
import numpy as np
import pytest

from author.families.config import ConfigError
from author.families.registry import from_config
from tests.making_checkpoints import (
    CONTEXT,
    FOLDER,
    close,
    decoder,
    expected,
    ids,
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


ODD = (None, "x", -1, 0, 1.5, [], {}, True, ["a"], [1, None], float("nan"), float("inf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_stands_in_a_config_it_is_read_or_refused(family):
    config, own = keys(family), shapes(family)
    nested = [(k, n) for k, v in config.items() if isinstance(v, dict) for n in v]
    for value in ODD:
        for key in config:
            read_or_refused(config | {key: value}, own)
        for key, name in nested:
            read_or_refused(config | {key: config[key] | {name: value}}, own)


def read_or_refused(config, own):
    with suppress(ConfigError):
        from_config(config, "config.json", own)


def shapes(family):
    return {name: array.shape for name, array in tensors(family).items()}


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


def test_a_tied_model_without_a_head_has_the_logits_of_its_embedding(tmp_path):
    plain, nested, wanted = tied(tmp_path)
    found = logits(plain, 4, ids(101, 17))
    assert found.shape == (17, 101)
    close(found, wanted)
    np.testing.assert_array_equal(logits(nested, 4, ids(101, 17)), found)


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
    alone, split = (decoder(FOLDER / family, chips, context=16, kernels="xla") for chips in (1, 3))
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
        kernels="xla",
    )
    assert set(found.receipt.skipped) == {named(name) for name in later}
    wanted = weights(FOLDER / family, 2)
    for key, leaf in found.decoder.weights.items():
        np.testing.assert_array_equal(leaf, wanted[key])
    made |= {"model.layers.0.twist": ones}
    strange = write(tmp_path / "d", config, {named(n): a for n, a in made.items()})
    assert f"{named('model.layers.0.twist')} belongs to nothing" in refusal(strange)
