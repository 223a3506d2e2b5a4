"""A conversion that was stopped is no model; run again it goes on, and the result is the same."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.killed import MARK, SHARD_SIZE, digests
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.cli import main
from tp.source import open_source
from tp.store import convert
from tp.store_journal import StoreError

ROOT = Path(__file__).parent.parent
LLAMA = ROOT / "tests" / "checkpoints" / "llama"
JOURNAL = "anyfold-q8.unfinished.json"


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.killed", LLAMA, tmp_path, "3"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    *moments, again = map(json.loads, run.stdout.splitlines())
    assert len(moments) > 40
    for moment in moments:
        assert moment["same"], moment
        assert moment["loads"] == moment["manifest"], moment
    # Between shards, and in the middle of one.
    assert {moment["part"] for moment in moments if moment["found"]} == {True, False}
    found = [moment["found"] for moment in moments if moment["found"] is not None]
    assert found == sorted(found)
    size = sum(file.stat().st_size for file in (tmp_path / "whole").glob("q8-*"))
    assert found[len(found) // 2] > size / 3
    # It never has to write again more than what came since the last mark.
    assert max(after - before for before, after in pairwise(found)) < SHARD_SIZE
    assert again["same"]
    assert again["times"] > 1


# --- What it goes on with


class Stopped(Exception):
    pass


def stopped(model, out, after):
    """A conversion that stops when so many bytes are written."""

    def progress(what, done, of):
        if what != "digests of the source" and done >= after:
            raise Stopped

    with pytest.raises(Stopped):
        started(model, out, progress=progress)
    return json.loads((out / JOURNAL).read_text())


def started(model, out, **options):
    """Convert; how many bytes were found there."""
    there = []
    sizes = {"shard_size": SHARD_SIZE, "mark": MARK, "resumes": lambda n, of: there.append(n)}
    convert(open_source(str(model)), out, model=str(model), **sizes | options)
    return sum(there)


@pytest.fixture
def wanted(tmp_path):
    """The digests of a store that was never stopped."""
    started(LLAMA, tmp_path / "wanted")
    return digests(tmp_path / "wanted")


def test_it_goes_on_after_the_last_mark(tmp_path, wanted):
    journal = stopped(LLAMA, tmp_path / "out", 50_000)
    assert len(journal["shards"]) == 2
    whole = sum(shard["bytes"] for shard in journal["shards"].values())
    assert started(LLAMA, tmp_path / "out") == whole + journal["begun"]["bytes"]
    assert digests(tmp_path / "out") == wanted


def test_the_digests_of_the_journal_are_those_of_the_files(tmp_path):
    journal = stopped(LLAMA, tmp_path / "out", 50_000)
    for name, said in journal["shards"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (said["bytes"], said["sha256"])
    (part,) = (tmp_path / "out").glob("*.part")
    begun = part.read_bytes()[: journal["begun"]["bytes"]]
    assert hashlib.sha256(begun).hexdigest() == journal["begun"]["sha256"]


def test_what_was_written_and_is_no_longer_right_is_written_again(tmp_path, wanted):
    journal = stopped(LLAMA, tmp_path / "out", 50_000)
    (part,) = (tmp_path / "out").glob("*.part")
    raw = bytearray(part.read_bytes())
    raw[1000] ^= 1
    part.write_bytes(raw)
    assert started(LLAMA, tmp_path / "out") > 0
    assert digests(tmp_path / "out") == wanted
    shutil.rmtree(tmp_path / "out")
    stopped(LLAMA, tmp_path / "out", 50_000)
    first, _ = journal["shards"]
    (tmp_path / "out" / first).unlink()
    assert started(LLAMA, tmp_path / "out") == 0
    assert digests(tmp_path / "out") == wanted


def test_ctrl_c_stops_it_as_anything_else_does(tmp_path, wanted, monkeypatch, capsys):
    arguments = ["convert", str(LLAMA), str(tmp_path / "out"), "--shard-size", str(SHARD_SIZE)]
    with monkeypatch.context() as patch:
        patch.setattr("tp.store.check_unchanged", interrupt)
        assert main(arguments) == 130
    assert main(arguments) == 0
    assert f"{tmp_path / 'out'}: goes on after 86.1 kB of 86.1 kB" in capsys.readouterr().err
    assert digests(tmp_path / "out") == wanted


def interrupt(*_):
    raise KeyboardInterrupt


# --- What it refuses


def test_an_unfinished_store_is_refused_with_the_command_that_finishes_it(tmp_path, capsys):
    out = tmp_path / "out"
    stopped(LLAMA, out, 50_000)
    wanted = f"run convert again, it goes on where it stopped: anyfold convert {LLAMA} {out}"
    for arguments in (["run", out, "--ids", "1"], ["convert", "--verify", out]):
        assert main([str(a) for a in arguments]) == 2
        said = capsys.readouterr().err
        assert said == f"anyfold: {out}: is a q8 store that was never finished; {wanted}\n"
    # Not even with what a directory of weights has.
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(out)


def test_a_source_that_changed_meanwhile_is_named(tmp_path):
    model = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    stopped(model, tmp_path / "out", 50_000)
    shard = model / "model-00002-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-2] ^= 1
    shard.write_bytes(raw)
    wanted = f"{shard.name} of {model} changed since this conversion began; remove {tmp_path}/out"
    with pytest.raises(StoreError, match=re.escape(wanted)):
        started(model, tmp_path / "out")


def test_a_source_of_the_same_bytes_elsewhere_is_the_same(tmp_path, wanted):
    model = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    stopped(model, tmp_path / "out", 50_000)
    other = Path(shutil.copytree(model, tmp_path / "other", copy_function=shutil.copyfile))
    assert started(other, tmp_path / "out") > 0
    assert digests(tmp_path / "out") == wanted


def test_a_source_that_changes_while_it_is_converted_is_named(tmp_path):
    model = Path(shutil.copytree(LLAMA, tmp_path / "model"))

    def progress(what, done, of):
        os.utime(model / "config.json", ns=(0, done))

    with pytest.raises(StoreError, match=r"config\.json changed while it was converted"):
        started(model, tmp_path / "out", progress=progress)
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(tmp_path / "out")


def test_another_shard_size_is_refused_and_none_is_that_of_the_beginning(tmp_path, wanted):
    stopped(LLAMA, tmp_path / "out", 50_000)
    with pytest.raises(StoreError, match=f"was begun with --shard-size {SHARD_SIZE}; give the sa"):
        started(LLAMA, tmp_path / "out", shard_size=SHARD_SIZE + 1)
    assert started(LLAMA, tmp_path / "out", shard_size=None) > 0
    assert digests(tmp_path / "out") == wanted


@pytest.mark.parametrize("change", [{"version": 2}, {"shards": 3}, {"more": 1}, {"begun": {}}])
def test_a_journal_that_is_not_ours_is_refused(change, tmp_path):
    journal = stopped(LLAMA, tmp_path / "out", 50_000)
    (tmp_path / "out" / JOURNAL).write_text(json.dumps(journal | change))
    with pytest.raises(StoreError, match="is not a journal of this version; remove"):
        started(LLAMA, tmp_path / "out")


def test_two_conversions_do_not_write_one_store(tmp_path):
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another conversion is writing it"):
            started(LLAMA, tmp_path / "out")
    finally:
        os.close(other)
    assert started(LLAMA, tmp_path / "out") == 0
