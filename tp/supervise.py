"""Processes of one run that are started together, and end together."""

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread, Timer
from typing import Any, BinaryIO

from tp.hosts import LostError

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OWN_END = 5.0  # seconds in which the others may end by themselves once one has
TERMINATION = 3.0  # and in which they may do so when they are asked to


@dataclass(frozen=True, kw_only=True)
class Start:
    """How to start one process. `held` keeps its standard input open, to be read as a sign of life.

    `descriptors` are those that it inherits.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] | None = None
    held: bool = False
    descriptors: tuple[int, ...] = ()


def supervise(starts: Sequence[Start], *, silent: bool) -> int:
    """Run processes side by side and return the exit status of all.

    The first has this process's input and output. What the others say is marked with their
    numbers, or kept back where `silent`. When one ends, the others are ended soon after; signals
    are passed on. The status is that of the first to fail, 5 where a signal ended one.
    """
    running = _Running(silent=silent)
    with running.passing_signals_on():
        for start in starts:
            running.start(start)
        return running.wait()


@dataclass(kw_only=True)
class _Running:
    silent: bool
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: queue.Queue[int] = field(default_factory=queue.Queue)
    order: list[int] = field(default_factory=list)
    copying: list[Thread] = field(default_factory=list)
    signalled: int | None = None

    def start(self, start: Start) -> None:
        number = len(self.processes)
        stdin = subprocess.PIPE if start.held else subprocess.DEVNULL
        output = subprocess.DEVNULL if self.silent else subprocess.PIPE
        process = subprocess.Popen(
            start.argv,
            env=start.environment,
            pass_fds=start.descriptors,
            stdin=None if number == 0 else stdin,
            stdout=None if number == 0 else output,
            stderr=None if number == 0 else subprocess.STDOUT,
        )
        self.processes.append(process)
        Thread(target=self._wait_for, args=(number,), daemon=True).start()
        if process.stdout is not None:
            copy = Thread(target=_marked, args=(number, process.stdout), daemon=True)
            copy.start()
            self.copying.append(copy)

    def wait(self) -> int:
        """Until one ends, and then until all have."""
        self.order.append(self.ended.get())
        self._gather_ends(OWN_END)
        for process in self._alive():
            process.terminate()
        self._gather_ends(TERMINATION)
        for process in self._alive():
            process.kill()
        self._gather_ends(TERMINATION)
        for copy in self.copying:
            copy.join(1)
        return self._status()

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: Any) -> None:
        self.signalled = number
        if number == signal.SIGTERM:
            self._send(number)
        else:
            # A terminal has sent it to all already, and once is enough.
            Timer(0.3, self._send, (number,)).start()

    def _send(self, number: int) -> None:
        for process in self._alive():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [p for n, p in enumerate(self.processes) if n not in self.order]

    def _wait_for(self, number: int) -> None:
        self.processes[number].wait()
        self.ended.put(number)

    def _gather_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive():
            try:
                self.order.append(self.ended.get(timeout=max(0, deadline - time.monotonic())))
            except queue.Empty:
                return

    def _status(self) -> int:
        statuses = [(number, self.processes[number].returncode) for number in self.order]
        if self.signalled is not None:
            return 128 + self.signalled
        for number, status in statuses:
            if status < 0:
                name = signal.Signals(-status).name
                print(f"anyfold: process {number} was ended by {name}", file=sys.stderr)
                return LostError.status
            if status > 0:
                return status
        return 0


def _marked(number: int, lines: BinaryIO) -> None:
    """Copy what a process says to standard error, each line with its number."""
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        print(f"[{number}] {text}", file=sys.stderr, flush=True)
