"""Logits by the texts themselves: each position's per-chip programs, a statement at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from author.chips import chip_programs
from author.names import Name
from author.program import Program, roles
from tp.authored import authored
from tp.interpret import interpret_chips
from tp.loader import read_table, read_whole
from tp.operands import operands
from tp.roll import roll
from tp.source import Source


def literal_logits(
    source: Source, ids: Sequence[int], *, chips: int, context: int
) -> Float32[np.ndarray, "rows vocabulary"]:
    """The logits at every position of `ids`, one decode step's texts after another.

    The texts of all chips are run side by side by the interpreter, in float32 with the
    reference kernels: no rolling, no lowering, no mesh.
    """
    spec = source.model.spec
    values: dict[Name, Any] = {}
    found: list[np.ndarray] = []
    for position, token in enumerate(ids, start=1):
        at = {"tok": token, "pos": position}
        program = authored(spec, "tp_decode_step", chips=chips, context=context, **at)
        if position == 1:
            short = source.model.short_length
            long = short is not None and len(ids) > short
            values |= _whole_matrices(source, program, long=long)
        chip_envs = interpret_chips(chip_programs(program), values)
        for env in chip_envs:
            values |= {name: env[name] for name in _kept(program) if name in env}
        found.append(np.asarray(chip_envs[0][Name("logits")])[0])
    return np.stack(found)


def _kept(program: Program) -> set[Name]:
    """The caches and states of every chip, which the next step is to find as they were left."""
    return {name for name, role in roles(program).items() if role in ("cache", "state")}


def _whole_matrices(source: Source, program: Program, *, long: bool) -> dict[Name, Any]:
    """Weights and tables whole, as the language has them: inputs by outputs."""
    model, checkpoint = source.model, source.checkpoint
    whole: dict[Name, Any] = {}
    for name, operand in operands(roll(program)).items():
        if operand.role == "table":
            whole[name] = read_table(model, checkpoint, operand, long=long)
        elif operand.role == "weight" and not (model.tied and name == Name("Wout")):
            whole[name] = read_whole(model, checkpoint, operand)
    if model.tied:
        whole[Name("Wout")] = whole[Name("Emb")].T
    return whole
