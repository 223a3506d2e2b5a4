"""The processes of a run find one another: the first listens, the others come, all are counted."""

import os
import platform
import queue
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tp.channel import Channel, Message
from tp.door import LOOPBACK, PATIENCE, Door, DoorError, Relay, is_loopback

PROTOCOL = 1  # of the messages; those of another number are refused


class HostsError(Exception):
    """What keeps the processes of a run from going on together; `status` is the exit status."""

    status = 1


class GatherError(HostsError):
    """They did not all come: where, which numbers were seen, and what kept the others."""

    status = 3

    def __init__(self, place: "Place", why: str, seen: Iterable[int]) -> None:
        self.seen = sorted(seen)
        numbers = ", ".join(map(str, self.seen)) or "none"
        who = f"process {place.process} of {place.processes}"
        super().__init__(f"{who} at {place.address}: {why}; numbers seen: {numbers}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of how many processes this is, and where they meet.

    `chips` is how many this process brings, where that was said; `local_chips` which of the
    accelerators of its host those are, where something else than all.
    """

    host: str
    port: int
    processes: int
    process: int
    timeout: float = 60.0
    chips: int | None = None
    local_chips: tuple[int, ...] | None = None

    @property
    def address(self) -> str:
        """Where the first process listens, as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a run."""

    process: int
    host: str
    pid: int
    chips: int | None = None

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """All processes of a run, met: a channel from the first to each, from each to the first.

    `door` knows where this process reaches JAX's coordinator; `own` is this process's address
    towards the others.
    """

    place: Place
    members: tuple[Member, ...]
    channels: Mapping[int, Channel]
    door: Door | Relay
    own: str

    def close(self) -> None:
        """Part from the others."""
        for channel in self.channels.values():
            channel.close()
        self.door.close()


def gather(place: Place) -> Gathered:
    """Meet the other processes of a run.

    Raises GatherError, in every process, where they are not all there within the timeout, two
    have one number, they count differently, or nobody of ours listens at the address.
    """
    return _receive(place) if place.process == 0 else _join(place)


def _greeting(place: Place) -> Message:
    me = Member(process=place.process, host=platform.node(), pid=os.getpid(), chips=place.chips)
    return {"anyfold": PROTOCOL, "processes": place.processes, "member": asdict(me)}


# --- The first process


@dataclass(kw_only=True)
class _Guests:
    """Who is there so far, the first process itself included; `seen` are also those who left."""

    place: Place
    members: dict[int, Member]
    channels: dict[int, Channel] = field(default_factory=dict)
    seen: set[int] = field(default_factory=lambda: {0})

    def take_in(self, member: Member, channel: Channel) -> None:
        self.members[member.process] = member
        self.channels[member.process] = channel
        self.seen.add(member.process)
        self.tell(seen=sorted(self.seen))

    def tell(self, **message: Any) -> None:
        for channel in self.channels.values():
            with suppress(OSError):  # it has left, which is seen soon
                channel.send(**message)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()

    def forget_those_who_left(self) -> None:
        for number in [n for n, channel in self.channels.items() if channel.is_over()]:
            del self.members[number]
            self.channels.pop(number).close()

    def missing(self) -> list[int]:
        self.forget_those_who_left()
        return [n for n in range(self.place.processes) if n not in self.members]

    def fault(self, greeting: Message) -> str | None:
        """Why somebody who comes cannot be taken in, and nobody can go on."""
        if greeting.get("anyfold") != PROTOCOL:
            return (
                f"a process speaks version {greeting.get('anyfold')} of the protocol and this one "
                f"{PROTOCOL}: install the same anyfold everywhere"
            )
        other = Member(**greeting["member"])
        if greeting["processes"] != self.place.processes:
            return (
                f"{other} counts {greeting['processes']} processes, process 0 counts "
                f"{self.place.processes}"
            )
        self.forget_those_who_left()
        held = self.members.get(other.process)
        if held is not None:
            return f"two processes have the number {other.process}: {held} and {other}"
        return None

    def refuse(self, why: str, extra: Channel | None = None) -> GatherError:
        """Tell everybody, and make the error for oneself."""
        if extra is not None:
            self.channels[-1] = extra
        self.tell(refused=why, seen=sorted(self.seen))
        return GatherError(self.place, why, self.seen)


def _receive(place: Place) -> Gathered:
    try:
        door = Door(place.host, place.port)
    except DoorError as error:
        raise _no_door(place, error) from None
    me = Member(**_greeting(place)["member"])
    guests = _Guests(place=place, members={0: me})
    try:
        _wait_for_all(guests, door)
    except BaseException:
        guests.close()
        door.close()
        raise
    refused = f"all {place.processes} processes are there already: {_list(guests.members)}"
    door.seal({"refused": refused, "seen": sorted(guests.members)})
    members = tuple(guests.members[n] for n in range(place.processes))
    guests.tell(go=[asdict(m) for m in members])
    own = next((c.own for c in guests.channels.values() if not is_loopback(c.own)), LOOPBACK)
    return Gathered(place=place, members=members, channels=guests.channels, door=door, own=own)


def _wait_for_all(guests: _Guests, door: Door) -> None:
    place = guests.place
    deadline = time.monotonic() + place.timeout
    while guests.missing():
        left = deadline - time.monotonic()
        if left <= 0:
            raise guests.refuse(_missed(place, guests.seen))
        try:
            greeting, channel = door.arrivals.get(timeout=min(left, 0.5))
        except queue.Empty:
            continue  # and look who has left
        why = guests.fault(greeting)
        if why is not None:
            raise guests.refuse(why, channel)
        guests.take_in(Member(**greeting["member"]), channel)


def _missed(place: Place, seen: Iterable[int]) -> str:
    """Who did not come in time; where all did, some left before the last one came."""
    missing = sorted(set(range(place.processes)) - set(seen))
    who = ", ".join(map(str, missing)) if missing else "all of them at once"
    return f"{who} did not come within {place.timeout:g} s"


def _no_door(place: Place, error: DoorError) -> GatherError:
    """Why the first process cannot listen; who holds its port may be a first process too."""
    if error.in_use:
        try:
            _join(replace(place, timeout=min(place.timeout, PATIENCE)))
        except GatherError as said:
            if said.seen:
                return said
    return GatherError(place, str(error), [])


def _list(members: Mapping[int, Member]) -> str:
    return ", ".join(str(member) for _, member in sorted(members.items()))


# --- The others


def _join(place: Place) -> Gathered:
    deadline = time.monotonic() + place.timeout
    connection = _connected(place, deadline)
    channel = Channel(connection)
    seen: list[int] = []
    try:
        channel.send(**_greeting(place))
        while (message := channel.receive(deadline - time.monotonic())) is not None:
            seen = message.get("seen", seen)
            if "refused" in message:
                why = message["refused"]
                break
            if "go" in message:
                return Gathered(
                    place=place,
                    members=tuple(Member(**m) for m in message["go"]),
                    channels={0: channel},
                    door=Relay(place.host, place.port, place.process),
                    own=channel.own,
                )
        else:
            why = "process 0 has gone" if seen else "something listens there that is not anyfold"
    except TimeoutError:
        silent = "something listens there and says nothing: is it process 0?"
        why = _missed(place, seen) if seen else silent
    except OSError as error:
        why = f"the connection broke ({error.strerror})"
    channel.close()
    raise GatherError(place, why, seen)


def _connected(place: Place, deadline: float) -> socket.socket:
    """A connection to the first process, which may start later than this one."""
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((place.host, place.port), timeout=max(left, 0.1))
        except OSError as error:
            if left > 0.3:
                time.sleep(0.2)
                continue
            found = error.strerror or error
            why = f"nobody listens there after {place.timeout:g} s ({found}): is process 0 running?"
            raise GatherError(place, why, []) from None
