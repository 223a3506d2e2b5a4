"""A mixture of experts in float64, expert by expert."""

import numpy as np
from numpy.typing import ArrayLike

from tests.oracle_rowwise import Matrix, as_matrix, sigmoid, softmax, swiglu


def moe(
    x: ArrayLike,
    router: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    down: ArrayLike,
    router_bias: ArrayLike | None = None,
    gate_bias: ArrayLike | None = None,
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    choice_bias: ArrayLike | None = None,
    *,
    chosen: int,
    experts: int,
    by_sigmoid: bool = False,
    used_groups: int | None = None,
    group_count: int | None = None,
    without_renormalizing: bool = False,
    scale: float | None = None,
    weighting_inputs: bool = False,
    limit: float | None = None,
    slope: float | None = None,
) -> Matrix:
    """The weighted sum of the chosen experts of one row."""
    (one,) = as_matrix(x)
    logits = one @ as_matrix(router) + _bias(router_bias, 0)
    scores = sigmoid(logits)[0] if by_sigmoid else np.array(softmax(list(logits), None))
    worth = scores + _bias(choice_bias, 0)
    eligible = list(range(experts))
    if used_groups is not None and group_count is not None:
        best = 2 if by_sigmoid and choice_bias is not None else 1
        eligible = _eligible(worth, experts // group_count, used_groups, best)
    picked = sorted(eligible, key=lambda e: (-worth[e], e))[:chosen]
    weights = {e: scores[e] for e in picked}
    if not without_renormalizing:
        weights = {e: w / sum(scores[p] for p in picked) for e, w in weights.items()}
    total = np.zeros_like(one)
    for e, weight in weights.items():
        w = weight * (1.0 if scale is None else scale)
        given = one * w if weighting_inputs else one
        g = np.split(as_matrix(gate), experts)[e] @ given + _bias(gate_bias, e)
        u = np.split(as_matrix(up), experts)[e] @ given + _bias(up_bias, e)
        hidden = _activated(g, u, limit, slope)
        y = np.split(as_matrix(down), experts)[e] @ hidden + _bias(down_bias, e)
        total = total + (y if weighting_inputs else w * y)
    return total[None, :]


def _bias(bias: ArrayLike | None, row: int) -> Matrix | float:
    return 0.0 if bias is None else as_matrix(bias)[row]


def _eligible(worth: Matrix, size: int, used: int, best: int) -> list[int]:
    """The experts of the `used` runs whose `best` largest have the largest sum."""
    runs = [range(start, start + size) for start in range(0, len(worth), size)]
    values = [sum(sorted((worth[e] for e in run), reverse=True)[:best]) for run in runs]
    order = sorted(range(len(runs)), key=lambda r: (-values[r], r))[:used]
    return sorted(e for r in order for e in runs[r])


def _activated(g: Matrix, u: Matrix, limit: float | None, slope: float | None) -> Matrix:
    if limit is None or slope is None:
        return swiglu(g, u)[0]
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (u + 1.0) * g * sigmoid(slope * g)[0]
