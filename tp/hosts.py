"""The processes of a run go on together: what one says to all, and what it does if one is lost.

The first process has a channel to every other. Over these they compare and share small values,
report the step they are at, and show that they live. Whoever is lost takes the run with it: a
step waits for every chip, so the others could only wait.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, NoReturn, TextIO

from tp.channel import Channel, Message
from tp.gather import Gathered, HostsError, Member

OUR_FAULT = 1  # the exit status of an error that no user made
GRACE = 2.0  # seconds in which a process may end by itself before another's end ends it


class DifferError(HostsError):
    """Processes that are not doing the same thing: what differs, and both values."""

    status = 4


class LostError(HostsError):
    """A process that has gone: which, how, and the last step it reported."""

    status = 5


class Alone:
    """A process that is the whole of its run: all that several do together is done by itself."""

    processes = 1
    process = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that reads, prints and writes for all."""
        return self.process == 0

    def report(self, step: str) -> None:
        """Let the others know how far this process is."""

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in order, which JSON can carry; waits for every one."""
        return [value]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What the first process makes, which JSON can carry, in every process."""
        return make()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise DifferError, in every process, where not all have the same facts."""

    def finish(self) -> None:
        """Wait until all have finished."""

    def leave(self, status: int, why: str | None) -> None:
        """End the process because of an error, if others are to know of it."""


class Hosts(Alone):
    """One of several processes that have gathered."""

    def __init__(self, gathered: Gathered, errors: TextIO = sys.stderr) -> None:
        self.gathered = gathered
        self.process = gathered.place.process
        self.processes = gathered.place.processes
        self._errors = errors
        self._timeout = gathered.place.timeout
        now = time.monotonic()
        self._steps = {m.process: "gathering" for m in gathered.members}
        self._heard = dict.fromkeys(gathered.channels, now)
        self._moved = now
        self._reported = 0.0
        self._asleep = False
        self._turn = 0
        self._given: dict[int, dict[int, Any]] = {}
        self._answers: dict[int, list[Any]] = {}
        self._changed = Condition()
        self._over = False
        for number, channel in gathered.channels.items():
            Thread(target=self._listen, args=(number, channel), daemon=True).start()
        Thread(target=self._watch, daemon=True).start()

    @property
    def members(self) -> tuple[Member, ...]:
        """Who is there, by number."""
        return self.gathered.members

    def report(self, step: str) -> None:
        """Let the others know how far this process is."""
        self._steps[self.process] = step
        now = time.monotonic()
        self._moved = now
        if now - self._reported > 0.02:  # the next sign of life will do for a step so short
            self._reported = now
            self._beat()

    # --- What all do at the same time

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in order, which JSON can carry; waits for every one.

        Raises DifferError where another process is at something else.
        """
        turn, self._turn = self._turn, self._turn + 1
        self.report(what)
        if self.first:
            self._take(turn, 0, [what, value])
        else:
            self._tell(give=turn, value=[what, value])
        with self._changed:
            self._changed.wait_for(lambda: turn in self._answers)
            answers = self._answers.pop(turn)
        for member, (at, _) in zip(self.members, answers, strict=True):
            if at != answers[0][0]:
                raise DifferError(f"process 0 is at {answers[0][0]!r}, and {member} at {at!r}")
        return [value for _, value in answers]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What the first process makes, which JSON can carry, in every process."""
        self._asleep = True
        try:
            return self.exchange(what, make() if self.first else None)[0]
        finally:
            self._asleep = False
            self._moved = time.monotonic()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise DifferError, in every process, where not all have the same facts."""
        ours, *theirs = self.exchange("comparing", dict(facts))
        said = [
            f"in {name}: {ours.get(name)} in process 0, {other.get(name)} in {member}"
            for member, other in zip(self.members[1:], theirs, strict=True)
            for name in dict.fromkeys([*ours, *other])
            if ours.get(name) != other.get(name)
        ]
        if said:
            raise DifferError(f"the processes differ {'; '.join(said)}")

    def finish(self) -> None:
        """Wait until all have finished; after that nobody is missed."""
        self.exchange("the end", None)
        self._over = True

    # --- How it ends otherwise

    def leave(self, status: int, why: str | None) -> NoReturn:
        """End this process because of an error of its own, and let the others know.

        What no mistake of the user's explains may come of the loss of another process, which is
        soon seen; then that is what is said.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
        if status == OUR_FAULT:
            time.sleep(GRACE)
        self._over = True
        self._tell(bye=status, why=why)
        self._exit(status, why)

    def _exit(self, status: int, why: str | None) -> NoReturn:
        """At once: an orderly end of JAX would wait for the other processes."""
        if why is not None:
            self._say(f"process {self.process} of {self.processes}: {why}")
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)

    def _say(self, what: str) -> None:
        with suppress(OSError, ValueError):  # whoever read it may have gone
            print(f"anyfold: {what}", file=self._errors, flush=True)

    def _lost(self, number: int, how: str) -> None:
        step = self._steps[number]
        self._end(f"{self.members[number]} is lost: {how}; the last step it reported: {step}")

    def _end(self, why: str, grace: float = 0.0) -> None:
        """End for another process's sake, unless this one ends by itself meanwhile."""
        if self._over:
            return
        if self.first:
            self._tell(lost=why, grace=grace)
        time.sleep(grace)
        if not self._over:
            self._over = True
            self._exit(LostError.status, why)

    # --- What is heard

    def _listen(self, number: int, channel: Channel) -> None:
        for message in channel.messages(self._timeout / 2):
            self._heard[number] = time.monotonic()
            self._hear(number, message)
        self._lost(number, "its connection broke")

    def _hear(self, number: int, message: Message) -> None:
        if "beat" in message:
            if message["beat"] != self._steps[number]:
                self._moved = time.monotonic()
            self._steps[number] = message["beat"]
        elif "give" in message:
            self._take(message["give"], number, message["value"])
        elif "all" in message:
            self._answer(message["all"], message["values"])
        elif "lost" in message:
            self._end(message["lost"], message["grace"])
        elif "bye" in message:
            self._part(number, message["bye"], message["why"])

    def _part(self, number: int, status: int, why: str | None) -> None:
        """Another ended: in good order, where its output was wanted no longer, or not."""
        if status != 0:
            self._end(f"{self.members[number]} ended: {why}", GRACE)
        elif not self._over:
            self._over = True
            self._exit(0, None)

    def _take(self, turn: int, number: int, value: Any) -> None:
        """Enter what a process gives; the last to give makes the answer for all."""
        with self._changed:
            given = self._given.setdefault(turn, {})
            given[number] = value
            if len(given) < self.processes:
                return
            values = [given[n] for n in range(self.processes)]
            del self._given[turn]
        self._tell(all=turn, values=values)
        self._answer(turn, values)

    def _answer(self, turn: int, values: list[Any]) -> None:
        with self._changed:
            self._answers[turn] = values
            self._changed.notify_all()

    # --- What is shown

    def _tell(self, **message: Any) -> None:
        for channel in self.gathered.channels.values():
            with suppress(OSError):  # who listens on it will find out
                channel.send(**message)

    def _beat(self) -> None:
        self._tell(beat=self._steps[self.process])

    def _watch(self) -> None:
        """Show that this process lives, and see that the others do."""
        interval = min(1.0, self._timeout / 10)
        woken = time.monotonic()
        while not self._over:
            time.sleep(interval)
            now = time.monotonic()
            if now - woken > 0.4 * self._timeout:  # stopped and continued, all of us perhaps
                self._heard, self._moved = dict.fromkeys(self._heard, now), now
            woken = now
            self._beat()
            for number, heard in self._heard.items():
                if now - heard > 0.8 * self._timeout:
                    self._lost(number, f"nothing was heard of it for {now - heard:.0f} s")
            self._say_if_nothing_moves(now)

    def _say_if_nothing_moves(self, now: float) -> None:
        """All live and none gets on: it may be a large file, a long compilation or a fault."""
        if not self.first or self._asleep or self._over or now - self._moved < self._timeout:
            return
        self._moved = now
        steps = ", ".join(f"process {n} at {step!r}" for n, step in sorted(self._steps.items()))
        self._say(f"no news for {self._timeout:g} s: {steps}")
