"""Rolling merges chips, sequences and layers, and writing out gives the text back."""

from dataclasses import replace

import pytest

from author.english import read_program
from author.kinds import KINDS, author
from author.manifest import Placed, TpCollective, TpManifest
from author.names import Name
from author.program import Program, ProgramError
from tests.test_goldens import FILES, golden, spec_of
from tests.tiny import SPECS, layer, model, random_spec, written
from tp.roll import roll
from tp.rolled import Loop, write_rolled
from tp.unroll import unroll

RANDOM = {f"random{seed}": random_spec(seed) for seed in range(100, 112)}


def items_of(items):
    """How many statements a rolled program holds, however often each stands."""
    return sum(items_of(i.body) if isinstance(i, Loop) else 1 for i in items)


def loops_of(rolled):
    return [i for i in rolled.items if isinstance(i, Loop)]


def same_text(program):
    rolled = roll(program)
    assert unroll(rolled) == program.statements
    return rolled


# --- Back again


@pytest.mark.parametrize("stem", FILES)
def test_a_golden_program_rolls_and_writes_out_again(stem):
    for case in golden(stem)["cases"]:
        if "text" in case:
            same_text(author(spec_of(stem), case["kind"], case["args"]))


@pytest.mark.parametrize("name", [*SPECS, *RANDOM])
def test_a_program_of_every_kind_rolls_and_writes_out_again(name):
    spec = {**SPECS, **RANDOM}[name]
    for number, kind in enumerate(KINDS):
        split = {"tp": (1, 2, 3, 5, 8)[number % 5]} if kind.startswith("tp_") else {}
        wide = {"vocabulary": number % 2 == 0, "align": 4} if split else {}
        same_text(written(spec, kind, **split, **wide))
    for rows in ("per_sequence", "shared"):
        same_text(written(spec, "tp_stacked_layer", tp=3, rows=rows))


@pytest.mark.parametrize("name", list(SPECS))
def test_chips_and_sequences_are_each_written_once(name):
    spec = SPECS[name]
    seqs = [[token, token] for token in range(1, 9)]
    few = roll(written(spec, "tp_decode_batch", tp=4, seqs=seqs[:2]))
    many = roll(written(spec, "tp_decode_batch", tp=7, seqs=seqs))
    assert items_of(many.items) == items_of(few.items)
    assert len(many.program.statements) > 5 * items_of(many.items)


# --- Layers


@pytest.mark.parametrize("kind", ["decode_step", "tp_decode_step", "tp_decode_batch", "prefill"])
def test_like_layers_become_one_loop(kind):
    split = {"tp": 3} if kind.startswith("tp_") else {}
    sizes = {}
    for count in (3, 12):
        rolled = same_text(written(model(*[layer("qk_norm")] * count), kind, **split))
        sizes[count] = items_of(rolled.items)
        # The first layer reads what is embedded, not what a layer before it gave.
        assert [loop.count for loop in loops_of(rolled) if loop.axis == "layer"] == [count - 1]
    assert sizes[3] == sizes[12]


def test_layers_that_take_turns_become_a_loop_of_both():
    turns = [layer("attention"), layer("sliding_window")] * 6
    rolled = same_text(written(model(*turns), "decode_step"))
    (loop,) = (loop for loop in loops_of(rolled) if loop.axis == "layer")
    assert loop.count == 5
    assert sum("within the last 3" in line for line in write_rolled(rolled).splitlines()) == 2


def test_an_odd_layer_out_stands_by_itself():
    layers = [layer("attention")] * 4 + [layer("gated_delta")] + [layer("attention")] * 3
    rolled = same_text(written(model(*layers), "decode_step"))
    counts = [loop.count for loop in loops_of(rolled) if loop.axis == "layer"]
    assert counts == [3, 3]


# --- How it reads

