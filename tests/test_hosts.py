"""Processes that have gathered go on together, and none is left waiting for one that is lost."""

import json
import os
import re
import signal
import time

import pytest

from tests.several import ended, python, several
from tp.door import free_port

LIMIT = 2.0
GATHER = """
import os, sys, time
from tp.gather import HostsError, Place, gather
from tp.hosts import Hosts
port, processes, process = map(int, sys.argv[1:4])
place = Place(
    host="127.0.0.1", port=port, processes=processes, process=process, timeout=float(sys.argv[4])
)
hosts = Hosts(gather(place))
try:
    exec(sys.argv[5])
    hosts.finish()
except HostsError as error:
    hosts.leave(error.status, str(error))
"""
STEPS = """
for step in range(1000):
    hosts.report(f"step {step}")
    print(step, flush=True)
    time.sleep(0.15)
"""


def together(*codes, timeout=10.0):
    """Processes that gather and run some lines each."""
    port, count = free_port(), len(codes)
    return several(
        [
            python("-c", GATHER, str(port), str(count), str(number), str(timeout), code)
            for number, code in enumerate(codes)
        ]
    )


def after_some_steps(processes):
    """Wait until each has printed its fourth step."""
    for process in processes:
        while process.stdout.readline() != "3\n":
            assert process.poll() is None, process.stderr.read()


def test_all_get_the_values_of_all_in_order():
    code = "print(hosts.exchange('numbers', [process * 10, 'x']))"
    with together(code, f"time.sleep(0.3); {code}", code) as processes:
        for process in processes:
            assert ended(process) == (0, "[[0, 'x'], [10, 'x'], [20, 'x']]\n", "")


def test_the_first_alone_reads_and_all_have_what_it_read():
    code = "print([hosts.from_first('a line', sys.stdin.readline) for _ in range(2)])"
    with together(code, code) as processes:
        processes[0].stdin.write("one\ntwo\n")
        processes[0].stdin.flush()
        assert [ended(p) for p in processes] == [(0, "['one\\n', 'two\\n']\n", "")] * 2


def test_what_differs_is_said_with_both_values_by_all():
    codes = [f"hosts.agree({{'a': '1', 'weights': {w!r}}})" for w in ("3f", "3f", "77")]
    with together(*codes) as processes:
        for number, process in enumerate(processes):
            status, out, err = ended(process)
            assert (status, out) == (4, "")
            said = f"anyfold: process {number} of 3: the processes differ in weights: "
            assert err.startswith(said)
            assert ": 3f in process 0, 77 in process 2 (pid" in err
            assert "process 1 (" not in err


def test_who_is_at_something_else_is_told():
    with together("hosts.exchange('a', 1)", "hosts.exchange('b', 1)") as processes:
        for process in processes:
            status, _, err = ended(process)
            assert status == 4
            assert "process 0 is at 'a', and process 1" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_with_its_last_step(victim):
    with together(STEPS, STEPS, STEPS) as processes:
        after_some_steps(processes)
        processes[victim].kill()
        killed = time.monotonic()
        for number, process in enumerate(processes):
            if number != victim:
                status, _, err = ended(process)
                assert status == 5
                assert f"process {victim} (pid {processes[victim].pid} on " in err
                said = r"its connection broke; the last step it reported: step [3-9]\n$"
                assert re.search(said, err)
        assert time.monotonic() - killed < LIMIT


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_lost_within_the_timeout(victim):
    with together(STEPS, STEPS, STEPS, timeout=LIMIT) as processes:
        after_some_steps(processes)
        os.kill(processes[victim].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        rest = [p for n, p in enumerate(processes) if n != victim]
        for process in rest:
            status, _, err = ended(process)
            assert status == 5
            assert f"process {victim} (pid {processes[victim].pid} on " in err
            said = r"nothing was heard of it for \d s; the last step it reported: step [3-9]\n$"
            assert re.search(said, err)
        assert time.monotonic() - stopped < LIMIT + 1
        os.kill(processes[victim].pid, signal.SIGCONT)  # it finds itself alone, and ends too
        assert ended(processes[victim])[0] == 5


def test_a_run_that_is_stopped_whole_goes_on():
    code = "for _ in range(4): hosts.exchange('a step', 1); print('.', flush=True); time.sleep(.2)"
    with together(code, code, timeout=LIMIT) as processes:
        for process in processes:
            assert process.stdout.readline() == ".\n"
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(LIMIT + 0.2)
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        for process in processes:
            assert ended(process) == (0, ".\n.\n.\n", "")


def test_an_error_of_one_is_told_by_the_others():
    codes = [STEPS, "hosts.leave(2, 'weights: no such file')", STEPS]
    with together(*codes) as processes:
        found = [ended(process) for process in processes]
    assert [status for status, _, _ in found] == [5, 2, 5]
    assert found[1][2] == "anyfold: process 1 of 3: weights: no such file\n"
    for _, _, err in (found[0], found[2]):
        assert "process 1 (pid" in err
        assert err.endswith(" ended: weights: no such file\n")


def test_all_end_quietly_when_the_output_of_the_first_is_wanted_no_longer():
    with together("hosts.leave(0, None)", STEPS) as processes:
        assert [ended(p)[::2] for p in processes] == [(0, ""), (0, "")]


def test_a_run_in_which_nothing_moves_says_where_all_are():
    codes = ["hosts.report('a')\nhosts.exchange('b', 1)", "hosts.report('c')\ntime.sleep(2.6)"]
    with together(*codes, timeout=LIMIT) as processes:
        status, _, err = ended(processes[0])
    assert (status, err) == (4, err)
    assert "anyfold: no news for 2 s: process 0 at 'b', process 1 at 'c'\n" in err


def test_a_large_value_arrives_whole():
    ids = list(range(300_000))
    code = "print(sum(hosts.from_first('ids', lambda: list(range(300_000)))))"
    with together(code, code) as processes:
        assert [ended(p) for p in processes] == [(0, json.dumps(sum(ids)) + "\n", "")] * 2
