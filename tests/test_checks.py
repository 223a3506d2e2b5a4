"""Every rule of a sound program: golden programs keep them all, one edit breaks one."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from author.checks import check_program
from author.english import read, read_program
from author.forms import EXPRESSIONS
from author.manifest import TpCollective, TpManifest, manifest_from_json
from author.names import Name
from author.program import Program, ProgramError
from author.shapes import SHAPE_RULES, shape_of
from author.statements import Join

GOLDENS = sorted((Path(__file__).parent / "goldens").glob("*.json"))


def program_of(case):
    manifest = case["manifest"]
    return Program(
        statements=read_program(case["text"]),
        f32={Name.of(n): (path, count) for n, (path, count) in case["f32w"].items()},
        q8={Name.of(n): path for n, path in case["q8w"].items()},
        manifest=None if manifest is None else manifest_from_json(manifest),
    )


@cache
def golden(file, kind, index=0, tp=None):
    """The case of a golden file of a kind, and of a width where one is given."""
    cases = json.loads((Path(__file__).parent / "goldens" / f"{file}.json").read_text())["cases"]
    found = [c for c in cases if c["kind"] == kind and tp in (None, c["args"].get("tp"))]
    return program_of(found[index])


def complaints(program):
    try:
        check_program(program)
    except ProgramError as error:
        return [str(c) for c in error.complaints]
    return []


def edited(program, old, new):
    """The program of a text with one edit; `old` stands once."""
    assert program.text.count(old) == 1, program.text.count(old)
    return replace(program, statements=read_program(program.text.replace(old, new)))


def with_lines(program, after, *lines):
    return edited(program, after + "\n", "\n".join((after, *lines)) + "\n")


def placing(program, name, **changes):
    """The program with one placed name changed; a slice is one, or a dict of changes to its own."""
    manifest = program.manifest
    where = manifest.by_name[Name.of(name)]
    if isinstance(changes.get("slice"), dict):
        changes["slice"] = replace(where.slice, **changes["slice"])
    moved = replace(where, **changes)
    placed = tuple(moved if p.name == where.name else p for p in manifest.placed)
    return replace(program, manifest=replace(manifest, placed=placed))


def collecting(program, **changes):
    """The program with its first collective changed."""
    (first, *others) = program.manifest.collectives
    changed = (replace(first, **changes), *others)
    return replace(program, manifest=replace(program.manifest, collectives=changed))


STEP = golden("llama_gqa", "decode_step")
DELTA = golden("gated_delta_dense", "prefill")
PREFILL = golden("sinks_and_biased_experts", "prefill")
LATENT = golden("latent_attention_q_lora", "decode_step")
TWO = golden("mqa", "tp_decode_step", tp=2)
FIVE = golden("mqa", "tp_decode_step", tp=5)


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: p.stem)
def test_every_golden_program_is_sound(path):
    for case in json.loads(path.read_text())["cases"]:
        # The golden programs of width 1 do not bind what their folds come to; ours do.
        if "text" in case and case["args"].get("tp") != 1:
            check_program(program_of(case))


def test_a_fold_of_width_one_binds_what_comes_out():
    one = golden("mqa", "tp_decode_step", tp=1)
    assert complaints(one) != []
    for fold in ("ao0", "dn0"):
        line = next(s for s in one.text.split("\n") if s.startswith(f"Let {fold}_c0 "))
        one = with_lines(one, line, f"Let {fold} be the fold of {fold}_c0 across 1 chips.")
    check_program(one)


@pytest.mark.parametrize("form", EXPRESSIONS)
def test_every_expression_has_a_shape(form):
    assert form in SHAPE_RULES


BROKEN_TEXT = {
    "unbound": (
        edited(STEP, "Let xn0 be rmsnorm of x with", "Let xn0 be rmsnorm of y with"),
        ["nothing binds y; wanted a statement before it that does"],
    ),
    "bound later": (
        edited(DELTA, "Let bqs0 be silu of bqc0.", "Let bqs0 be silu of bqs1."),
        ["nothing binds bqs1"],
    ),
    "unbound target": (
        edited(STEP, "Set row pos of Kc0 to kp0.", "Set row pos of Kc9 to kp0."),
        ["nothing binds Kc9"],
    ),
    "bound twice": (
        with_lines(STEP, "Let next be argmax of logits.", "Let pos be 3."),
        ["line 3 binds pos already; wanted another name"],
    ),
    "set on a value": (
        edited(STEP, "Set row pos of Vc0 to vr0.", "Set row 1 of vr0 to vr0."),
        ["vr0 is changed in place, but bound by 'Let vr0 be xn0 matmul Wv0'"],
    ),
    "state that is a value": (
        edited(DELTA, "weight Wcq0 state Csq0 over", "weight Wcq0 state bqr0 over"),
        ["bqr0 is changed in place", "state bqr0 is 3 by 16; wanted 4 by 16"],
    ),
    "item past the ids": (
        edited(DELTA, "Set item 3 of toks to 1.", "Set item 4 of toks to 1."),
        ["toks has no item 4; wanted items from 1 to 3"],
    ),
    "item of a matrix": (
        edited(DELTA, "Set item 3 of toks to 1.", "Set item 3 of Emb to 1."),
        ["Emb is changed in place", "wanted 'Let Emb be a … tensor of Int'"],
    ),
    "a matrix for a number": (
        edited(STEP, "Set row pos of Kc0 to kp0.", "Set row x of Kc0 to kp0."),
        ["row x is a matrix; wanted a number"],
    ),
    "a number for a matrix": (
        edited(STEP, "Let xn0 be rmsnorm of x with", "Let xn0 be rmsnorm of tok with"),
        ["x tok is a number; wanted a matrix"],
    ),
    "a matrix for token ids": (
        edited(DELTA, "Let X be rows toks of Emb.", "Let X be rows Emb of Emb."),
        ["tokens Emb is a matrix; wanted token ids"],
    ),
    "token ids for a matrix": (
        with_lines(DELTA, "Let next be argmax of logits.", "Let y be silu of toks."),
        ["x toks is token ids; wanted a matrix"],
    ),
}


@pytest.mark.parametrize("name", BROKEN_TEXT)
def test_a_broken_text_is_complained_of(name):
    program, wanted = BROKEN_TEXT[name]
    found = complaints(program)
    assert len(found) >= 1
    for part in wanted:
        assert any(part in complaint for complaint in found), found


def test_a_complaint_says_where():
    program = edited(STEP, "Let qr0 be xn0 matmul Wq0.", "Let qr0 be xn9 matmul Wq0.")
    (found,) = complaints(program)
    line = program.text.split("\n").index("Let qr0 be xn9 matmul Wq0.") + 1
    assert found.startswith(f"line {line}: Let qr0 be xn9 matmul Wq0.: nothing binds xn9; ")


def test_all_complaints_are_collected():
    program = edited(STEP, "Set row pos of Kc0 to kp0.", "Set row pos of Kc9 to kp8.")
    program = edited(program, "Let next be argmax of logits.", "Let next be argmax of lgts.")
    assert [c.split(": ")[2].split(";")[0] for c in complaints(program)] == [
        "nothing binds kp8",
        "nothing binds Kc9",
        "nothing binds lgts",
    ]


def test_a_base_that_ends_in_a_digit_is_refused():
    let = STEP.statements[-1]
    renamed = replace(let, name=Name("next2", layer=3))
    (found,) = complaints(replace(STEP, statements=(*STEP.statements[:-1], renamed)))
    assert "next23 reads back as Name(base='next', layer=23" in found


# What each form demands: statements that declare, the one that does not fit, what is said of it.
BROKEN_SHAPES = [
    ("x 1 4", "row 2 of x", "row 2; wanted rows from 1 to 1"),
    ("x 1 4", "row 0 of x", "row 0; wanted"),
    ("x 1 4, w 5 2", "x matmul w", "x has 4 columns and w has 5 rows"),
    ("x 1 4, w 4 2", "x matmul w across 3 heads", "x has 4 columns; wanted a multiple of 3"),
    ("a 2 4, b 3 4", "a plus b", "a is 2 by 4 and b is 3 by 4; wanted equal shapes, or one"),
    ("a 2 4, b 1 3", "a hadamard b", "wanted equal shapes"),
    ("a 2 4, b 2 1", "a hadamard b", "wanted equal shapes"),
    ("x 2 4, w 1 3", "rmsnorm of x with weight w", "weight w is 1 by 3; wanted 1 by 4"),
    ("x 2 4, w 1 2", "rmsnorm of x with weight w across 2 heads", "wanted 1 by 4"),
    ("x 2 4", "l2norm of x across 3 heads", "3 heads over x, 2 by 4"),
    ("x 2 4", "l2norm of x across 1 heads", "1 heads over x, 2 by 4"),
    ("x 1 6, c 1 2, s 1 2", "rope of x with cos c and sin s across 4 heads", "a multiple of 4"),
    ("x 1 6, c 1 2, s 1 2", "rope of x with cos c and sin s across 2 heads", "half a head of 3"),
    ("x 1 4, c 1 2, s 1 1", "rope of x with cos c and sin s across 1 heads", "sin s is 1 by 1"),
    ("x 1 4, c 2 2, s 2 2", "rope of x with cos c and sin s across 1 heads", "wanted a position"),
    (
        "x 2 4, c 2 2, s 2 2",
        "rope of x with cos c and sin s from position 2 across 1 heads",
        "position 2 to 3; wanted positions from 1 to 2",
    ),
    ("x 1 4", "the first 1 of every 3 of x", "1 of every 3 of 4 columns"),
    ("x 1 4", "the last 3 of every 2 of x", "3 of every 2"),
    ("x 1 4, y 2 4", "x joined with y", "x has 1 rows and y has 2"),
    ("x 1 4, y 1 3", "x joined with y across 2 heads", "y has 3 columns; wanted a multiple of 2"),
    ("x 1 4, y 1 3", "swiglu of x and y", "up y is 1 by 3; wanted 1 by 4"),
    ("x 2 4", "argmax of x", "x has 2 rows; wanted one row"),
    ("q 1 6, k 5 2, v 5 2", "attention of q over k and v with 4 heads 1 groups", "multiple of 4"),
    ("q 1 6, k 5 4, v 5 4", "attention of q over k and v with 3 heads 2 groups", "3 heads in 2"),
    (
        "q 1 8, k 5 2, v 5 4",
        "attention of q over k and v with 4 heads 2 groups",
        "k has 2 columns; wanted 2 groups of 2",
    ),
    ("q 1 8, k 5 4, v 4 4", "attention of q over k and v with 4 heads 2 groups", "k has 5 rows"),
    ("q 1 8, k 5 4, v 5 3", "attention of q over k and v with 4 heads 2 groups", "v has 3 columns"),
    ("q 2 8, k 5 4, v 5 4", "attention of q over k and v with 4 heads 2 groups", "q has 2 rows"),
    (
        "q 1 8, k 5 4, v 5 4",
        "attention of q over k and v with 4 heads 2 groups up to 6",
        "position 6; wanted positions from 1 to 5",
    ),
    (
        "q 2 8, k 5 4, v 5 4",
        "causal attention of q over k and v with 4 heads 2 groups from 5",
        "position 5 to 6; wanted",
    ),
    (
        "q 1 8, k 5 4, v 5 4, s 1 2",
        "attention of q over k and v with 4 heads 2 groups with sinks s",
        "sinks s is 1 by 2; wanted 1 by 4",
    ),
    (
        "x 1 4, w 3 4, s 2 4",
        "causal conv of x with weight w state s over 3 taps",
        "state s is 2 by 4; wanted 3 by 4",
    ),
    ("x 1 4, w 2 4, s 3 4", "causal conv of x with weight w state s over 3 taps", "weight w is"),
    ("x 2 4, b 1 4, r 1 3", "decay of x with bias b rate r", "rate r is 1 by 3; wanted 1 by 4"),
]
BROKEN_SHAPES += [
    ("x 1 4", "x clamped between 2.0 and 1.0", "between 2.0 and 1.0; wanted the lower of the two"),
    ("x 2 4, w 1 3", "layernorm of x with weight w", "weight w is 1 by 3; wanted 1 by 4"),
    (
        "x 2 4, s 1 1, w 1 4",
        "x over the root of s of 8 columns with weight w",
        "squares s is 1 by 1; wanted 2 by 1",
    ),
    (
        "x 2 4, s 2 1, w 1 8",
        "x over the root of s of 8 columns with weight w",
        "weight w is 1 by 8; wanted 1 by 4",
    ),
    (
        "x 2 4, s 2 1, w 1 4",
        "x over the root of s of 3 columns with weight w",
        "3 columns and x has 4; wanted as many or more",
    ),
    (
        "x 2 4, p 1 1, n 1 4",
        "xielu of x with positive p negative n beta 0.5 cut at 0.0",
        "negative n is 1 by 4; wanted 1 by 1",
    ),
    (
        "x 2 6, b 1 6, r 1 6",
        "decay of x with bias b rate r across 2 heads",
        "rate r is 1 by 6; wanted 1 by 2",
    ),
    (
        "x 2 6, b 1 2, r 1 2",
        "decay of x with bias b rate r across 2 heads",
        "bias b is 1 by 2; wanted 1 by 6",
    ),
    (
        "x 2 6, b 1 6, r 1 4",
        "decay of x with bias b rate r across 4 heads",
        "x has 6 columns; wanted a multiple of 4",
    ),
    (
        "q 2 6, k 2 6, v 2 6, d 1 4, s 6 2",
        "linear attention of q over k and v decay d state s with 4 heads",
        "v has 6 columns; wanted a multiple of 4",
    ),
]
# The shapes of what fits.
SHAPES = [
    ("x 2 4", "x clamped between -1.5 and 1.0", (2, 4)),
    ("x 2 4, w 1 4", "layernorm of x with weight w with epsilon 1e-5", (2, 4)),
    ("x 2 4", "the square sum of x", (2, 1)),
    ("x 2 4, s 2 1, w 1 4", "x over the root of s of 8 columns with weight w", (2, 4)),
    ("x 2 0, s 2 1, w 1 0", "x over the root of s of 8 columns with weight w", (2, 0)),
    ("x 2 4, p 1 1, n 1 1", "xielu of x with positive p negative n beta 0.5 cut at -1e-6", (2, 4)),
    ("x 2 6, b 1 6, r 1 2", "decay of x with bias b rate r across 2 heads", (2, 6)),
]
LINEAR_LINE = "linear attention of q over k and v decay d state s with 4 heads"
LINEAR_SHAPES = dict.fromkeys("qkv", "3 8") | {"d": "1 4", "s": "8 2"}
DELTA_LINE = "gated delta of q over k and v with gate z beta b decay d state s norm n with"
DELTA_SHAPES = {"q": "1 4", "k": "1 4", "v": "1 8", "z": "1 8", "b": "1 4", "d": "1 4"}
DELTA_SHAPES |= {"s": "8 2", "n": "1 2"}
DELTA_FIELDS = {"z": "gate", "b": "beta", "d": "decay", "s": "state", "n": "norm"}
MOE_LINE = (
    "moe of x with router r plus br gate g plus bg up u plus bu down d plus bd"
    " choosing 2 of 4 by sigmoid biased by c"
)
MOE_SHAPES = {"x": "1 6", "r": "6 4", "g": "12 6", "u": "12 6", "d": "24 3", "br": "1 4"}
MOE_SHAPES |= {"bg": "4 3", "bu": "4 3", "bd": "4 6", "c": "1 4"}


def shapes_of(declared):
    words = [d.split() for d in declared.split(",")]
    return {Name.of(n): (int(rows), int(cols)) for n, rows, cols in words}


def declared(shapes):
    return ", ".join(f"{n} {shape}" for n, shape in shapes.items())


def shape(shapes, expression):
    return shape_of(read(f"Let out be {expression}.").value, shapes_of(shapes))


@pytest.mark.parametrize(("shapes", "expression", "wanted"), BROKEN_SHAPES)
def test_operands_that_do_not_fit_are_refused(shapes, expression, wanted):
    with pytest.raises(ProgramError) as error:
        shape(shapes, expression)
    assert wanted in str(error.value)
    assert str(error.value).startswith(expression)


@pytest.mark.parametrize(("shapes", "expression", "wanted"), SHAPES)
def test_a_value_has_the_shape_of_its_form(shapes, expression, wanted):
    assert shape(shapes, expression) == wanted


@pytest.mark.parametrize("name", DELTA_SHAPES)
def test_every_operand_of_a_gated_delta_has_one_shape(name):
    line = f"{DELTA_LINE} 4 heads 2 groups"
    assert shape(declared(DELTA_SHAPES), line) == (1, 8)
    with pytest.raises(ProgramError, match=f"[qkv{DELTA_FIELDS.get(name, '')}] "):
        shape(declared(DELTA_SHAPES | {name: "9 9"}), line)


def test_a_decay_by_channel_has_a_column_for_each_column_of_a_key():
    line = f"{DELTA_LINE} 4 heads 2 groups".replace("decay d", "decay d by channel")
    wider = {"q": "1 6", "k": "1 6", "v": "1 12", "z": "1 12", "b": "1 4", "n": "1 3", "s": "12 3"}
    assert shape(declared(wider | {"d": "1 6"}), line) == (1, 12)
    with pytest.raises(ProgramError, match="decay d is 1 by 4; wanted 1 by 6"):
        shape(declared(wider | {"d": "1 4"}), line)


@pytest.mark.parametrize("name", LINEAR_SHAPES)
def test_every_operand_of_a_linear_attention_has_one_shape(name):
    assert shape(declared(LINEAR_SHAPES), LINEAR_LINE) == (3, 8)
    with pytest.raises(ProgramError, match=r"(?:[qkv]|decay d|state s) "):
        shape(declared(LINEAR_SHAPES | {name: "9 9"}), LINEAR_LINE)


@pytest.mark.parametrize("name", MOE_SHAPES)
def test_every_operand_of_a_mixture_has_one_shape(name):
    assert shape(declared(MOE_SHAPES), MOE_LINE) == (1, 6)
    with pytest.raises(ProgramError, match=rf"\b{name} (is|has) "):
        shape(declared(MOE_SHAPES | {name: "9 9"}), MOE_LINE)


@pytest.mark.parametrize(
    ("clause", "wanted"),
    [
        ("choosing 5 of 4", "choosing 5; wanted 1 to 4 experts"),
        ("choosing 3 of 4 within the top 1 of 2 groups", "choosing 3; wanted 1 to 2 experts"),
        ("choosing 1 of 4 within the top 3 of 2 groups", "4 experts, within the top 3 of 2"),
        ("choosing 1 of 4 within the top 1 of 3 groups", "4 experts, within the top 1 of 3"),
        ("choosing 1 of 5", "g has 12 rows; wanted a multiple of 5"),
    ],
)
def test_the_choice_of_a_mixture_is_possible(clause, wanted):
    with pytest.raises(ProgramError, match=wanted):
        shape(declared(MOE_SHAPES), f"moe of x with router r gate g up u down d {clause}")


def test_a_join_is_as_wide_as_all_its_partials():
    join = Join(Name.of("lg_c0"), 3)
    shapes = {Name.of(f"lg_c{c}"): (1, 5 + c) for c in range(3)}
    assert shape_of(join, shapes) == (1, 18)
    with pytest.raises(ProgramError, match="nothing gives lg_c1 and lg_c2 a shape"):
        shape_of(join, {Name.of("lg_c0"): (1, 5)})


@pytest.mark.parametrize(
    ("program", "old", "new", "wanted"),
    [
        (STEP, "Set row pos of Kc0 to kp0.", "Set row pos of Kc0 to x.", "x has 32 columns and"),
        (STEP, "Set row pos of Kc0 to kp0.", "Set row 17 of Kc0 to kp0.", "rows from 1 to 16"),
        (
            PREFILL,
            "Set row 1 of bmo0 to mo0_s0.",
            "Set row 1 of bmo0 to X.",
            "X has 2 rows; wanted",
        ),
        (
            PREFILL,
            "Set rows from pos_s0 of Kc0 to bkp0.",
            "Set rows from 16 of Kc0 to bkp0.",
            "row 16 to 17; wanted rows from 1 to 16",
        ),
        (LATENT, "the first 16 of every 20 of Kc0", "the first 15 of every 20 of Kc0", "Wvb0"),
    ],
)
def test_rows_that_do_not_fit_are_complained_of_once(program, old, new, wanted):
    (found,) = complaints(edited(program, old, new))
    assert wanted in found


BROKEN_MANIFEST = {
    "a placed name that is not bound": (
        edited(
            TWO,
            "Let hh0_c1 be swiglu of gt0_c1 and up0_c1.\nLet dn0_c1 be hh0_c1",
            "Let dn0_c1 be gt0_c1",
        ),
        "hh0_c1 is placed, but not bound",
    ),
    "a name placed twice": (
        replace(TWO, manifest=replace(TWO.manifest, placed=TWO.manifest.placed * 2)),
        "Wq0_c0 is placed 2 times; wanted one chip",
    ),
    "a chip that is not there": (
        placing(TWO, "Wq0_c1", chip=2),
        "Wq0_c1 is placed on chip 2; wanted chips from 0 to 1",
    ),
    "a chip other than the name says": (
        placing(TWO, "Wq0_c1", chip=0),
        "Wq0_c1 is placed on chip 0; wanted chip 1, as it says",
    ),
    "a slice of another shape": (
        edited(TWO, "Let Wq0_c1 be a 32 by 16 tensor", "Let Wq0_c1 be a 32 by 8 tensor"),
        "Wq0_c1 is a slice of Wq0, but bound by 'Let Wq0_c1 be a 32 by 8 tensor of Real'",
    ),
    "a slice that is computed": (
        placing(TWO, "qr0_c0", slice=TWO.manifest.slice_of(Name.of("Wq0_c0"))),
        "qr0_c0 is a slice of Wq0, but bound by 'Let qr0_c0 be xn0 matmul Wq0_c0'",
    ),
    "a range past the end": (
        placing(TWO, "Wq0_c1", slice={"ranges": ((17, 16),)}),
        "Wq0_c1 has the range [17, 16]; wanted ranges apart, within the 32 cols of Wq0",
    ),
    "ranges over each other": (
        placing(TWO, "Wq0_c1", slice={"ranges": ((16, 8), (20, 8))}),
        "Wq0_c1 has the range [20, 8] over another",
    ),
    "a gap": (
        placing(TWO, "Wq0_c1", slice={"ranges": ((0, 16),)}),
        "cols 16-31 of Wq0 are on no chip; wanted each on one",
    ),
    "rows that two chips add": (
        placing(TWO, "Wd0_c1", slice={"ranges": ((15, 16),)}),
        "rows 15 of Wd0 are on several chips; wanted each on one",
    ),
    "slices of two wholes": (
        placing(TWO, "Wd0_c1", slice={"of_shape": (33, 32)}),
        "Wd0_c0 and Wd0_c1 disagree on the shape or the axis of Wd0",
    ),
    "partials out of order": (
        collecting(TWO, partials=tuple(reversed(TWO.manifest.collectives[0].partials))),
        "ao0 has the partials ao0_c1 and ao0_c0; wanted one on each of 2 chips, in order",
    ),
    "a partial too few": (
        collecting(TWO, partials=TWO.manifest.collectives[0].partials[:1]),
        "ao0 has the partials ao0_c0; wanted one on each of 2 chips",
    ),
    "no steps": (collecting(TWO, steps=()), "ao0 has the steps none; wanted 1, the last of them"),
    "a last step that is not the sum": (
        collecting(TWO, steps=(Name.of("dn0"),)),
        "ao0 has the steps dn0; wanted 1, the last of them ao0",
    ),
    "a partial added twice": (
        edited(TWO, "Let ao0 be ao0_c0 plus ao0_c1.", "Let ao0 be ao0_c0 plus ao0_c0."),
        "ao0 is bound by 'Let ao0 be ao0_c0 plus ao0_c0'; wanted 'Let ao0 be ao0_c0 plus ao0_c1'",
    ),
    "a step left out": (
        edited(FIVE, "Let ao0_f3 be ao0_f2 plus ao0_c3.", "Let ao0_f3 be ao0_f1 plus ao0_c3."),
        "ao0_f3 is bound by 'Let ao0_f3 be ao0_f1 plus ao0_c3'; wanted 'Let ao0_f3 be ao0_f2 plus",
    ),
    "a sum that is not listed": (
        replace(TWO, manifest=replace(TWO.manifest, collectives=TWO.manifest.collectives[1:])),
        "ao0_c0 and ao0_c1 are on chips 0 and 1; wanted one chip, or a collective",
    ),
    "a fold that is not listed": (
        with_lines(
            TWO, "Let next be argmax of logits.", "Let y be the fold of ao0_c0 across 1 chips."
        ),
        "the manifest has no collective y; wanted one",
    ),
    "another chip's name": (
        edited(TWO, "Let gt0_c1 be x2n0 matmul Wg0_c1.", "Let gt0_c1 be x2n0 matmul Wg0_c0."),
        "gt0_c1 and Wg0_c0 are on chips 0 and 1; wanted one chip, or a collective",
    ),
    "another chip's cache": (
        edited(TWO, "Set row pos of Kc0_c1 to kp0_c1.", "Set row pos of Kc0_c1 to kp0_c0."),
        "Kc0_c1 and kp0_c0 are on chips 0 and 1",
    ),
    "a replicated name from a placed one": (
        edited(TWO, "Let xr0 be x plus ao0.", "Let xr0 be x plus ao0_c0."),
        "xr0 is on every chip, ao0_c0 on chip 0; wanted one chip, or a collective",
    ),
    "a step read outside": (
        edited(FIVE, "Let xr0 be x plus ao0.", "Let xr0 be x plus ao0_f3."),
        "ao0_f3 is a step of a collective; wanted what comes out of it",
    ),
}


@pytest.mark.parametrize("name", BROKEN_MANIFEST)
def test_a_broken_manifest_is_complained_of(name):
    program, wanted = BROKEN_MANIFEST[name]
    found = complaints(program)
    assert any(wanted in complaint for complaint in found), found


def test_several_chips_may_hold_the_keys_and_values_that_they_read():
    held = [p for p in TWO.manifest.placed if p.name.base in ("Wk", "Wv", "Kc", "Vc")]
    assert len(held) == 8
    assert all(p.slice.ranges == ((0, 8),) for p in held)
    check_program(TWO)


def joined_program():
    """Two chips that each compute some columns, put side by side."""
    text = (
        "## Main\n"
        "Let x be a 1 by 4 tensor of Real.\n"
        "Let W_c0 be a 4 by 3 tensor of Real.\n"
        "Let lg_c0 be x matmul W_c0.\n"
        "Let W_c1 be a 4 by 2 tensor of Real.\n"
        "Let lg_c1 be x matmul W_c1.\n"
        "Let lg be lg_c0 joined with lg_c1.\n"
        "Let next be argmax of lg.\n"
    )
    piece = {"of": "W", "of_shape": [4, 5], "axis": "cols"}
    placed = [
        {"var": "W_c0", "chip": 0, "slice": piece | {"ranges": [[0, 3]]}},
        {"var": "lg_c0", "chip": 0, "slice": None},
        {"var": "W_c1", "chip": 1, "slice": piece | {"ranges": [[3, 2]]}},
        {"var": "lg_c1", "chip": 1, "slice": None},
    ]
    join = {"out": "lg", "partials": ["lg_c0", "lg_c1"], "joins": ["lg"]}
    manifest = {"chips": 2, "placed": placed, "collectives": [join]}
    return program_of({"text": text, "f32w": {}, "q8w": {"W": "w/W"}, "manifest": manifest})


def test_a_join_is_spelled_out_as_columns_side_by_side():
    program = joined_program()
    check_program(program)
    broken = collecting(program, kind="fold")
    (found,) = complaints(broken)
    assert "wanted 'Let lg be lg_c0 plus lg_c1'" in found


def test_a_manifest_without_names_asks_for_nothing():
    check_program(replace(STEP, manifest=TpManifest(chips=3)))


def test_a_collective_of_unbound_names_is_complained_of():
    names = {"out": Name.of("zz"), "partials": (Name.of("z_c0"), Name.of("z_c1"))}
    extra = TpCollective(**names, steps=(Name.of("zz"),))
    manifest = replace(TWO.manifest, collectives=(*TWO.manifest.collectives, extra))
    (found,) = complaints(replace(TWO, manifest=manifest))
    assert "zz has the partials z_c0 and z_c1" in found
