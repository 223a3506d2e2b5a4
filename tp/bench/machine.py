"""The machine that measures: its cores, its load, and whether other work disturbs."""

import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from tp.bench.contender import BenchError

PROC = Path("/proc")
# Shares of the cores' time above which a measurement is worth little.
_MUCH_OTHER_WORK = 0.05
_MUCH_IDLE_WORK = 0.02


@contextmanager
def pinned(threads: int | None) -> Iterator[int]:
    """This process and those it starts on as many cores as asked for (all it may use, if None).

    Yields how many. Raises BenchError for more than there are.
    """
    if not hasattr(os, "sched_getaffinity"):
        there = os.cpu_count() or 1
        if threads not in (None, there):
            raise BenchError(f"--threads {threads}: {platform.system()} lets no cores be chosen")
        yield there
        return
    allowed = os.sched_getaffinity(0)
    if threads is not None and threads > len(allowed):
        raise BenchError(
            f"--threads {threads}: wanted at most {len(allowed)}, as many as there are cores"
        )
    chosen = sorted(allowed)[:threads]
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_name() -> str:
    """What the machine calls its CPU."""
    info = PROC / "cpuinfo"
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@dataclass(kw_only=True)
class Watch:
    """What the cores did while contenders were measured one at a time, in seconds of a core.

    `other` is what neither contenders nor this process did; None where the system does not say.
    `waiting` is what contenders did when it was another's turn. `steal` is what a host took.
    """

    pids: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    other: float | None = 0.0
    steal: float = 0.0
    waiting: float = 0.0
    load: list[float] = field(default_factory=list)

    @contextmanager
    def turn_of(self, workers: Collection[str]) -> Iterator[None]:
        """Watch while these contenders work."""
        before, started = self._read(), perf_counter()
        yield
        after, seconds = self._read(), perf_counter() - started
        self.seconds += seconds
        self.load.append(os.getloadavg()[0])
        if before is None or after is None:
            self.other = None
            return
        spent = {name: after.own[name] - before.own[name] for name in before.own}
        stolen = after.steal - before.steal
        self.other = (self.other or 0.0) + after.busy - before.busy - sum(spent.values())
        self.steal += stolen
        self.waiting += sum(s for name, s in spent.items() if name not in (*workers, ""))

    def about(self) -> dict[str, Any]:
        """Shares of all cores' time, and the load average: first, largest."""
        whole = max(self.seconds * (os.cpu_count() or 1), 1e-9)
        return {
            "load_average": [self.load[0], max(self.load)] if self.load else [],
            "other_work": None if self.other is None else max(0.0, self.other / whole),
            "steal": self.steal / whole,
            "waiting_contenders": self.waiting / whole,
        }

    def _read(self) -> "_Times | None":
        if not (PROC / "stat").exists():
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        cpu = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = (int(n) / ticks for n in cpu[:8])
        own = {name: _process_seconds(pid, ticks) for name, pid in self.pids.items()}
        # This process, and those it started and waited for: the commands.
        own[""] = sum(os.times()[:4])
        return _Times(busy=user + nice + system + irq + soft, steal=steal, own=own)


@dataclass(frozen=True, kw_only=True)
class _Times:
    busy: float
    steal: float
    own: Mapping[str, float]


def _process_seconds(pid: int, ticks: int) -> float:
    """The time that a process's threads have had so far."""
    # The name in brackets may hold anything; the numbers follow its last bracket.
    numbers = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / ticks


def disturbances(about: Mapping[str, Any]) -> list[str]:
    """What to know before believing a measurement, a line each."""
    other, steal, waiting = about["other_work"], about["steal"], about["waiting_contenders"]
    lines = []
    if other is None:
        lines.append("whether other work disturbed is not known: this system does not say")
    elif other > _MUCH_OTHER_WORK:
        lines.append(
            f"other work took {other:.0%} of the cores: the speeds are too low, measure anew"
        )
    if steal > _MUCH_OTHER_WORK:
        lines.append(f"the machine's host took {steal:.0%} of the cores away")
    if waiting > _MUCH_IDLE_WORK:
        lines.append(f"contenders used {waiting:.0%} of the cores while it was another's turn")
    return lines
