"""A split for people: what each chip holds and reads, where they meet, what it is worth."""

from collections.abc import Iterator, Sequence

from tp.columns import amount, count, memory, plural, table
from tp.matrices import Matrix
from tp.split import Holding
from tp.weighing import FARTHEST, Weighed, fewest, wasted

FEW = 16  # chips that get a row each; of more, those alike share one

HEADINGS = {
    "query_heads": "query heads",
    "kv_heads": "kv heads",
    "value_heads": "value heads",
    "key_heads": "key heads",
    "ffn_columns": "ffn columns",
    "expert_columns": "experts' columns",
    "shared_columns": "shared columns",
    "vocabulary": "vocabulary",
}
ONE = {
    "query_heads": "query head",
    "kv_heads": "kv head",
    "value_heads": "value head",
    "key_heads": "key head",
    "ffn_columns": "ffn column",
    "expert_columns": "experts' column",
    "shared_columns": "shared column",
    "vocabulary": "vocabulary row",
}


def title(weighed: Weighed) -> str:
    """The model in a line."""
    outline, alone = weighed.outline, weighed.alone.given
    made_for = "" if outline.context is None else f", made for {outline.context:,} tokens"
    return (
        f"{outline.name}: {outline.family}, {plural(len(outline.spec.layers), 'layer')} of width "
        f"{outline.spec.d:,}, {count(weighed.alone.weights)} weights "
        f"({amount(alone.weight_bytes)} in q8){made_for}"
    )


# --- One width


def report(weighed: Weighed) -> str:
    """One width: a table of the chips, and what follows from it."""
    heading = f"{plural(weighed.chips, 'chip')}, a context of {plural(weighed.context, 'token')}"
    return "\n".join(
        (
            title(weighed),
            heading,
            "",
            _chips(weighed),
            "",
            *_remarks(weighed),
            *_layers(weighed),
        )
    )


def _chips(weighed: Weighed) -> str:
    rows = [_row(weighed, str(chip), held) for chip, held in enumerate(weighed.split.chips)]
    first = "chip"
    if weighed.chips > FEW:
        first, rows = "chips", _grouped(rows)
    heading = (
        first,
        *HEADINGS.values(),
        *("weights", "padding", "cache", "a token", "states", "reads", "of all"),
        "operations",
    )
    return table(_without_empty([heading, *rows, _row(weighed, "given", weighed.split.given)]))


def _row(weighed: Weighed, name: str, holding: Holding) -> list[str]:
    given, alone = weighed.split.given, weighed.alone.given
    padding = given.weight_bytes - holding.weight_bytes
    return [
        name,
        *(f"{holding.counts[count]:,}" for count in HEADINGS),
        amount(holding.weight_bytes),
        "" if holding is given else amount(padding),
        amount(holding.cache_bytes),
        amount(holding.cache_bytes_per_token),
        amount(holding.state_bytes),
        amount(holding.cost.reads),
        f"{100 * holding.cost.reads / alone.cost.reads:.1f} %",
        count(holding.cost.operations),
    ]


