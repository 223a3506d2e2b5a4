"""Forms of linear and delta attention, written out by hand, lower to what their text says."""

import jax.numpy as jnp
import numpy as np
import pytest

from author.checks import check_program
from author.chips import chip_programs
from author.english import read_program
from author.manifest import Placed, TpCollective, TpManifest, TpSlice
from author.names import Name
from author.program import Program, bound, roles
from tests import oracle
from tests.tiny import kept, lowering, outcome, states, weights
from tp.interpret import cut, interpret_chips
from tp.step import whole_step

# Heads of width 2 of each chip, over rows of 6 columns.
SHARES = {1: [3], 2: [2, 1]}
WIDTH, COLS = 2, 6

# Matrices that are cut: rows and columns of the whole, the axis, and how wide a head of it is.
CUT = {
    **{f"W{part}": ((COLS, COLS), "cols", WIDTH) for part in "qkvaz"},
    **dict.fromkeys(("Dt", "wn"), ((1, COLS), "cols", WIDTH)),
    **dict.fromkeys(("Dl", "Al"), ((1, 3), "cols", 1)),
    "Wb": ((COLS, 3), "cols", 1),
    "Wo": ((COLS, COLS), "rows", WIDTH),
    "Wp": ((COLS, COLS), "rows", WIDTH),
    **dict.fromkeys(("Sl", "Sd"), ((COLS, WIDTH), "rows", WIDTH)),
}

BEFORE = """
Let X be a {rows} by 6 tensor of Real.
Let wd0 be a 1 by 2 tensor of Real.
Let p0 be a 1 by 1 tensor of Real.
Let n0 be a 1 by 1 tensor of Real.
Let lw0 be a 1 by 6 tensor of Real.
Let bn0 be layernorm of X with weight lw0.
"""
PRODUCTS = """
Let bq0{c} be bn0 matmul Wq0{c}.
Let bk0{c} be bn0 matmul Wk0{c}.
Let bv0{c} be bn0 matmul Wv0{c}.
Let ba0{c} be bn0 matmul Wa0{c}.
Let bz0{c} be bn0 matmul Wz0{c}.
Let bb0{c} be bn0 matmul Wb0{c}.
Let bbe0{c} be sigmoid of bb0{c}.
Let bdd0{c} be decay of ba0{c} with bias Dt0{c} rate Al0{c} across {heads} heads.
"""
RECURRENT = """
Let {b}l0{s}{c} be linear attention of {b}q0{s}{c} over {b}k0{s}{c} and {b}v0{s}{c} decay Dl0{c}
 state Sl0{s}{c} with {heads} heads.
Let {b}g0{s}{c} be gated delta of {b}q0{s}{c} over {b}k0{s}{c} and {b}v0{s}{c} with sigmoid gate
 {b}z0{s}{c} beta {b}be0{s}{c} decay {b}dd0{s}{c} by channel state Sd0{s}{c} norm wd0 with
 {heads} heads {heads} groups.
"""


NORMED = """
Let bln0{c} be bl0{c} over the root of bss0 of 6 columns with weight wn0{c} with epsilon 1e-5.
Let bo0{c} be bln0{c} matmul Wo0{c}.
"""
AFTER = """
Let bx0 be xielu of bp0 with positive p0 negative n0 beta 0.5 cut at -1e-6.
Let bc0 be bo0 clamped between -0.75 and 0.5.
Let bout0 be bc0 plus bx0.
"""


def lines(template, **words):
    return template.replace("\n ", " ").strip().format(**words).split("\n")


class Writer:
    """A text on its way, for some rows, sequences and chips, and the slices that it declares."""

    def __init__(self, chips):
        self.shares = SHARES[chips]
        self.marks = [""] if chips == 1 else [f"_c{chip}" for chip in range(chips)]
        self.text, self.slices, self.folds = [], {}, []

    def declare(self, base, chip, tail=""):
        (rows, cols), axis, width = CUT[base]
        start, length = sum(self.shares[:chip]) * width, self.shares[chip] * width
        shape = (length, cols) if axis == "rows" else (rows, length)
        name = f"{base}0{tail}{self.marks[chip]}"
        self.text.append(f"Let {name} be a {shape[0]} by {shape[1]} tensor of Real.")
        of, ranges = Name.of(f"{base}0{tail}"), ((start, length),)
        self.slices[name] = TpSlice(of=of, of_shape=(rows, cols), axis=axis, ranges=ranges)

    def recurrent(self, chip, tail, b):
        self.declare("Sl", chip, tail)
        self.declare("Sd", chip, tail)
        words = {"b": b, "s": tail, "c": self.marks[chip], "heads": self.shares[chip]}
        self.text += lines(RECURRENT, **words)

    def fold(self, name):
        if len(self.marks) > 1:
            partials = [f"{name}{c}" for c in self.marks]
            self.text.append(f"Let {name} be {' plus '.join(partials)}.")
            out, names = Name.of(name), tuple(map(Name.of, partials))
            self.folds.append(TpCollective(out=out, partials=names, steps=(out,)))

    def program(self):
        statements = read_program("\n".join(["## Main", *self.text, ""]))
        if len(self.marks) == 1:
            return Program(statements=statements)
        names = [n for s in statements if (n := bound(s)) is not None and n.chip is not None]
        placed = [Placed(name=n, chip=n.chip, slice=self.slices.get(str(n))) for n in names]
        folds, chips = tuple(self.folds), len(self.marks)
        manifest = TpManifest(chips=chips, placed=tuple(placed), collectives=folds)
        return Program(statements=statements, manifest=manifest)


