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
from author.spec import (
    Attention,
    ChannelDelta,
    Dense,
    GatedDelta,
    Layer,
    LinearMixer,
    Mla,
    ModelSpec,
    Moe,
    NormedResidual,
    Rope,
    SpecError,
    Temperature,
    Window,
    Xielu,
    spec_from_json,
)
from author.statements import Tensor
from tests import oracle
from tests.tiny import wholes
from tp.interpret import interpret
from tp.roll import roll
from tp.rolled import write_rolled
from tp.unroll import unroll

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


def authored(spec, kind, **more):
    return author(spec, kind, {n: ARGS[n] for n in KINDS[kind].needed if n in ARGS} | more)


def written(stem, kind, **more):
    return authored(spec_of(stem), kind, **more)


def lines(program, *, about):
    return [line for line in program.text.splitlines() if f"Let {about}" in line]


def test_whatever_is_authored_is_split():
    assert [stem for stem in FILES if stem not in SPLIT and not stem.startswith("refused_")] == []


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
        if t.name.base not in ("bct", "bod", "bol", "blo", "bmo")
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


# --- What no golden has: each feature alone, and as families combine them

ROPE = Rope(dims=4, theta=100.0)
PLAIN = Attention(
    heads=6,
    kv_heads=2,
    head_dim=4,
    value_dim=4,
    rope=ROPE,
    qk_norm=False,
    qk_norm_whole=False,
    qk_unit_norm=False,
    temperature=None,
    bias=False,
    output_bias=False,
    sinks=False,
    output_gate=False,
    fused_qkv=False,
    window=None,
    scale=0.5,
    softcap=None,
)
BIASED = replace(PLAIN, bias=True, output_bias=True)
WHOLE = replace(PLAIN, qk_norm=True, qk_norm_whole=True)
LATENT = Mla(
    heads=3,
    q_lora_rank=5,
    kv_lora_rank=7,
    qk_nope=3,
    qk_rope=4,
    v_dim=5,
    scale=0.4,
    rope=ROPE,
    bias=True,
    output_bias=True,
    norm_eps=1e-4,
)
CHANNEL = ChannelDelta(heads=3, head_dim=4, conv_taps=3, decay_rank=2, gate_rank=5)
LINEAR = LinearMixer(heads=4, head_dim=3, norm_eps=1e-4)
DELTA = GatedDelta(k_heads=2, v_heads=4, head_dim=3, conv_taps=3, gate="silu", unit_eps=1e-2)

SILU = Dense(dff=7, act="silu")
UNGATED = replace(SILU, gated=False)
XIELU = replace(UNGATED, xielu=Xielu(beta=0.5, cut=-1e-6))
MIXTURE = Moe(
    experts=5,
    top_k=2,
    expert_dff=7,
    act="silu",
    gating="softmax_then_top_k",
    groups=None,
    norm_top_k=True,
    weights_scale=1.0,
    shared_experts=0,
    shared_dff=0,
    shared_gate=False,
    biases=False,
)
SHARED = replace(MIXTURE, shared_experts=1, shared_dff=3, shared_bias=True)


def layer(mixer=PLAIN, ffn=SILU, **fields):
    norms = {"post_mixer_norm": False, "post_ffn_norm": False}
    return Layer(mixer=mixer, ffn=ffn, **(norms | fields))


def model(*layers, **fields):
    usual = {
        "d": 8,
        "vocab": 11,
        "rms_eps": 1e-3,
        "final_logit_softcap": None,
        "embedding_scale": None,
        "hyper": None,
        "ple": None,
        "indexer": None,
    }
    return ModelSpec(layers=layers, **(usual | fields))


def norms_after(*, rope=ROPE, **fields):
    mixer = replace(WHOLE, rope=rope, **fields)
    return layer(mixer, pre_norm=False, post_mixer_norm=True, post_ffn_norm=True)


def normed(alpha, beta):
    return NormedResidual(mixer_alpha=alpha, mixer_beta=beta, ffn_alpha=1.0, ffn_beta=0.5)


