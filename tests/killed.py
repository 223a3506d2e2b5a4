"""Converts a model in processes that are killed: at every moment that touches the disk, say.

`killed.py MODEL FOLDER STEP` writes what came of each, a line of JSON. It is a program of its own
since it forks.
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

from tp import store
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.source import open_source
from tp.store_shard import Output

SHARD_SIZE, MARK = 20_000, 4_000  # bytes
MANIFEST = "anyfold-q8.json"


def convert(source, out):
    """The conversion that is killed; how many bytes it found there, if it went on."""
    found = []
    store.convert(
        source,
        out,
        model="model",
        shard_size=SHARD_SIZE,
        mark=MARK,
        resumes=lambda there, of: found.append(there),
    )
    return found[0] if found else None


def killed(source, out, moment):
    """Convert in a process that is killed before a moment; whether it got that far."""
    child = os.fork()
    if child == 0:
        left = iter(range(moment))

        def counted(call):
            def wrapped(*arguments, **keywords):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **keywords)

            return wrapped

        # A process that is killed loses nothing that it wrote: there is no need to wait for disks.
        os.replace, os.fsync = counted(os.replace), counted(lambda _: None)
        os.mkdir, os.unlink = counted(os.mkdir), counted(os.unlink)
        Output.write = counted(Output.write)
        convert(source, out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def digests(out):
    """The sha256 of every file."""
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def loads(out):
    """Whether a directory is taken for a model."""
    try:
        open_checkpoint(out)
    except CheckpointError:
        return False
    return True


def main(model, folder, step):
    """Kill at each `step`th moment, and at several moments one after another."""
    os.fsync = lambda _: None
    source = open_source(model)
    whole = folder / "whole"
    convert(source, whole)
    wanted, moment = digests(whole), 0
    while True:
        out = folder / f"killed_{moment}"
        if not killed(source, out, moment):
            break
        said = {"moment": moment, "manifest": (out / MANIFEST).exists(), "loads": loads(out)}
        said["part"] = any(file.stat().st_size for file in out.glob("q8-*.part"))
        said["found"] = convert(source, out)
        print(json.dumps(said | {"same": digests(out) == wanted}))
        moment += step
    out, times = folder / "again", 0
    chance = random.Random(0)
    while killed(source, out, chance.randrange(20, 60)):
        times += 1
        assert not loads(out) or (out / MANIFEST).exists()
    print(json.dumps({"times": times, "same": digests(out) == wanted}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
