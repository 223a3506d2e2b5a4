"""Processes find one another, or all of them say in time where, who was seen and what is wrong."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from tp.channel import Channel
from tp.door import free_port
from tp.gather import PROTOCOL, GatherError, Place, gather

LIMIT = 1.0  # seconds, of those that are to end by it


def places(processes, port=None, **options):
    port = free_port() if port is None else port
    made = Place(host="127.0.0.1", port=port, processes=processes, process=0, timeout=LIMIT)
    return [replace(made, process=process, **options) for process in range(processes)]


@contextmanager
def meeting(*wanted, between=0.0):
    """What becomes of processes that gather at the same time, one started after another."""

    def come(item):
        time.sleep(between * item[0])
        try:
            return gather(item[1])
        except GatherError as error:
            return error

    started = time.monotonic()
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(come, enumerate(wanted)))
    assert time.monotonic() - started < LIMIT + between * len(wanted) + 1
    try:
        yield found
    finally:
        for gathered in found:
            if not isinstance(gathered, GatherError):
                gathered.close()


def refusals(found, place, seen):
    """What all of them say, each with its number, the address and the numbers that were seen."""
    for error in found:
        assert isinstance(error, GatherError)
        assert error.status == 3
        assert re.match(r"process \d of \d at ", str(error))
        assert f"127.0.0.1:{place.port}" in str(error)
        assert str(error).endswith(f"numbers seen: {seen}")
    return [str(error) for error in found]


def test_all_know_all_and_can_talk_to_the_first():
    wanted = [replace(place, chips=place.process + 1) for place in places(3)]
    with meeting(*reversed(wanted), between=0.1) as found:
        for gathered in found:
            assert [m.process for m in gathered.members] == [0, 1, 2]
            assert [m.chips for m in gathered.members] == [1, 2, 3]
            assert gathered.own == "127.0.0.1"
        first, second = found[-1], found[1]
        assert (sorted(first.channels), sorted(second.channels)) == ([1, 2], [0])
        second.channels[0].send(said=[1, "ä"])
        assert first.channels[1].receive(LIMIT) == {"said": [1, "ä"]}


def test_jax_is_reached_through_the_one_address():
    with meeting(*places(2)) as (first, second):
        host, _, port = second.door.jax.partition(":")
        with socket.create_connection((host, int(port))) as ours:
            ours.sendall(b"hello")  # before JAX listens
            time.sleep(0.2)
            host, _, port = first.door.jax.partition(":")
            with socket.create_server((host, int(port))) as listener:
                theirs, _ = listener.accept()
                with theirs:
                    assert theirs.recv(5, socket.MSG_WAITALL) == b"hello"
                    theirs.sendall(b"world")
                    assert ours.recv(5, socket.MSG_WAITALL) == b"world"
            ours.settimeout(0.3)
            with pytest.raises(TimeoutError):  # it is not told that the far end has gone
                ours.recv(1)


def test_who_does_not_come_is_named():
    wanted = places(4)
    with meeting(wanted[0], wanted[2]) as found:
        for said in refusals(found, wanted[0], "0, 2"):
            assert "1, 3 did not come within 1 s" in said


@pytest.mark.parametrize("twice", [0, 1])
def test_two_with_one_number_are_told_apart_by_their_pids(twice):
    wanted = places(3)
    present = [wanted[0], wanted[twice]] if twice == 0 else [wanted[0], wanted[1], wanted[1]]
    with meeting(*present, between=0.2) as found:
        for said in refusals(found, wanted[0], "0" if twice == 0 else "0, 1"):
            assert f"two processes have the number {twice}: process {twice} (pid" in said


def test_who_counts_otherwise_is_told_both_counts():
    wanted = places(3)
    with meeting(wanted[0], replace(wanted[1], processes=2), between=0.2) as found:
        for said in refusals(found, wanted[0], "0"):
            assert re.search(r"process 1 \(.*\) counts 2 processes, process 0 counts 3", said)


def test_nobody_at_the_address():
    (_, lonely) = places(2, timeout=0.5)
    with meeting(lonely) as found:
        (said,) = refusals(found, lonely, "none")
        assert "nobody listens there after 0.5 s (Connection refused)" in said


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_a_port_that_another_program_has(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        wanted = places(2, port=listener.getsockname()[1])

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        if answer is None:
                            connection.recv(1 << 16), connection.recv(1)
                        else:
                            connection.sendall(answer)

        pool.submit(serve)
        with meeting(*wanted) as found:
            first, second = refusals(found, wanted[0], "none")
        listener.shutdown(socket.SHUT_RDWR)
    assert f"port {wanted[0].port} is in use by another program" in first
    assert ("says nothing" if answer is None else "is not anyfold") in second


def test_a_coordinator_elsewhere_is_no_place_for_process_0():
    elsewhere = replace(places(2)[0], host="192.0.2.77")  # of a block that is for documents
    with pytest.raises(GatherError, match=r"192\.0\.2\.77 is not an address of this machine"):
        gather(elsewhere)
    with pytest.raises(GatherError, match=r"nowhere\.invalid is not known here"):
        gather(replace(elsewhere, host="nowhere.invalid"))


def test_who_comes_too_late_disturbs_nobody():
    wanted = places(2)
    with meeting(*wanted) as (first, second):
        with meeting(wanted[1]) as late:
            (said,) = refusals(late, wanted[0], "0, 1")
            assert "all 2 processes are there already: process 0 (pid" in said
        first.channels[1].send(still=True)
        assert second.channels[0].receive(LIMIT) == {"still": True}


def test_who_left_before_all_came_may_come_again():
    wanted = places(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, replace(wanted[0], processes=3))
        with pytest.raises(GatherError):
            gather(replace(wanted[1], processes=3, timeout=0.3))
        rest = [replace(wanted[1], processes=3), replace(wanted[1], processes=3, process=2)]
        with meeting(*rest) as found:
            first = waiting.result()
            assert [m.process for m in first.members] == [0, 1, 2]
            assert all(g.members == first.members for g in found)
            first.close()


def test_another_version_of_the_protocol_is_refused():
    wanted = places(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, wanted[0])
        time.sleep(0.2)
        channel = Channel(socket.create_connection(("127.0.0.1", wanted[0].port)))
        channel.send(anyfold=PROTOCOL + 1)
        assert "refused" in channel.receive(LIMIT)
        channel.close()
        said = str(waiting.exception())
    assert f"speaks version {PROTOCOL + 1} of the protocol and this one {PROTOCOL}" in said


def test_what_is_no_greeting_is_no_process():
    wanted = places(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gather, wanted[0])
        time.sleep(0.2)
        for line in (b"\n", b"[]\n", json.dumps({"hello": 1}).encode() + b"\n", b"\xff" * 5000):
            with socket.create_connection(("127.0.0.1", wanted[0].port)) as stranger:
                stranger.sendall(line)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        second = pool.submit(gather, wanted[1])
        for gathered in (first.result(), second.result()):
            gathered.close()
