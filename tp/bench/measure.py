"""Measures a model at several widths beside other programs, in turns, part by part.

Numbers go by the names they have in the report's JSON: tokens and bytes a second, seconds, bytes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tp.bench.contender import Contender, Run, run_command, start
from tp.bench.machine import Watch
from tp.bench.orders import random_ids
from tp.bench.rivals import Common, start_rival
from tp.bench.turns import Series, Thing, in_turns, joined

Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured; parts that are None or False are left out.

    `rivals` are the other programs, all of them here, with the Python that each runs in; `cache`
    is where files written for them are kept.
    """

    model: str
    chips: tuple[int, ...]
    threads: int
    context: int | None
    prompt_tokens: int
    tokens: int
    repeats: int
    batch: int | None
    position: int | None
    cold: bool
    check: bool
    rivals: dict[str, str]
    cache: Path


@dataclass(kw_only=True)
class Measuring:
    """A measurement, part by part: what was found so far, and of whom.

    The methods raise BenchError for what cannot be measured.
    """

    asked: Asked
    say: Callable[[str], None]
    watch: Watch = field(default_factory=Watch)
    series: Series = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def all(self) -> None:
        """Every part that was asked for."""
        self.speeds()
        if self.asked.position is not None:
            self.far_on(self.asked.position)
        if self.asked.cold:
            self.cold()
        if self.asked.check:
            self.errors()

    # --- Parts

    def speeds(self) -> None:
        """Reading a prompt, making tokens, a command's first token, memory; then batches."""
        asked = self.asked
        with ExitStack() as stack:
            ours, theirs, probe = self._loaded(stack, asked.context, asked.rivals)
            things = [self._prefill(c) for c in (*ours, *theirs)]
            things += [self._decode(c, probe) for c in ours]
            things += [self._their_decode(c) for c in theirs]
            things += [self._first_token(chips) for chips in asked.chips]
            self._take_turns("speed", things, [*ours, *theirs, probe])
            self.about |= {c.name: c.about for c in (*ours, *theirs)}
            for contender in theirs:
                peak = contender.ask("memory")["peak_bytes"]
                self.series[contender.name]["peak_host_bytes"] = [peak]
            for contender, chips in zip(ours, asked.chips, strict=True):
                peak = self._peak(chips, contender.about["vocabulary"])
                self.series[contender.name]["peak_host_bytes"] = [peak]
            if asked.batch is not None:
                things = [self._batch(c, asked.batch) for c in ours]
                self._take_turns(f"batch of {asked.batch}", things, [*ours, *theirs, probe])

    def far_on(self, position: int) -> None:
        """Making tokens far into a sequence, by processes that have room for it.

        Without transformers, which would have to read the prompt anew each turn.
        """
        room = max(position + self.asked.tokens + 1, self.asked.context or 0)
        rivals = {r: p for r, p in self.asked.rivals.items() if r != "transformers"}
        with ExitStack() as stack:
            ours, theirs, probe = self._loaded(stack, room, rivals)
            things = [self._decode(c, probe, position) for c in ours]
            things += [self._their_decode(c, position) for c in theirs]
            self._take_turns(f"position {position:,}", things, [*ours, *theirs, probe])

    def cold(self) -> None:
        """The first width's first token where no compiled code is kept from an earlier command."""
        thing = self._first_token(self.asked.chips[0], cold=True)
        self._take_turns("first token, nothing compiled", [thing], [], warm=False)

    def errors(self) -> None:
        """How far the logits after a prompt are from float32's, of the same weights."""
        order = {"tokens": self.asked.prompt_tokens, "prompts": self.asked.repeats}
        with TemporaryDirectory() as folder:
            exact = str(Path(folder) / "exact.npy")
            with ExitStack() as stack:
                self.say("comparing with float32")
                self._start(stack, 1, self.asked.context, kernels="xla").ask(
                    "logits", out=exact, **order
                )
            for chips in self.asked.chips:
                with ExitStack() as stack:
                    worker = self._start(stack, chips, self.asked.context)
                    error = worker.ask("error", exact=exact, **order)["error_over_deviation"]
                    self.series[worker.name]["prefill_error"] = [error]

    def _take_turns(
        self,
        part: str,
        things: Sequence[Thing],
        contenders: Sequence[Contender],
        *,
        warm: bool = True,
    ) -> None:
        def told(turn: int) -> None:
            self.say(f"{part}: {f'turn {turn} of {self.asked.repeats}' if turn else 'warming up'}")

        self.watch.pids = {c.name: c.process.pid for c in contenders}
        found = in_turns(things, self.asked.repeats, self.watch, warm=warm, told=told)
        self.series = joined(self.series, found)

    # --- Contenders

    def _loaded(
        self, stack: ExitStack, context: int | None, rivals: Mapping[str, str]
    ) -> tuple[list[Contender], list[Contender], Contender]:
        """Ours, the rivals' and the probe of memory, all waiting; closed with the stack."""
        ours = [self._start(stack, chips, context) for chips in self.asked.chips]
        about = ours[0].about
        common = Common(
            path=Path(about["path"]),
            format=about["format"],
            vocabulary=about["vocabulary"],
            context=about["context"],
            threads=self.asked.threads,
            cache=self.asked.cache,
        )
        theirs: list[Contender] = []
        for rival, python in rivals.items():
            self.say(f"loading {rival}")
            theirs += start_rival(rival, python, common, stack)
        probe = start("memory", "memory", {"threads": self.asked.threads})
        stack.callback(probe.close)
        return ours, theirs, probe

    def _start(
        self, stack: ExitStack, chips: int, context: int | None, kernels: str = "auto"
    ) -> Contender:
        self.say(f"loading {self.asked.model} on {named(chips)}")
        options = {"chips": chips, "context": context, "kernels": kernels}
        argument = {"model": self.asked.model, "options": options}
        contender = start(named(chips), "anyfold", argument)
        stack.callback(contender.close)
        return contender

    # --- Things to measure

    def _prefill(self, contender: Contender) -> Thing:
        def measure() -> Numbers:
            return {
                "prefill_tokens_per_second": _rate(
                    contender.ask("prefill", tokens=self.asked.prompt_tokens)
                )
            }

        return Thing(who=contender.name, measure=measure, workers=(contender.name,))

    def _decode(self, contender: Contender, probe: Contender, position: int | None = None) -> Thing:
        """Ours, with the share that it has of what memory gives right before, on a CPU."""
        if contender.about["platform"] != "cpu":
            return self._their_decode(contender, position)
        at = "" if position is None else "position_"
        order = {"tokens": self.asked.tokens} | _at(position)

        def measure() -> Numbers:
            read = probe.ask("read")
            memory = read["bytes"] / read["seconds"]
            answer = contender.ask("decode", **order)
            speed = _rate(answer)
            return {
                f"{at}decode_tokens_per_second": speed,
                f"{at}memory_read_gb_per_second": memory / 1e9,
                f"{at}memory_share": speed * answer["bytes"] / memory,
            }

        return Thing(who=contender.name, measure=measure, workers=(contender.name, probe.name))

    def _their_decode(self, contender: Contender, position: int | None = None) -> Thing:
        at = "" if position is None else "position_"
        order = {"tokens": self.asked.tokens} | _at(position)

        def measure() -> Numbers:
            return {f"{at}decode_tokens_per_second": _rate(contender.ask("decode", **order))}

        return Thing(who=contender.name, measure=measure, workers=(contender.name,))

    def _batch(self, contender: Contender, sequences: int) -> Thing:
        """All sequences together, and how many times one alone, right before, that is."""

        def measure() -> Numbers:
            one = _rate(contender.ask("decode", tokens=self.asked.tokens))
            many = _rate(contender.ask("batch", tokens=self.asked.tokens, sequences=sequences))
            return {"batch_decode_tokens_per_second": many, "batch_times_single": many / one}

        return Thing(who=contender.name, measure=measure, workers=(contender.name,))

    def _first_token(self, chips: int, *, cold: bool = False) -> Thing:
        command = partial(self._command, [1, 2, 3, 4, 5], chips=chips, tokens=1)

        def measure() -> Numbers:
            if not cold:
                return {"first_token_seconds": command().first_token_seconds}
            with TemporaryDirectory() as empty:
                run = command(environment={**os.environ, "JAX_COMPILATION_CACHE_DIR": empty})
            return {"first_token_compiling_seconds": run.first_token_seconds}

        return Thing(who=named(chips), measure=measure, workers=())

    def _peak(self, chips: int, vocabulary: int) -> int:
        """The memory of a run that reads and makes as much as was measured."""
        self.say(f"memory of a run on {named(chips)}")
        ids = random_ids(self.asked.prompt_tokens, vocabulary)
        return self._command(ids, chips=chips, tokens=self.asked.tokens).peak_bytes

    def _command(self, ids: Sequence[int], **options: Any) -> Run:
        return run_command(self.asked.model, ids, context=self.asked.context, **options)


def named(chips: int) -> str:
    """What a width is called."""
    return f"{chips} chip{'s' if chips > 1 else ''}"


def _rate(answer: dict[str, Any]) -> float:
    return answer["tokens"] / answer["seconds"]


def _at(position: int | None) -> dict[str, int]:
    return {} if position is None else {"position": position}
