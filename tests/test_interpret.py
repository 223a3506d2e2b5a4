"""Every kind of program of a spec computes the same logits and states, at every width."""

from functools import cache

import numpy as np
import pytest

from author.chips import chip_programs
from author.english import read_program
from author.names import Name
from author.program import Program, ProgramError
from author.spec import SpecError
from tests import oracle
from tests.tiny import (
    SPECS,
    kept,
    layer,
    model,
    outcome,
    random_spec,
    states,
    weights,
    written,
)
from tp.interpret import cut, interpret, interpret_chips, results

TOKENS = (3, 8, 1, 8, 5)
ALL = {**SPECS, **{f"random{seed}": random_spec(seed) for seed in range(6)}}
WIDTHS = range(1, 9)
LOGITS, NEXT = Name("logits"), Name("next")


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


@cache
def walked(name):
    """One token after another: the logits after each, and the states before each and at last."""
    spec, env, logits, before = ALL[name], {}, [], []
    for position, token in enumerate(TOKENS, start=1):
        program = written(spec, "decode_step", tok=token, pos=position)
        before.append(env)
        made = outcome(program, env)
        assert made[NEXT] == int(np.argmax(made[LOGITS]))
        logits.append(made[LOGITS])
        env = kept(program, made)
    return np.concatenate(logits), (*before, env)


def same_states(program, env, wanted):
    """The states of a program, on every chip, are the slices of those of one device."""
    found = kept(program, env)
    assert found.keys() >= wanted.keys() or program.manifest is not None
    for name, value in found.items():
        piece = None if program.manifest is None else program.manifest.slice_of(name)
        whole = wanted[name if piece is None else piece.of]
        same(value, whole if piece is None else cut(whole, piece.axis, piece.ranges))


def of_sequences(walk, lengths):
    """States of several sequences, each as after so many tokens."""
    return {
        name._replace(sequence=sequence): value
        for sequence, length in enumerate(lengths)
        for name, value in walk[length].items()
    }


# --- One device


@pytest.mark.parametrize("name", ALL)
def test_a_forward_pass_is_the_first_token(name):
    embed = written(ALL[name], "decode_embed", tok=TOKENS[0])
    forward = written(ALL[name], "forward")
    found = outcome(forward, {Name("x"): outcome(embed)[Name("x")]})
    same(found[LOGITS], walked(name)[0][:1])


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_in_one_piece_or_several_is_one_token_after_another(name):
    wanted, walk = walked(name)
    whole = written(ALL[name], "prefill", toks=TOKENS, pos0=1)
    env = outcome(whole)
    same(env[LOGITS], wanted[-1:])
    assert env[NEXT] == int(np.argmax(wanted[-1]))
    same_states(whole, env, walk[-1])
    for pieces in ((2, 3), (1, 1, 3), (4, 1)):
        at, held, rows = 0, {}, []
        for size in pieces:
            toks = TOKENS[at : at + size]
            program = written(ALL[name], "prefill_logits", toks=toks, pos0=at + 1)
            env = outcome(program, held)
            held, at = kept(program, env), at + size
            rows.append(env[Name("blogits")])
        same(np.concatenate(rows), wanted)
        same_states(program, env, walk[-1])


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_each_of_its_sequences(name):
    wanted, walk = walked(name)
    lengths = (4, 0, 2)
    batch = written(
        ALL[name], "decode_batch", seqs=[[TOKENS[length], length + 1] for length in lengths]
    )
    env = outcome(batch, of_sequences(walk, lengths))
    same(env[Name("blogits")], wanted[list(lengths)])
    for sequence, length in enumerate(lengths):
        assert env[Name("next", sequence=sequence)] == int(np.argmax(wanted[length]))
        for state, value in walk[length + 1].items():
            same(env[state._replace(sequence=sequence)], value)


