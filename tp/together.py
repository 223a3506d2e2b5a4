"""A command run by several processes: which this one is, who prints, and how all of it ends."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from tp.commands import UsageError
from tp.gather import HostsError, Place, gather
from tp.hosts import Alone, Hosts, LostError

STATUSES = (
    "One command a process; the first reads and prints for all. Exit status 3: they did not "
    "gather; 4: they differ; 5: one was lost."
)

Told = Callable[[BaseException], tuple[int, str | None]]  # of an error: exit status and message


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a command takes that several processes can run."""
    several = parser.add_argument_group("several processes", STATUSES)
    several.add_argument(
        "--hosts",
        action="store_true",
        dest="detect",
        help="one of the processes of SLURM, MPI, Kubernetes or a TPU pod, as JAX finds out",
    )
    several.add_argument(
        "--coordinator", type=_address, metavar="HOST:PORT", help="where process 0 listens"
    )
    several.add_argument("--processes", type=_counted(1), metavar="P", help="how many there are")
    several.add_argument("--process", type=_counted(0), metavar="I", help="which this is, from 0")
    several.add_argument(
        "--chips-here",
        type=_counted(1),
        metavar="N",
        help="how many of the chips are this process's (default: an even share)",
    )
    several.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds in which all have to come, and a silent process is lost (default: 60)",
    )
    # A launcher's: the process ends when this descriptor reads as ended.
    several.add_argument("--until-eof", type=int, metavar="FD", help=argparse.SUPPRESS)


@contextmanager
def together(args: argparse.Namespace, told: Told) -> Iterator[Alone]:
    """What a command does with the other processes of its run, of which it is one.

    Only the first reads and prints. An error ends every process, each with a status and a
    message of its own; nothing returns, since JAX would wait for those that are gone.
    """
    if "coordinator" not in args:
        yield Alone()
        return
    if args.until_eof is not None:
        Thread(target=_end_with, args=(args.until_eof,), daemon=True).start()
    place = place_of(args)
    if place is None:
        yield Alone()
        return
    hosts = Hosts(gather(place), errors=sys.stderr)
    try:
        _print_only_results(hosts)
        hosts.agree(_settings(args))
        yield hosts
        sys.stdout.flush()
        hosts.finish()
    except BaseException as error:
        hosts.leave(*told(error))


# What may differ from process to process: a path on its host, and what the first alone uses.
PATHS = {"model", "out", "receipt", "json"}
OWN = PATHS | {
    *("prompt", "prompts", "ids", "coordinator", "process", "chips_here", "until_eof", "hosts")
}


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """The options that have to be the same in every process."""
    named = {name: value for name, value in vars(args).items() if name not in OWN}
    named["command"] = args.command.__name__
    return {f"--{name.replace('_', '-')}": str(value) for name, value in sorted(named.items())}


def _end_with(descriptor: int) -> None:
    """End this process when whoever started it has gone, which closes what it held open."""
    with suppress(OSError):
        while os.read(descriptor, 1):
            pass
    with suppress(OSError):  # who read this may have gone too
        print("anyfold: whoever started this process has gone", file=sys.stderr, flush=True)
    os._exit(LostError.status)


def _print_only_results(hosts: Hosts) -> None:
    """Leave standard output to the results of the first process.

    Libraries below Python write there too; and what the others would say, the first says.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    results = os.dup(1)
    os.dup2(nowhere, 1)
    if hosts.first:
        sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors="replace")
    else:
        sys.stdout = sys.stderr = os.fdopen(nowhere, "w")


# --- Which process this is


def place_of(args: argparse.Namespace) -> Place | None:
    """What the options say; None for a run of one process.

    Raises UsageError for options that do not go together.
    """
    by_hand = {"--coordinator": args.coordinator, "--processes": args.processes}
    by_hand["--process"] = args.process
    missing = [name for name, value in by_hand.items() if value is None]
    if args.detect and len(missing) < len(by_hand):
        raise UsageError("--hosts finds out what --coordinator, --processes and --process say")
    if args.detect:
        return _found(args)
    if len(missing) == len(by_hand):
        return None
    if missing:
        raise UsageError(f"{', '.join(missing)} must be given too")
    if args.process >= args.processes:
        raise UsageError(
            f"--process {args.process}: {args.processes} processes count from 0 to "
            f"{args.processes - 1}"
        )
    host, port = args.coordinator
    return Place(
        host=host,
        port=port,
        processes=args.processes,
        process=args.process,
        timeout=args.timeout,
        chips=args.chips_here,
    )


def _found(args: argparse.Namespace) -> Place:
    """What JAX finds out from SLURM, MPI, Kubernetes or a TPU pod."""
    from jax._src.clusters import ClusterEnv

    from_mpi = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ)
    detect = ClusterEnv.auto_detect_unset_distributed_params
    timeout = int(args.timeout)
    try:
        found = detect(None, None, None, None, None, timeout)
        if found[0] is None and from_mpi:
            found = detect(None, None, None, None, "mpi4py", timeout)
    except (RuntimeError, KeyError, ValueError, ImportError) as error:
        raise HostsError(f"--hosts: JAX cannot tell which process this is: {error}") from None
    address, processes, process, local = found
    if address is None or processes is None or process is None:
        raise UsageError(
            "--hosts: no SLURM, MPI, Kubernetes or TPU pod is seen here"
            + ("; for this MPI, pip install mpi4py would do" if from_mpi else "")
            + "; --coordinator, --processes and --process say it by hand"
        )
    host, port = address_of(address)
    return Place(
        host=host,
        port=port,
        processes=processes,
        process=process,
        timeout=args.timeout,
        chips=args.chips_here,
        local_chips=None if local is None else tuple(local),
    )


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r}: wanted HOST:PORT, as in 10.0.0.1:9000")
    return host.removeprefix("[").removesuffix("]"), int(port)


# --- The command line


def _address(text: str) -> tuple[str, int]:
    try:
        return address_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counted(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from {least}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1 <= found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted seconds from 1 to 86400")
    return found
