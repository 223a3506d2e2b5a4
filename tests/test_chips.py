"""One chip's program says what the joint program says of it, and all together compute the same."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from author.checks import check_program
from author.chips import chip_program, chip_programs
from author.forms import Part, slots
from author.names import Name
from author.program import ProgramError, bound
from author.statements import (
    Fold,
    Join,
    Let,
    Number,
    Row,
    SetItem,
    SetRow,
    SetRows,
    Tensor,
    Tokens,
)
from tests import oracle
from tests.test_checks import (
    FIVE,
    STEP,
    TWO,
    collecting,
    edited,
    golden,
    joined_program,
    program_of,
)

GOLDENS = sorted((Path(__file__).parent / "goldens").glob("*.json"))
FUNCTIONS = {"RmsNorm": "rms_norm", "L2Norm": "l2_norm"}


def snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def values(form, env):
    """The arguments of a form's meaning: matrices by position, the rest by keyword."""
    kinds = {s.field: s.kind for s in slots(type(form))}
    args, kwargs = [], {}
    for field in dataclasses.fields(form):
        value = getattr(form, field.name)
        if kinds.get(field.name) == "name":
            args.append(None if value is None else env[value])
        elif isinstance(value, Part):
            kwargs |= dataclasses.asdict(value)
        elif kinds.get(field.name) != "part":
            kwargs[field.name] = env[value] if isinstance(value, Name) else value
    return args, kwargs


def evaluated(form, env):
    """The value of an expression; a matrix that it changes is changed in `env`."""
    args, kwargs = values(form, env)
    if isinstance(form, Row):
        if isinstance(form.row, Name):  # of an embedding, by the id
            return oracle.embedding_row(*args, **kwargs)
        return oracle.row(*args, row=form.row)
    name = type(form).__name__
    out = getattr(oracle, FUNCTIONS.get(name, snake(name)))(*args, **kwargs)
    for field in type(form).UPDATES:
        out, env[getattr(form, field)] = out
    return out


def steps(program, env):
    """Run a program in `env`; each fold or join hands out the chip's partial and gets the whole."""
    for statement in program.statements:
        match statement:
            case Tensor(name, rows, cols):
                assert env[name].shape == (rows, cols)
            case Tokens(name, cols):
                env[name] = np.zeros((1, cols), dtype=int)
            case SetItem(item, name, token):
                env[name][0, item - 1] = token
            case Number(name, value):
                env[name] = value
            case SetRow(row, name, x) | SetRows(row, name, x):
                at = env[row] if isinstance(row, Name) else row
                env[name] = oracle.set_rows(env[name], env[x], row=at)
            case Let(name, Fold(partial) | Join(partial)):
                env[name] = yield env[partial]
            case Let(name, value):
                env[name] = evaluated(value, env)


def filled(program, seed=0):
    """Random matrices for what a joint program declares, slices of one whole alike."""
    rng, wholes, env = np.random.default_rng(seed), {}, {}
    for name, rows, cols in [
        (s.name, s.rows, s.cols) for s in program.statements if isinstance(s, Tensor)
    ]:
        piece = program.manifest.slice_of(name)
        if piece is None:
            env[name] = rng.normal(size=(rows, cols))
            continue
        whole = wholes.setdefault(piece.of, rng.normal(size=piece.of_shape))
        taken = [i for start, n in piece.ranges for i in range(start, start + n)]
        env[name] = whole[taken] if piece.axis == "rows" else whole[:, taken]
    return env


def run_together(programs, envs):
    """All chips to their next collective, and on with what comes out of it."""
    runs = [steps(p, env) for p, env in zip(programs, envs, strict=True)]
    kinds = [s.value for s in programs[0].statements if isinstance(s, Let)]
    kinds = [v for v in kinds if isinstance(v, Fold | Join)]
    partials = [next(run) for run in runs]
    for kind in kinds:
        whole = oracle.fold(partials) if isinstance(kind, Fold) else oracle.join(partials)
        partials = [_sent(run, whole) for run in runs]
    assert partials == [None] * len(runs)


def _sent(run, value):
    try:
        return run.send(value)
    except StopIteration:
        return None


def lines_of(program):
    return program.text.split("\n")


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: p.stem)
def test_chip_programs_are_sound_and_made_of_the_joint_text(path):
    for case in json.loads(path.read_text())["cases"]:
        if not case.get("manifest") or case["args"]["tp"] == 1:
            continue
        joint = program_of(case)
        said = set(lines_of(joint))
        parts = chip_programs(joint)
        assert len(parts) == joint.manifest.chips
        for chip, part in enumerate(parts):
            check_program(part)
            assert (part.f32, part.q8) == (joint.f32, joint.q8)
            assert {p.chip for p in part.manifest.placed} == {chip}
            new = [line for line in lines_of(part) if line not in said]
            assert new == [
                f"Let {c.out} be the fold of {c.partials[chip]} across {len(parts)} chips."
                for c in joint.manifest.collectives
            ]
        held = {bound(s) for part in parts for s in part.statements}
        halfway = {s for c in joint.manifest.collectives for s in c.steps} - held
        assert {bound(s) for s in joint.statements} - held == halfway


