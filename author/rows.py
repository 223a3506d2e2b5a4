"""Rows of a step: those that share a state are written at once, those that do not one by one."""

from collections.abc import Callable
from typing import Any

from author import statements as say
from author.names import Name
from author.writer import Scope


def by_state(
    scope: Scope, taken: tuple[str, ...], result: str, width: int, write: Callable[[Scope], object]
) -> Name:
    """Write what reads or changes a state, once for each state that the rows stand in.

    Where each row has its own, the rows of the `taken` values are handed to `write`, and its
    `result`, a row of `width` columns, is put back into a stack.
    """
    if scope.rows.stacked != "per_sequence":
        write(scope)
        return scope.value(result)
    stack = scope.writer.tensor(scope.value(result), scope.rows.count, width)
    for number, row in enumerate(scope.split(), start=1):
        take(scope, row, number, *taken)
        write(row)
        scope.writer.say(say.SetRow(number, stack, row.value(result)))
    return stack


def take(scope: Scope, row: Scope, number: int, *bases: str) -> None:
    """Bind one row of stacked values."""
    for base in bases:
        row.let(base, say.Row(number, scope.value(base)))


def keep(row: Scope, base: str, x: Name) -> Name:
    """Write rows into a cache at their position; the cache."""
    assert row.position is not None
    cache = row.state(base)
    write = say.SetRows if row.stacked else say.SetRow
    row.writer.say(write(row.position, cache, x))
    return cache


def attending(row: Scope, **fields: Any) -> say.Attention | say.CausalAttention:
    """Attention from the position of one row, or of each of the rows that share a state."""
    if not row.stacked:
        return say.Attention(position=row.position, **fields)
    assert row.position is not None
    return say.CausalAttention(position=row.position, **fields)