def _grouped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows that are alike once, with how many there are; those of most chips first."""
    found: dict[tuple[str, ...], int] = {}
    for _, *cells in rows:
        found[tuple(cells)] = found.get(tuple(cells), 0) + 1
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [[f"{number:,}", *cells] for cells, number in ordered]


def _without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The table without columns that say nothing of any chip."""
    empty = ("", "0", "0 B")
    kept = [i for i in range(len(rows[0])) if any(row[i] not in empty for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


# --- What follows


def _remarks(weighed: Weighed) -> Iterator[str]:
    yield from _meetings(weighed)
    yield from _worth(weighed)
    yield from _fit(weighed)
    yield from _on_cpu(weighed)


def _meetings(weighed: Weighed) -> Iterator[str]:
    if weighed.chips == 1:
        yield "One chip meets no other."
        return
    found: dict[tuple[str, str, int], int] = {}
    for c in weighed.split.collectives:
        found[c.kind, c.name, c.bytes] = found.get((c.kind, c.name, c.bytes), 0) + c.count
    parts = [
        f"{plural(times, kind)} of {amount(size)} ({name})"
        for (kind, name, size), times in found.items()
    ]
    yield (
        f"A token's step has {', '.join(parts)}: each chip sends {amount(weighed.sent)} at least."
    )


def _worth(weighed: Weighed) -> Iterator[str]:
    if weighed.chips == 1:
        return
    yield (
        f"Balance: the chip that reads most reads {weighed.split.balance:.2f} times the mean. All "
        "are given as much as the one that has most, the rest is padding."
    )
    yield (
        f"{plural(weighed.chips, 'chip')} are at best {weighed.speed_up:.2f} times as fast as one "
        f"by bytes read, as for one token after another, {weighed.speed_up_by_operations:.2f} "
        "times by operations, as for a long prompt."
    )


def _fit(weighed: Weighed) -> Iterator[str]:
    if weighed.memory is None or weighed.longest is None:
        return
    given, has = weighed.split.given, memory(weighed.memory)
    needs = f"a chip is given {amount(given.bytes)} at a context of {weighed.context:,}"
    if weighed.fits:
        yield f"Fits {has} a chip: {needs}; a context of up to {weighed.longest:,} does."
        return
    ways = [f"a context of up to {weighed.longest:,}"] if weighed.longest > 0 else []
    more = fewest(weighed)
    ways += [] if more is None else [f"{more:,} chips"]
    remedy = " or ".join(ways) or f"no number of chips up to {FARTHEST}"
    yield f"Does not fit {has} a chip: {needs}; {remedy} would do."


def _on_cpu(weighed: Weighed) -> Iterator[str]:
    from kernels.native.library import why_not

    missing = why_not()
    floats = [m.name for m in weighed.split.matrices if _is_float(m, native=missing is None)]
    if not floats:
        return
    size = weighed.split.cpu_bytes(native=missing is None)
    which = ", ".join(dict.fromkeys(floats)) if missing is None else f"all of it ({missing})"
    yield f"Simulated on this CPU, float32 holds {which}: {amount(size)} of weights a chip."


def _is_float(matrix: Matrix, *, native: bool) -> bool:
    return matrix.is_weight and matrix.dtype == "q8" and not (native and matrix.tiles)


def _layers(weighed: Weighed) -> Iterator[str]:
    """The kinds of layers, where there are several."""
    kinds = weighed.split.kinds
    if len(kinds) > 1:
        each = (f"{_numbers(k.layers)} {k.mixer}, {k.feed_forward}" for k in kinds)
        yield f"Kinds of layers: {'; '.join(each)}."


def _numbers(layers: Sequence[int]) -> str:
    """The numbers of layers, runs of them by their ends."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(parts if len(parts) <= 8 else [*parts[:6], "...", parts[-1]])


# --- Several widths


def comparison(widths: Sequence[Weighed]) -> str:
    """Several widths in a table, and those of them that gain nothing."""
    one = widths[0]
    heading = (
        *("chips", "weights a chip", "padding", "cache", "reads", "of one", "balance"),
        *("speed-up", "by operations", "folds", "joins", "bytes sent", "longest context"),
    )
    rows = [heading, *(_width_row(weighed) for weighed in widths)]
    about = f"a context of {plural(one.context, 'token')}"
    if one.memory is not None:
        about += f", {memory(one.memory)} a chip"
    return "\n".join((title(one), about, "", table(_without_empty(rows)), "", *_notes(widths)))


def _width_row(weighed: Weighed) -> list[str]:
    split, given = weighed.split, weighed.split.given
    padding = weighed.chips * given.weight_bytes - sum(c.weight_bytes for c in split.chips)
    alone = weighed.alone.given.cost.reads
    return [
        f"{weighed.chips:,}",
        amount(given.weight_bytes),
        f"{100 * padding / (weighed.chips * given.weight_bytes):.1f} %",
        amount(given.cache_bytes),
        amount(given.cost.reads),
        f"{100 * given.cost.reads / alone:.1f} %",
        f"{split.balance:.2f}",
        f"{weighed.speed_up:.2f}",
        f"{weighed.speed_up_by_operations:.2f}",
        f"{weighed.folds:,}" if weighed.chips > 1 else "0",
        f"{weighed.joins:,}" if weighed.chips > 1 else "0",
        amount(weighed.sent),
        _longest(weighed),
    ]


def _longest(weighed: Weighed) -> str:
    if weighed.longest is None:
        return ""
    return f"{weighed.longest:,}" if weighed.longest > 0 else "none"


def _notes(widths: Sequence[Weighed]) -> Iterator[str]:
    at, found = {weighed.chips: weighed for weighed in widths}, wasted(widths)
    if not found and len(widths) > 1:
        yield "On more chips, each reads less."
    for chips, (fewer, counts) in found.items():
        still = [plural(at[chips].split.given.counts[c], ONE[c]) for c in counts]
        why = ", ".join(still) or "what every chip holds whole"
        yield f"{chips} chips gain nothing over {fewer}: a chip still has {why}."