NEW = {
    "norm_of_all_heads": model(layer(WHOLE)),
    "norm_of_all_heads_each_its_own": model(layer(replace(WHOLE, heads=3, kv_heads=3))),
    "norm_of_all_heads_and_one_group": model(layer(replace(WHOLE, heads=5, kv_heads=1, bias=True))),
    "norm_after_rope": model(layer(replace(PLAIN, qk_norm=True, qk_norm_after_rope=True))),
    "clip": model(layer(replace(PLAIN, clip=0.2))),
    "latent": model(layer(LATENT)),
    "latent_without_rope": model(layer(replace(LATENT, rope=None, q_lora_rank=None))),
    "unit_eps": model(layer(DELTA)),
    "channel_delta": model(layer(CHANNEL)),
    "linear_attention": model(layer(LINEAR)),
    "ungated": model(layer(ffn=UNGATED)),
    "ungated_gelu": model(layer(ffn=replace(UNGATED, act="gelu_tanh", bias=True))),
    "biased_feed_forward": model(layer(ffn=replace(SILU, bias=True, output_bias=True))),
    "biased_choice": model(layer(ffn=replace(MIXTURE, choice_bias=True))),
    "biased_shared_experts": model(layer(ffn=SHARED)),
    "biased_shared_experts_gated": model(layer(ffn=replace(SHARED, shared_gate=True))),
    "no_norm_before_a_mixture": model(layer(ffn=SHARED, pre_norm=False, post_ffn_norm=True)),
    "parallel_mixture": model(layer(ffn=SHARED, parallel=True, post_mixer_norm=True)),
    "residual_scale": model(layer(post_mixer_norm=True, residual_scale=0.3)),
    "normed_residual": model(layer(normed_residual=normed(2.0, 0.5))),
    "logits": model(layer(), logit_scale=0.25, final_logit_softcap=2.0, head_bias=True),
    # Whole families
    "olmo3": model(
        norms_after(window=Window(kind="sliding", n=3)),
        norms_after(rope=replace(ROPE, variant=1)),
    ),
    "olmoe": model(layer(replace(WHOLE, clip=0.3), replace(MIXTURE, norm_top_k=False))),
    "kimi_linear": model(
        layer(CHANNEL), layer(replace(LATENT, rope=None, bias=False, output_bias=False), MIXTURE)
    ),
    "minimax": model(
        layer(LINEAR, MIXTURE, normed_residual=normed(1.5, 0.7)),
        layer(PLAIN, MIXTURE, normed_residual=normed(1.0, 1.0)),
    ),
    "granite": model(
        *[layer(BIASED, replace(SILU, bias=True, output_bias=True), residual_scale=0.2)] * 2,
        embedding_scale=12.0,
        logit_scale=0.1,
    ),
    "cohere2": model(
        layer(parallel=True), layer(replace(BIASED, rope=None), parallel=True), norm="layer"
    ),
    "apertus": model(layer(replace(PLAIN, qk_norm=True), XIELU)),
    "ministral3": model(
        layer(replace(PLAIN, temperature=Temperature(floor=2.0, scale=0.1, offset=0)))
    ),
    "ernie": model(layer(BIASED, replace(SHARED, choice_bias=True)), head_bias=True),
}
WIDTHS = (1, 2, 3, 5, 8)


def same(program):
    check_program(program)
    assert read_program(program.text) == program.statements
    assert unroll(roll(program)) == program.statements


@pytest.mark.parametrize("name", NEW)
def test_what_no_golden_has_is_sound_and_rolls(name):
    for number, kind in enumerate(KINDS):
        if not kind.startswith("tp_"):
            same(authored(NEW[name], kind))
            continue
        for chips in (WIDTHS[number % 5], WIDTHS[(number + 2) % 5]):
            split = {"tp": chips, "vocabulary": number % 2 == 0, "align": 1 + number % 3}
            program = authored(NEW[name], kind, **split, beyond=True)
            same(program)
            assert len(chip_programs(program)) == chips


@pytest.mark.parametrize("name", NEW)
def test_rows_that_share_a_state_roll_too(name):
    for chips in WIDTHS:
        same(authored(NEW[name], "tp_stacked_layer", tp=chips, rows="shared", beyond=True))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", NEW)
