"""What a load read and where it went, kept while threads are at it."""

import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax

from tp.checkpoint import Checkpoint


@dataclass(kw_only=True)
class Held:
    """What one device was given; what all hold alike is read once, and not counted as read here.

    In `seconds` something was read or laid out for it alone, by one thread or several.
    """

    bytes_read: int = 0
    bytes_held: int = 0
    bytes_padding: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Receipt:
    """What a load read and where it went; bytes are counted at the file and on the devices.

    `peak_host_bytes` is the most that the process ever had in memory, devices that share it
    included.
    """

    chips: list[Held]
    seconds: float = 0.0
    peak_host_bytes: int = 0
    shared_bytes_read: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        """All bytes that were read from the checkpoint."""
        return self.shared_bytes_read + sum(c.bytes_read for c in self.chips)


class Books:
    """Enters into a receipt what threads do; `done` closes it."""

    def __init__(self, receipt: Receipt, checkpoint: Checkpoint) -> None:
        self.receipt = receipt
        self.checkpoint = checkpoint
        self._started = time.perf_counter()
        self._writing = Lock()
        self._at_work: Counter[int] = Counter()  # threads, by chip
        self._since: dict[int, float] = {}

    @contextmanager
    def work_for(self, chip: int) -> Iterator[None]:
        """What is read and how long it takes, for one chip alone."""
        before = self.checkpoint.bytes_read_here
        with self._writing:
            self._since.setdefault(chip, time.perf_counter())
            self._at_work[chip] += 1
        try:
            yield
        finally:
            with self._writing:
                held = self.receipt.chips[chip]
                held.bytes_read += self.checkpoint.bytes_read_here - before
                self._at_work[chip] -= 1
                if self._at_work[chip] == 0:
                    held.seconds += time.perf_counter() - self._since.pop(chip)

    @contextmanager
    def work_for_all(self) -> Iterator[None]:
        """What is read once for every chip."""
        before = self.checkpoint.bytes_read_here
        yield
        with self._writing:
            self.receipt.shared_bytes_read += self.checkpoint.bytes_read_here - before

    def given(self, chips: Iterable[int], part: Any, padding: float = 0.0) -> None:
        """What these chips were given each; `padding` is the share of it that holds nothing."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(part))
        with self._writing:
            for chip in chips:
                self.receipt.chips[chip].bytes_held += size
                self.receipt.chips[chip].bytes_padding += round(size * padding)

    def done(self) -> Receipt:
        """The receipt, with the time since the load began."""
        self.receipt.seconds = time.perf_counter() - self._started
        self.receipt.peak_host_bytes = peak_host_bytes()
        return self.receipt


def peak_host_bytes() -> int:
    """The most that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
