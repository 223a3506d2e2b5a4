"""What the command `anyfold bench` does: measures, then prints a table or JSON."""

import argparse
import json
import os
import sys
from pathlib import Path

from tp.commands import UsageError, say


def bench(args: argparse.Namespace) -> None:
    """Measure a model at several widths, beside other programs where those are here."""
    from tp.bench.facts import facts_of
    from tp.bench.machine import disturbances, pinned
    from tp.bench.measure import Asked, Measuring

    rivals = _rivals(args)
    with pinned(args.threads) as threads:
        asked = Asked(
            model=args.model,
            chips=args.chips,
            threads=threads,
            context=args.ctx,
            prompt_tokens=args.prompt_tokens,
            tokens=args.tokens,
            repeats=args.repeats,
            batch=args.batch,
            position=args.position,
            cold=args.cold,
            check=args.check,
            rivals=rivals,
            cache=_cache(),
        )
        measuring = Measuring(asked=asked, say=lambda text: say(f"anyfold: {text}"))
        measuring.all()
    facts = facts_of(measuring)
    if args.json:
        for line in disturbances(facts):
            say(f"anyfold: {line}")
        print(json.dumps(facts, indent=2))
        return
    from tp.bench.report import shown

    print(shown(facts))


def _rivals(args: argparse.Namespace) -> dict[str, str]:
    """The rivals that are here, with the Python of each; of the others, what is lacking is said.

    Raises UsageError where a Python was named for a rival, and lacks it.
    """
    from tp.bench.rivals import why_not

    named = {"llama.cpp": args.llama_python, "transformers": args.transformers_python}
    found: dict[str, str] = {}
    for rival in args.against:
        python = named[rival] or sys.executable
        why = why_not(rival, python, args.model)
        if why is None:
            found[rival] = python
        elif named[rival] is not None:
            raise UsageError(why)
        else:
            say(f"anyfold: {why}")
    return found


def rivals(text: str) -> list[str]:
    """The value of `--against`: names of rivals, each once."""
    from tp.bench.rivals import RIVALS

    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: wanted some of {', '.join(RIVALS)}"
        )
    return names


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "anyfold" / "q8_0"
