"""Which process of a run this one is, by hand or by a scheduler, and what all of them compare."""

import shutil
from pathlib import Path

import pytest

from tests.tiny import decoder, layer, model
from tp.checkpoint import open_checkpoint
from tp.cli import _parsed, main
from tp.identity import facts, weights_identity
from tp.launch import LaunchError, shares
from tp.together import place_of

LLAMA = Path(__file__).parent / "checkpoints" / "llama"
RUN = ["run", "demo", "hi"]
HERE = ["--coordinator", "[::1]:9000", "--processes", "3", "--process", "2"]


def place(*options):
    return place_of(_parsed([*RUN, *options]))


# --- Which process this is


def test_one_process_is_the_default():
    assert place() is None


def test_by_hand():
    found = place(*HERE, "--chips-here", "4", "--timeout", "7")
    assert (found.host, found.port, found.address) == ("::1", 9000, "[::1]:9000")
    assert (found.processes, found.process, found.chips, found.timeout) == (3, 2, 4, 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--process", "0"], "--coordinator, --processes must be given too"),
        ([*HERE, "--process", "3"], "--process 3: 3 processes count from 0 to 2"),
        ([*HERE, "--hosts"], "--hosts finds out what --coordinator"),
        (["--coordinator", "10.0.0.1"], "'10.0.0.1': wanted HOST:PORT, as in 10.0.0.1:9000"),
        (["--coordinator", "a:99999"], "'a:99999': wanted HOST:PORT"),
        (["--timeout", "0"], "'0': wanted seconds from 1"),
        (["--hosts"], "--hosts: no SLURM, MPI, Kubernetes or TPU pod is seen here"),
    ],
)
def test_options_that_do_not_go_together(options, said, capsys):
    try:
        status = main([*RUN, *options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_slurm_says_which_process_this_is(monkeypatch):
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[3-5]", "NTASKS": "3", "PROCID": "2"}
    for name, value in {**slurm, "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = place("--hosts")
    # JAX takes a port out of the last 4096 by the number of the job.
    assert (found.host, found.port) == ("node3", 65535 - 4096 + 1 + 7)
    assert (found.processes, found.process, found.local_chips) == (3, 2, (1,))


# --- Who brings how many chips


@pytest.mark.parametrize(
    ("chips", "said", "there", "brought"),
    [
        (None, [None, None], None, [1, 1]),
        (None, [None, None], [4, 2], [4, 2]),
        (None, [3, None], None, [3, 1]),
        (5, [None, None], None, [3, 2]),
        (5, [None, None], [1, 8], [1, 4]),
        (7, [None, 4, None], None, [2, 4, 1]),
        (5, [2, 3], [4, 4], [2, 3]),
    ],
)
def test_chips_are_spread_evenly_where_nothing_else_was_said(chips, said, there, brought):
    assert shares(chips, said, there) == brought


@pytest.mark.parametrize(
    ("chips", "said", "there", "why"),
    [
        (2, [None] * 3, None, "2 chips were asked for, and 3 processes bring 1 + 1 + 0"),
        (5, [2, 2], None, "5 chips were asked for, and 2 processes bring 2 + 2"),
        (9, [None, None], [4, 4], "9 chips were asked for, and 2 processes bring 4 + 4"),
        (None, [3, None], [2, 2], "process 0 was to bring 3 chips and has 2"),
    ],
)
def test_chips_that_do_not_add_up_are_refused_with_the_sum(chips, said, there, why):
    with pytest.raises(LaunchError, match=why.replace("+", r"\+")):
        shares(chips, said, there)


# --- What has to be the same


def test_weights_are_told_from_others_of_the_same_shapes(tmp_path):
    same = shutil.copytree(LLAMA, tmp_path / "same")
    other = shutil.copytree(LLAMA, tmp_path / "other")
    shard = next(iter(sorted(other.glob("*.safetensors"))))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    shard.write_bytes(data)
    ours, copied, changed = (weights_identity(open_checkpoint(p)) for p in (LLAMA, same, other))
    assert ours == copied
    assert ours != changed


def test_the_split_and_the_text_are_compared():
    plain, capped = layer("qk_norm", "softmax"), layer("sliding_window", "softmax")
    checkpoint = open_checkpoint(LLAMA)
    one, again, wider, other = (
        facts(decoder(model(kind), chips), checkpoint)
        for kind, chips in ((plain, 2), (plain, 2), (plain, 3), (capped, 2))
    )
    assert one == again
    assert {"anyfold", "jax", "the platform", "the kernels", "the weights"} < set(one)
    for differing in (wider, other):
        assert one["the program"] != differing["the program"]
    assert one["the manifest"] != wider["the manifest"]
