"""The command `inspect`: a split in numbers, and every stage from a spec to a compiled step."""

import argparse
import re
from pathlib import Path
from typing import Any

from tp.commands import UsageError, check_writable, say

MOST = 4096  # chips, as of a running model
COMPARED = (1, 8)  # widths, where none is named
MOST_WIDTHS = 64  # in one table
MOST_DRAWN = 256  # chips on a page
STAGES = {
    "spec": "what programs are authored from, as JSON",
    "text": "the program of a decode step: the joint text, or one chip's",
    "manifest": "who holds which slice, and where the chips meet, as JSON",
    "rolled": "the program with its chips and layers as loops",
    "kernels": "the path that each statement takes here, and why others declined",
    "hlo": "the compiled step of one chip",
}
UNITS = {
    **{"": 1, "b": 1},
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}


def inspect(args: argparse.Namespace) -> None:
    """Print a split: its numbers for people or as JSON, or one of its stages."""
    from tp.outline import open_outline

    _check(args)
    outline = open_outline(args.model)
    if args.stage is not None:
        _print_stage(args, outline)
    else:
        _print_numbers(args, outline)


def _check(args: argparse.Namespace) -> None:
    """Refuse options that say nothing of what is asked for."""
    one = args.chips is not None and len(args.chips) == 1
    if args.stage not in (None, "spec") and args.chips is not None and not one:
        raise UsageError(f"--{args.stage} is of one width: found {len(args.chips)} in --chips")
    if args.chip is not None and args.stage not in ("text", "manifest"):
        raise UsageError("--chip goes with --text or --manifest, which a chip has of its own")
    if args.layer is not None and args.stage in (None, "spec"):
        raise UsageError(
            "--layer goes with a stage: --text, --manifest, --rolled, --kernels, --hlo"
        )
    if args.json and args.stage is not None:
        raise UsageError(f"--json is of the numbers: leave out --{args.stage}")
    if args.html is not None:
        _check_page(args)


def _check_page(args: argparse.Namespace) -> None:
    if args.stage is not None:
        raise UsageError(f"--html is of the numbers: leave out --{args.stage}")
    if args.chips is None or len(args.chips) > 1:
        raise UsageError("--html draws one width: wanted it in --chips, as in --chips 5")
    if args.chips[0] > MOST_DRAWN:
        raise UsageError(f"--html draws up to {MOST_DRAWN} chips, found {args.chips[0]} in --chips")
    check_writable(Path(args.html))


def _print_numbers(args: argparse.Namespace, outline: Any) -> None:
    from tp.columns import json_lines
    from tp.split_json import weighed_json, widths_json
    from tp.weighing import weigh

    widths = args.chips or tuple(range(COMPARED[0], COMPARED[1] + 1))
    weighed = weigh(
        outline,
        widths,
        context=context_of(outline, args.ctx),
        cache_bytes={"f32": 4, "f16": 2}[args.cache],
        memory=args.memory,
    )
    if args.html is not None:
        _write_page(Path(args.html), weighed[0])
    if args.json:
        found = weighed_json(weighed[0]) if len(weighed) == 1 else widths_json(weighed)
        print(json_lines(found), end="")
        return
    from tp.split_text import comparison, report

    print(report(weighed[0]) if len(weighed) == 1 else comparison(weighed))


def _write_page(path: Path, weighed: Any) -> None:
    from tp.picture.page import page

    size = path.write_bytes(page(weighed).encode("utf-8", errors="replace"))
    say(f"wrote {path}, {size / 1000:.0f} kB")


def context_of(outline: Any, asked: int | None) -> int:
    """The context that was asked for, or that a running model would have."""
    from tp.outline import CONTEXT

    made_for = outline.context
    if asked is None:
        return CONTEXT if made_for is None else min(CONTEXT, made_for)
    if made_for is not None and asked > made_for:
        raise UsageError(
            f"a context of {asked} was asked for; this model was made for 1 to {made_for}"
        )
    return asked


def _print_stage(args: argparse.Namespace, outline: Any) -> None:
    from tp.stages import STAGES, Asked

    asked = Asked(
        outline=outline,
        chips=1 if args.chips is None else args.chips[0],
        context=context_of(outline, args.ctx),
        layer=args.layer,
        chip=args.chip,
    )
    print(STAGES[args.stage](asked), end="")


# --- What an option may be


def widths(text: str) -> tuple[int, ...]:
    """Widths as `3`, `1-8`, `1,2,5` and mixes of these, in the order given, each once."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last <= MOST:
            wanted = f"wanted chips from 1 to {MOST}, as in 3, 1-8 or 1,2,5"
            raise argparse.ArgumentTypeError(f"{text!r}: {wanted}")
        found |= dict.fromkeys(range(first, last + 1))
    if len(found) > MOST_WIDTHS:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted at most {MOST_WIDTHS} widths at once")
    return tuple(found)


def size(text: str) -> int:
    """Bytes as `24GiB`, `16 GB` or a plain number."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?i?b?)\s*", text.lower())
    unit = None if match is None else UNITS.get(match[2])
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted bytes, as in 24GiB or 16GB")
    return int(float(match[1]) * unit)
