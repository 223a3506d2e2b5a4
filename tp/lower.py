"""Lowers a rolled program to what one device runs, its chips a mesh axis, its sequences a batch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from author.english import write
from author.forms import Statement
from author.program import ProgramError, changed, read_by
from author.statements import Join, Let, Matmul, Plus
from tp.interpret import operation
from tp.operands import Operand, canonical, operands, tensors
from tp.plan import CHIP as CHIP
from tp.plan import Arrays, Plan, Taken, key_of
from tp.rolled import Item, Loop, Once, Rolled
from tp.trace import traced
from tp.unroll import unroll_layers


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """One step as a function of what one device holds.

    `run(weights, states, inputs)` gives the names that were asked for, and the new states. It is
    to be called inside a `shard_map` over the axis `chip`; `weights` and `states` are the
    device's own slices by canonical name, `inputs` the run-time integers: `tok` and `pos`, or
    `toks` `[1, rows]` and `pos` (one, or one a sequence), and `count` where only the first rows
    are real.
    """

    run: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weights: Mapping[str, Operand]
    states: Mapping[str, Operand]
    taken: Sequence[Taken]

    @property
    def kernels(self) -> Mapping[str, str]:
        """The paths that each operation took when it was last traced."""
        found: dict[str, set[str]] = {}
        for taken in self.taken:
            form = taken.statement.value if isinstance(taken.statement, Let) else taken.statement
            found.setdefault(operation(form), set()).add(taken.path)
        return {name: ", ".join(sorted(paths)) for name, paths in found.items()}


def lower(
    rolled: Rolled,
    *,
    platform: str,
    kernels: str = "auto",
    outputs: Collection[str] | None = None,
) -> Lowered:
    """The step of a rolled program; `kernels` names the path to take where there are several.

    `outputs` are the names that are wanted of it, by default all that the text binds. Raises
    ProgramError for a statement that cannot be lowered.
    """
    wanted = {str(n): o for n, o in operands(rolled).items()}
    items = unroll_layers(rolled)
    flat = tuple(_flat(items, None))
    keys = {str(canonical(t.name)): key_of(t.name) for t, _ in tensors(items)}
    kept = {k: o for k, o in wanted.items() if o.role in ("cache", "state")}
    plan = Plan(
        wanted=wanted,
        held=dict(_held(items, wanted)),
        read_last={
            key_of(n): at for at, (s, _) in enumerate(flat) for n in (*read_by(s), *changed(s))
        },
        outputs=outputs,
        states=frozenset(keys[k] for k in kept),
        platform=platform,
        kernels=kernels,
        taken=[],
    )

    def run(weights: Arrays, states: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        given = {keys[k]: array for k, array in {**weights, **states}.items()}
        env = traced(plan, flat, given, inputs)
        return env, {k: env[keys[k]] for k in states}

    return Lowered(
        run=run,
        weights={k: o for k, o in wanted.items() if k not in kept},
        states=kept,
        taken=plan.taken,
    )


def _flat(items: tuple[Item, ...], batch: int | None) -> Iterator[tuple[Statement, int | None]]:
    """The statements in order, each with how many sequences it stands for."""
    for item in items:
        match item:
            case Loop("sequence", count, body):
                yield from _flat(body, count)
            case Loop():
                yield from _flat(item.body, batch)
            case Once():
                yield from _flat((item.item,), batch)
            case _:
                yield item, batch


def partition(operand: Operand) -> PartitionSpec:
    """How an operand's array is cut over the mesh, in the order in which it is stored."""
    batch = () if operand.sequences is None else (None,)
    if operand.layout is None:
        return PartitionSpec()
    first = (operand.layout.axis == "rows") != (operand.stored == "turned")
    return PartitionSpec(*batch, *((CHIP,) if first else (None, CHIP)))


def _held(
    items: tuple[Item, ...], wanted: Mapping[str, Operand]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """How many columns each chip really has of what a join puts together."""
    made = {key_of(i.name): i.value for i in _statements(items) if isinstance(i, Let)}
    for value in made.values():
        if not isinstance(value, Join):
            continue
        form = made.get(key_of(value.partial))
        if isinstance(form, Plus):  # a product and its bias
            form = made.get(key_of(form.a))
        operand = wanted.get(str(canonical(form.w))) if isinstance(form, Matmul) else None
        if operand is None or operand.layout is None or operand.layout.axis != "cols":
            raise ProgramError.of(
                f"'{write(value)}'",
                found="a partial whose columns are not those of a weight",
                wanted="a product with a matrix that is cut by columns",
            )
        layout = operand.layout
        yield key_of(value.partial), tuple(map(layout.held, range(len(layout.ranges))))


def _statements(items: tuple[Item, ...]) -> Iterator[Statement]:
    for item in items:
        match item:
            case Loop():
                yield from _statements(item.body)
            case Once():
                yield from _statements((item.item,))
            case _:
                yield item
