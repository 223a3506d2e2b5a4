"""Tokens made on the device, many a call: of one sequence, or of several side by side."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tp import sample
from tp.launch import from_first_chip
from tp.lower import Arrays, Lowered
from tp.sample import Sampling
from tp.step import compiled

# The most tokens of a sequence that are made before the host looks, which takes a millisecond.
STRIDE = 32

# Stands for a token where logits are not numbers.
_NAN = -2


class NumbersError(ValueError):
    """Logits that are not numbers: where they were found, and what would do."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"the logits {where} are not numbers (NaN): the model's numbers grow too large, or its "
            "weights are damaged; where caches are float16, --cache f32 would show which"
        )


Likeliest = Callable[[jax.Array], jax.Array]

# Of every sequence its tokens, and the states after them.
Parts = Iterator[tuple[list[list[int]], Arrays]]


def loop(
    lowered: Lowered, mesh: Mesh, *, greedy: bool, likeliest: Likeliest | None = None
) -> Callable[..., Any]:
    """Steps one after another on the device, until nothing is left to make or the call is over.

    With `likeliest`, the argmax of each row, they are those of several sequences. `inputs` are as
    `inputs_for` makes them. A sequence that has ended stays where it is.
    """

    def body(weights: Arrays, states: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        def more(carry: Any) -> Any:
            made, _, _, left, *_ = carry
            return (made < inputs["limit"]) & jnp.any(left > 0)

        def one(carry: Any) -> Any:
            made, tokens, positions, left, out, states = carry
            run = partial(lowered.run, weights, states)
            logits, chosen, states = _step(run, tokens, positions, likeliest)
            if not greedy:
                draw = partial(sample.choose, numbers=inputs, greedy=False)
                chosen = jax.vmap(draw)(logits[:, None], positions)
            chosen = from_first_chip(chosen)
            # Among NaN no token is the likeliest, and the one that is taken is NaN itself.
            lost = jnp.isnan(jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0])
            going = left > 0
            out = out.at[made].set(jnp.where(going, jnp.where(lost, _NAN, chosen), -1))
            stopped = lost | jnp.any(chosen[:, None] == inputs["stops"][None], axis=1)
            left = jnp.where(stopped, 0, jnp.maximum(left - 1, 0))
            tokens = jnp.where(going, chosen, tokens)
            return made + 1, tokens, positions + going.astype(jnp.int32), left, out, states

        tokens, positions, left = (inputs[key] for key in ("tokens", "positions", "left"))
        out = jnp.zeros((STRIDE, tokens.shape[0]), jnp.int32)
        start = (jnp.int32(0), tokens, positions, left, out, states)
        made, tokens, positions, left, out, states = jax.lax.while_loop(more, one, start)
        moved = {"tokens": tokens, "positions": positions, "left": left}
        return {"made": made, "out": out, **moved}, states

    return compiled(lowered, mesh, body)


def _step(
    run: Callable[[Arrays], tuple[Arrays, Arrays]],
    tokens: jax.Array,
    positions: jax.Array,
    likeliest: Likeliest | None,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """The logits after a token of each sequence, and the likeliest next of each."""
    if likeliest is None:
        values, states = run({"tok": tokens[0], "pos": positions[0]})
        return values["logits"], values["next"].reshape(1).astype(jnp.int32), states
    values, states = run({"toks": tokens[None], "pos": positions})
    return values["blogits"], likeliest(values["blogits"]), states


def inputs_for(
    tokens: Sequence[int] = (0,),
    positions: Sequence[int] = (1,),
    limits: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    stops: frozenset[int] = frozenset(),
) -> Arrays:
    """What `loop` starts from: of every sequence its last token, where that stands, and how many
    more are wanted."""
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "left": jnp.asarray(limits, jnp.int32),
        "limit": np.int32(STRIDE),
        "stops": _padded(stops),
        **(sampling or Sampling()).numbers(),
    }


def _padded(stops: frozenset[int]) -> np.ndarray:
    """Always of one length, so that another set compiles nothing; no token is -1."""
    padded = np.full(64, -1, np.int32)
    padded[: len(stops)] = sorted(stops)[:64]
    return padded


def parts(run: Any, weights: Arrays, states: Arrays, inputs: Arrays, *, stride: int) -> Parts:
    """Calls of a `loop` until nothing is left to make: what each made, at most `stride` a sequence.

    The states of each call are given up to the next one. Raises NumbersError where logits are not.
    """
    left = int(np.max(inputs["left"]))
    while left > 0:
        inputs["limit"] = np.int32(min(left, stride))
        out, states = run(weights, states, inputs)
        made = np.asarray(out["out"])[: int(out["made"])]
        inputs |= {key: out[key] for key in ("tokens", "positions", "left")}
        left = int(np.max(np.asarray(out["left"])))
        if (made == _NAN).any():
            raise NumbersError(f"after {len(made)} more tokens at the most")
        yield [[t for t in column if t >= 0] for column in made.T.tolist()], states
