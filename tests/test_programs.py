"""Programs that no golden has: split prefill, split vocabulary, every block split; all sound."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from author.checks import check_program
from author.chips import chip_programs
from author.english import read_program
from author.kinds import KINDS, author
from author.names import Name
from author.refusals import check, check_tp
from author.spec import SpecError, spec_from_json
from author.statements import Tensor
from tests import oracle
from tp.interpret import interpret

FOLDER = Path(__file__).parent / "goldens"
ARGS = {
    "dir": "w",
    "ctx": 16,
    "tok": 7,
    "pos": 5,
    "toks": [1, 2, 3],
    "pos0": 2,
    "seqs": [[5, 4], [6, 1]],
    "l": 0,
    "poss": [2, 3],
    "rows": "per_sequence",
    "chunk": 3,
    "bsz": 2,
}
STEPS = ["decode_step", "prefill", "prefill_logits", "decode_batch"]


@cache
def spec_of(stem):
    return spec_from_json(json.loads((FOLDER / f"{stem}.json").read_text())["spec"])


def splits(spec):
    try:
        check_tp(spec, 2, beyond=True)
    except SpecError:
        return False
    return True


FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
SPLIT = [stem for stem in FILES if splits(spec_of(stem))]


def written(stem, kind, **more):
    return author(spec_of(stem), kind, {n: ARGS[n] for n in KINDS[kind].needed if n in ARGS} | more)


def lines(program, *, about):
    return [line for line in program.text.splitlines() if f"Let {about}" in line]


def test_only_a_norm_over_all_heads_is_not_split():
    whole = [stem for stem in FILES if stem not in SPLIT and not stem.startswith("refused_")]
    assert whole == ["qk_norm_whole"]


# --- Sound, and read back


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("tp_")])
@pytest.mark.parametrize("stem", SPLIT)
def test_a_program_of_one_device_is_sound(stem, kind):
    check(spec_of(stem))
    program = written(stem, kind)
    assert read_program(program.text) == program.statements
    check_program(program)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("tp_")])
@pytest.mark.parametrize("stem", SPLIT)
def test_a_program_of_several_chips_is_sound(stem, kind):
    for chips, vocabulary in ((1, True), (3, False), (8, True)):
        split = {"tp": chips, "vocabulary": vocabulary, "align": 4, "beyond": True}
        program = written(stem, kind, **split)
        assert read_program(program.text) == program.statements
        check_program(program)
        assert len(chip_programs(program)) == chips


@pytest.mark.parametrize("stem", SPLIT)
def test_the_rows_of_a_stacked_layer_may_share_a_state(stem):
    shared = written(stem, "tp_stacked_layer", tp=3, rows="shared", beyond=True)
    check_program(shared)
    assert lines(shared, about="pos_s") == ["Let pos_s0 be 2."]
    assert shared != written(stem, "tp_stacked_layer", tp=3, beyond=True)


# --- The same numbers


def values_for(program):
    """Random weights, caches and states; a row of ones is one. Buffers are left out."""
    draw = np.random.default_rng(0)
    declared = [s for s in program.statements if isinstance(s, Tensor)]
    return {
        t.name: np.ones((t.rows, t.cols))
        if t.name.base.startswith("ones")
        else draw.normal(size=(t.rows, t.cols)) / 2
        for t in declared
        if t.name.base not in ("bct", "bod", "bol", "bmo")
    }


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("stem", SPLIT)
def test_several_chips_compute_what_one_does(stem, kind):
    one = written(stem, kind)
    values = values_for(one)
    logits = Name("logits" if kind in ("decode_step", "prefill") else "blogits")
    wanted = interpret(one, values, meanings=oracle)[logits]
    for chips, vocabulary, align in ((1, True, 1), (2, False, 4), (3, True, 4), (7, True, 1)):
        split = {"tp": chips, "vocabulary": vocabulary, "align": align, "beyond": True}
        program = written(stem, f"tp_{kind}", **split)
        found = interpret(program, values, meanings=oracle)[logits]
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


# --- How they read


def test_each_chip_looks_up_its_rows_and_the_fold_brings_them_to_all():
    program = written("llama_gqa", "tp_decode_embed", tp=3, vocabulary=True, align=8)
    d = spec_of("llama_gqa").d
    assert program.text.splitlines() == [
        "## Main",
        "Let tok be 7.",
        f"Let Emb_c0 be a 16 by {d} tensor of Real.",
        "Let x_c0 be row tok of Emb_c0 counted from 0.",
        f"Let Emb_c1 be a 24 by {d} tensor of Real.",
        "Let x_c1 be row tok of Emb_c1 counted from 16.",
        f"Let Emb_c2 be a 24 by {d} tensor of Real.",
        "Let x_c2 be row tok of Emb_c2 counted from 40.",
        "Let x_f1 be x_c0 plus x_c1.",
        "Let x be x_f1 plus x_c2.",
    ]


def test_logits_are_joined_before_they_are_capped():
    program = written("softcaps_and_post_norms", "tp_decode_head", tp=3, vocabulary=True)
    said = lines(program, about="logits")
    assert [line.split(" be ")[1] for line in said[-3:]] == [
        "logits_raw_c0 joined with logits_raw_c1.",
        "logits_raw_j1 joined with logits_raw_c2.",
        "logits_raw capped at 30.0.",
    ]
    (joined,) = program.manifest.collectives
    assert (joined.kind, str(joined.out), len(joined.partials)) == ("join", "logits_raw", 3)


def test_a_lone_partial_is_joined_all_the_same():
    program = written("llama_gqa", "tp_head", tp=1, vocabulary=True)
    assert lines(program, about="logits ") == [
        "Let logits be the join of logits_c0 across 1 chips."
    ]
    assert program.manifest.collectives[0].steps == ()


def test_a_chip_past_the_vocabulary_holds_an_empty_slice():
    program = written("llama_gqa", "tp_decode_embed", tp=4, vocabulary=True, align=32)
    (declared, looked_up) = (lines(program, about=f"{name}_c0 ")[0] for name in ("Emb", "x"))
    assert declared.startswith("Let Emb_c0 be a 0 by ")
    assert looked_up == "Let x_c0 be row tok of Emb_c0 counted from 0."


def test_a_bias_of_the_output_is_added_once_after_the_fold():
    program = written("refused_tp_output_bias", "tp_decode_layer", tp=2, beyond=True)
    assert lines(program, about="ao0") == [
        "Let ao0_c0 be ct0_c0 matmul Wo0_c0.",
        "Let ao0_c1 be ct0_c1 matmul Wo0_c1.",
        "Let ao0_r be ao0_c0 plus ao0_c1.",
        "Let ao0 be ao0_r plus Bo0.",
    ]


def test_every_chip_routes_and_one_adds_the_bias_of_the_experts():
    program = written("sinks_and_biased_experts", "tp_decode_layer", tp=2, beyond=True)
    mixtures = [line for line in program.text.splitlines() if " be moe of " in line]
    assert all(" with router Wr0 plus Br0 gate Wg0_c" in line for line in mixtures)
    assert all(" down Wd0_c" in line and " plus Bd0_c" in line for line in mixtures)
    slices = {str(p.name): p.slice for p in program.manifest.placed if p.slice is not None}
    experts = spec_of("sinks_and_biased_experts").layers[0].ffn.experts
    assert len(slices["Wg0_c1"].ranges) == experts
    assert "Bd0_c0" in slices and "Bd0_c1" not in slices


def test_a_chip_may_have_columns_of_the_shared_experts_alone():
    spec = spec_of("gated_delta_shared_gate_moe")
    layer = replace(spec.layers[0], ffn=replace(spec.layers[0].ffn, expert_dff=16, shared_dff=32))
    spec = replace(spec, layers=(layer,))
    args = {"dir": "w", "ctx": 16, "tok": 7, "pos": 5}
    one = author(spec, "decode_step", args)
    two = author(spec, "tp_decode_step", args | {"tp": 2, "align": 16, "beyond": True})
    check_program(two)
    slices = {str(p.name): p.slice for p in two.manifest.placed if p.slice is not None}
    assert [slices[f"{name}0_c0"].length for name in ("Wd", "Wsd")] == [0, 16]
    values, logits = values_for(one), Name("logits")
    found, wanted = (interpret(p, values, meanings=oracle)[logits] for p in (two, one))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_latent_is_on_every_chip():
    program = written("latent_attention_q_lora", "tp_decode_layer", tp=2, beyond=True)
    placed = {str(p.name) for p in program.manifest.placed}
    assert placed.isdisjoint({"Wkva0", "Kc0", "kc0", "Vl0", "qxn0"})
    assert placed.issuperset({"Wqb0_c0", "Wkb0_c1", "Wvb0_c0", "Wo0_c1", "qa0_c0"})
