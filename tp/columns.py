"""How things are written: tables in columns, bytes and counts in words, JSON in lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PREFIXES = "kMGTPE"
BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first row a heading, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def amount(size: int) -> str:
    """Bytes for people."""
    scaled, prefix = _scaled(size)
    return f"{scaled} {prefix}B"


def memory(size: int) -> str:
    """The memory of a chip, in binary units where it is a round number of them."""
    unit = next((u for u in reversed(BINARY) if size >= BINARY[u]), None)
    if unit is None or size % (BINARY[unit] // 2) != 0:
        return amount(size)
    return f"{size / BINARY[unit]:,g} {unit}"


def count(number: int) -> str:
    """A large number in thousands, millions and so on."""
    scaled, prefix = _scaled(number)
    return f"{scaled} {prefix}".rstrip()


def _scaled(number: int) -> tuple[str, str]:
    power = next((p for p in range(len(PREFIXES)) if number < 1000 ** (p + 1)), len(PREFIXES))
    if power == 0:
        return str(number), ""
    return f"{number / 1000**power:,.1f}", PREFIXES[power - 1]


def plural(number: int, word: str) -> str:
    """A number of things."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def json_lines(value: Mapping[str, Any]) -> str:
    """An object as JSON to be read and compared: a key a line, and an item of a list of objects."""
    return "\n".join(_lines(value, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, Mapping) and (depth == 0 or any(map(_is_long, value.values()))):
        keys, values, ends = [f"{json.dumps(key)}: " for key in value], [*value.values()], "{}"
    elif _is_long(value):
        keys, values, ends = [""] * len(value), [*value], "[]"
    else:
        yield json.dumps(value)
        return
    yield ends[0]
    for number, (key, inner) in enumerate(zip(keys, values, strict=True), start=1):
        first, *rest = _lines(inner, depth + 1)
        lines = [f"{key}{first}", *rest]
        lines[-1] += "," if number < len(values) else ""
        yield from (f" {line}" for line in lines)
    yield ends[1]


def _is_long(value: Any) -> bool:
    """Whether a value is a list of objects, each of which is worth a line."""
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)
