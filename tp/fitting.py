"""Whether a checkpoint holds just the tensors of a model: all, whole, of the right shapes."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from author.families.model import Model, View
from tp.checkpoint import Checkpoint, CheckpointError
from tp.operands import Operand
from tp.slices import outputs_first
from tp.views import is_about, misfits, shape_of


def check_tensors(
    model: Model, operands: Mapping[str, Operand], checkpoint: Checkpoint
) -> dict[str, str]:
    """Refuse a checkpoint whose tensors are not just those of the model; why others are skipped."""
    problems: list[str] = []
    taken: Counter[str] = Counter()
    for operand in operands.values():
        if operand.role != "weight":
            continue
        if operand.name in model.constants:
            problems += _misfits_of_constant(operand, model.constants[operand.name])
            continue
        views = model.views.get(operand.name, ())
        wrong = list(_misfits(operand, views, checkpoint))
        problems += wrong
        for view in views:
            taken[view.tensor] += 0 if wrong else _entries(view, checkpoint)
    if not problems:
        problems += _left_over(taken, checkpoint)
    problems += _other_numbers(model, checkpoint)
    used = {*taken, *model.numbers}
    used |= {r.divisors for r in model.rotations if r.divisors is not None}
    patterns = {p: reason for p, reason in model.skipped.items() if "*" in p}
    skipped: dict[str, str] = {}
    for name in sorted(set(checkpoint.tensors) - used):
        matching = (reason for p, reason in patterns.items() if fnmatchcase(name, p))
        reason = model.skipped.get(name) or next(matching, None)
        if reason is None:
            problems.append(f"{name} belongs to nothing that a {model.family} model computes")
        else:
            skipped[name] = reason
    if problems:
        raise CheckpointError(
            file=str(checkpoint.path),
            tensor=None,
            found="; ".join(problems),
            wanted="wanted the tensors that its config describes",
        )
    return skipped


def _entries(view: View, checkpoint: Checkpoint) -> int:
    """How many entries of a tensor a view takes."""
    return math.prod(shape_of(view, checkpoint.tensors[view.tensor]))


def _left_over(taken: Mapping[str, int], checkpoint: Checkpoint) -> Iterator[str]:
    """Tensors of which the views leave something: a fused one is cut by other sizes, say."""
    for name, entries in taken.items():
        tensor = checkpoint.tensors[name]
        if entries < math.prod(tensor.shape):
            yield f"{name} is {list(tensor.shape)}, and the config asks for {entries} entries of it"


def _misfits(operand: Operand, views: Sequence[View], checkpoint: Checkpoint) -> Iterator[str]:
    outputs, inputs = outputs_first(operand)
    if len(views) == 0:
        yield f"{operand.name} has no tensor"
        return
    missing = [v.tensor for v in views if v.tensor not in checkpoint.tensors]
    if missing:
        yield f"{', '.join(missing)} is missing"
        return
    found = [(v, checkpoint.tensors[v.tensor]) for v in views]
    wrong = [problem for view, tensor in found for problem in misfits(view, tensor)]
    if wrong:
        yield from wrong
        return
    shapes = [shape_of(view, tensor) for view, tensor in found]
    total = sum(rows for rows, _ in shapes)
    for (view, tensor), (rows, cols) in zip(found, shapes, strict=True):
        if cols != inputs or total != outputs:
            taken = "" if (view.rows, view.cols) == (None, None) else f", {[rows, cols]} of it used"
            wanted = [outputs] if inputs == 1 else [outputs, inputs]
            yield f"{tensor.name} is {list(tensor.shape)}{taken}, wanted {wanted}"


def _misfits_of_constant(operand: Operand, rows: Sequence[Sequence[float]]) -> Iterator[str]:
    found = (len(rows), len(rows[0]))
    if found != operand.whole:
        yield f"{operand.name} is {list(found)}, wanted {list(operand.whole)}"


def _other_numbers(model: Model, checkpoint: Checkpoint) -> Iterator[str]:
    for name, wanted in model.numbers.items():
        if name not in checkpoint.tensors:
            yield f"{name} is missing"
            continue
        found = checkpoint.read(name).ravel()
        if len(found) != 1 or not is_about(float(found[0]), wanted):
            yield f"{name} holds {found.tolist()}, wanted {wanted}"