def text_of(rows, sequences, chips):
    """Rows of one sequence, or one of each of several, through both kinds of attention."""
    made = Writer(chips)
    made.text += lines(BEFORE, rows=rows)
    for chip, c in enumerate(made.marks):
        for base in CUT:
            if base not in ("Sl", "Sd"):
                made.declare(base, chip)
        made.text += lines(PRODUCTS, c=c, heads=made.shares[chip])
        if sequences == 1:
            made.recurrent(chip, "", "b")
        else:
            cols = made.shares[chip] * WIDTH
            made.text += [f"Let b{x}0{c} be a {rows} by {cols} tensor of Real." for x in "lg"]
    for chip, c in enumerate(made.marks if sequences > 1 else []):
        for s in range(sequences):
            parts = ("q", "k", "v", "z", "be", "dd")
            made.text += [f"Let {x}0_s{s}{c} be row {s + 1} of b{x}0{c}." for x in parts]
            made.recurrent(chip, f"_s{s}", "")
            made.text += [f"Set row {s + 1} of b{x}0{c} to {x}0_s{s}{c}." for x in "lg"]
    made.text += [f"Let bss0{c} be the square sum of bl0{c}." for c in made.marks]
    made.fold("bss0")
    for c in made.marks:
        made.text += lines(NORMED, c=c)
    made.fold("bo0")
    made.text += [f"Let bp0{c} be bg0{c} matmul Wp0{c}." for c in made.marks]
    made.fold("bp0")
    made.text += lines(AFTER)
    return made.program()


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


def stepped(program, before, inputs, **words):
    made = lowering(program, **words)
    step = whole_step(made.lowered, made.mesh, tuple(made.outputs))
    out, after = step(made.weights(), made.states(before), inputs)
    return out["bout0"], made.wholes(after)


def same_states(program, after, wanted):
    """Every state, or every chip's slice of it, is as it was wanted."""
    assert {name.base for name in after} == {"Sl", "Sd"}
    for name, value in kept(program, wanted).items():
        piece = None if program.manifest is None else program.manifest.slice_of(name)
        whole = after[name if piece is None else piece.of]
        close(whole if piece is None else cut(whole, piece.axis, piece.ranges), value)


TEXTS = [(1, 1, 1), (3, 1, 2), (3, 3, 1), (3, 3, 2)]


@pytest.mark.parametrize(("rows", "sequences", "chips"), TEXTS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_hand_written_step_computes_what_its_text_says(rows, sequences, chips, kernels):
    program = text_of(rows, sequences, chips)
    check_program(program)
    before = states(program)
    wanted = outcome(program, before)
    out, after = stepped(program, before, {}, kernels=kernels)
    close(out, wanted[Name.of("bout0")])
    same_states(program, after, wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_are_not_real_reach_no_state(count):
    program, shorter = text_of(4, 1, 2), text_of(count, 1, 2)
    before = states(program)
    out, after = stepped(program, before, {"count": jnp.int32(count)})
    x = {Name("X"): before[Name("X")][:count]}
    wanted = outcome(shorter, before | x)
    close(out[:count], wanted[Name.of("bout0")])
    same_states(shorter, after, wanted)


def test_each_chip_by_itself_computes_what_the_joint_text_says():
    program = text_of(3, 3, 2)
    before = states(program)
    given = weights(program) | before
    wanted = outcome(program, before)[Name.of("bout0")]
    for env in interpret_chips(chip_programs(program), given, meanings=oracle):
        close(env[Name.of("bout0")], wanted)


def test_every_state_of_a_hand_written_step_is_one():
    found = roles(text_of(3, 3, 2))
    assert {str(n) for n, role in found.items() if role == "state"} == {
        f"{base}0_s{s}_c{c}" for base in ("Sl", "Sd") for s in range(3) for c in range(2)
    }