def test_several_chips_compute_what_one_does_beyond_the_goldens(name, kind):
    one = authored(NEW[name], kind)
    values = values_for(one)
    logits = Name("logits" if kind in ("decode_step", "prefill") else "blogits")
    wanted = interpret(one, values, meanings=oracle)
    for chips, align in zip(WIDTHS, (1, 2, 1, 3, 1), strict=True):
        split = {"tp": chips, "vocabulary": chips % 2 == 1, "align": align, "beyond": True}
        program = authored(NEW[name], f"tp_{kind}", **split)
        assert wholes(program) == wholes(one)
        found = interpret(program, values, meanings=oracle)
        np.testing.assert_allclose(found[logits], wanted[logits], rtol=1e-9, atol=1e-9)


# --- How that reads


def test_a_key_head_on_several_chips_counts_once():
    spec = NEW["norm_of_all_heads_and_one_group"]
    program = authored(spec, "tp_decode_layer", tp=3, beyond=True)
    assert lines(program, about="kf0") == [
        "Let kf0_c0 be kq0_c0 scaled by 1.0.",
        "Let kf0_c1 be kq0_c1 scaled by 0.0.",
        "Let kf0_c2 be kq0_c2 scaled by 0.0.",
    ]
    assert "  Let kf0_c{c} be kq0_c{c} scaled by {1.0/0.0/0.0}." in write_rolled(roll(program))


def test_a_norm_over_all_heads_meets_in_one_fold():
    program = authored(NEW["norm_of_all_heads"], "tp_decode_layer", tp=2, beyond=True)
    assert lines(program, about="sq") == [
        "Let sq0_c0 be qq0_c0 joined with kq0_c0.",
        "Let sq0_c1 be qq0_c1 joined with kq0_c1.",
        "Let sq0 be sq0_c0 plus sq0_c1.",
        "Let sqq0 be the first 1 of every 2 of sq0.",
        "Let sqk0 be the last 1 of every 2 of sq0.",
    ]
    assert lines(program, about="qm0_c1") == [
        "Let qm0_c1 be qr0_c1 over the root of sqq0 of 24 columns with weight Qn0_c1"
        " with epsilon 0.001."
    ]
    assert [str(c.out) for c in program.manifest.collectives] == ["sq0", "ao0", "dn0"]


def test_a_chip_without_heads_adds_nothing_to_the_squares():
    program = authored(NEW["linear_attention"], "tp_decode_layer", tp=5, beyond=True)
    assert lines(program, about="lq0_c0") == [
        "Let lq0_c0_z be the first 1 of every 8 of xn0.",
        "Let lq0_c0 be lq0_c0_z scaled by 0.0.",
    ]
    assert "For each chip c of 0 to 4, chip 0 has no part:" in write_rolled(roll(program))


def test_the_bias_of_the_head_is_cut_with_its_columns():
    program = authored(NEW["logits"], "tp_decode_head", tp=2, vocabulary=True, beyond=True)
    assert program.text.splitlines()[-7:] == [
        "Let Bout_c1 be a 1 by 6 tensor of Real.",
        "Let logits_raw_c1_r be xf matmul Wout_c1.",
        "Let logits_raw_c1 be logits_raw_c1_r plus Bout_c1.",
        "Let logits_raw be logits_raw_c0 joined with logits_raw_c1.",
        "Let logits_scaled be logits_raw scaled by 0.25.",
        "Let logits be logits_scaled capped at 2.0.",
        "Let next be argmax of logits.",
    ]


def test_a_layer_of_normed_residuals_goes_on_from_what_it_norms():
    program = authored(NEW["normed_residual"], "decode_layer")
    assert [lines(program, about=f"{name} ")[0] for name in ("xn0s", "ao0s", "xr0", "xo0")] == [
        "Let xn0s be xn0 scaled by 2.0.",
        "Let ao0s be ao0 scaled by 0.5.",
        "Let xr0 be xn0s plus ao0s.",
        "Let xo0 be x2n0 plus dn0s.",
    ]


def test_parallel_blocks_read_one_norm():
    program = authored(NEW["cohere2"], "decode_layer", l=0)
    said = [line for line in program.text.splitlines() if "layernorm" in line or "xn0" in line]
    assert [line.split(" be ")[1] for line in said] == [
        "layernorm of x with weight an0 with epsilon 0.001.",
        *(f"xn0 matmul W{base}0." for base in "qkvgu"),
    ]
    assert lines(program, about="x")[-2:] == [
        "Let xr0 be x plus ao0.",
        "Let xo0 be xr0 plus dn0.",
    ]
