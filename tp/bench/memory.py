"""Measures how fast this machine reads memory: the limit of a step that reads every weight."""

import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tp.bench.orders import Answer, obey, timed

# Far more than caches hold, for all threads together.
BYTES = 512 << 20
PASSES = 4


def main() -> None:
    """Obey orders with the threads that the first argument names."""
    asked = json.loads(sys.argv[1])

    def start() -> tuple[Answer, Mapping[str, Callable[..., Answer]]]:
        probe = Probe(asked["threads"])
        return {}, {"read": probe.read}

    obey(start)


class Probe:
    """A buffer for each thread, far beyond the caches."""

    def __init__(self, threads: int) -> None:
        # Ones: memory that was never written is one page of zeros, read again and again.
        self.buffers = [np.ones(BYTES // threads // 8, np.int64) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads)

    def read(self) -> Answer:
        """Read all of it a few times; the fastest pass is what the memory can do."""
        passes = [timed(self._pass)[0] for _ in range(PASSES)]
        return {"bytes": sum(b.nbytes for b in self.buffers), "seconds": min(passes)}

    def _pass(self) -> None:
        # NumPy gives its lock away meanwhile, and one `or` a number leaves a core waiting for
        # memory: sums, maxima and BLAS dot products come to the same speed.
        list(self.pool.map(np.bitwise_or.reduce, self.buffers))


if __name__ == "__main__":
    main()
