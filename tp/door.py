"""Where the first process listens: who comes is kept for it, and JAX's own traffic is let through.

JAX's coordinator ends every process, with a stack trace of its own, as soon as a connection to
it breaks. So it listens on the loopback of the first process alone, and the others reach it by
a relay through the one address that all know: a relay whose far end is gone stays silent, and
there is time to say which process was lost.
"""

import errno
import ipaddress
import json
import os
import platform
import queue
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

from tp.channel import Channel, Message, first_line, message_of

LOOPBACK = "127.0.0.1"
PATIENCE = 10.0  # seconds in which somebody who connects has to say what for


class DoorError(Exception):
    """An address at which this process cannot listen."""

    def __init__(self, why: str, *, in_use: bool = False) -> None:
        super().__init__(why)
        self.in_use = in_use


class Door:
    """The first process's listening address; who greets there is put into `arrivals`."""

    def __init__(self, host: str, port: int) -> None:
        self.arrivals: queue.Queue[tuple[Message, Channel]] = queue.Queue()
        self._jax: int | None = None
        self._refusal: Message | None = None
        self._answering = Lock()
        self._listener = _listener(host, port)
        _serve(self._listener, self._greet)

    @property
    def jax(self) -> str:
        """Where JAX's coordinator is to listen, once all processes are there."""
        return f"{LOOPBACK}:{self._jax}"

    def seal(self, refusal: Message) -> None:
        """Take in nobody else, and let JAX through."""
        with self._answering:
            self._refusal = refusal
            self._jax = free_port()
        while not self.arrivals.empty():
            _refuse(self.arrivals.get()[1], refusal)

    def close(self) -> None:
        """Listen no more."""
        _close(self._listener)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        greeting = message_of(first_line(connection))
        connection.settimeout(None)
        if greeting is None or "anyfold" not in greeting:
            connection.close()
        elif "relay" in greeting and self._jax is not None:
            _relay(connection, _connected(self._jax))
        else:
            self._arrived(greeting, Channel(connection))

    def _arrived(self, greeting: Message, channel: Channel) -> None:
        with self._answering:
            if self._refusal is None:
                self.arrivals.put((greeting, channel))
                return
        _refuse(channel, self._refusal)


class Relay:
    """An address of another process's own that leads through the door to JAX's coordinator."""

    def __init__(self, host: str, port: int, process: int) -> None:
        self._door = (host, port)
        self._greeting = json.dumps({"anyfold": True, "relay": process}).encode() + b"\n"
        self._listener = socket.create_server((LOOPBACK, 0))
        self.jax = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        _serve(self._listener, self._follow)

    def close(self) -> None:
        """Listen no more."""
        _close(self._listener)

    def _follow(self, connection: socket.socket) -> None:
        onward = socket.create_connection(self._door)
        onward.sendall(self._greeting)
        _relay(connection, onward)


def _close(listener: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
    listener.close()


def free_port() -> int:
    """A port of the loopback on which nobody listens now."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


def _connected(port: int) -> socket.socket:
    """A connection to a port of the loopback, on which JAX may take its time to listen."""
    while True:
        try:
            return socket.create_connection((LOOPBACK, port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def _refuse(channel: Channel, refusal: Message) -> None:
    with suppress(OSError):  # it did not wait for an answer
        channel.send(**refusal)
    channel.close()


def _serve(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    """Answer whoever connects, each in a thread of its own, until the listener is closed."""

    def answered(connection: socket.socket) -> None:
        try:
            answer(connection)
        except OSError:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            Thread(target=answered, args=(connection,), daemon=True).start()

    Thread(target=accept, daemon=True).start()


def _relay(away: socket.socket, towards: socket.socket) -> None:
    """Carry bytes between a process and JAX's coordinator, until the process has parted from it.

    The coordinator waits for all to part, so an end is told towards it. Away from it none is.
    """
    back = Thread(target=_carry, args=(towards, away), daemon=True)
    back.start()
    _carry(away, towards)
    with suppress(OSError):
        towards.shutdown(socket.SHUT_RDWR)
    back.join()
    away.close()
    towards.close()


def _carry(source: socket.socket, to: socket.socket) -> None:
    taken = True
    while data := _received(source):
        taken = taken and _taken(to, data)


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _taken(to: socket.socket, data: bytes) -> bool:
    try:
        to.sendall(data)
    except OSError:
        return False
    return True


# --- Addresses


def is_loopback(host: str) -> bool:
    """Whether a name says of itself that it is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(host: str, port: int) -> socket.socket:
    """On the loopback where that was named, else on every address, if the host's is among them.

    A machine's own name often stands for its loopback in its own tables, and not in those of
    the other machines.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise DoorError(f"{host} is not known here ({error.strerror})") from None
    family, *_, address = found[0]
    if not any(_is_own(family, str(address[0])) for family, *_, address in found):
        raise DoorError(
            f"{host} is not an address of this machine, {platform.node()}; process 0 is to run "
            "where the coordinator's address is"
        )
    try:
        if is_loopback(host):
            return socket.create_server(address[:2], family=family)
        return _listener_everywhere(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise DoorError(f"port {port} is in use by another program", in_use=True) from None
        raise DoorError(f"cannot listen there ({os.strerror(error.errno or 0)})") from None


def _is_own(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _listener_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))