def layered(spec, first, middle, last, env, **split):
    """A step a program at a time: what goes in, every layer, what comes out."""
    programs = [(first[0], first[1])]
    programs += [(middle[0], middle[1] | {"l": number}) for number in range(len(spec.layers))]
    programs += [last]
    for kind, args in programs:
        program = written(spec, kind, **args, **split)
        made = outcome(program, env)
        env = env | made
    return env


def steps_by_layer(prefix=""):
    """The kinds of a step written layer by layer: of a token, of a batch, of a prompt."""
    lengths = (4, 0, 2)
    batch = {"poss": [length + 1 for length in lengths], "rows": "per_sequence"}
    prompt = {"poss": [1, 2, 3, 4, 5], "rows": "shared"}
    return {
        "token": (
            (f"{prefix}decode_embed", {"tok": TOKENS[4]}),
            (f"{prefix}decode_layer", {"pos": 5}),
            (f"{prefix}decode_head", {}),
        ),
        "batch": (
            (f"{prefix}decode_batch_embed", {"toks": [TOKENS[n] for n in lengths]}),
            (f"{prefix}stacked_layer", batch),
            (f"{prefix}decode_batch_head", {"bsz": 3}),
        ),
        "prompt": (
            (f"{prefix}decode_batch_embed", {"toks": TOKENS}),
            (f"{prefix}stacked_layer", prompt),
            (f"{prefix}prefill_head", {"chunk": 5}),
        ),
        "every row": (
            (f"{prefix}decode_batch_embed", {"toks": TOKENS}),
            (f"{prefix}stacked_layer", prompt),
            (f"{prefix}prefill_logits_head", {"chunk": 5}),
        ),
        "first": (
            (f"{prefix}decode_embed", {"tok": TOKENS[0]}),
            (f"{prefix}layer", {}),
            (f"{prefix}head", {}),
        ),
    }


def check_step(name, how, prefix="", **split):
    """A step written layer by layer gives what one token after another gives."""
    wanted, walk = walked(name)
    before = {"token": walk[4], "batch": of_sequences(walk, (4, 0, 2))}.get(how, {})
    env = layered(ALL[name], *steps_by_layer(prefix)[how], before, **split)
    match how:
        case "token" | "prompt":
            same(env[LOGITS], wanted[-1:])
            assert env[NEXT] == int(np.argmax(wanted[-1]))
        case "batch":
            same(env[Name("blogits")], wanted[[4, 0, 2]])
        case "every row":
            same(env[Name("blogits")], wanted)
        case "first":
            same(env[LOGITS], wanted[:1])


@pytest.mark.parametrize("name", ALL)
def test_a_step_may_be_written_layer_by_layer(name):
    for how in steps_by_layer():
        check_step(name, how)


# --- Several chips


def split_of(width):
    """Cuts that differ from width to width: whole or split vocabulary, anywhere or in blocks."""
    return {"tp": width, "vocabulary": width % 3 != 2, "align": (1, 4, 1, 32)[width % 4]}


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_chips_gives_the_same_after_every_token(name):
    wanted, walk = walked(name)
    for width in WIDTHS:
        env = {}
        for position, token in enumerate(TOKENS[:3], start=1):
            step = {"tok": token, "pos": position}
            program = written(ALL[name], "tp_decode_step", **step, **split_of(width))
            made = outcome(program, env)
            same(made[LOGITS], wanted[position - 1 : position])
            same_states(program, made, walk[position])
            env = kept(program, made)


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_chips_reads_the_same_prompts_and_batches(name):
    wanted, walk = walked(name)
    lengths = (4, 0, 2)
    for width in WIDTHS:
        split = split_of(width)
        kind = "tp_prefill" if width % 2 else "tp_prefill_logits"
        program = written(ALL[name], kind, toks=TOKENS[2:], pos0=3, **split)
        env = outcome(program, walk[2])
        rows = env[LOGITS] if width % 2 else env[Name("blogits")]
        same(rows, wanted[-1:] if width % 2 else wanted[2:])
        same_states(program, env, walk[-1])
        seqs = [[TOKENS[length], length + 1] for length in lengths]
        batch = written(ALL[name], "tp_decode_batch", seqs=seqs, **split)
        env = outcome(batch, of_sequences(walk, lengths))
        same(env[Name("blogits")], wanted[list(lengths)])
        after = of_sequences(walk, [length + 1 for length in lengths])
        same_states(batch, env, after)


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_chips_may_run_layer_by_layer(name):
    for width, how in zip(WIDTHS, [*steps_by_layer(), *steps_by_layer()], strict=False):
        check_step(name, how, "tp_", **split_of(width))


