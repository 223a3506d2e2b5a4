"""The command `check`: whether a model says the same at every width, and if not, where it parts."""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tp.columns import json_lines
from tp.commands import UsageError, check_writable, say
from tp.inspect_command import widths

WIDTHS = (1, 2, 3, 5, 8)  # where none is named
TOKENS = 24  # of a built-in prompt
ROWS = 256  # of the caches, where the prompts need no more

# Prose, code, and what few tokenizers have words for.
PROMPTS = (
    "The ferry left at seven, when the harbour was already full of small boats going out to fish,"
    " and the gulls that had followed them turned back towards the town. ",
    "def total(shapes):\n    found = 0.0\n    for shape in shapes:\n"
    "        found += shape.width * shape.height  # square metres\n    return found\n\n",
    "Zażółć gęślą jaźń: 東京 → Αθήνα, 9 527,5 km; Łódź ∈ {51.77, 19.45}; 7 × 8 = 56. ",
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The command line of `check`, but for what it has in common with other commands."""
    check_parser = subparsers.add_parser(
        "check",
        help="compare widths",
        description="Run the same prompts at several widths, at once and token by token, and "
        "compare logits with those of one chip. Where they differ, the first statement at fault "
        "is named. Exit status 0: all is within the tolerance; 1: something is not.",
    )
    check_parser.set_defaults(command=check)
    check_parser.add_argument(
        "--chips",
        type=widths,
        metavar="N",
        help="1-8 or 1,2,5 (default: 1,2,3,5,8, or those that there are devices for)",
    )
    check_parser.add_argument(
        "--prompt", dest="prompts", action="append", metavar="TEXT", help="may be given again"
    )
    check_parser.add_argument(
        "--tolerance",
        type=tolerance,
        default=1e-3,
        metavar="T",
        help="of the logits' standard deviation (default: 1e-3)",
    )
    check_parser.add_argument(
        "--against",
        choices=("transformers",),
        help="compare with it too, in this Python, on the values that are held",
    )
    check_parser.add_argument(
        "--json", metavar="FILE", help="write all numbers; `-`: standard output"
    )
    return check_parser


def check(args: argparse.Namespace) -> int:
    """Compare the widths of a model and print how far apart they are; the status is the verdict."""
    from tp.check.told import numbers, told
    from tp.check.widths import Check
    from tp.source import open_source

    _check_arguments(args)
    source = open_source(args.model)
    prompts = args.hosts.from_first("the prompts", lambda: _prompts(args, source))
    context = _context(args, source, prompts)
    checking = Check(
        source=source,
        prompts=prompts,
        widths=_widths(args),
        context=context,
        tolerance=args.tolerance,
        other=_other(args, source, prompts, context),
        said=say,
        hosts=args.hosts,
    )
    report = checking.report()
    asked = {"model": str(source.path), "tolerance": args.tolerance, "prompts": prompts}
    text = "\n".join(told(report, args.tolerance, prompts))
    if args.hosts.first:
        _print(text, args.json, asked | numbers(report))
    return 0 if report.holds else 1


def _print(text: str, where: str | None, numbers: dict[str, Any]) -> None:
    """The table on standard output, unless that is where the numbers go."""
    if where == "-":
        say(text)
        print(json_lines(numbers), end="")
        return
    print(text)
    if where is not None:
        Path(where).write_text(json_lines(numbers))


# --- What is asked for


def tolerance(text: str) -> float:
    """A part of a standard deviation."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 0, as in 1e-3")
    return found


def _check_arguments(args: argparse.Namespace) -> None:
    """Say no before the work is done, not after."""
    given = args.prompts or args.ids
    if given and args.tokens is not None:
        raise UsageError("--tokens is of the built-in prompts: leave out --prompt and --ids")
    if args.against is not None and args.hosts.processes > 1:
        raise UsageError("--against runs the other program in one process: leave it out")
    if args.json not in (None, "-") and args.hosts.first:
        check_writable(Path(args.json))


def _prompts(args: argparse.Namespace, source: Any) -> list[list[int]]:
    """The prompts given; or built-in ones, through the tokenizer, if there is one."""
    given = [source.spelling().encode(text, special=True) for text in args.prompts or ()]
    given += args.ids or []
    if given:
        return given
    tokens = TOKENS if args.tokens is None else args.tokens
    if source.tokenizer is None:
        return list(_drawn(source.model.spec.vocab, tokens))
    return [_spelled(source.tokenizer, text, tokens) for text in PROMPTS]


def _drawn(vocabulary: int, tokens: int) -> Iterator[list[int]]:
    import numpy as np

    for seed in range(len(PROMPTS)):
        yield np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()


def _spelled(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """So many tokens of a text, said again until there are."""
    found: list[int] = []
    times = 1
    while len(found) < tokens:
        found = tokenizer.encode(text * times, special=True)
        times *= 2
    return found[:tokens]


def _context(args: argparse.Namespace, source: Any, prompts: Sequence[Sequence[int]]) -> int:
    from tp.engine import check_fits

    longest = max(map(len, prompts))
    context = min(source.model.context, max(longest, ROWS)) if args.ctx is None else args.ctx
    for ids in prompts:
        check_fits(source.model, ids, context)
    return context


def _widths(args: argparse.Namespace) -> tuple[int, ...]:
    """The widths named, or those of the usual ones that there are devices for."""
    from tp.launch import LaunchError, devices

    # One chip is run by each process alone; of others every process has one at least.
    widths = tuple(n for n in WIDTHS if n == 1 or n >= args.hosts.processes)
    if args.chips is not None:
        devices(max(args.chips), args.hosts)
        return args.chips
    try:
        devices(max(WIDTHS), args.hosts)
    except LaunchError:
        most = devices(hosts=args.hosts).chips
        return tuple(n for n in widths if n <= most)
    return widths


def _other(
    args: argparse.Namespace, source: Any, prompts: Sequence[Sequence[int]], context: int
) -> Any:
    if args.against is None:
        return None
    from tp.check.transformers_model import check_there, run_transformers
    from tp.check.wholes import whole_operands

    check_there(source)
    return run_transformers(source, whole_operands(source, context), prompts, said=say)
