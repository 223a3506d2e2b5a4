"""One cell of the grid: a checkpoint at a width, by three ways, against transformers' logits."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tp import launch
from tp.decoder import Decoder
from tp.engine import load

WAYS = ("prefill", "decode", "batch")
LIMIT = 1e-3  # of the logits' standard deviation


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How far one way of computing is from the reference at worst, and whether its words agree.

    `error` is the largest difference of a logit over the standard deviation of the reference;
    `greedy` how many of the tokens that follow greedily are the reference's.
    """

    family: str
    chips: int
    way: str
    error: float
    greedy: int
    of: int

    @property
    def holds(self) -> bool:
        """Whether the cell is green."""
        return self.error < LIMIT and self.greedy == self.of


@dataclass(frozen=True)
class _Prompt:
    ids: list[int]
    logits: np.ndarray
    greedy: list[int]


def cells(
    checkpoint: Path, chips: int, ways: Sequence[str] = WAYS, kernels: str = "auto"
) -> Iterator[Cell]:
    """The cells of a checkpoint at a width."""
    decoder = load(str(checkpoint), chips=chips, kernels=kernels).decoder
    decoder.chunks = (32,)
    expected = np.load(checkpoint / "expected.npz")
    prompts = [
        _Prompt(
            expected[f"input_ids_{i}"].tolist(),
            expected[f"logits_{i}"],
            expected[f"greedy_{i}"].tolist(),
        )
        for i in (0, 1)
    ]
    run = {"prefill": _prefill, "decode": _decode, "batch": _batch}
    for way in ways:
        error, greedy, of = run[way](decoder, prompts)
        yield Cell(family=checkpoint.name, chips=chips, way=way, error=error, greedy=greedy, of=of)


def _prefill(decoder: Decoder, prompts: list[_Prompt]) -> tuple[float, int, int]:
    """Each prompt with what follows it read in chunks; the next token is the likeliest one."""
    error, greedy = 0.0, 0
    for prompt in prompts:
        found = decoder.score([*prompt.ids, *prompt.greedy[:-1]])
        at = len(prompt.ids)
        error = max(error, _distance(found[:at], prompt.logits))
        greedy += _agreement(found[at - 1 :].argmax(axis=1), prompt.greedy)
    return error, greedy, _total(prompts)


def _decode(decoder: Decoder, prompts: list[_Prompt]) -> tuple[float, int, int]:
    """Each prompt a token at a time, and then the tokens that it chooses itself."""
    error, greedy = 0.0, 0
    for prompt in prompts:
        states, found, made = decoder.fresh(), [], []
        for position in range(1, len(prompt.ids) + len(prompt.greedy)):
            token = prompt.ids[position - 1] if position <= len(prompt.ids) else made[-1]
            length = max(position, len(prompt.ids))
            logits, states = decoder.step(states, token, position, length=length)
            found.append(np.asarray(logits)[0])
            if position >= len(prompt.ids):
                made.append(int(found[-1].argmax()))
        error = max(error, _distance(np.stack(found[: len(prompt.ids)]), prompt.logits))
        greedy += _agreement(made, prompt.greedy)
    return error, greedy, _total(prompts)


def _batch(decoder: Decoder, prompts: list[_Prompt]) -> tuple[float, int, int]:
    """Three sequences side by side, at positions of their own, each with a start read alone."""
    rows = [prompts[0], prompts[1], prompts[1]]
    ids = [[*p.ids, *p.greedy[:-1]] for p in rows]
    positions = [3, 5, 1]
    states = decoder.fresh_batch(3)
    for slot, start in enumerate(positions):
        one = decoder.fresh()
        for position, token in enumerate(ids[slot][:start], start=1):
            _, one = decoder.step(one, token, position, length=len(rows[slot].ids))
        states = decoder.insert(states, slot, one)
    found: list[dict[int, np.ndarray]] = [{}, {}, {}]
    for _ in range(max(map(len, ids))):
        # A sequence that has ended stays where it is: it must not disturb the others.
        positions = [min(p + 1, len(i)) for p, i in zip(positions, ids, strict=True)]
        tokens = [i[p - 1] for i, p in zip(ids, positions, strict=True)]
        lengths = [max(p, len(row.ids)) for p, row in zip(positions, rows, strict=True)]
        logits, states = decoder.step_batch(states, tokens, positions, lengths=lengths)
        for row, position in enumerate(positions):
            found[row].setdefault(position, np.asarray(logits)[row])
    error, greedy = 0.0, 0
    for prompt, seen in zip(rows, found, strict=True):
        at = len(prompt.ids)
        first = min(seen)
        stacked = np.stack([seen[p] for p in range(first, at + 1)])
        error = max(error, _distance(stacked, prompt.logits[first - 1 :]))
        after = [int(seen[p].argmax()) for p in range(at, at + len(prompt.greedy))]
        greedy += _agreement(after, prompt.greedy)
    return error, greedy, _total(rows)


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / wanted.std())


def _agreement(made: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = zip(made, wanted, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))


def _total(prompts: list[_Prompt]) -> int:
    return sum(len(p.greedy) for p in prompts)


def main(arguments: Sequence[str]) -> None:
    """Print the cells of a checkpoint at some widths, a line of JSON each."""
    checkpoint, kernels, *widths = arguments
    launch.devices(max(map(int, widths)))
    for chips in map(int, widths):
        for cell in cells(Path(checkpoint), chips, kernels=kernels):
            print(json.dumps(asdict(cell)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
