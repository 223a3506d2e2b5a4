"""Computes a mixture of experts over one row, plainly.

Experts are chosen as in DeepSeek-V3 (arXiv 2412.19437), Mixtral (arXiv 2401.04088) and gpt-oss.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.arrays import Row, einsum

Bias = Float[Array, "experts _"] | None
SMALLEST = jnp.finfo(jnp.float32).tiny

Choice = Float[Array, "1 experts"] | None


def moe(
    x: Row,
    router: Float[Array, "_ experts"],
    gate: Float[Array, "_ _"],
    up: Float[Array, "_ _"],
    down: Float[Array, "_ _"],
    router_bias: Choice = None,
    gate_bias: Bias = None,
    up_bias: Bias = None,
    down_bias: Bias = None,
    choice_bias: Choice = None,
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
) -> Row:
    """The weighted sum of the chosen experts, `down(act(gate x, up x))` each."""
    logits = einsum("ra,ab->rb", x, router)
    logits = logits if router_bias is None else logits + router_bias
    scores = jax.nn.sigmoid(logits) if by_sigmoid else jax.nn.softmax(logits)
    # The bias has a say in the choice and none in the weights.
    worth = (scores if choice_bias is None else scores + choice_bias)[0]
    if used_groups is not None and group_count is not None:
        best = 2 if by_sigmoid and choice_bias is not None else 1
        worth = _within_groups(worth, used_groups, group_count, best)
    _, ids = jax.lax.top_k(worth, chosen)  # the first of equals
    weights = scores[0, ids]
    if not without_renormalizing:
        # Sigmoids can all underflow to 0; they then weigh nothing.
        weights = weights / jnp.maximum(jnp.sum(weights), SMALLEST)
    weights = weights if scale is None else scale * weights

    def one(expert: Int[Array, ""], weight: Float[Array, ""]) -> Row:
        w_gate, w_up, w_down = (
            w.reshape(experts, -1, w.shape[1])[expert] for w in (gate, up, down)
        )
        b_gate, b_up, b_down = (
            jnp.float32(0) if b is None else b[expert][None]
            for b in (gate_bias, up_bias, down_bias)
        )
        inputs = weight * x if weighting_inputs else x
        g = einsum("ra,ba->rb", inputs, w_gate) + b_gate
        u = einsum("ra,ba->rb", inputs, w_up) + b_up
        out = einsum("ra,ba->rb", _activated(g, u, limit, slope), w_down) + b_down
        return out if weighting_inputs else weight * out

    return jnp.sum(jax.vmap(one)(ids, weights), axis=0)


def _within_groups(
    worth: Float[Array, " experts"], used_groups: int, group_count: int, best: int
) -> Float[Array, " experts"]:
    """Worths with minus infinity outside the best runs of experts."""
    runs = worth.reshape(group_count, -1)
    run_worth = jnp.sum(jax.lax.top_k(runs, best)[0], axis=1)
    _, used = jax.lax.top_k(run_worth, used_groups)
    is_used = jnp.zeros(group_count, bool).at[used].set(True)
    return jnp.where(is_used[:, None], runs, -jnp.inf).reshape(-1)


def _activated(g: Row, u: Row, limit: float | None, slope: float | None) -> Row:
    if limit is None or slope is None:
        return jax.nn.silu(g) * u
    g = jnp.minimum(g, limit)
    u = jnp.clip(u, -limit, limit)
    return (u + 1) * g * jax.nn.sigmoid(slope * g)
