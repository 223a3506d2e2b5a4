"""A model to talk to: `load` it on any number of chips, then text in, text out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from jaxtyping import Float32

from author.families.model import Model
from kernels.native.library import why_not
from kernels.table import NATIVE
from tp import identity, launch
from tp.ahead import Ahead
from tp.decoder import ContextError, Decoder, check_ids
from tp.generation import NumbersError
from tp.hosts import Alone
from tp.loader import Held, Progress, Receipt, load_tables
from tp.loader import load as load_weights
from tp.lower import Arrays
from tp.sample import Sampling
from tp.side_by_side import side_by_side
from tp.source import Source, open_source
from tp.spelling import spelled
from tp.step import CACHES

# A cache is made for this many tokens unless asked for more: what the model was made for may
# not fit the machine.
CONTEXT = 2048


def load(
    name: str,
    *,
    chips: int | None = None,
    context: int | None = None,
    kernels: str = "auto",
    cache: str = "f32",
    progress: Progress = lambda what, done, of: None,
) -> "Engine":
    """A model on its chips: `name` is `demo`, a directory, a `.gguf` file or a q8 store.

    `chips` defaults to the accelerators there are, or one; on a CPU any number is simulated.
    `context` is how many tokens a sequence may have: by default what the model was made for,
    2048 at the most. `kernels` are `auto`, or only those named `native`, `xla` or `reference`;
    `cache` is what caches hold, `f32` or `f16`. Raises one error that says what was found and
    what would do.
    """
    source = open_source(name)
    return load_source(
        source, chips=chips, context=context, kernels=kernels, cache=cache, progress=progress
    )


def load_source(
    source: Source,
    *,
    chips: int | None = None,
    context: int | None = None,
    kernels: str = "auto",
    cache: str = "f32",
    progress: Progress = lambda what, done, of: None,
    hosts: Alone | None = None,
) -> "Engine":
    """A model whose files are open already, on its chips: those of all processes in `hosts`.

    Raises DifferError, before it reads weights, where these would not run the same.
    """
    hosts = Alone() if hosts is None else hosts
    missing = why_not() if kernels == NATIVE else None
    if missing is not None:
        raise launch.LaunchError(f"native kernels were asked for: {missing}")
    if cache not in CACHES:
        raise launch.LaunchError(f"caches of {cache!r}: wanted {' or '.join(CACHES)}")
    context = check_context(source.model, context)
    decoder = Decoder(
        model=source.model,
        devices=launch.devices(chips, hosts),
        context=context,
        kernels=kernels,
        cache=cache,
    )
    if hosts.processes > 1:
        hosts.agree(identity.facts(decoder, source.checkpoint))
        hosts.report("loading")
    weights, receipt = load_weights(
        source.model,
        decoder.operands,
        source.checkpoint,
        decoder.devices,
        kernels=kernels,
        progress=progress,
    )
    decoder.weights = weights
    if hosts.processes > 1:
        receipt.chips = _held_by_all(receipt, decoder.devices, hosts)
    if source.model.short_length is not None:
        decoder.long_tables = load_tables(
            source.model, decoder.operands, source.checkpoint, decoder.devices, long=True
        )
    return Engine(decoder=decoder, source=source, receipt=receipt)


def _held_by_all(receipt: Receipt, devices: launch.Devices, hosts: Alone) -> list[Held]:
    """What each chip was given, as the process tells that it belongs to."""
    told = hosts.exchange("loaded", [asdict(held) for held in receipt.chips])
    owners = [device.process_index for device in devices.mesh.devices.flat]
    return [Held(**told[owner][chip]) for chip, owner in enumerate(owners)]


def check_context(model: Model, context: int | None) -> int:
    """The rows of the caches: what was asked for, or by default what the model was made for."""
    if context is None:
        return min(model.context, CONTEXT)
    if not 1 <= context <= model.context:
        raise ContextError(
            f"a context of {context} was asked for; this model was made for 1 to {model.context}"
        )
    return context


def check_fits(model: Model, ids: Sequence[int], context: int | None) -> int:
    """The rows of the caches; raises ContextError for ids that the model could not read."""
    rows = check_context(model, context)
    check_ids(ids, vocabulary=model.spec.vocab, context=rows)
    return rows


@dataclass(kw_only=True)
class Counts:
    """How much a generation read and made, and how long each took."""

    compile_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(kw_only=True)
class Engine:
    """A loaded model."""

    decoder: Decoder
    source: Source
    receipt: Receipt

    def __repr__(self) -> str:
        decoder = self.decoder
        return f"<{self.source.path}, chips={decoder.devices.chips}, context={decoder.context}>"

    def logits(self, ids: Sequence[int]) -> Float32[np.ndarray, "rows vocabulary"]:
        """The logits at every position of a sequence of token ids."""
        return self.decoder.score(ids)

    def logits_by_steps(self, ids: Sequence[int]) -> Float32[np.ndarray, "rows vocabulary"]:
        """The same logits, read one token at a time."""
        states, found = self.decoder.fresh(), []
        for position, token in enumerate(ids, start=1):
            logits, states = self.decoder.step(states, token, position, length=len(ids))
            found.append(np.asarray(logits)[0])
        return np.stack(found)

    def generate(self, prompt: str, **options: Any) -> str:
        """The text that follows a prompt; options as for `stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """The text that follows a prompt, piece by piece; options as for `Conversation.reply`."""
        ids = self.source.spelling().encode(prompt, special=True)
        return Conversation(engine=self).reply(ids, **options)

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        at_once: int = 8,
    ) -> list[str]:
        """The texts that follow several prompts; options as for `Conversation.reply`.

        As many as `at_once` are made side by side, each with a cache of its own, which takes far
        less than one after the other. Raises ContextError, before anything runs, where a prompt
        does not fit.
        """
        if isinstance(prompts, str):
            raise ValueError("one prompt was given as several: a list of them would do")
        if at_once < 1:
            raise ValueError(f"at_once is {at_once}; wanted at least 1")
        _check_limit(max_tokens)
        tokenizer, decoder = self.source.spelling(), self.decoder
        all_ids = [tokenizer.encode(prompt, special=True) for prompt in prompts]
        for ids in all_ids:
            decoder.check_fits(ids)
        if decoder.model.short_length is not None:
            at_once = 1  # sequences that grow long are read again, each in its own time
        words: Any = {"max_tokens": max_tokens, "sampling": sampling, "ignore_eos": ignore_eos}
        if at_once == 1:
            return ["".join(Conversation(engine=self).reply(ids, **words)) for ids in all_ids]
        stops = frozenset() if ignore_eos else tokenizer.stop_ids
        texts: list[str] = []
        for start in range(0, len(all_ids), at_once):
            some = all_ids[start : start + at_once]
            made = side_by_side(
                decoder, some, limit=max_tokens, sampling=sampling or Sampling(), stops=stops
            )
            for tokens in made:
                made_freely = takewhile(lambda t: t not in stops, tokens)
                known = (t for t in made_freely if t < tokenizer.vocab_size)
                texts.append("".join(spelled(known, tokenizer.stream())))
        return texts

    def chat(self) -> "Conversation":
        """A conversation that keeps its cache from turn to turn."""
        return Conversation(engine=self)


@dataclass(kw_only=True)
class Conversation:
    """One sequence on the chips: what it holds so far, and what has been said.

    `ids` are the tokens in the caches; `states` are theirs.
    """

    engine: Engine
    ids: list[int] = field(default_factory=list)
    states: Arrays | None = field(default=None, repr=False)
    messages: list[Mapping[str, str]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    _replies: int = 0

    def say(self, text: str, **options: Any) -> Iterator[str]:
        """The answer to one turn of a chat, piece by piece; it is remembered when it is done."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.engine.source.spelling().encode_chat(messages)
        answer: list[str] = []
        for piece in self.reply(ids, **options):
            answer.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def reply(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """The text that follows a whole sequence of token ids, piece by piece.

        What the caches hold of it already is not read again. `counts` says how it ended:
        `stop` at a stop token, `length` after `max_tokens` or with a full context. Raises
        ContextError, before anything runs, where the ids do not fit.
        """
        tokenizer = self.engine.source.spelling()
        known = tokenizer.vocab_size
        stops = frozenset() if ignore_eos else tokenizer.stop_ids
        stream = tokenizer.stream()
        made = self.tokens(ids, max_tokens=max_tokens, sampling=sampling, stops=stops)
        # Embeddings may be padded past the vocabulary; nothing is spelled so.
        yield from spelled((token for token in made if token < known), stream)

    def tokens(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stops: frozenset[int] = frozenset(),
    ) -> Iterator[int]:
        """The token ids that follow, one at a time; a stop token ends them unseen."""
        _check_limit(max_tokens)
        sampling = sampling or Sampling()
        decoder = self.engine.decoder
        self._replies += 1
        reply = self._replies
        logits = self._read(ids, sampling)
        room = decoder.context - len(ids)
        limit = room if max_tokens is None else min(room, max_tokens)
        self.counts.reason = "length"
        if limit < 1:
            return
        started = time.perf_counter()
        first = decoder.first_token(logits, len(ids), sampling)
        for token in self._rest(first, limit, sampling, stops):
            self.counts.tokens += 1
            self.counts.seconds = time.perf_counter() - started
            if token in stops:
                self.counts.reason = "stop"
                return
            yield token
            if reply != self._replies:
                raise ContextError(
                    "this reply was left for a newer one of the same conversation, which has its "
                    "caches now: ask again, or use a conversation for each"
                )

    def _read(self, ids: Sequence[int], sampling: Sampling) -> Any:
        """Bring the caches to hold `ids`, and the logits after the last of them."""
        decoder = self.engine.decoder
        decoder.check_fits(ids)
        kept = self._kept(ids)
        self.counts = Counts(prompt_tokens=len(ids) - kept)
        started = time.perf_counter()
        decoder.prepare(len(ids) - kept, greedy=sampling.greedy)
        self.counts.compile_seconds = time.perf_counter() - started
        started = time.perf_counter()
        logits = self._bring(ids)
        if np.isnan(np.asarray(logits)).any():
            raise NumbersError("after the prompt")
        self.counts.prompt_seconds = time.perf_counter() - started
        return logits

    def _kept(self, ids: Sequence[int]) -> int:
        """How many tokens of `ids` the caches hold, and hold as `ids` wants them read."""
        decoder = self.engine.decoder
        kept = _common(self.ids, ids[:-1])
        turned = decoder.is_long(len(self.ids)) == decoder.is_long(len(ids))
        usable = self.states is not None and turned
        return kept if usable and (kept == len(self.ids) or decoder.rewinds) else 0

    def _bring(self, ids: Sequence[int]) -> Any:
        """The logits after the last of `ids`, which the caches then hold."""
        decoder = self.engine.decoder
        kept = self._kept(ids)
        states, self.states = self.states if kept > 0 else None, None
        states = decoder.fresh() if states is None else states
        logits, self.states = decoder.prefill(states, ids[kept:], kept + 1)
        self.ids = list(ids)
        return logits

    def _rest(
        self, token: int, limit: int, sampling: Sampling, stops: frozenset[int]
    ) -> Iterator[int]:
        """A first token and those after it, with `ids` and `states` kept in step."""
        yield token
        decoder = self.engine.decoder
        left = limit - 1
        while left > 0 and token not in stops:
            position = len(self.ids) + 1
            if decoder.is_long(position) and not decoder.is_long(len(self.ids)):
                # Once it is long, all of a sequence turns differently: read it again.
                logits = self._bring([*self.ids, token])
                token = decoder.first_token(logits, position, sampling)
                left -= 1
                yield token
                continue
            room = decoder.short_room(position)
            part = left if room is None else min(left, room)
            for tokens in self._generated(token, part, sampling, stops):
                token = tokens[-1]
                yield from tokens
            left -= part

    def _generated(
        self, token: int, limit: int, sampling: Sampling, stops: frozenset[int]
    ) -> Iterator[list[int]]:
        """At most `limit` tokens after one, a few at a time, made on the device."""
        states, self.states = self.states, None
        assert states is not None
        decoder = self.engine.decoder
        parts = decoder.generate(
            states, token, len(self.ids) + 1, limit=limit, sampling=sampling, stops=stops
        )
        made, reply = Ahead(parts, ahead=decoder.rewinds), self._replies
        in_step = False  # whether `ids` are what the states hold
        try:
            for tokens in made:
                self.ids += [token, *tokens[:-1]]
                token = tokens[-1]
                in_step = True
                yield tokens
                in_step = False
            in_step = True
        finally:
            states = made.finish()
            if not (in_step or decoder.rewinds):
                states = None
            if reply == self._replies:  # else a newer reply has the conversation
                self.states, self.ids = states, [] if states is None else self.ids


def _check_limit(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 0:
        raise ValueError(
            f"max_tokens is {max_tokens}; wanted at least 0, or None for all there is room"
        )


def _common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(held, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(wanted)))
