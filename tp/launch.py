"""Devices: how many chips there are or are simulated, and the mesh over the first of them."""

import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from tp.lower import CHIP

MOST = 4096  # chips; a text is written out for each


class LaunchError(ValueError):
    """Devices that cannot be had: what was asked for, what there is, what would do."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The chips of a run."""

    mesh: Mesh
    simulated: bool

    @property
    def chips(self) -> int:
        """How many there are."""
        return self.mesh.size

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform


def devices(chips: int | None = None) -> Devices:
    """A mesh of exactly `chips` devices; of all accelerators, or one CPU, where none is asked for.

    Without accelerators any number is simulated on the CPU, if JAX has not started yet.
    Raises LaunchError where there are too few.
    """
    if chips is not None and chips < 1:
        raise LaunchError(f"{chips} chips were asked for; wanted at least 1")
    if chips is not None and chips > MOST:
        raise LaunchError(f"{chips} chips were asked for; wanted at most {MOST}")
    started = not _prepare_cpu(chips or 1)
    found = jax.devices()
    platform = found[0].platform
    wanted = (len(found) if platform != "cpu" else 1) if chips is None else chips
    if wanted > len(found):
        raise LaunchError(_too_few(wanted, len(found), platform, started))
    mesh = Mesh(np.array(found[:wanted]), (CHIP,))
    return Devices(mesh=mesh, simulated=platform == "cpu" and wanted > 1)


def _prepare_cpu(chips: int) -> bool:
    """Set up simulated devices; False where JAX has started already.

    XLA's CPU client runs every chip of a step on a pool of as many threads as it sees cores,
    and a chip that waits for the others at a fold keeps its thread: with too few, a step
    starves and XLA ends the process. So the pool is made larger than the chips need, and
    steps are run one at a time.
    """
    threads = max(os.cpu_count() or 1, 2 * chips + 2)
    os.environ.setdefault("PJRT_NPROC", str(threads))
    try:
        jax.config.update("jax_num_cpu_devices", chips)
    except RuntimeError:
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def _too_few(wanted: int, found: int, platform: str, started: bool) -> str:
    if platform != "cpu":
        return f"{wanted} chips were asked for, and this machine has {found} ({platform})"
    if started:
        return (
            f"{wanted} simulated chips were asked for after JAX had started with {found}: load "
            "the model before anything else uses JAX, or set "
            f"jax.config.update('jax_num_cpu_devices', {wanted}) first"
        )
    return f"{wanted} simulated chips were asked for, and JAX gave {found}: is XLA_FLAGS set?"
