"""A model stepping on its chips, ids to logits: prompts in chunks, tokens many a call, batches."""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from author.families.model import Model
from author.program import Program
from kernels.native import chain
from kernels.native.library import why_not
from kernels.table import NATIVE
from tp import sample
from tp.authored import authored
from tp.generation import STRIDE, Likeliest, Parts, inputs_for, loop, parts
from tp.launch import Devices, once
from tp.lower import Arrays, Lowered, lower
from tp.operands import Operand
from tp.roll import roll
from tp.sample import Sampling
from tp.step import shapes, whole_step, zeros
from tp.stretch import stretch

# A prompt is read in chunks of these sizes: few, so that few programs are compiled.
CHUNKS = (16, 64, 256)
# Bytes of weights that a tenth of a second may read, roughly: one chip's, or all simulated ones'.
TENTH_ON_CPU, TENTH = 4e9, 1e11


class ContextError(ValueError):
    """More tokens than a context holds: how many, and what it holds."""


def check_ids(ids: Sequence[int], *, vocabulary: int, context: int, position: int = 1) -> None:
    """Raise ContextError for no ids, ids beyond a vocabulary, or more than a context has rows."""
    if len(ids) == 0:
        raise ContextError("an empty prompt: wanted at least one token")
    strange = [i for i in ids if not 0 <= i < vocabulary]
    if strange:
        named = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
        raise ContextError(f"token ids {named} are not among the {vocabulary} of the model")
    last = position + len(ids) - 1
    if last > context:
        raise ContextError(
            f"{last} tokens do not fit a context of {context}: a shorter prompt or a larger "
            "context (--ctx, or `context` of load) would do"
        )


