"""The command `launch`: all processes of a run started on this machine, and ended together."""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tp.commands import UsageError
from tp.door import LOOPBACK, free_port
from tp.supervise import Start, supervise

ROOT = Path(__file__).parent.parent
COMMANDS = ("run", "chat", "logits", "check")  # that several processes can run
OURS = ("--hosts", "--coordinator", "--processes", "--process", "--chips-here", "--until-eof")


def add_parser(subparsers: Any) -> None:
    """The command line of `launch`."""
    launch = subparsers.add_parser(
        "launch",
        help="start a command in several processes here",
        description="Start a command in several processes on this machine: all are ended when "
        "one ends. The first reads and prints; what the others say is marked with their numbers.",
        usage="anyfold launch --processes P [--chips-per-process N] -- COMMAND ...",
    )
    launch.set_defaults(command=launch_here)
    launch.add_argument("--processes", type=_positive, required=True, metavar="P")
    add_launch_options(launch)
    launch.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """What `launch` and `scripts/launch` have in common."""
    parser.add_argument(
        "--chips-per-process",
        type=_several,
        metavar="N",
        help="one number, or one for each process: 3,2 (default: an even share of --chips)",
    )
    parser.add_argument("--timeout", metavar="S", help="as the command has it")
    parser.add_argument(
        "--silent", action="store_true", help="keep back what all but the first process say"
    )


def launch_here(args: argparse.Namespace) -> None:
    """Start the processes on loopback and exit with the status of all."""
    chips = chips_of_each(args.chips_per_process, args.processes)
    rest = command_of(args.rest[args.rest[:1] == ["--"] :])
    address = f"{LOOPBACK}:{free_port()}"
    # It reads as ended in every process, even if this one is killed.
    alive, held = os.pipe()
    starts = []
    for process in range(args.processes):
        options = process_options(args, address, args.processes, process, chips)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), environment.get("PYTHONPATH")])
        )
        environment |= _accelerators(chips, process)
        argv = [sys.executable, "-P", "-m", "tp.cli", *rest, *options, "--until-eof", str(alive)]
        starts.append(Start(argv=argv, environment=environment, descriptors=(alive,)))
    status = supervise(starts, silent=args.silent)
    os.close(held)
    raise SystemExit(status)


def command_of(command: list[str]) -> list[str]:
    """What stands after `--`, if several processes can run it; UsageError otherwise."""
    if not command or command[0] not in COMMANDS:
        found = repr(command[0]) if command else "nothing"
        raise UsageError(f"found {found} after --, wanted one of {', '.join(COMMANDS)}")
    taken = [option for option in OURS if option in command]
    if taken:
        raise UsageError(f"{', '.join(taken)}: launch says that to each process by itself")
    return command


def chips_of_each(counts: Sequence[int] | None, processes: int) -> list[int] | None:
    """How many chips each process brings, where that was said; UsageError for another length."""
    if counts is None:
        return None
    if len(counts) == 1:
        return [counts[0]] * processes
    if len(counts) != processes:
        raise UsageError(
            f"--chips-per-process has {len(counts)} numbers for {processes} processes: "
            "wanted one, or one for each"
        )
    return list(counts)


def process_options(
    args: argparse.Namespace, address: str, processes: int, process: int, chips: list[int] | None
) -> list[str]:
    """What one process is told about itself and the others."""
    options = ["--coordinator", address, "--processes", str(processes), "--process", str(process)]
    if chips is not None:
        options += ["--chips-here", str(chips[process])]
    if args.timeout is not None:
        options += ["--timeout", args.timeout]
    return options


def _accelerators(chips: list[int] | None, process: int) -> dict[str, str]:
    """Which accelerators of the machine are a process's, in the words of JAX; CPUs ignore it."""
    if chips is None:
        return {}
    begin = [0, *accumulate(chips)][process]
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(begin, begin + chips[process])))}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1")
    return int(text)


def _several(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]
