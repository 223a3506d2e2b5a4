"""Devices: as many as asked for and no more, and a refusal that says what would do."""

import subprocess
import sys

import pytest

from tp.launch import LaunchError, devices


@pytest.mark.parametrize("chips", [1, 2, 3, 8])
def test_the_mesh_has_exactly_the_chips_asked_for(chips: int) -> None:
    found = devices(chips)
    assert found.chips == chips
    assert found.platform == "cpu"
    assert found.simulated == (chips > 1)


def test_one_chip_is_the_default_without_accelerators() -> None:
    assert devices().chips == 1


def test_more_chips_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(LaunchError, match=r"9 simulated chips .* started with 8: load the model"):
        devices(9)


def test_no_chips_are_refused() -> None:
    with pytest.raises(LaunchError, match="0 chips were asked for; wanted at least 1"):
        devices(0)


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """What a Python of its own says to some lines."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_chips_are_simulated_without_a_word_about_flags() -> None:
    done = fresh("from tp.launch import devices; print(devices(5).chips)")
    assert done.stdout == "5\n", done.stderr


def test_asking_after_jax_has_started_says_what_to_do() -> None:
    done = fresh("import jax; jax.devices(); from tp.launch import devices; devices(3)")
    last = done.stderr.strip().splitlines()[-1]
    assert "3 simulated chips were asked for after JAX had started with 1" in last
    assert "jax_num_cpu_devices" in last
