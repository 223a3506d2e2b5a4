"""Frozen dataclasses as JSON and back, by their annotations; variants are told apart by `KIND`."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal


def written_record(value: Any) -> Any:
    """A record as JSON, every field present but those that are as their defaults say."""
    if isinstance(value, tuple):
        return [written_record(v) for v in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {
        f.name: written_record(getattr(value, f.name))
        for f in dataclasses.fields(value)
        if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
    }
    kind = _kind(type(value))
    return fields if kind is None else {"kind": kind, **fields}


def read_record(cls: type, obj: object, path: str) -> tuple[Any, tuple[str, ...]]:
    """The record that `written_record` wrote, and all that does not fit, each with its path."""
    reader = _Reader()
    value = reader.value(cls, obj, path)
    return value, tuple(reader.problems)


def _kind(cls: Any) -> str | None:
    return getattr(cls, "KIND", None)


class _Reader:
    """Reads JSON by type; what does not fit is noted, and read as None."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def wrong(self, path: str, found: object, wanted: str) -> None:
        self.problems.append(f"{path} is {_shown(found)}, wanted {wanted}")

    def value(self, hint: Any, obj: Any, path: str) -> Any:
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self.union(typing.get_args(hint), obj, path)
        if origin is tuple:
            return self.items(typing.get_args(hint), obj, path)
        if dataclasses.is_dataclass(hint):
            return self.record(hint, obj, path)
        return self.plain(hint, obj, path)

    def union(self, options: tuple[Any, ...], obj: Any, path: str) -> Any:
        """The option that fits: null, the record of that kind, or the one that is left."""
        if obj is None and types.NoneType in options:
            return None
        records = [o for o in options if dataclasses.is_dataclass(o)]
        others = [o for o in options if o not in records and o is not types.NoneType]
        if len(records) + len(others) == 1:
            return self.value((records + others)[0], obj, path)
        for record in records:
            if isinstance(obj, Mapping) and obj.get("kind") == _kind(record):
                return self.record(record, obj, path)
        if others and isinstance(obj, str) and obj in typing.get_args(others[0]):
            return obj
        words = [repr(w) for o in others for w in typing.get_args(o)]
        kinds = [f"an object of kind {_kind(r)!r}" for r in records]
        self.wrong(path, obj, " or ".join(words + kinds))
        return None

    def items(self, hints: tuple[Any, ...], obj: Any, path: str) -> Any:
        if not isinstance(obj, list):
            return self.wrong(path, obj, "a list")
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(obj)
        if len(hints) != len(obj):
            return self.wrong(path, obj, f"a list of {len(hints)}")
        pairs = zip(hints, obj, strict=True)
        return tuple(self.value(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(pairs))

    def record(self, cls: Any, obj: Any, path: str) -> Any:
        if not isinstance(obj, Mapping):
            return self.wrong(path, obj, "an object")
        hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
        known = {*hints} if _kind(cls) is None else {*hints, "kind"}
        before = len(self.problems)
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        self.problems += [f"{path}.{name} is missing" for name in needed if name not in obj]
        self.problems += [
            f"{path}.{name} is no field (there are {', '.join(hints)})"
            for name in obj
            if name not in known
        ]
        fields = {n: self.value(h, obj[n], f"{path}.{n}") for n, h in hints.items() if n in obj}
        return cls(**fields) if len(self.problems) == before else None

    def plain(self, hint: Any, obj: Any, path: str) -> Any:
        if typing.get_origin(hint) is Literal:
            words = typing.get_args(hint)
            return obj if obj in words else self.wrong(path, obj, " or ".join(map(repr, words)))
        wanted, fits = _PLAIN[hint]
        if not fits(obj):
            return self.wrong(path, obj, wanted)
        return hint(obj)


def _is_count(obj: object) -> bool:
    return isinstance(obj, int) and not isinstance(obj, bool) and obj >= 0


def _is_real(obj: object) -> bool:
    return isinstance(obj, int | float) and not isinstance(obj, bool) and math.isfinite(obj)


_PLAIN: dict[Any, tuple[str, Callable[[object], bool]]] = {
    bool: ("true or false", lambda obj: isinstance(obj, bool)),
    int: ("a count", _is_count),
    float: ("a number", _is_real),
}


def _shown(obj: object) -> str:
    text = repr(obj)
    return text if len(text) <= 60 else f"{text[:57]}..."
