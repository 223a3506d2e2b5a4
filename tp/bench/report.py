"""What a measurement found, for people: a table for a terminal, and one for a page."""

from collections.abc import Callable, Iterator
from functools import partial

from tp.bench.facts import Facts
from tp.bench.machine import disturbances
from tp.bench.measure import named
from tp.show import amount, table

Cell = Callable[[Facts], str]

# What a run is allowed: weights and caches and a part of them, and so many bytes for the rest.
_SHARE, _BYTES = 1.3, 400_000_000


def shown(facts: Facts) -> str:
    """The facts as a person at a terminal reads them."""
    rows = _rows(facts)
    width = max(len(row[0]) for row in rows)
    aligned = [(row[0].ljust(width), *row[1:]) for row in rows]
    lines = [line.rstrip() for line in table(aligned).splitlines()]
    return "\n".join([_title(facts), *lines, *_notes(facts)])


def page(facts: Facts) -> str:
    """The facts as Markdown."""
    heading, *rows = _rows(facts)
    lines = [heading, ("---",) + ("---:",) * (len(heading) - 1), *rows]
    drawn = [f"| {' | '.join(cell.strip() for cell in line)} |" for line in lines]
    notes = "; ".join(_notes(facts))
    return "\n".join([f"{_title(facts)}.", "", *drawn, "", f"{notes[0].upper()}{notes[1:]}."])


def _title(facts: Facts) -> str:
    model = facts["model"].rpartition("/")[2]
    threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    return (
        f"{model} with {threads} on {facts['cpu']}, a context of {facts['context']:,}; medians of "
        f"{facts['repeats']}"
    )


def _rows(facts: Facts) -> list[tuple[str, ...]]:
    """A heading, then a line for each thing that was measured, contenders side by side."""
    columns = {named(width["chips"]): width for width in facts["widths"]} | facts["against"]
    lines = (
        (name, *(_cell(cell, found) for found in columns.values())) for name, cell in _lines(facts)
    )
    return [("", *columns), *(line for line in lines if any(line[1:]))]


def _cell(cell: Cell, found: Facts) -> str:
    try:
        return cell(found)
    except KeyError:  # not measured of this contender, or not asked for
        return ""


def _lines(facts: Facts) -> Iterator[tuple[str, Cell]]:
    def speed(title: str, name: str) -> Iterator[tuple[str, Cell]]:
        yield f"{title}, tokens/s", partial(_spread, name=name)
        for rival in facts["against"]:
            yield f"  times {rival}", partial(_times, rival=rival, name=name)

    yield from speed(f"reading {facts['prompt_tokens']:,}", "prefill_tokens_per_second")
    yield "  largest error / deviation", lambda f: f"{f['prefill_error']:.1e}"
    yield from speed(f"making {facts['tokens']:,}", "decode_tokens_per_second")
    yield "  memory reads, GB/s", partial(_spread, name="memory_read_gb_per_second")
    yield "  share of that", lambda f: f"{f['memory_share']:.0%}"
    if facts["batch"] is not None:
        yield from speed(f"a batch of {facts['batch']}", "batch_decode_tokens_per_second")
        yield "  times one sequence", lambda f: f"{f['batch_times_single']:.2f}"
    if facts["position"] is not None:
        yield from speed(f"at position {facts['position']:,}", "position_decode_tokens_per_second")
        yield "  share of memory's speed", lambda f: f"{f['position_memory_share']:.0%}"
    yield "first token of a command, s", partial(_spread, name="first_token_seconds")
    yield "  nothing compiled, s", partial(_spread, name="first_token_compiling_seconds")
    yield "peak memory", lambda f: amount(int(f["peak_host_bytes"]))
    yield "  share of what is allowed", lambda f: f"{f['peak_host_bytes'] / _allowed(f):.0%}"


def _spread(found: Facts, name: str) -> str:
    """A median, and how far least and largest are from each other, half of it to a side."""
    middle = found[name]
    shown = f"{middle:,.1f}" if middle >= 10 else f"{middle:.2f}"
    if name not in found["spread"]:
        return shown
    least, largest = found["spread"][name]
    return f"{shown} ±{(largest - least) / 2 / middle:.0%}"


def _times(found: Facts, *, rival: str, name: str) -> str:
    return f"{found['times'][rival][name]:.2f}"


def _allowed(found: Facts) -> float:
    return _SHARE * (found["weight_bytes"] + found["cache_bytes"]) + _BYTES


def _notes(facts: Facts) -> Iterator[str]:
    first, largest = facts["load_average"]
    other = facts["other_work"]
    said = "" if other is None else f"; other work took {other:.1%} of the cores"
    yield f"load average {first:.1f} as it began, {largest:.1f} at most{said}"
    yield from disturbances(facts)
    yield from dict.fromkeys(found["version"] for found in facts["against"].values())
