"""The command `convert`: a model as a q8 store, or a store re-read by its digests."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from tp.columns import amount
from tp.commands import UsageError, say

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "convert",
        help="keep a model quantised, to load it sooner",
        description="Write a model as a q8 store, which is a MODEL too. Stopped, it goes on from "
        "there when it is run again.",
    )
    parser.set_defaults(command=convert)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what is to be converted")
    parser.add_argument("out", metavar="OUT", nargs="?", help="a directory to make")
    parser.add_argument(
        "--shard-size",
        type=shard_size,
        metavar="SIZE",
        help="about how large each file may get (default: 1GB)",
    )
    parser.add_argument("--verify", metavar="OUT", help="re-read a store by its digests instead")


def convert(args: argparse.Namespace) -> None:
    """Write a q8 store, go on with one that was cut off, or re-read one."""
    if args.verify is not None:
        if args.model is not None:
            raise UsageError("--verify re-reads a store: leave out MODEL and OUT")
        _verify(Path(args.verify))
        return
    if args.out is None:
        raise UsageError("convert wants MODEL and OUT, or --verify OUT")
    _convert(args.model, Path(args.out), args.shard_size)


def _convert(model: str, out: Path, shard_size: int | None) -> None:
    from tp import store
    from tp.source import open_source

    source = open_source(model)
    progress = _Progress("converting")

    def resumes(there: int, of: int) -> None:
        progress.clear()
        say(f"{out}: goes on after {amount(there)} of {amount(of)}")

    try:
        written = store.convert(
            source,
            out,
            model=model,
            shard_size=shard_size,
            progress=progress,
            resumes=resumes,
        )
    finally:
        progress.clear()
    shards = f"{written.shards} shard{'' if written.shards == 1 else 's'}"
    size = f"{shards}, {amount(written.bytes)}"
    say(f"{out}: was whole already: {size}" if written.whole else f"wrote {size} to {out}")


def _verify(out: Path) -> None:
    from tp.store_file import verify

    progress = _Progress("reading")
    try:
        files, total = verify(out, progress)
    finally:
        progress.clear()
    say(f"{out}: all {files} files, {amount(total)}, are as they were written")


class _Progress:
    """One line that is written over as bytes pass by; nothing where nobody looks."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.shown = sys.stderr.isatty()

    def __call__(self, what: str, done: int, of: int) -> None:
        if self.shown:
            line = f"{self.verb} {amount(done)} of {amount(of)}, {what:<30}"
            say(f"\r{line}", end="")

    def clear(self) -> None:
        if self.shown:
            say("\r" + " " * 70 + "\r", end="")


def shard_size(text: str) -> int:
    """A size such as `1GB`, `500 MB` or a number of bytes."""
    found = re.fullmatch(r"\s*([0-9]+)\s*([KMGT]?B)?\s*", text.upper())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a size, as in 1GB or 500MB")
    return int(found[1]) * _UNITS[found[2] or "B"]