@pytest.mark.parametrize("name", ALL)
def test_each_chip_by_its_own_text_computes_what_the_joint_text_does(name):
    for width, kind in ((1, "tp_prefill"), (2, "tp_decode_batch"), (5, "tp_decode_step")):
        program = written(ALL[name], kind, **split_of(width))
        before = states(program)
        joint = outcome(program, before)
        given = weights(program) | before
        chips = interpret_chips(chip_programs(program), given, meanings=oracle)
        assert len(chips) == width
        for env in chips:
            assert env.keys() <= joint.keys()
            assert results(program, joint).keys() <= env.keys()
            for found, value in env.items():
                same(value, joint[found])


@pytest.mark.parametrize("mixer", ["norm_of_all_heads", "biases", "sinks", "latent"])
def test_what_the_goldens_refuse_to_split_is_refused_unless_asked_for(mixer):
    with pytest.raises(SpecError, match="the language cannot write a tensor-parallel"):
        written(model(layer(mixer)), "tp_decode_step", tp=2, beyond=False)


# --- The float32 reference


def in_float32(values):
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


@pytest.mark.parametrize(
    ("mixer", "feed", "kind"),
    [
        ("sinks", "biased_oai", "decode_step"),
        ("gated_delta", "shared_gated", "prefill"),
        ("latent", "sigmoid_biased_in_groups", "tp_decode_step"),
    ],
)
def test_the_reference_kernels_compute_what_float64_does(mixer, feed, kind):
    spec = model(layer(mixer, feed))
    program = written(spec, kind, **({"tp": 2} if kind.startswith("tp_") else {}))
    given = weights(program) | states(program)
    wanted = interpret(program, given, meanings=oracle)
    found = interpret(program, in_float32(given))
    assert found.keys() == wanted.keys()
    for made in results(program, wanted).keys() | kept(program, wanted).keys():
        if made.base == "next":
            assert found[made] == wanted[made]
            continue
        scale = max(1.0, np.abs(wanted[made]).max())
        np.testing.assert_allclose(found[made], wanted[made], rtol=1e-4, atol=2e-5 * scale)


# --- What cannot be run


def test_a_value_of_another_shape_is_refused_by_its_declaration():
    program = Program(statements=read_program("## Main\nLet W be a 2 by 3 tensor of Real.\n"))
    with pytest.raises(ProgramError, match=r"W be a 2 by 3.*\(3, 2\)"):
        interpret(program, {Name("W"): np.zeros((3, 2))}, meanings=oracle)


def test_one_chip_alone_cannot_meet_the_others():
    program = written(SPECS["attention-silu"], "tp_decode_step", tp=2)
    with pytest.raises(ProgramError, match="one chip's text by itself"):
        interpret(chip_programs(program)[0], weights(program), meanings=oracle)


def test_chips_that_wait_for_different_things_are_refused():
    lines = "## Main\nLet x be a 1 by 2 tensor of Real.\nLet y be the {} of x across 2 chips.\n"
    texts = [Program(statements=read_program(lines.format(word))) for word in ("fold", "join")]
    with pytest.raises(ProgramError, match="different collectives"):
        interpret_chips(texts, {}, meanings=oracle)
    alone = Program(statements=read_program("## Main\nLet x be a 1 by 2 tensor of Real.\n"))
    with pytest.raises(ProgramError, match="different collectives"):
        interpret_chips([texts[0], alone], {}, meanings=oracle)
