"""Computes the forms of recurrent layers, plainly: conv, decay, gated delta, linear attention.

As in Qwen3-Next (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692) and MiniMax-01 (arXiv
2501.08313). The states are returned anew; rows beyond `count` do not reach them, and what comes
out of those rows means nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.arrays import EPSILON, Integer, Matrix, einsum, real


def causal_conv(
    x: Float[Array, "rows cols"],
    weight: Float[Array, "taps cols"],
    state: Float[Array, "taps cols"],
    *,
    taps: int,
    count: Integer | None = None,
) -> tuple[Float[Array, "rows cols"], Float[Array, "taps cols"]]:
    """A depthwise convolution over the last `taps` inputs of each column, oldest first."""
    assert taps == weight.shape[0]

    def one(state, row_and_real):
        row, is_real = row_and_real
        shifted = jnp.concatenate([state[1:], row[None]])
        out = jnp.sum(shifted * weight, axis=0)
        return jnp.where(is_real, shifted, state), out

    state, out = jax.lax.scan(one, state, (x, real(x.shape[0], count)))
    return out, state


def decay(
    x: Float[Array, "rows cols"],
    bias: Float[Array, "1 cols"],
    rate: Float[Array, "1 _"],
    *,
    heads: int | None = None,
) -> Float[Array, "rows cols"]:
    """`exp(-exp(rate) * softplus(x + bias))`; with heads, a column has the rate of its head."""
    if heads is not None:
        rate = jnp.repeat(rate, x.shape[1] // heads, axis=1)
    return jnp.exp(-jnp.exp(rate) * jax.nn.softplus(x + bias))


def gated_delta(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    gate: Matrix,
    beta: Float[Array, "rows heads"],
    decay: Float[Array, "rows _"],
    state: Float[Array, "_ _"],
    norm: Float[Array, "1 _"],
    *,
    heads: int,
    groups: int,
    sigmoid_gate: bool = False,
    by_channel: bool = False,
    epsilon: float | None = None,
    count: Integer | None = None,
) -> tuple[Matrix, Float[Array, "_ _"]]:
    """The gated delta rule, row after row, its output normed and gated.

    Value head `j` reads key head `j mod groups`. Rows of a head's state are value
    dimensions, columns key dimensions. `by_channel`: a decay for each column of each key head.
    """
    rows = q.shape[0]
    key_head = jnp.arange(heads) % groups
    q = q.reshape(rows, groups, -1)[:, key_head] / (q.shape[1] // groups) ** 0.5
    k = k.reshape(rows, groups, -1)[:, key_head]
    v = v.reshape(rows, heads, -1)
    decays = decay.reshape(rows, groups if by_channel else heads, -1)
    decay = decays[:, key_head] if by_channel else decays

    def one(state, row):
        q, k, v, beta, decay, is_real = row
        new = decay[:, None] * state
        change = beta[:, None] * (v - einsum("hde,he->hd", new, k))
        new += einsum("hd,he->hde", change, k)
        return jnp.where(is_real, new, state), einsum("hde,he->hd", new, q)

    each_row = (q, k, v, beta, decay, real(rows, count))
    by_head, out = jax.lax.scan(one, state.reshape(heads, v.shape[2], k.shape[2]), each_row)
    epsilon = EPSILON if epsilon is None else epsilon
    out /= jnp.sqrt(jnp.mean(out * out, axis=2, keepdims=True) + epsilon)
    out = (out * norm[None]).reshape(gate.shape)
    gating = jax.nn.sigmoid(gate) if sigmoid_gate else jax.nn.silu(gate)
    return out * gating, by_head.reshape(state.shape)


def linear_attention(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    decay: Float[Array, "1 heads"],
    state: Float[Array, "_ _"],
    *,
    heads: int,
    count: Integer | None = None,
) -> tuple[Matrix, Float[Array, "_ _"]]:
    """A decaying sum of outer products of values and keys, read by each row's query.

    Rows of a head's state are value dimensions, columns key dimensions.
    """
    q, k, v = (x.reshape(x.shape[0], heads, -1) for x in (q, k, v))

    def one(state, row):
        q, k, v, is_real = row
        new = decay[0, :, None, None] * state + einsum("hd,he->hde", v, k)
        return jnp.where(is_real, new, state), einsum("hde,he->hd", new, q)

    each_row = (q, k, v, real(q.shape[0], count))
    by_head, out = jax.lax.scan(one, state.reshape(heads, v.shape[2], k.shape[2]), each_row)
    return out.reshape(out.shape[0], -1), by_head.reshape(state.shape)
