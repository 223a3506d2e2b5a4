"""Runs several processes side by side for a test, and sees that none outlives it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 80.0  # seconds until a process that should have ended is a failure


@contextmanager
def several(commands: Sequence[Sequence[str]], **options: str) -> Iterator[list[subprocess.Popen]]:
    """The processes of some commands, each with a hash seed of its own; killed at the end."""
    started = []
    try:
        for number, command in enumerate(commands):
            environment = {**os.environ, "PYTHONHASHSEED": str(number + 1), **options}
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a process that ends by itself."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def python(*arguments: str) -> list[str]:
    """A command for this Python."""
    return [sys.executable, *arguments]


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has ended meanwhile
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Sequence[int], within: float) -> list[int]:
    """Those that are still alive after so many seconds."""
    deadline = time.monotonic() + within
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
