"""A split as JSON, every number of it.

One object: `model` (what is split), `asked` (over how many chips, for which context), `chips` (a
list, one object a chip: what it really holds, `weight_bytes` and so on; what it is given, the same
keys with `given_` before them; `padding_bytes` between the two; its `share_of_reads` of a model on
one chip), `collectives` (the folds and joins of a step, `count` of each), `totals` (balance,
speed-ups, whether it fits), `kinds` (layers that are alike, and each chip's heads and columns in
one of them), `matrices` (each once a kind of layers: its shape, its axis and the ranges of each
chip within each of its `blocks`, bytes held and given, the statements that use it), `segments`
(what each chip reads and computes between two collectives, the steps of a timeline).

Sizes are bytes; `reads` and `operations` are those of one token, the last of a full context.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tp.costs import Cost
from tp.matrices import Matrix
from tp.outline import Outline
from tp.segments import Segment
from tp.split import Holding, Split
from tp.weighing import Weighed, fewest


def weighed_json(weighed: Weighed) -> dict[str, Any]:
    """A split and its judgement as JSON."""
    split = weighed.split
    return {
        "model": model_json(weighed.outline, weighed.alone),
        "asked": {
            "chips": len(split.chips),
            "context": weighed.context,
            "cache_bytes_per_number": weighed.cache_bytes,
            "memory": weighed.memory,
        },
        "chips": [_chip(weighed, number) for number in range(len(split.chips))],
        "collectives": [asdict(c) for c in split.collectives],
        "totals": _totals(weighed),
        "kinds": [asdict(kind) for kind in split.kinds],
        "matrices": [_matrix(matrix) for matrix in split.matrices],
        "segments": [_segment(segment) for segment in split.segments],
    }


def widths_json(widths: Sequence[Weighed]) -> dict[str, Any]:
    """Several widths of one model as JSON: an object for each under `widths`."""
    each = [weighed_json(weighed) for weighed in widths]
    return {"model": each[0]["model"], "widths": each}


def model_json(outline: Outline, alone: Split) -> dict[str, Any]:
    """The model that is split; its bytes are those of its weights in q8, on one chip."""
    spec = outline.spec
    return {
        "name": outline.name,
        "family": outline.family,
        "layers": len(spec.layers),
        "width": spec.d,
        "vocabulary": spec.vocab,
        "context": outline.context,
        "tied": outline.tied,
        "weights": alone.weights,
        "weight_bytes": alone.given.weight_bytes,
        "file_bytes": outline.file_bytes,
        "reads": alone.given.cost.reads,
        "operations": alone.given.cost.operations,
    }


def _chip(weighed: Weighed, number: int) -> dict[str, Any]:
    split = weighed.split
    held, given = split.chips[number], split.given
    return {
        "chip": number,
        **_holding(held),
        **{f"given_{key}": value for key, value in _holding(given).items()},
        "padding_bytes": given.weight_bytes - held.weight_bytes,
        "share_of_reads": held.cost.reads / weighed.alone.given.cost.reads,
    }


def _holding(holding: Holding) -> dict[str, int]:
    return {
        **holding.counts,
        "weight_bytes": holding.weight_bytes,
        "cache_bytes_per_token": holding.cache_bytes_per_token,
        "cache_bytes": holding.cache_bytes,
        "state_bytes": holding.state_bytes,
        "table_bytes": holding.table_bytes,
        "bytes": holding.bytes,
        **_cost(holding.cost),
    }


def _cost(cost: Cost) -> dict[str, int]:
    return {"reads": cost.reads, "operations": cost.operations}


def _totals(weighed: Weighed) -> dict[str, Any]:
    split = weighed.split
    return {
        "balance": split.balance,
        "speed_up": weighed.speed_up,
        "speed_up_by_operations": weighed.speed_up_by_operations,
        "weight_bytes": sum(c.weight_bytes for c in split.chips),
        "given_weight_bytes": len(split.chips) * split.given.weight_bytes,
        "given_weight_bytes_on_cpu": split.cpu_bytes(native=True),
        "folds": weighed.folds,
        "joins": weighed.joins,
        "collective_bytes": sum(c.count * c.bytes for c in split.collectives),
        "sent_bytes": weighed.sent,
        "fits": weighed.fits,
        "longest_context": weighed.longest,
        "chips_that_would_fit": fewest(weighed),
    }


def _matrix(matrix: Matrix) -> dict[str, Any]:
    return {**asdict(matrix), "replicated": matrix.replicated}


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "before": segment.collective.name,
        "layer_kind": segment.collective.layer_kind,
        "count": segment.collective.count,
        "reads": [cost.reads for cost in segment.chips],
        "operations": [cost.operations for cost in segment.chips],
        **{f"given_{key}": value for key, value in _cost(segment.given).items()},
    }
