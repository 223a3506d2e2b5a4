"""A check of devices on its way: items in turn, as long as the time lasts, and the report."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.device_findings import Finding, page

# Past this much of the time an item hangs, and all ends.
PATIENCE = 1.25


@dataclass(frozen=True)
class Item:
    """Something to check."""

    part: str
    name: str
    work: Callable[[], list[Finding]]


@dataclass(kw_only=True)
class Check:
    """A check on its way, and its report, written anew after every item."""

    minutes: float
    report: Path | None
    about: str
    started: float = field(default_factory=time.perf_counter)
    findings: list[Finding] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    now: Item | None = None

    def run(self, items: Sequence[Item], *, share: float = 1.0) -> list[Item]:
        """Work on items while so much of the time lasts; those that no longer fit are returned."""
        left_out = []
        for item in items:
            begun = time.perf_counter()
            left = share * self.minutes * 60 - (begun - self.started)
            if left < self.longest.get(item.part, 0.0):
                left_out.append(item)
                continue
            self.now = item
            found = _done(item)
            took = time.perf_counter() - begun
            self.longest[item.part] = max(took, self.longest.get(item.part, 0.0))
            for finding in found:
                print(f"{finding.line} ({took:.0f} s)", flush=True)
            self.findings += found
            self.write([])
        return left_out

    def write(self, skipped: Sequence[str], *, complete: bool = False) -> None:
        """Write the report as it stands."""
        if self.report is None:
            return
        took = f"in {(time.perf_counter() - self.started) / 60:.0f} minutes on {self.about}"
        self.report.write_text(page(self.findings, skipped, by=took, complete=complete))

    def give_up(self) -> None:
        """Leave what was found, and end, whatever hangs."""
        assert self.now is not None
        problem = f"not done after {PATIENCE * self.minutes:g} minutes, and left"
        self.findings.append(_failed(self.now, problem))
        self.write([])
        print(self.findings[-1].line, flush=True)
        os._exit(1)


@contextmanager
def watched(check: Check) -> Iterator[None]:
    """Give up, whatever hangs, when a check is far beyond its time."""
    watch = threading.Timer(PATIENCE * 60 * check.minutes, check.give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _done(item: Item) -> list[Finding]:
    try:
        return item.work()
    except Exception as error:  # whatever a device's compiler or runtime raises
        said = (str(error).strip().splitlines() or [""])[0]
        return [_failed(item, f"{type(error).__name__}: {said}")]
    finally:
        gc.collect()  # a model goes before the next one comes


def _failed(item: Item, problem: str) -> Finding:
    return Finding(part=item.part, cells=(item.name,), holds=False, problem=problem)
