"""The next part of a generation is made while the one before it is read and printed."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tp.plan import Arrays

Part = tuple[list[int], Arrays]


class Ahead:
    """The tokens of a generation, and the states that it leaves behind.

    With `ahead`, whoever stops early is left with states that have gone on further: right for
    caches, which are read up to a position, and wrong for recurrent states.
    """

    def __init__(self, parts: Iterator[Part], *, ahead: bool) -> None:
        self._parts = parts
        self._ahead = ahead
        self._states: Arrays | None = None
        self._next: Future[Part | None] | None = None
        self._asked = False  # for a part that has the states, even if `_next` is not there yet
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __iter__(self) -> Iterator[list[int]]:
        """The tokens of one part after the other."""
        while (part := self._made()) is not None:
            if self._ahead:
                self._ask()
            yield part[0]

    def finish(self) -> Arrays | None:
        """The states after all that was made; None where it failed or was interrupted on its way.

        A part that nobody was handed leaves caches as good as they were, and recurrent states not.
        """
        try:
            if self._asked:
                part = None if self._next is None else self._next.result()
                states = self._states if part is None else part[1]
                self._states = states if self._ahead and self._next is not None else None
        except Exception:
            self._states = None
        finally:
            self._thread.shutdown()
        return self._states

    def _made(self) -> Part | None:
        pending = self._next or self._ask()
        part = pending.result()
        if part is not None:
            self._states = part[1]
        self._next = None
        self._asked = False
        return part

    def _ask(self) -> "Future[Part | None]":
        # An interrupt may come between any two of these steps, and finds states given up or whole.
        self._asked = True
        self._next = self._thread.submit(next, self._parts, None)
        return self._next
