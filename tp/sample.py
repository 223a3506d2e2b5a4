"""Chooses a token from logits: greedily, or drawn with temperature, top-k and top-p."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HOTTEST, COLDEST = 1e6, 1e-6  # temperatures between which a draw means something in float32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 takes the likeliest.

    `top_k` of 0 and `top_p` of 1 keep every token. The same seed gives the same tokens at every
    width and in every process. Raises ValueError for what no choice can be made by.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature is {self.temperature}; wanted 0 to {HOTTEST:g}")
        if not 0 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k is {self.top_k}; wanted 0 (all tokens) to {(1 << 31) - 1}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; wanted more than 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: logits over a smaller temperature would overflow."""
        return self.temperature < COLDEST

    def numbers(self) -> dict[str, Array]:
        """The parameters as run-time inputs: changing them compiles nothing."""
        return {
            "temperature": jnp.float32(self.temperature),
            "top_k": jnp.int32(self.top_k),
            "top_p": jnp.float32(self.top_p),
            "seed": jnp.uint32(self.seed % (1 << 32)),
        }


def choose(
    logits: Float[Array, "1 vocabulary"],
    position: Int[Array, ""],
    numbers: dict[str, Array],
    *,
    greedy: bool,
) -> Int[Array, ""]:
    """The token that follows `position`; a draw depends on the seed and the position alone."""
    if greedy:
        return likeliest(logits)[0]
    key = jax.random.fold_in(jax.random.key(numbers["seed"]), position)
    kept = _kept(logits[0] / numbers["temperature"], numbers["top_k"], numbers["top_p"])
    return jax.random.categorical(key, kept).astype(jnp.int32)


def likeliest(logits: Float[Array, "rows vocabulary"]) -> Int[Array, " rows"]:
    """The first of the largest of each row, or of NaN: two plain reductions, which XLA's CPU
    compiler runs five times as fast as the one of `argmax`."""
    last = logits.shape[-1] - 1
    at = jnp.arange(last + 1, dtype=jnp.int32)[None]
    largest = (logits == jnp.max(logits, axis=-1, keepdims=True)) | jnp.isnan(logits)
    return jnp.min(jnp.where(largest, at, last), axis=-1)


def _kept(
    logits: Float[Array, " vocabulary"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, " vocabulary"]:
    """The logits with all but the likeliest tokens at minus infinity.

    Top-p keeps the fewest tokens that together reach it, of those that top-k kept.
    """
    size = logits.shape[0]
    order = jnp.argsort(-logits, stable=True)
    ranked = logits[order]
    rank = jnp.arange(size)
    ranked = jnp.where((top_k == 0) | (rank < top_k), ranked, -jnp.inf)
    chances = jax.nn.softmax(ranked)
    before = jnp.cumsum(chances) - chances
    ranked = jnp.where((before < top_p) | (rank == 0), ranked, -jnp.inf)
    return jnp.full((size,), -jnp.inf, jnp.float32).at[order].set(ranked)
