"""Several sequences at a time, each with a cache of its own: what follows each of some prompts."""

from collections.abc import Sequence

import numpy as np

from tp.decoder import Decoder
from tp.generation import NumbersError
from tp.sample import Sampling


def side_by_side(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int | None,
    sampling: Sampling,
    stops: frozenset[int],
) -> list[list[int]]:
    """The tokens that follow each prompt: at most `limit`, or with its stop token, or until its
    context is full."""
    rooms = [decoder.context - len(ids) for ids in prompts]
    wanted = [room if limit is None else min(room, limit) for room in rooms]
    states = decoder.fresh_batch(len(prompts))
    tokens: list[int] = []
    for slot, ids in enumerate(prompts):
        logits, one = decoder.prefill(decoder.fresh(), ids)
        states = decoder.insert(states, slot, one)
        if np.isnan(np.asarray(logits)).any():
            raise NumbersError(f"after prompt {slot + 1}")
        tokens.append(decoder.first_token(logits, len(ids), sampling))
    made = [[t] if n > 0 else [] for t, n in zip(tokens, wanted, strict=True)]
    left = [0 if t in stops else n - 1 for t, n in zip(tokens, wanted, strict=True)]
    positions = [len(ids) + 1 for ids in prompts]
    parts = decoder.generate_batch(
        states, tokens, positions, limits=left, sampling=sampling, stops=stops
    )
    for part, _ in parts:
        for so_far, more in zip(made, part, strict=True):
            so_far += more
    return made
