"""One of several processes that run checkpoints on their chips together, and say what came of it.

    python -m tests.hosts_worker PORT PROCESSES PROCESS CHIPS OUT CHECKPOINT ...

Each process writes `OUT/CHECKPOINT.PROCESS.json`.
"""

import json
import random
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tp.decoder import Decoder
from tp.engine import Conversation, Engine, load_source
from tp.gather import Place, gather
from tp.hosts import Hosts
from tp.sample import Sampling
from tp.show import process_json
from tp.source import open_source

FOLDER = Path(__file__).parent / "checkpoints"
CONTEXT = 64
TALKING = ("llama",)  # what reads its prompt in chunks too, and draws tokens
DRAWN = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=7)


def talk(engine: Engine, ids: list[int], tokens: int, sampling: Sampling) -> list[int]:
    """The tokens that an engine says after a prompt."""
    made = Conversation(engine=engine).tokens(ids, max_tokens=tokens, sampling=sampling)
    return list(made)


def by_steps(decoder: Decoder, ids: list[int], tokens: int) -> tuple[np.ndarray, list[int]]:
    """The logits after a prompt, and the likeliest tokens after it: one program, compiled once."""
    states, made, after = decoder.fresh(), [], np.empty(0)
    for position in range(1, len(ids) + tokens):
        token = ids[position - 1] if position <= len(ids) else made[-1]
        logits, states = decoder.step(states, token, position)
        if position == len(ids):
            after = np.asarray(logits)[0]
        if position >= len(ids):
            made.append(int(np.asarray(logits).argmax()))
    return after, made


def main(arguments: list[str]) -> None:
    port, processes, process, chips = map(int, arguments[:4])
    out = Path(arguments[4])
    random.seed(process)
    np.random.seed(process)  # what a process draws by itself must not matter
    place = Place(host="127.0.0.1", port=port, processes=processes, process=process, chips=chips)
    hosts = Hosts(gather(place))
    try:
        run(hosts, out, arguments[5:])
        hosts.finish()
    except Exception:
        hosts.leave(1, traceback.format_exc())


def run(hosts: Hosts, out: Path, names: list[str]) -> None:
    """Run some checkpoints, one after another."""
    for name in names:
        engine = load_source(open_source(str(FOLDER / name)), context=CONTEXT, hosts=hosts)
        decoder = engine.decoder
        decoder.chunks = (16,)
        with np.load(FOLDER / name / "expected.npz") as expected:
            ids, count = expected["input_ids_0"].tolist(), len(expected["greedy_0"])
        logits, greedy = by_steps(decoder, ids, count)
        found = {
            "logits": logits.tolist(),
            "greedy": greedy,
            "drawn": talk(engine, ids, count, DRAWN) if name in TALKING else None,
            "receipt": process_json(engine),
            "chips": [asdict(held) for held in engine.receipt.chips],
        }
        (out / f"{name}.{hosts.process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
