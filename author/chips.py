"""One chip's own program, from the joint program of all chips and its manifest."""

from collections.abc import Iterator
from dataclasses import replace

from author.checks import chips_meet_in_collectives, collected, collectives_are_spelled_out
from author.forms import Statement
from author.manifest import TpManifest
from author.program import Complaint, Program, ProgramError, bound, changed, read_by


def chip_program(program: Program, chip: int) -> Program:
    """What one chip runs: the replicated statements, its own, and a fold or join where all meet.

    The tables still name whole matrices, and the collectives all their partials; the placed names
    are the chip's. Raises ProgramError where the joint text reads across chips, or a collective is
    not spelled out.
    """
    manifest = _checked(program)
    if not 0 <= chip < manifest.chips:
        wanted = f"wanted chips from 0 to {manifest.chips - 1}"
        raise ProgramError((Complaint(where="manifest", found=f"no chip {chip}", wanted=wanted),))
    return _part(program, manifest, chip)


def chip_programs(program: Program) -> tuple[Program, ...]:
    """The program of every chip, in order."""
    manifest = _checked(program)
    return tuple(_part(program, manifest, chip) for chip in range(manifest.chips))


def _checked(program: Program) -> TpManifest:
    if program.manifest is None:
        found = "the program has none: it is written for one device"
        wanted = "wanted a program of several chips"
        raise ProgramError((Complaint(where="manifest", found=found, wanted=wanted),))
    rules = (collectives_are_spelled_out, chips_meet_in_collectives)
    complaints = tuple(complaint for rule in rules for complaint in rule(program))
    if complaints:
        raise ProgramError(complaints)
    return program.manifest


def _part(program: Program, manifest: TpManifest, chip: int) -> Program:
    own = replace(manifest, placed=tuple(p for p in manifest.placed if p.chip == chip))
    return replace(program, statements=tuple(_statements(program, manifest, chip)), manifest=own)


def _statements(program: Program, manifest: TpManifest, chip: int) -> Iterator[Statement]:
    collectives = {c.out: c for c in manifest.collectives}
    steps = {s for c in manifest.collectives for s in c.steps}
    for statement in program.statements:
        name = bound(statement)
        collective = None if name is None else collectives.get(name)
        if collective is not None:
            yield collected(collective, collective.partials[chip], manifest.chips)
        elif name not in steps and _runs_on(statement, manifest, chip):
            yield statement


def _runs_on(statement: Statement, manifest: TpManifest, chip: int) -> bool:
    name = bound(statement)
    names = (*read_by(statement), *changed(statement), *(() if name is None else (name,)))
    return all(manifest.chip_of(n) in (None, chip) for n in names)
