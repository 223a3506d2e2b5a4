"""Measures this project's own decoder: a process for each number of chips."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tp.bench.orders import SHORT, Answer, obey, random_ids, timed
from tp.bench.reads import step_bytes, weight_bytes
from tp.engine import Engine, load
from tp.sample import Sampling

GREEDY, NONE = Sampling(), frozenset()


def main() -> None:
    """Obey orders on the model that the first argument describes."""
    asked = json.loads(sys.argv[1])

    def start() -> tuple[Answer, Mapping[str, Callable[..., Answer]]]:
        run = Anyfold(load(asked["model"], **asked["options"]))
        orders = {
            "prefill": run.prefill,
            "decode": run.decode,
            "batch": run.batch,
            "logits": run.logits,
            "error": run.error,
        }
        return run.about(), orders

    obey(start)


class Anyfold:
    """A loaded model, and sequences that a later order may go on from."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.decoder = engine.decoder
        self.vocabulary = engine.source.model.spec.vocab
        self.held: tuple[int, int, Any] | None = None
        caches = jax.tree.leaves(self.decoder.fresh())
        self.cache_bytes = sum(c.nbytes for c in caches)
        self.item_bytes = min((c.dtype.itemsize for c in caches), default=4)

    def about(self) -> Answer:
        """What was loaded, and the bytes of its weights, as Q8_0, and of its caches."""
        source, devices = self.engine.source, self.decoder.devices
        return {
            "path": str(source.path),
            "format": source.checkpoint.format,
            "vocabulary": self.vocabulary,
            "layers": len(source.model.spec.layers),
            "context": self.decoder.context,
            "platform": devices.platform,
            "simulated": devices.simulated,
            "weight_bytes": weight_bytes(source.model, self.decoder.operands),
            "cache_bytes": self.cache_bytes,
        }

    def prefill(self, *, tokens: int, seed: int = 0) -> Answer:
        """Read a prompt into a fresh cache, until its logits are there."""
        self.held = None
        ids = random_ids(tokens, self.vocabulary, seed)
        states = jax.block_until_ready(self.decoder.fresh())
        seconds, _ = timed(lambda: self._read(states, ids))
        return {"tokens": tokens, "seconds": seconds}

    def decode(self, *, tokens: int, position: int = SHORT) -> Answer:
        """Greedy tokens after the first that follows a prompt of `position` tokens."""
        first, states = self._started(position)
        seconds, (made, states) = timed(lambda: self._generate(states, first, position, tokens))
        if self.decoder.rewinds:
            self.held = (position, first, states)
        return {"tokens": made, "seconds": seconds, "bytes": self._bytes(position, tokens)}

    def batch(self, *, tokens: int, sequences: int, position: int = SHORT) -> Answer:
        """As many greedy tokens of each of several sequences, a step for all of them at a time."""
        first, one = self._started(position)
        states = self.decoder.fresh_batch(sequences)
        for slot in range(sequences):
            states = self.decoder.insert(states, slot, one)
        del one
        chosen = [first] * sequences
        jax.block_until_ready(states)
        seconds, made = timed(lambda: self._steps(states, chosen, position, tokens))
        return {"tokens": made, "seconds": seconds}

    def logits(self, *, tokens: int, prompts: int, out: str) -> Answer:
        """Write the logits after each of some prompts to a file, `[prompts, vocabulary]`."""
        np.save(out, self._logits(tokens, prompts))
        return {}

    def error(self, *, tokens: int, prompts: int, exact: str) -> Answer:
        """The largest difference of a logit from those in a file, over their deviation."""
        wanted = np.load(exact)
        found = np.abs(self._logits(tokens, prompts) - wanted).max() / wanted.std()
        return {"error_over_deviation": float(found)}

    # --- Parts

    def _started(self, position: int) -> tuple[int, Any]:
        """The first token after a prompt, and the states that hold the prompt, given up."""
        held, self.held = self.held, None
        if held is not None and held[0] == position:
            return held[1:]
        ids = random_ids(position, self.vocabulary)
        logits, states = self._read(self.decoder.fresh(), ids)
        return self.decoder.first_token(logits, position, GREEDY), states

    def _logits(self, tokens: int, prompts: int) -> np.ndarray:
        self.held = None
        asked = (random_ids(tokens, self.vocabulary, seed) for seed in range(prompts))
        return np.concatenate([self._read(self.decoder.fresh(), ids)[0] for ids in asked])

    def _read(self, states: Any, ids: list[int]) -> tuple[Any, Any]:
        logits, states = self.decoder.prefill(states, ids)
        return np.asarray(logits), states

    def _generate(self, states: Any, first: int, position: int, tokens: int) -> tuple[int, Any]:
        made = 0
        for part, after in self.decoder.generate(
            states, first, position + 1, limit=tokens, sampling=GREEDY, stops=NONE
        ):
            made += len(part)
            states = after
        return made, states

    def _steps(self, states: Any, chosen: list[int], position: int, tokens: int) -> int:
        limits = [tokens] * len(chosen)
        made = self.decoder.generate_batch(
            states, chosen, [position + 1] * len(chosen), limits=limits, sampling=GREEDY, stops=NONE
        )
        return sum(len(one) for part, _ in made for one in part)

    def _bytes(self, position: int, tokens: int) -> int:
        """What a token in the middle of those generated reads."""
        return step_bytes(
            self.engine.source.model,
            {**self.decoder.operands, **self.decoder.decode.states},
            position + (tokens + 1) // 2,
            item_bytes=self.item_bytes,
        )