CHIPS = """\
## Main
Let tok be 3.
Let x be a 1 by 3 tensor of Real.
{layers}Let z be xo2 scaled by 2.0.
"""
ONE_LAYER = """\
Let W{l}_c0 be a 3 by 1 tensor of Real.
Let V{l}_c0 be a 1 by 3 tensor of Real.
Let h{l}_c0 be {x} matmul W{l}_c0.
Let y{l}_c0 be h{l}_c0 matmul V{l}_c0.
Let W{l}_c1 be a 3 by 2 tensor of Real.
Let V{l}_c1 be a 2 by 3 tensor of Real.
Let h{l}_c1 be {x} matmul W{l}_c1.
Let y{l}_c1 be h{l}_c1 matmul V{l}_c1.
Let y{l}_c2 be {x} scaled by 0.0.
Let y{l}_f1 be y{l}_c0 plus y{l}_c1.
Let y{l} be y{l}_f1 plus y{l}_c2.
Let xo{l} be {x} plus y{l}.
"""
ROLLED = """\
## Main
Let tok be 3.
Let x be a 1 by 3 tensor of Real.
For each chip c of 0 to 2, chip 2 has no part:
  Let W0_c{c} be a 3 by {1/2/-} tensor of Real.
  Let V0_c{c} be a {1/2/-} by 3 tensor of Real.
  Let h0_c{c} be x matmul W0_c{c}.
  Let y0_c{c} be h0_c{c} matmul V0_c{c}.
Let y0 be the fold of y0_c{c} across 3 chips.
Let xo0 be x plus y0.
For each layer l of 0 to 1:
  For each chip c of 0 to 2, chip 2 has no part:
    Let W{l+1}_c{c} be a 3 by {1/2/-} tensor of Real.
    Let V{l+1}_c{c} be a {1/2/-} by 3 tensor of Real.
    Let h{l+1}_c{c} be xo{l} matmul W{l+1}_c{c}.
    Let y{l+1}_c{c} be h{l+1}_c{c} matmul V{l+1}_c{c}.
  Let y{l+1} be the fold of y{l+1}_c{c} across 3 chips.
  Let xo{l+1} be xo{l} plus y{l+1}.
Let z be xo2 scaled by 2.0.
"""


def on_chips(text, chips=3, layers=3):
    """A program of hand-made text, with the manifest that it is written by."""
    statements = read_program(text)
    names = {Name.of(line.split()[1]) for line in text.splitlines() if line.startswith("Let ")}
    outs = [Name("y", number) for number in range(layers)]
    collectives = tuple(
        TpCollective(
            out=out,
            partials=tuple(out._replace(chip=chip) for chip in range(chips)),
            steps=(*(out._replace(tail=f"_f{i}") for i in range(1, chips - 1)), out),
        )
        for out in outs
    )
    placed = tuple(
        Placed(name=n, chip=n.chip) for n in sorted(names, key=str) if n.chip is not None
    )
    manifest = TpManifest(chips=chips, placed=placed, collectives=collectives)
    return Program(statements=statements, manifest=manifest)


def hand_made(old="", new=""):
    layers = "".join(
        ONE_LAYER.format(l=number, x=f"xo{number - 1}" if number else "x") for number in range(3)
    )
    text = CHIPS.format(layers=layers)
    assert old in text
    return on_chips(text.replace(old, new) if old else text)


def test_a_rolled_program_is_read_like_a_program():
    program = hand_made()
    rolled = same_text(program)
    assert write_rolled(rolled) == ROLLED


def test_sequences_are_listed_where_the_caller_decides():
    program = written(
        model(layer("attention"), d=4), "decode_batch", seqs=[[5, 4], [6, 1], [9, 11]]
    )
    lines = write_rolled(roll(program)).splitlines()
    assert lines[1:7] == [
        "For each sequence s of 0 to 2:",
        "  Let pos_s{s} be {4,1,11}.",
        "Let Emb be a 37 by 4 tensor of Real.",
        "Let toks be a 1 by 3 tensor of Int.",
        "For each sequence s of 0 to 2:",
        "  Set item {s+1} of toks to {5,6,9}.",
    ]


# --- What does not run alike


def refusal(program):
    with pytest.raises(ProgramError) as caught:
        roll(program)
    return str(caught.value)


