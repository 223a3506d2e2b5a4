"""Measures llama.cpp through the package xllamacpp, which may be another Python's.

Standard library alone but for that package.
"""

import json
import sys
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from tp.bench.orders import SHORT, Answer, obey, random_ids


def main() -> None:
    """Obey orders on the model that the first argument describes."""
    asked = json.loads(sys.argv[1])

    def start() -> tuple[Answer, Mapping[str, Callable[..., Answer]]]:
        run = LlamaCpp(**asked)
        return {"version": run.version}, {"prefill": run.prefill, "decode": run.decode}

    obey(start)


class LlamaCpp:
    """llama.cpp's server with one slot; what is not said here is as it comes."""

    def __init__(self, *, model: str, threads: int, context: int, vocabulary: int) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context
        params.n_parallel = 1
        params.cache_ram_mib = 0  # no prompts kept beside the cache: memory, and time to copy
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        self.vocabulary = vocabulary
        self.version = f"xllamacpp {xllamacpp.__version__}"

    def prefill(self, *, tokens: int, seed: int = 0) -> Answer:
        """Read a prompt into an empty cache, until a token can be chosen."""
        timings = self._complete(random_ids(tokens, self.vocabulary, seed), 1, keep=False)
        return {"tokens": timings["prompt_n"], "seconds": timings["prompt_ms"] / 1000}

    def decode(self, *, tokens: int, position: int = SHORT) -> Answer:
        """Greedy tokens after the first that follows a prompt of `position` tokens."""
        ids = random_ids(position, self.vocabulary)
        # The server's clock starts with the first token, which the prompt's logits gave.
        timings = self._complete(ids, tokens + 1, keep=True)
        made = timings["predicted_n"] - 1
        return {"tokens": made, "seconds": timings["predicted_ms"] / 1000}

    def _complete(self, ids: list[int], count: int, *, keep: bool) -> dict[str, Any]:
        """The server's own clock readings, which leave out the way to it and back."""
        body = {
            "prompt": ids,
            "n_predict": count,
            "ignore_eos": True,
            "cache_prompt": keep,
            "samplers": ["temperature"],  # at 0: the best token, and no work for other samplers
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["timings"]
