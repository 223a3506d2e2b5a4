"""Steps of a decoder that show what every chip computes, and what each chip holds."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from author.forms import Statement
from author.names import Name
from author.program import Program, bound, changed
from kernels.matmul import as_float
from tp.authored import authored
from tp.decoder import Decoder
from tp.lower import CHIP, Arrays, Lowered, partition
from tp.operands import Operand, canonical
from tp.rolled import Along
from tp.stretch import stacked

Way = Literal["prefill", "steps"]  # a prompt read in chunks, or a token at a time


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one program reads of a prompt, its first token at `position`.

    `rows` is how many the program is compiled for; None for a token by itself.
    """

    ids: Sequence[int]
    position: int
    rows: int | None

    @property
    def last(self) -> int:
        """The position of its last token."""
        return self.position + len(self.ids) - 1


def pieces(ids: Sequence[int], way: Way, chunks: Sequence[int]) -> Iterator[Piece]:
    """The pieces in which a decoder with programs for such chunks reads a prompt."""
    if way == "steps":
        yield from (Piece(ids=[t], position=p, rows=None) for p, t in enumerate(ids, start=1))
        return
    ordered, at = sorted(chunks), 0
    while at < len(ids):
        rows = next((size for size in ordered if size >= len(ids) - at), ordered[-1])
        yield Piece(ids=ids[at : at + rows], position=at + 1, rows=rows)
        at += rows


def text_of(decoder: Decoder, piece: Piece, chips: int) -> Program:
    """The joint text that reads a piece, at any width."""
    ids = list(piece.ids)
    kind, read = "tp_decode_step", {"tok": ids[0], "pos": piece.position}
    if piece.rows is not None:
        kind, read = "tp_prefill_logits", {"toks": ids, "pos0": piece.position}
    return authored(decoder.model.spec, kind, chips=chips, context=decoder.context, **read)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A piece as it was read: what every chip computed, by key, and the states after it."""

    values: Mapping[str, np.ndarray]
    states: Arrays
    real: int  # rows

    def value(self, name: Name, chip: int) -> np.ndarray | None:
        """A chip's value of a name, in its padding; None where the step shows none."""
        of_all, own = _keys(name)
        if name.sequence is not None and of_all in self.values:
            return self.values[of_all][chip, name.sequence]
        found = self.values.get(own)
        if found is None:
            return None
        return found[chip, : self.real] if stacked(name) else found[chip]


@dataclass(kw_only=True)
class Shown:
    """A decoder whose steps come back with values: those of `names`, or of all that a text binds.

    Kernels that take several statements at once show what they make, and all that is asked for
    keeps them apart: with few names a step runs more as it does unseen.
    """

    decoder: Decoder
    names: Collection[str] | None = None
    _steps: dict[int | None, tuple[Lowered, Any]] = field(default_factory=dict)

    def step(self, piece: Piece, states: Arrays, length: int) -> Step:
        """Read a piece of a prompt that is so long; `states` stay as they are."""
        decoder, (_, run) = self.decoder, self._step(piece.rows)
        long = decoder.long_tables if decoder.is_long(length) else {}
        values, after = run({**decoder.weights, **long}, states, _inputs(piece))
        shown = {key: np.asarray(value) for key, value in values.items()}
        return Step(values=shown, states=after, real=len(piece.ids))

    def path(self, name: Name, piece: Piece) -> str | None:
        """The path that the last statement to make a name took in the program for a piece."""
        keys = _keys(name)
        made = [t for t in self._step(piece.rows)[0].taken if _made(t.statement) in keys]
        return made[-1].path if made else None

    def plainly(self, names: Iterable[Name]) -> "Shown":
        """The same by XLA's own kernels, showing what some names stand for."""
        plain = replace(self.decoder, kernels="xla", _steps={})
        return Shown(decoder=plain, names={key for name in names for key in _keys(name)})

    def _step(self, rows: int | None) -> tuple[Lowered, Any]:
        if rows not in self._steps:
            lowered = self._lowered(rows)
            self._steps[rows] = lowered, _showing(lowered, self.decoder, self.names)
        return self._steps[rows]

    def _lowered(self, rows: int | None) -> Lowered:
        kind, read = "tp_decode_step", {"tok": 0, "pos": 1}
        if rows is not None:
            kind, read = "tp_prefill_logits", {"toks": [0, 0], "pos0": 1}
        return self.decoder.lowered(kind, read, self.names, rows)

    # --- What is held

    def held(self, name: Name, chip: int) -> np.ndarray | None:
        """What a chip holds of a weight, in its padding, as the language has it; None of others."""
        key, decoder = str(canonical(name)), self.decoder
        operand = decoder.operands.get(key)
        if operand is None or key not in decoder.weights:
            return None
        device = decoder.devices.mesh.devices.flat[chip]
        local = jax.tree.map(lambda leaf: _on(leaf, device), decoder.weights[key])
        return _inputs_first(operand, np.asarray(_floats(local)))


def _keys(name: Name) -> tuple[str, str]:
    """Where a step has a name: under that of all sequences, or under its own."""
    rolled: Any = name if name.chip is None else name._replace(chip=Along("chip", 0))
    return str(rolled._replace(sequence=Along("sequence", 0))), str(rolled)


def _made(statement: Statement) -> str:
    """The key of what a statement binds or changes."""
    return str(bound(statement) or changed(statement)[0])


def _inputs(piece: Piece) -> Arrays:
    if piece.rows is None:
        return {"tok": jnp.int32(piece.ids[0]), "pos": jnp.int32(piece.position)}
    tokens = np.zeros((1, piece.rows), np.int32)
    tokens[0, : len(piece.ids)] = piece.ids
    return {
        "toks": tokens,
        "pos": jnp.int32(piece.position),
        "count": jnp.int32(len(piece.ids)),
    }


def _showing(lowered: Lowered, decoder: Decoder, names: Collection[str] | None) -> Any:
    """A step whose values come back chip by chip."""
    weights = {k: partition(o) for k, o in lowered.weights.items()}
    states = {k: partition(o) for k, o in lowered.states.items()}

    def body(weights: Arrays, states: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        values, new = lowered.run(weights, states, inputs)
        given = {id(array) for array in weights.values()}
        own = {k: v for k, v in values.items() if isinstance(v, jax.Array) and id(v) not in given}
        asked = own if names is None else {k: v for k, v in own.items() if k in names}
        return {k: v[None] for k, v in asked.items()}, new

    mapped = jax.shard_map(
        body,
        mesh=decoder.devices.mesh,
        in_specs=(weights, states, PartitionSpec()),
        out_specs=(PartitionSpec(CHIP), states),
    )
    return jax.jit(mapped)


_floats = jax.jit(as_float)  # one compilation a shape, where each step of it would be one


def _on(leaf: jax.Array, device: Any) -> jax.Array:
    return next(shard.data for shard in leaf.addressable_shards if shard.device == device)


def _inputs_first(operand: Operand, stored: np.ndarray) -> np.ndarray:
    """A matrix from the order in which it is stored."""
    if not operand.quantised or operand.stored == "plain":
        return stored
    if operand.stored == "turned":
        return stored.T
    inputs, cols = stored.shape[1], operand.whole[1]
    return stored.reshape(-1, cols, inputs).swapaxes(1, 2).reshape(-1, cols)