@dataclass(kw_only=True)
class Decoder:
    """Steps of one model on its chips, compiled as they are asked for.

    `weights` are the arrays of the loader; `context` the rows of each cache, whose numbers are
    `cache` (`f32` or `f16`). Where a model turns
    by other frequencies once a sequence is longer than `model.short_length`, `long_tables` are
    its tables for those, and a sequence that grows past it is to be read again from its start.
    """

    model: Model
    devices: Devices
    context: int
    weights: Arrays = field(default_factory=dict, repr=False)
    long_tables: Arrays = field(default_factory=dict, repr=False)
    kernels: str = "auto"
    cache: str = "f32"
    chunks: Sequence[int] = CHUNKS
    _steps: dict[Any, Any] = field(default_factory=dict, repr=False)

    # --- Programs

    @cached_property
    def decode(self) -> Lowered:
        """One token at one position."""
        return self.lowered("tp_decode_step", {"tok": 0, "pos": 1}, ("logits", "next"))

    @property
    def operands(self) -> dict[str, Operand]:
        """What the loader is to fill: the same weights for every program of the model."""
        return dict(self.decode.weights)

    def authored(self, kind: str, args: dict[str, Any]) -> Program:
        """A program of the model on these chips."""
        chips, context = self.devices.chips, self.context
        return authored(self.model.spec, kind, chips=chips, context=context, **args)

    def lowered(
        self,
        kind: str,
        args: dict[str, Any],
        outputs: Collection[str] | None,
        rows: int | None = None,
    ) -> Lowered:
        """A program of the model, authored for two rows and stretched where it stacks them."""
        rolled = roll(self.authored(kind, args))
        if rows is not None:
            rolled = stretch(rolled, rows)
        return lower(rolled, platform=self.devices.platform, kernels=self.kernels, outputs=outputs)

    def _step(self, key: tuple[Any, ...], make: Any) -> Any:
        if key not in self._steps:
            self._steps[key] = make()
        return self._steps[key]

    def prepare(self, tokens: int, *, greedy: bool) -> None:
        """Compile what reading so many tokens, and generating after them, will need.

        Side by side, since compiling one program keeps one core busy. What is compiled already
        is left as it is; nothing that follows compiles again.
        """
        sizes = {rows for _, rows in _chunks(range(tokens), self.chunks)}
        wanted: dict[tuple[Any, ...], Any] = {
            ("prefill", rows): lambda rows=rows: self._prefill(rows) for rows in sizes
        }
        wanted["generate", greedy] = lambda: self._generator(greedy=greedy)
        missing = {key: make for key, make in wanted.items() if key not in self._steps}
        with ThreadPoolExecutor(max_workers=2) as pool:
            self._steps.update(zip(missing, pool.map(self._compiled, missing.items()), strict=True))

    def _compiled(self, item: tuple[tuple[Any, ...], Any]) -> Any:
        (kind, size), make = item
        inputs = _chunk_inputs([0], size, 1) if kind == "prefill" else inputs_for()
        return make().lower(self.weights, self._shapes, inputs).compile()

    @cached_property
    def _shapes(self) -> Arrays:
        """Caches and states of one sequence by shape and place alone."""
        return shapes(self.decode.states, self.devices.mesh, self.cache)

    @cached_property
    def stride(self) -> int:
        """How many tokens are made a call: about a tenth of a second's, to be seen as they come.

        Worked out from the weights' bytes, so that it is the same in every process of a run.
        """
        held = sum(array.nbytes for array in jax.tree.leaves(self.weights))
        if not self.devices.simulated:
            held //= self.devices.chips
        read = TENTH_ON_CPU if self.devices.platform == "cpu" else TENTH
        return min(max(1, round(read / max(1, held))), STRIDE)

    # --- Short and long sequences

    def is_long(self, length: int) -> bool:
        """Whether a sequence of so many tokens turns by the long tables."""
        return self.model.short_length is not None and length > self.model.short_length

    def short_room(self, position: int) -> int | None:
        """How many more tokens may be read from a position on before the tables change."""
        if self.model.short_length is None or self.is_long(position):
            return None
        return self.model.short_length - position + 1

    def _weights(self, length: int) -> Arrays:
        return self._long_weights if self.is_long(length) else self.weights

    @cached_property
    def _long_weights(self) -> Arrays:
        return {**self.weights, **self.long_tables}

    def _batch_weights(self, lengths: Sequence[int]) -> Arrays:
        """Weights with tables of its own for each sequence, where there are two kinds of them."""
        if not self.long_tables:
            return self.weights
        kinds = tuple(map(self.is_long, lengths))
        return self._step(("tables", *kinds), lambda: self._stacked_tables(kinds))

    def _stacked_tables(self, kinds: tuple[bool, ...]) -> Arrays:
        stacked = {
            key: jnp.stack([long if kind else self.weights[key] for kind in kinds])
            for key, long in self.long_tables.items()
        }
        return {**self.weights, **stacked}

    # --- States

    def fresh(self) -> Arrays:
        """Empty caches and states of one sequence."""
        make = self._step(
            ("fresh",), lambda: zeros(self.decode.states, self.devices.mesh, self.cache)
        )
        return make()

    def fresh_batch(self, sequences: int) -> Arrays:
        """Empty caches and states of several sequences, one a leading row."""
        states = self._batch(sequences)[0].states
        make = self._step(
            ("fresh", sequences), lambda: zeros(states, self.devices.mesh, self.cache)
        )
        return make()

    def insert(self, batch: Arrays, slot: int, one: Arrays) -> Arrays:
        """The batch with one sequence's states put into a slot; the batch is given up."""
        put = self._step(("insert",), lambda: jax.jit(_inserted, donate_argnums=0))
        return put(batch, jnp.int32(slot), one)

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can go back to an earlier position: a recurrent state cannot."""
        return all(operand.role == "cache" for operand in self.decode.states.values())

    # --- Reading a prompt

    def prefill(
        self, states: Arrays, ids: Sequence[int], position: int = 1
    ) -> tuple[jax.Array, Arrays]:
        """The logits `[1, vocabulary]` after the last of `ids`, the first at `position`.

        What the states hold must have been read as the start of a sequence of that kind.

        Raises ContextError where they do not fit; `states` are given up.
        """
        self.check_fits(ids, position)
        weights = self._weights(position + len(ids) - 1)
        logits: Any = None
        for part, rows in _chunks(ids, self.chunks):
            step = self._step(("prefill", rows), lambda rows=rows: self._prefill(rows))
            out, states = step(weights, states, _chunk_inputs(part, rows, position))
            logits = out["logits"]
            position += len(part)
        return logits, states

    def _prefill(self, rows: int) -> Any:
        args = {"toks": [0, 0], "pos0": 1}
        lowered = self.lowered("tp_prefill", args, ("logits",), rows)
        return whole_step(lowered, self.devices.mesh, ("logits",))

    def score(self, ids: Sequence[int]) -> Float32[np.ndarray, "rows vocabulary"]:
        """The logits at every position of `ids`, a sequence of their own."""
        return self.read(self.fresh(), ids)[0]

    def read(
        self, states: Arrays, ids: Sequence[int], position: int = 1
    ) -> tuple[Float32[np.ndarray, "rows vocabulary"], Arrays]:
        """The logits at every one of `ids`, the first at `position`, and the states after them."""
        self.check_fits(ids, position)
        weights = self._weights(position + len(ids) - 1)
        found: list[np.ndarray] = []
        for part, rows in _chunks(ids, self.chunks):
            step = self._step(("score", rows), lambda rows=rows: self._score(rows))
            out, states = step(weights, states, _chunk_inputs(part, rows, position))
            found.append(np.asarray(out["blogits"])[: len(part)])
            position += len(part)
        return np.concatenate(found), states

    def _score(self, rows: int) -> Any:
        args = {"toks": [0, 0], "pos0": 1}
        lowered = self.lowered("tp_prefill_logits", args, ("blogits",), rows)
        return whole_step(lowered, self.devices.mesh, ("blogits",))

    def check_fits(self, ids: Sequence[int], position: int = 1) -> None:
        """Raise ContextError for ids that the model lacks or that its context has no room for."""
        vocabulary = self.model.spec.vocab
        check_ids(ids, vocabulary=vocabulary, context=self.context, position=position)

    # --- One token after another

    def step(
        self, states: Arrays, token: int, position: int, *, length: int | None = None
    ) -> tuple[jax.Array, Arrays]:
        """The logits `[1, vocabulary]` after one token, the states moved on.

        `length` is how long the sequence will be, where it is known to be longer than so far.
        """
        self.check_fits([token], position)
        step = self._step(
            ("step",), lambda: whole_step(self.decode, self.devices.mesh, ("logits",))
        )
        inputs = {"tok": jnp.int32(token), "pos": jnp.int32(position)}
        out, states = step(self._weights(length or position), states, inputs)
        return out["logits"], states

    def step_batch(
        self,
        states: Arrays,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        lengths: Sequence[int] | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """The logits `[sequences, vocabulary]` after one token of each sequence."""
        for token, position in zip(tokens, positions, strict=True):
            self.check_fits([token], position)
        _, step = self._batch(len(tokens))
        inputs = {
            "toks": jnp.asarray(tokens, jnp.int32)[None],
            "pos": jnp.asarray(positions, jnp.int32),
        }
        weights = self._batch_weights(positions if lengths is None else lengths)
        out, states = step(weights, states, inputs)
        return out["blogits"], states

    def _batch(self, sequences: int) -> tuple[Lowered, Any]:
        def make() -> tuple[Lowered, Any]:
            args = {"seqs": [[0, 1], [0, 1]]}
            lowered = self.lowered("tp_decode_batch", args, ("blogits",), sequences)
            return lowered, whole_step(lowered, self.devices.mesh, ("blogits",))

        return self._step(("batch", sequences), make)

    # --- Generating

    def first_token(self, logits: jax.Array, position: int, sampling: Sampling) -> int:
        """The token chosen from logits that stand at `position`."""
        pick = self._step(
            ("choose", sampling.greedy),
            lambda: once(self.devices.mesh, partial(sample.choose, greedy=sampling.greedy)),
        )
        return int(pick(logits, jnp.int32(position), sampling.numbers()))

    def generate(
        self,
        states: Arrays,
        token: int,
        position: int,
        *,
        limit: int,
        sampling: Sampling,
        stops: frozenset[int],
    ) -> Iterator[tuple[list[int], Arrays]]:
        """The tokens that follow `token`, which is to stand at `position`, a few at a time.

        Ends after `limit` tokens or with the first of `stops`; a sequence that grows too long for
        its tables is the caller's to stop (`short_room`). With each part come the states,
        which hold all tokens but the last; those given are given up.
        """
        greedy = sampling.greedy
        run = self._step(("generate", greedy), lambda: self._generator(greedy=greedy))
        inputs = inputs_for([token], [position], [limit], sampling, stops)
        for made, after in parts(run, self._weights(position), states, inputs, stride=self.stride):
            yield made[0], after

    def generate_batch(
        self,
        states: Arrays,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        limits: Sequence[int],
        sampling: Sampling,
        stops: frozenset[int],
    ) -> Parts:
        """As `generate`, of several sequences side by side, whose states are a batch's.

        Each ends after its own limit or its first stop token, and waits for the others. None may
        grow too long for its tables.
        """
        greedy, count = sampling.greedy, len(tokens)
        lowered = self._batch(count)[0]
        run = self._step(
            ("generate", count, greedy),
            lambda: loop(lowered, self.devices.mesh, greedy=greedy, likeliest=self._likeliest),
        )
        inputs = inputs_for(tokens, positions, limits, sampling, stops)
        yield from parts(run, self._batch_weights(positions), states, inputs, stride=self.stride)

    def _generator(self, *, greedy: bool) -> Any:
        return loop(self.decode, self.devices.mesh, greedy=greedy)

    @property
    def _likeliest(self) -> Likeliest:
        """What takes the argmax of each sequence's logits."""
        native = self.devices.platform == "cpu" and self.kernels in ("auto", NATIVE)
        return chain.likeliest if native and why_not() is None else sample.likeliest


def _inserted(batch: Arrays, slot: jax.Array, one: Arrays) -> Arrays:
    return jax.tree.map(lambda many, single: many.at[slot].set(single), batch, one)


def _chunks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    """The ids in pieces, each with the size of the program that reads it."""
    ordered = sorted(sizes)
    at = 0
    while at < len(ids):
        left = len(ids) - at
        rows = next((s for s in ordered if s >= left), ordered[-1])
        yield ids[at : at + rows], rows
        at += rows


def _chunk_inputs(part: Sequence[int], rows: int, position: int) -> Arrays:
    tokens = np.zeros((1, rows), np.int32)
    tokens[0, : len(part)] = part
    return {"toks": tokens, "pos": jnp.int32(position), "count": jnp.int32(len(part))}
