"""Messages between processes: JSON objects, one a line, over a socket."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Any

Message = dict[str, Any]

LONGEST = 1 << 26  # bytes of a line; nothing of ours comes near


class Channel:
    """One end of a connection to another process; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = Lock()

    @property
    def own(self) -> str:
        """This end's address."""
        return self._connection.getsockname()[0].removeprefix("::ffff:")

    def send(self, **message: Any) -> None:
        """Send a message; raises OSError where nobody takes it."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)

    def receive(self, seconds: float) -> Message | None:
        """The next message; None where there will be no more, or what came was not one.

        Raises TimeoutError where none comes in time; the channel is of no use after that.
        """
        self._connection.settimeout(max(seconds, 0.001))
        try:
            return message_of(self._lines.readline(LONGEST))
        except TimeoutError:
            raise
        except OSError:
            return None

    def messages(self, patience: float) -> Iterator[Message]:
        """All messages to come, until the connection ends.

        From now on a send that is not taken raises OSError after `patience` seconds.
        """
        whole, rest = divmod(patience, 1)
        limit = struct.pack("ll", int(whole), int(rest * 1e6))
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            while (message := message_of(self._lines.readline(LONGEST))) is not None:
                yield message
        except (OSError, ValueError):  # broken, or closed by another thread
            return

    def is_over(self) -> bool:
        """Whether the other end has gone; for a channel on which nothing is to be received."""
        try:
            self._connection.setblocking(False)
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._connection.setblocking(True)

    def close(self) -> None:
        """Say that no more will come, and go."""
        with suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes who receives
        self._lines.close()
        self._connection.close()


def message_of(line: bytes) -> Message | None:
    """The message that a line is; None for what is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def first_line(connection: socket.socket) -> bytes:
    """A line and not a byte more: what follows may be no message."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line
