"""A check as it is told: rows of a table, the statements that differ, and all of it as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tp.check.fault import Fault
from tp.check.widths import ONE, PREFILL, Bisected, Report, Row
from tp.columns import plural, table

HEADING = (
    *("chips", "way", "against", "difference", "of deviation"),
    *("prompt", "position", "token", "same top", ""),
)
LOOK = {
    "text": "the text of this width",
    "weights": "the weights that are held",
    "execution": "what is done with them",
}


def told(report: Report, tolerance: float, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """The lines of a report; prompts, positions, rows and columns count from 1, chips from 0."""
    lengths = sorted({len(ids) for ids in prompts})
    of = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    yield f"{plural(len(prompts), 'prompt')} of {of} tokens"
    yield from (line.rstrip() for line in table([HEADING, *map(_cells, report.rows)]).split("\n"))
    bad = sum(not row.holds for row in report.rows)
    if bad == 0:
        yield f"all within {tolerance:g} of the logits' deviation"
    else:
        yield f"{bad} of {plural(len(report.rows), 'row')} beyond {tolerance:g} of the deviation"
    for found in report.bisected:
        yield ""
        yield from _bisected(found)


def _cells(row: Row) -> tuple[str, ...]:
    worst = row.prompts[row.worst]
    alike, of = (sum(getattr(prompt, f) for prompt in row.prompts) for f in ("alike", "of"))
    return (
        *(str(row.chips), row.way, row.against, f"{worst.largest:.1e}", f"{worst.over:.1e}"),
        *(str(row.worst + 1), str(worst.position), str(worst.token)),
        *(f"{alike}/{of}", "" if row.holds else "differs"),
    )


def _bisected(found: Bisected) -> Iterator[str]:
    """Where a row that differs leads."""
    row = found.row
    yield f"{plural(row.chips, 'chip')} by {row.way} against {row.against}, prompt {row.worst + 1}:"
    if found.fault is not None:
        yield from _fault(found.fault, found.chips)
        return
    yield "  every weight is the slice that the text names, and no statement is off by too much"
    if found.nearest is not None:
        yield "  the farthest off:"
        yield from _fault(found.nearest, found.chips)
    if row.against in (ONE, PREFILL):
        yield "  so it is rounding that adds up"
    else:
        yield f"  beside {row.against}, {_first_layer(found.layer)}"


def _first_layer(layer: int | None) -> str:
    if layer is None:
        return "what goes into every layer is alike"
    out_of = "the embedding" if layer == 0 else f"layer {layer - 1}"
    return f"what comes out of {out_of} is the first to differ"


def _fault(fault: Fault, chips: int) -> Iterator[str]:
    layer = "no layer" if fault.layer is None else f"layer {fault.layer}"
    chip = "every chip" if fault.chip is None else f"chip {fault.chip} of {chips}"
    yield f"  {layer}, {chip}, position {fault.position}: {LOOK[fault.of]}"
    yield f"    {fault.statement}"
    yield (
        f"    found {fault.found:.6g}, wanted {fault.wanted:.6g} in row {fault.row + 1}, column"
        f" {fault.col + 1}: off by {fault.off:.1e} of the root mean square"
    )
    for said in fault.because:
        yield f"    {said}"


# --- JSON


def numbers(report: Report) -> dict[str, Any]:
    """All of a report; null stands for what is not finite. All counts but positions are from 0."""
    rows = [{**asdict(row), "worst": row.worst, "holds": row.holds} for row in report.rows]
    bisected = [_bisected_numbers(found) for found in report.bisected]
    return _finite({"holds": report.holds, "rows": rows, "bisected": bisected})


def _bisected_numbers(found: Bisected) -> dict[str, Any]:
    row = {key: getattr(found.row, key) for key in ("chips", "way", "against", "worst")}
    faults = {"fault": found.fault, "nearest": found.nearest}
    return {
        **{"row": row, "chips": found.chips, "layer": found.layer},
        **{key: None if fault is None else _fault_numbers(fault) for key, fault in faults.items()},
    }


def _fault_numbers(fault: Fault) -> dict[str, Any]:
    return {**asdict(fault), "name": str(fault.name), "layer": fault.layer}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
