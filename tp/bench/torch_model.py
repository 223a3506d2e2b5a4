"""Measures Hugging Face transformers on torch, which may be another Python's.

Standard library alone but for those packages.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tp.bench.orders import SHORT, Answer, obey, random_ids, timed


def main() -> None:
    """Obey orders on the model that the first argument describes."""
    asked = json.loads(sys.argv[1])

    def start() -> tuple[Answer, Mapping[str, Callable[..., Answer]]]:
        run = TorchModel(**asked)
        return {"version": run.version}, {"prefill": run.prefill, "decode": run.decode}

    obey(start)


class TorchModel:
    """A causal model of transformers with the cache it makes itself."""

    def __init__(self, *, model: str, threads: int, vocabulary: int, dtype: str) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, **where
        ).eval()
        self.torch = torch
        self.vocabulary = vocabulary
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def prefill(self, *, tokens: int, seed: int = 0) -> Answer:
        """Read a prompt into an empty cache, until a token can be chosen."""
        ids = random_ids(tokens, self.vocabulary, seed)
        seconds, _ = timed(lambda: self._step(ids, None))
        return {"tokens": tokens, "seconds": seconds}

    def decode(self, *, tokens: int, position: int = SHORT) -> Answer:
        """Greedy tokens after the first that follows a prompt of `position` tokens."""
        first, cache = self._step(random_ids(position, self.vocabulary), None)

        def made() -> None:
            token, held = first, cache
            for _ in range(tokens):
                token, held = self._step([token], held)

        seconds, _ = timed(made)
        return {"tokens": tokens, "seconds": seconds}

    def _step(self, ids: list[int], cache: Any) -> tuple[int, Any]:
        """The best token after some, and the cache that holds them."""
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            return int(out.logits[0, -1].argmax()), out.past_key_values
