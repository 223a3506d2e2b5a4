"""A step between the places where its chips meet: what each reads and computes until then."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from author.fits import Shape
from author.forms import Statement
from author.names import Name
from author.statements import Fold, Join, Let, Number, Tensor
from tp.costs import Cost, Stored, Walk, of_chip, padded
from tp.matrices import FLOAT, Matrix, layer_of
from tp.rolled import Item


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A fold or a join of a step, once for all like layers: `count` is how often it runs.

    `bytes` is what each chip brings to it, padding included. `sent` is the least that each has
    to send: in a ring, a fold passes all but its own part twice, a join once.
    """

    kind: str
    name: str
    layer_kind: int | None
    count: int
    bytes: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What the chips do, each by itself, before they meet in a collective.

    What follows the last collective of a layer, or of the step, is counted with it. `chips` is by
    what each chip really holds, `given` by what all of them are given.
    """

    collective: Collective
    chips: tuple[Cost, ...]
    given: Cost


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A step to be measured: its items, its matrices, and how many layers each kind stands for.

    `visible` is how many positions are attended to, `joined` how many columns a join makes.
    """

    items: tuple[Item, ...]
    matrices: tuple[Matrix, ...]
    layers: Sequence[int]
    chips: int
    visible: int
    joined: int

    def segments(self) -> tuple[Segment, ...]:
        """The segments of the step, in order."""
        walk = self._walk(0, self._given(), {_key(m): m.given for m in self.matrices})
        given = _between(padded(self.items), walk)
        alike = self._alike()
        measured = {chip: self._measured(chip) for chip in set(alike)}
        return tuple(
            Segment(
                collective=self._collective(statement, walk),
                chips=tuple(measured[first][at] for first in alike),
                given=cost,
            )
            for at, (statement, cost) in enumerate(given)
        )

    def _measured(self, chip: int) -> list[Cost]:
        walk = self._walk(chip, self._held(chip), {})
        return [cost for _, cost in _between(of_chip(self.items, chip), walk)]

    def _alike(self) -> list[int]:
        """For each chip the first that holds as much as it of every matrix, and so does as much."""
        first: dict[tuple[object, ...], int] = {}
        return [
            first.setdefault(
                tuple((len(m.ranges[chip]), m.held[chip]) for m in self.matrices), chip
            )
            for chip in range(self.chips)
        ]

    def _walk(
        self, chip: int, stored: Mapping[Name, Stored], declared: Mapping[Name, Shape]
    ) -> Walk:
        return Walk(
            chip=chip,
            declared=declared,
            stored=stored,
            visible=self.visible,
            joined=self.joined,
        )

    def _held(self, chip: int) -> dict[Name, Stored]:
        return {_key(m): Stored.of(m.held_bytes[chip], m.held[chip][0]) for m in self.matrices}

    def _given(self) -> dict[Name, Stored]:
        return {_key(m): Stored.of(m.given_bytes, m.given[0]) for m in self.matrices}

    def _collective(self, statement: Let, walk: Walk) -> Collective:
        form, layer = statement.value, layer_of(statement)
        assert isinstance(form, Fold | Join)
        rows, cols = walk.partial(form.partial)
        others, size = self.chips - 1, FLOAT * rows * cols
        is_fold = isinstance(form, Fold)
        return Collective(
            kind="fold" if is_fold else "join",
            name=str(statement.name._replace(layer=None)),
            layer_kind=layer,
            count=1 if layer is None else self.layers[layer],
            bytes=size,
            sent=2 * others * size // self.chips if is_fold else others * size,
        )


def _key(matrix: Matrix) -> Name:
    return Name(matrix.name, matrix.kind)


def _between(statements: Iterable[Statement], walk: Walk) -> list[tuple[Let, Cost]]:
    """Each collective, with the cost of what leads up to it and of what ends its layer."""
    found: list[tuple[Let, Cost]] = []
    cost, here = Cost(), None
    for statement in statements:
        more = walk.cost(statement)
        if isinstance(statement, Tensor | Number):
            continue
        if layer_of(statement) != here and found:
            found[-1] = found[-1][0], found[-1][1] + cost
            cost = Cost()
        here, cost = layer_of(statement), cost + more
        if isinstance(statement, Let) and isinstance(statement.value, Fold | Join):
            found.append((statement, cost))
            cost = Cost()
    found[-1] = found[-1][0], found[-1][1] + cost
    return found
