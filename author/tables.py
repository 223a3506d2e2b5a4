"""The tables that the host computes and a program declares: rotations, temperatures, ones."""

from author import statements as say
from author.names import Name
from author.spec import Rope, rotation_of
from author.writer import Scope, Writer


def declare_rotations(writer: Writer, ctx: int | None, layer: int | None = None) -> None:
    """Declare the tables of every rotation, or of one layer's; with `ctx`, a row a position."""
    only = None if layer is None else rotation_of(writer.spec.layers[layer])
    for number, rope in enumerate(writer.rotations):
        if layer is None or rope == only:
            for base in ("cos", "sin"):
                name = _table(base, number, cached=ctx is not None)
                writer.float_matrix(name, 1 if ctx is None else ctx, rope.dims // 2)


def rotated(scope: Scope, base: str, x: Name, rope: Rope, heads: int) -> Name:
    """A value turned by a rotation."""
    number = scope.writer.rotations.index(rope)
    return _turned(scope, base, x, _pair("", number, scope), heads)


def tempered(scope: Scope, base: str, x: Name, head_width: int, heads: int) -> Name:
    """Queries scaled by position: a turn whose cosine is the factor and whose sine is 0."""
    half = head_width // 2
    tables = _pair("t", half, scope)
    for name in tables:
        scope.writer.float_matrix(name, 1 if scope.rows.ctx is None else scope.rows.ctx, half)
    return _turned(scope, base, x, tables, heads)


def ones(writer: Writer, width: int) -> Name:
    """A row of ones."""
    return writer.float_matrix(Name(f"ones{width}"), 1, width)


def _turned(scope: Scope, base: str, x: Name, tables: tuple[Name, Name], heads: int) -> Name:
    cos, sin = tables
    return scope.let(base, say.Rope(x, cos, sin, heads, scope.position))


def _pair(prefix: str, number: int, scope: Scope) -> tuple[Name, Name]:
    cached = scope.rows.ctx is not None
    return _table(f"{prefix}cos", number, cached), _table(f"{prefix}sin", number, cached)


def _table(base: str, number: int, cached: bool) -> Name:
    return Name(f"{base}{'c' if cached else ''}{number}")
