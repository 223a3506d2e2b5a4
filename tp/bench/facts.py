"""What a measurement found, as JSON has it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tp.bench.machine import cpu_name
from tp.bench.measure import Measuring, named
from tp.bench.turns import medians, spreads, times

Facts = dict[str, Any]


def facts_of(measuring: Measuring) -> Facts:
    """All that was found: the first width's numbers at the top, each width's under `widths`.

    Numbers are medians over the turns, `spread` the least and the largest of each; `times` says
    how many times each rival's speeds ours are, `against` what the rivals' are.
    """
    asked, series = measuring.asked, measuring.series
    ours = {named(chips): chips for chips in asked.chips}
    theirs = [who for who in series if who not in ours]
    first = measuring.about[next(iter(ours))]
    widths = [
        {
            "chips": chips,
            **_numbers(series[name]),
            **{key: measuring.about[name][key] for key in ("weight_bytes", "cache_bytes")},
            "times": {rival: times(series[name], series[rival]) for rival in theirs},
        }
        for name, chips in ours.items()
    ]
    return {
        "model": first["path"],
        **{key: first[key] for key in ("context", "platform")},
        "simulated": any(measuring.about[name]["simulated"] for name in ours),
        "cpu": cpu_name(),
        "threads": asked.threads,
        "prompt_tokens": asked.prompt_tokens,
        "tokens": asked.tokens,
        "repeats": asked.repeats,
        "batch": asked.batch,
        "position": asked.position,
        **measuring.watch.about(),
        **widths[0],
        "widths": widths,
        "against": {
            rival: {"version": measuring.about[rival]["version"], **_numbers(series[rival])}
            for rival in theirs
        },
    }


def _numbers(found: Mapping[str, Sequence[float]]) -> Facts:
    return {**medians(found), "spread": spreads(found)}
