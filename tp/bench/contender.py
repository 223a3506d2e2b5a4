"""A process that is measured, as its parent sees it: started once, then asked in turns."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Any

# Bytes in the unit that systems count a process's memory in.
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024

ROOT = str(Path(__file__).resolve().parent.parent.parent)

_OURS = "import sys; sys.path.insert(0, {root!r}); from {module} import main; sys.exit(main())"
# Another Python may see this module of ours, but nothing else that lies here or is installed here.
_THEIRS = (
    "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; from {module} import main; "
    "sys.path.remove({root!r}); sys.exit(main())"
)


class BenchError(ValueError):
    """A measurement that cannot be made: of what, why, and what would do."""


@dataclass(kw_only=True)
class Contender:
    """One program on one model, loaded and waiting; `about` is what it said of itself."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    about: dict[str, Any] = field(default_factory=dict)

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """The answer to an order; raises BenchError with what the program says instead."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: why is read below
            print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        return f"ended with status {status}: {_last_line(self.log) or 'it said nothing'}"

    def close(self) -> None:
        """End it; it holds nothing worth keeping."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


def start(name: str, module: str, argument: Any, *, python: str | None = None) -> Contender:
    """Start a module of `tp.bench`, in another Python if one is named, and hear what it loaded.

    Raises BenchError where it loads nothing.
    """
    boot = (_OURS if python is None else _THEIRS).format(root=ROOT, module=f"tp.bench.{module}")
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    try:
        process = subprocess.Popen(
            [python or sys.executable, "-c", boot, json.dumps(argument)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    except OSError as error:
        raise BenchError(f"{name}: {python}: {error.strerror}; wanted a Python") from None
    contender = Contender(name=name, process=process, log=log)
    try:
        contender.about = contender.hear()
    except BaseException:
        contender.close()
        raise
    return contender


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the command: from its start to the first token on its output, and its memory."""

    first_token_seconds: float
    peak_bytes: int


def run_command(
    model: str,
    ids: Sequence[int],
    *,
    chips: int,
    context: int | None,
    tokens: int,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run `anyfold run` on a prompt to its end; raises BenchError with what it says if it fails."""
    command = [sys.executable, "-c", _OURS.format(root=ROOT, module="tp.cli"), "run", model]
    command += ["--ids", " ".join(map(str, ids)), "--max-tokens", str(tokens), "--ignore-eos"]
    command += ["--chips", str(chips), *([] if context is None else ["--ctx", str(context)])]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        started = perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdout is not None
        with process.stdout as output:
            # A token that spells no whole character shows as the end of what was said.
            output.read(1)
            seconds = perf_counter() - started
            output.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise BenchError(f"anyfold run: {_last_line(log) or process.returncode}")
    return Run(first_token_seconds=seconds, peak_bytes=used.ru_maxrss * MAXRSS_UNIT)


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().strip().splitlines()
    return lines[-1] if lines else ""
