"""What a contender's process does: obeys orders, a line of JSON each, and answers in kind.

Standard library alone, since contenders may run in other Pythons than this one's.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

# A prompt's length where only what comes after it is measured.
SHORT = 16

Answer = dict[str, Any]


def obey(load: Callable[[], tuple[Answer, Mapping[str, Callable[..., Answer]]]]) -> None:
    """Load once, then answer orders `{"do": NAME, ...}` until the input ends.

    The first answer says what was loaded. A mistake, in loading or later, is answered as
    `{"error": ...}`. Whatever prints to standard output lands beside it.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(said: Answer) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        about, orders = load()
        answer(about)
        for line in sys.stdin:
            order = json.loads(line)
            answer(_done(orders, order.pop("do"), order))
    except Exception as error:
        answer({"error": str(error) or type(error).__name__, "kind": type(error).__name__})
        raise


def _done(orders: Mapping[str, Callable[..., Answer]], name: str, order: Answer) -> Answer:
    if name == "memory":
        return {"peak_bytes": peak_bytes()}
    return orders[name](**order)


def random_ids(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """The same token ids for every contender."""
    draw = Random(f"{seed} {count}")
    return [draw.randrange(vocabulary) for _ in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that some work took, and what came of it."""
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def peak_bytes() -> int:
    """The most memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, which counts what the process was before it became this program.
        kilobytes = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(kilobytes.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
