"""The recurrent layer over many rows: causal conv, decay and gated delta.

The states keep the layout of the language. Rows beyond `count` reach no state.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.arrays import EPSILON, Integer, Matrix, einsum, full


def causal_conv(
    x: Float[Array, "rows cols"],
    weight: Float[Array, "taps cols"],
    state: Float[Array, "taps cols"],
    *,
    taps: int,
    count: Integer | None = None,
) -> tuple[Float[Array, "rows cols"], Float[Array, "taps cols"]]:
    """All rows at once, each tap a multiple of the inputs moved by one row."""
    rows = x.shape[0]
    inputs = jnp.concatenate([state, x])
    out = jnp.zeros_like(x)
    for t in range(taps):
        out += weight[t][None] * inputs[t + 1 : t + 1 + rows]
    if count is None:
        return out, inputs[rows:]
    return out, jax.lax.dynamic_slice_in_dim(inputs, count, taps)


def gated_delta(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    gate: Matrix,
    beta: Float[Array, "rows heads"],
    decay: Float[Array, "rows heads"],
    state: Float[Array, "_ _"],
    norm: Float[Array, "1 _"],
    *,
    heads: int,
    groups: int,
    sigmoid_gate: bool = False,
    epsilon: float | None = None,
    count: Integer | None = None,
) -> tuple[Matrix, Float[Array, "_ _"]]:
    """The gated delta rule; rows beyond `count` are not computed.

    A row reads the state once for `S k` and `S q` together and writes it once, since
    `(d S + c k') q` is `d S q + (k' q) c`: 60 us a row for 16 heads of 128 on a CPU, 200 with
    sums in the place of products.
    """
    rows = q.shape[0]
    key_head = jnp.arange(heads) % groups
    q = q.reshape(rows, groups, -1)[:, key_head] * (q.shape[1] // groups) ** -0.5
    k = k.reshape(rows, groups, -1)[:, key_head]
    v = v.reshape(rows, heads, -1)
    both = jnp.stack([k, q], axis=2)
    overlap = jnp.sum(k * q, axis=2, keepdims=True)
    beta, decay = beta[:, :, None], decay[:, :, None]

    def one(j: Any, state: Any) -> tuple[Any, Any]:
        products = decay[j][:, :, None] * einsum("hde,hce->hdc", state, both[j])
        change = beta[j] * (v[j] - products[:, :, 0])
        state = decay[j][:, :, None] * state + change[:, :, None] * k[j][:, None]
        return state, products[:, :, 1] + overlap[j] * change

    by_head = state.reshape(heads, v.shape[2], k.shape[2])
    by_head, out = _row_by_row(one, by_head, v, count, beside=(both, v, beta, decay, state))
    epsilon = EPSILON if epsilon is None else epsilon
    out = out / jnp.sqrt(jnp.mean(out * out, axis=2, keepdims=True) + epsilon)
    out = (out * norm[None]).reshape(gate.shape)
    gating = jax.nn.sigmoid(gate) if sigmoid_gate else jax.nn.silu(gate)
    return out * gating, by_head.reshape(state.shape)


def _row_by_row(one: Any, state: Any, like: Any, count: Any, *, beside: Any) -> Any:
    """The state after the real rows, and what `one` gives for each; zeros for the others."""
    rows = like.shape[0]
    if rows == 1 and count is None:
        state, out = one(0, state)
        return state, out[None]

    def step(j: Any, carry: Any) -> Any:
        state, out = carry
        state, row = one(j, state)
        return state, out.at[j].set(row)

    before = (state + full((1, 1, 1), 0.0, *beside), full(like.shape, 0.0, *beside))
    return jax.lax.fori_loop(0, rows if count is None else count, step, before)