def test_a_chip_with_another_statement_is_refused():
    broken = hand_made("Let h1_c1 be xo0 matmul W1_c1.", "Let h1_c1 be W1_c1 scaled by 0.5.")
    assert refusal(broken) == (
        "'Let W1_c0 be a 3 by 1 tensor of Real.': the chips' statements differ in more than "
        "integers; wanted the same statements on every chip that has a part"
    )


def test_a_chip_with_a_statement_more_is_refused():
    last = "Let y1_c1 be h1_c1 matmul V1_c1."
    broken = hand_made(last, f"Let e1_c1 be h1_c1 scaled by 2.0.\n{last}")
    assert "the chips' statements differ in more than integers" in refusal(broken)


def test_a_read_across_chips_is_refused_unless_a_collective_says_so():
    broken = hand_made("Let h1_c1 be xo0 matmul W1_c1.", "Let h1_c1 be xo0 matmul W1_c0.")
    found = refusal(broken)
    assert found.startswith("'Let h1_c1 be xo0 matmul W1_c0.': it reads across chips [0, 1]")
    unlisted = hand_made()
    manifest = replace(unlisted.manifest, collectives=unlisted.manifest.collectives[1:])
    found = refusal(replace(unlisted, manifest=manifest))
    assert found.startswith("'Let y0_f1 be y0_c0 plus y0_c1.': it reads across chips [0, 1]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Let y2 be y2_f1 plus y2_c2.", "Let y2 be y2_f1 plus y2_c1."),
        ("Let y2_f1 be y2_c0 plus y2_c1.", "Let y2_f1 be y2_c1 plus y2_c0."),
        ("Let y2 be y2_f1 plus y2_c2.", "Let y2 be y2_f1 hadamard y2_c2."),
    ],
)
def test_a_fold_that_is_not_the_sum_of_its_partials_is_refused(old, new):
    found = refusal(hand_made(old, new))
    assert "it is not how y2 is put together from its partials" in found
    assert found.endswith("Let y2_f1 be y2_c0 plus y2_c1")


def test_a_chip_without_a_part_must_say_so():
    text = "## Main\nLet x be a 1 by 3 tensor of Real.\nLet y0_c0 be x scaled by 2.0.\n"
    found = refusal(on_chips(text, chips=2, layers=1))
    assert found == (
        "'Let y0_c0 be x scaled by 2.0.': only chips [0] of 2 have a part here; "
        "wanted a zero partial for each chip that has none"
    )


SEQUENCES = """\
## Main
Let bx be a 2 by 3 tensor of Real.
Let by be a 2 by 3 tensor of Real.
Let x_s0 be row 1 of bx.
Let y_s0 be x_s0 scaled by 2.0.
Set row 1 of by to y_s0.
Let x_s1 be row 2 of bx.
Let y_s1 be x_s1 scaled by 2.0.
Set row 2 of by to y_s1.
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Let y_s1 be x_s1 scaled by 2.0.", "Let y_s1 be x_s1 scaled by 3.0."),
        ("Let y_s1 be x_s1 scaled by 2.0.", "Let y_s1 be silu of x_s1."),
        ("Let y_s1 be x_s1 scaled by 2.0.\n", ""),
    ],
    ids=["another real", "another form", "a statement less"],
)
def test_sequences_that_differ_are_refused(old, new):
    whole = Program(statements=read_program(SEQUENCES))
    assert unroll(roll(whole)) == whole.statements
    text = SEQUENCES.replace(old, new).replace("to y_s1", "to y_s1" if new else "to x_s1")
    found = refusal(Program(statements=read_program(text)))
    assert found == (
        "'Let x_s0 be row 1 of bx.': sequences [0, 1] differ in more than integers that run "
        "evenly; wanted the same statements for every sequence, from 0 on"
    )


def test_rows_that_do_not_run_evenly_are_refused():
    third = "Let x_s2 be row 2 of bx.\nLet y_s2 be x_s2 scaled by 2.0.\nSet row 2 of by to y_s2.\n"
    found = refusal(Program(statements=read_program(SEQUENCES + third)))
    assert "sequences [0, 1, 2] differ in more than integers that run evenly" in found