TOGETHER = [("mqa", "tp_decode_step", 5), ("mqa", "tp_decode_batch", 2)]
TOGETHER += [("gated_delta_dense", "tp_decode_step", 3), ("uneven_heads_9_3", "tp_decode_step", 4)]


@pytest.mark.parametrize(("file", "kind", "tp"), TOGETHER)
def test_chips_together_compute_what_the_joint_program_does(file, kind, tp):
    joint = golden(file, kind, tp=tp)
    parts = chip_programs(joint)
    env = filled(joint)
    own = [dict(env) for _ in parts]
    list(steps(joint, env))
    run_together(parts, own)
    assert len({v.shape for v in own[0].values() if isinstance(v, np.ndarray)}) > 3
    for chip, part in enumerate(parts):
        names = [n for s in part.statements if (n := bound(s)) is not None]
        assert len(names) > 10
        for name in names:
            np.testing.assert_allclose(own[chip][name], env[name], rtol=1e-9, atol=1e-9)


def test_a_chip_without_work_contributes_zeros():
    text = chip_program(FIVE, 0).text
    assert (
        "Let ao0_c0 be xn0 scaled by 0.0.\nLet ao0 be the fold of ao0_c0 across 5 chips.\n" in text
    )
    assert "Wq0" not in text


def test_a_join_stands_where_its_last_step_stood():
    joint = joined_program()
    (_, second) = parts = chip_programs(joint)
    assert lines_of(second)[1:] == [
        "Let x be a 1 by 4 tensor of Real.",
        "Let W_c1 be a 4 by 2 tensor of Real.",
        "Let lg_c1 be x matmul W_c1.",
        "Let lg be the join of lg_c1 across 2 chips.",
        "Let next be argmax of lg.",
        "",
    ]
    env = filled(joint)
    own = [dict(env) for _ in parts]
    list(steps(joint, env))
    run_together(parts, own)
    assert [e[Name.of("next")] for e in own] == [env[Name.of("next")]] * 2


def test_a_program_of_one_chip_is_its_own():
    one = golden("mqa", "tp_decode_step", tp=1)
    lines = []
    for line in lines_of(one)[1:-1]:
        lines.append(line)
        for out in ("ao0", "dn0"):
            if line.startswith(f"Let {out}_c0 "):
                lines.append(f"Let {out} be the fold of {out}_c0 across 1 chips.")
    joint = edited(one, one.text, "\n".join(["## Main", *lines, ""]))
    check_program(joint)
    assert chip_programs(joint) == (joint,)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Let gt0_c1 be x2n0 matmul Wg0_c1.", "Let gt0_c1 be x2n0 matmul Wg0_c0."),
        ("Let xr0 be x plus ao0.", "Let xr0 be x plus ao0_c0."),
        ("Set row pos of Kc0_c1 to kp0_c1.", "Set row pos of Kc0_c1 to kp0_c0."),
    ],
)
def test_a_text_that_reads_across_chips_is_refused_by_statement(old, new):
    broken = edited(TWO, old, new)
    line = lines_of(broken).index(new) + 1
    with pytest.raises(ProgramError) as error:
        chip_program(broken, 0)
    (complaint,) = error.value.complaints
    assert complaint.where == f"line {line}: {new}"
    assert str(complaint).endswith("wanted one chip, or a collective")


def test_a_sum_that_is_not_all_partials_is_refused():
    broken = edited(TWO, "Let ao0 be ao0_c0 plus ao0_c1.", "Let ao0 be ao0_c1 plus ao0_c1.")
    with pytest.raises(ProgramError, match="wanted 'Let ao0 be ao0_c0 plus ao0_c1'"):
        chip_programs(broken)


def test_a_text_that_adds_two_chips_without_a_collective_is_refused():
    unlisted = replace(TWO.manifest, collectives=TWO.manifest.collectives[1:])
    with pytest.raises(ProgramError, match="ao0_c0 and ao0_c1 are on chips 0 and 1"):
        chip_programs(replace(TWO, manifest=unlisted))


def test_what_has_no_chips_has_no_programs_of_them():
    with pytest.raises(ProgramError, match="manifest: the program has none"):
        chip_programs(STEP)
    with pytest.raises(ProgramError, match="no chip 2; wanted chips from 0 to 1"):
        chip_program(TWO, 2)
    with pytest.raises(ProgramError, match="wanted one on each of 2 chips"):
        chip_programs(collecting(TWO, partials=TWO.manifest.collectives[0].partials[:1]))
