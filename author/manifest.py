"""Which chip holds what, and where the chips' partial results meet; JSON to manifest and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from author.names import Name

Axis = Literal["rows", "cols"]
Ranges = tuple[tuple[int, int], ...]  # (start, length), in the order in which they are joined


@dataclass(frozen=True, kw_only=True)
class TpSlice:
    """The part of a whole matrix that one chip holds."""

    of: Name
    of_shape: tuple[int, int]
    axis: Axis
    ranges: Ranges

    @property
    def length(self) -> int:
        """The extent of the slice along its axis."""
        return sum(length for _, length in self.ranges)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the slice."""
        rows, cols = self.of_shape
        return (self.length, cols) if self.axis == "rows" else (rows, self.length)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A name that one chip alone holds; `slice` is None for a value computed there."""

    name: Name
    chip: int
    slice: TpSlice | None = None


@dataclass(frozen=True, kw_only=True)
class TpCollective:
    """`out` made of one partial a chip: their sum (`fold`), or their columns in order (`join`).

    `steps` are the names bound by the statements that the joint text spells it out in, the last
    of them `out`; a fold of a single partial has none.
    """

    out: Name
    partials: tuple[Name, ...]
    steps: tuple[Name, ...]
    kind: Literal["fold", "join"] = "fold"


@dataclass(frozen=True, kw_only=True)
class TpManifest:
    """The split of one program over `chips` chips; a name that is not placed is on every chip."""

    chips: int
    placed: tuple[Placed, ...] = ()
    collectives: tuple[TpCollective, ...] = ()
    by_name: Mapping[Name, Placed] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {p.name: p for p in self.placed})

    def chip_of(self, name: Name) -> int | None:
        """The chip that holds a name; None where every chip does."""
        placed = self.by_name.get(name)
        return None if placed is None else placed.chip

    def slice_of(self, name: Name) -> TpSlice | None:
        """The slice that a name is; None for a value, or a matrix that every chip holds."""
        placed = self.by_name.get(name)
        return None if placed is None else placed.slice


def manifest_to_json(manifest: TpManifest) -> dict[str, Any]:
    """The manifest as JSON; the steps of a collective stand under `folds` or `joins`."""
    return {
        "chips": manifest.chips,
        "placed": [
            {"var": str(p.name), "chip": p.chip, "slice": _slice_to_json(p.slice)}
            for p in manifest.placed
        ],
        "collectives": [
            {
                "out": str(c.out),
                "partials": [str(p) for p in c.partials],
                f"{c.kind}s": [str(s) for s in c.steps],
            }
            for c in manifest.collectives
        ],
    }


def manifest_from_json(json: Mapping[str, Any]) -> TpManifest:
    """The manifest that `manifest_to_json` wrote."""
    return TpManifest(
        chips=json["chips"],
        placed=tuple(
            Placed(name=Name.of(p["var"]), chip=p["chip"], slice=_slice_from_json(p["slice"]))
            for p in json["placed"]
        ),
        collectives=tuple(_collective_from_json(c) for c in json["collectives"]),
    )


def _slice_to_json(piece: TpSlice | None) -> dict[str, Any] | None:
    if piece is None:
        return None
    return {
        "of": str(piece.of),
        "of_shape": list(piece.of_shape),
        "axis": piece.axis,
        "ranges": [list(r) for r in piece.ranges],
    }


def _slice_from_json(json: Mapping[str, Any] | None) -> TpSlice | None:
    if json is None:
        return None
    rows, cols = json["of_shape"]
    return TpSlice(
        of=Name.of(json["of"]),
        of_shape=(rows, cols),
        axis=json["axis"],
        ranges=tuple((start, length) for start, length in json["ranges"]),
    )


def _collective_from_json(json: Mapping[str, Any]) -> TpCollective:
    kind: Literal["fold", "join"] = "fold" if "folds" in json else "join"
    return TpCollective(
        out=Name.of(json["out"]),
        partials=tuple(Name.of(p) for p in json["partials"]),
        steps=tuple(Name.of(s) for s in json[f"{kind}s"]),
        kind=kind,
    )
