"""A run of several processes from one command line, and how it ends when one of them does."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.several import children, ended, gone, python, several
from tp.door import free_port

LLAMA = Path(__file__).parent / "checkpoints" / "llama"
SUPERVISE = """
import sys
from tp.supervise import Start, supervise
starts = [Start(argv=[sys.executable, "-c", code], held=True) for code in sys.argv[2:]]
raise SystemExit(supervise(starts, silent=sys.argv[1] == "silent"))
"""
WAIT = "import time; time.sleep(60)"
READ = "import sys; sys.stdin.read()"


def supervised(*codes, silent="loud"):
    return several([python("-c", SUPERVISE, silent, *codes)])


def run(*options, model=LLAMA):
    """A command that answers a prompt of the tiny checkpoint."""
    with np.load(LLAMA / "expected.npz") as expected:
        ids = " ".join(map(str, expected["input_ids_0"]))
    return ["run", str(model), "--ids", ids, "--ctx", "256", *options]


def anyfold(*arguments):
    return python("-m", "tp.cli", *arguments)


def side_by_side(*commands, timeout):
    """Runs of several processes, told of one another by hand."""
    port, count = free_port(), len(commands)
    here = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count), "--process"]
    limit = ["--timeout", str(timeout)]
    return several([anyfold(*c, *here, str(n), *limit) for n, c in enumerate(commands)])


# --- Processes that are started together


def test_what_the_others_say_is_marked_and_the_status_is_of_the_first_to_fail():
    codes = ["print('first'); import time; time.sleep(.4); exit(3)", "print('one'); exit(4)"]
    with supervised(*codes) as (process,):
        assert ended(process) == (4, "first\n", "[1] one\n")
    with supervised(*codes, silent="silent") as (process,):
        assert ended(process) == (4, "first\n", "")


def test_a_process_that_a_signal_ended_is_named():
    with supervised(READ, "import os; os.kill(os.getpid(), 9)") as (process,):
        process.stdin.close()
        process.stdin = None
        status, _, err = ended(process)
    assert (status, err) == (5, "anyfold: process 1 was ended by SIGKILL\n")


def test_the_first_reads_what_the_launcher_is_given():
    with supervised("print(input())", "import time; time.sleep(.2)") as (process,):
        out, err = process.communicate("a line\n", timeout=20)
        assert (process.returncode, out, err) == (0, "a line\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_to_all(number):
    catch = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('caught', flush=True), exit(1)))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with supervised(catch, catch) as (process,):
        assert process.stdout.readline() == "ready\n"
        assert process.stderr.readline() == "[1] ready\n"
        process.send_signal(number)
        assert ended(process) == (128 + number, "caught\n", "[1] caught\n")


def test_who_holds_out_is_ended_too():
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
    code = "from tp import supervise as s; s.OWN_END = s.TERMINATION = 0.3\n" + SUPERVISE
    started = time.monotonic()
    with several([python("-c", code, "loud", "import time; time.sleep(.5)", stubborn)]) as (one,):
        while not (left := children(one.pid)):
            time.sleep(0.05)
        assert ended(one)[0] == 5
    assert gone(left, 0) == []
    assert time.monotonic() - started < 10


# --- The whole of it, with chips


def test_a_run_of_two_processes_prints_what_one_prints():
    command = anyfold("launch", "--processes", "2", "--chips-per-process", "2,1", "--")
    with several([[*command, *run("--max-tokens", "12")]]) as (process,):
        status, out, err = ended(process)
    with np.load(LLAMA / "expected.npz") as expected:
        wanted = expected["greedy_0"].tolist()
    assert (status, [int(word) for word in out.split()]) == (0, wanted)
    assert err.startswith(
        "llama: 2 layers of width 64 on 3 simulated chips of 2 processes (cpu)\nchip"
    )
    assert "[1]" not in err


def test_nothing_is_left_of_a_launch_that_was_killed():
    command = anyfold("launch", "--processes", "2", "--", *run("--max-tokens", "200"))
    with several([command]) as (process,):
        while len(left := children(process.pid)) < 2:
            time.sleep(0.05)
        process.kill()
        assert gone(left, 10) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_in_a_step_ends_the_run(victim):
    commands = [run("--max-tokens", "200")] * 2
    with side_by_side(*commands, timeout=20) as processes:
        assert processes[0].stdout.read(1) != ""
        processes[victim].kill()
        killed = time.monotonic()
        status, _, err = ended(processes[1 - victim])
        assert time.monotonic() - killed < 10
    said = err.splitlines()[-1]
    assert status == 5
    assert len(err.splitlines()) == (1 if victim == 0 else 2)  # the first says what it runs
    assert f"process {victim} (pid {processes[victim].pid} on " in said
    assert "its connection broke; the last step it reported: " in said


def test_a_process_that_is_stopped_in_a_step_ends_the_run():
    commands = [run("--max-tokens", "200")] * 2
    with side_by_side(*commands, timeout=4) as processes:
        assert processes[0].stdout.read(1) != ""
        os.kill(processes[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        status, _, err = ended(processes[0])
        assert time.monotonic() - stopped < 4 + 2
    assert status == 5
    assert "nothing was heard of it for" in err
    assert "; the last step it reported: " in err


def test_processes_with_other_weights_refuse_with_both_digests(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in LLAMA.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-4096:] = bytes(4096)
        (other / path.name).write_bytes(data)
    with side_by_side(run(), run(model=other), timeout=20) as processes:
        for number, process in enumerate(processes):
            status, out, err = ended(process)
            assert (status, out, len(err.splitlines())) == (4, "", 1)
            assert f"process {number} of 2: the processes differ in the weights: " in err
            assert "the program" not in err


def test_a_cluster_is_simulated_and_told_in_one_table():
    command = ["scripts/simulate", "--hosts", "2", "--chips", "1", str(LLAMA), "--ids", "1 2 3"]
    with several([python(*command)]) as (process,):
        status, out, _ = ended(process)
    heading, prefill, steps, verdict = out.splitlines()
    assert status == 0
    assert heading.split()[:2] == ["processes", "chips"]
    assert prefill.split()[:6] == ["2", "2", "1", "+", "1", "prefill"]
    assert steps.split()[:6] == ["2", "2", "1", "+", "1", "steps"]
    assert float(steps.split()[6]) < 1e-3
    assert steps.split()[7] == "3/3"
    assert verdict == "all widths agree with one chip"


def test_a_simulation_that_cannot_run_ends_with_the_status_of_its_run():
    with several([python("scripts/simulate", "nowhere")]) as (process,):
        status, out, err = ended(process)
    assert (status, out) == (2, "")
    assert "nowhere: is not there" in err
