"""Devices: how many chips there are or are simulated, and the mesh over those of all processes."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tp.door import LOOPBACK
from tp.hosts import Alone, Hosts
from tp.lower import CHIP

MOST = 4096  # chips; a text is written out for each
DAY = 24 * 3600  # seconds


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

    @property
    def processes(self) -> int:
        """How many processes the chips belong to."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def here(self) -> list[tuple[int, Any]]:
        """The chips of this process, by number."""
        process = jax.process_index()
        numbered = enumerate(self.mesh.devices.flat)
        return [(chip, device) for chip, device in numbered if device.process_index == process]


def everywhere(value: Any, mesh: Mesh) -> jax.Array:
    """A value that every process has, whole on every chip; each process fills its own chips."""
    copies = [jax.device_put(value, device) for device in mesh.local_devices]
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(value.shape, whole, copies)


def from_first_chip(value: jax.Array) -> jax.Array:
    """Inside a `shard_map`: a number as the first chip has it, where other processes have chips.

    Their processors may round differently, and a token that is another is another text.
    """
    if jax.process_count() == 1:
        return value
    chosen = jnp.where(jax.lax.axis_index(CHIP) == 0, value, jnp.zeros_like(value))
    return jax.lax.psum(chosen, CHIP)


def once(mesh: Mesh, choose: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A compiled function of what every chip has, whose result is the first chip's everywhere."""
    everywhere = PartitionSpec()
    chosen = jax.shard_map(
        lambda *args: from_first_chip(choose(*args)),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
    )
    return jax.jit(chosen)


def devices(chips: int | None = None, hosts: Alone | None = None) -> Devices:
    """A mesh of exactly `chips` devices; of all accelerators, or one CPU, where none is asked for.

    Without accelerators any number is simulated on the CPU, if JAX has not started yet. With
    `hosts` the chips are those of all processes, spread over them as evenly as can be.
    Raises LaunchError where there are too few.
    """
    if chips is not None and (not isinstance(chips, int) or isinstance(chips, bool)):
        raise LaunchError(f"{chips!r} chips were asked for; wanted a whole number")
    if chips is not None and chips < 1:
        raise LaunchError(f"{chips} chips were asked for; wanted at least 1")
    if chips is not None and chips > MOST:
        raise LaunchError(f"{chips} chips were asked for; wanted at most {MOST}")
    if isinstance(hosts, Hosts):
        return _devices_of_all(chips, hosts)
    started = not _prepare_cpu(chips or 1)
    found = jax.local_devices()  # alone among several processes, with its own
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


# --- Chips of several processes


def _devices_of_all(chips: int | None, hosts: Hosts) -> Devices:
    said = [member.chips for member in hosts.members]
    simulated = shares(chips, said)[hosts.process]
    if not jax.distributed.is_initialized():
        if not _prepare_cpu(simulated):
            raise LaunchError("JAX had started before the processes gathered: load a model first")
        hosts.report("starting JAX")
        _start(hosts)
    there = [[d for d in jax.devices() if d.process_index == p] for p in range(hosts.processes)]
    wanted = shares(chips, said, [len(found) for found in there])
    taken = [d for found, count in zip(there, wanted, strict=True) for d in found[:count]]
    mesh = Mesh(np.array(taken), (CHIP,))
    _meet(mesh)
    return Devices(mesh=mesh, simulated=taken[0].platform == "cpu")


def shares(
    chips: int | None, said: Sequence[int | None], there: Sequence[int] | None = None
) -> list[int]:
    """How many chips each process brings: as `said`, or an even share of what is left of `chips`.

    `there` is how many each has; without it any number is simulated, and one is the default.
    Raises LaunchError where they do not come to `chips`.
    """
    most = [MOST] * len(said) if there is None else there
    default = [1] * len(said) if there is None else there
    for process, (count, limit) in enumerate(zip(said, most, strict=True)):
        if count is not None and count > limit:
            raise LaunchError(f"process {process} was to bring {count} chips and has {limit}")
    if chips is None:
        return [d if count is None else count for count, d in zip(said, default, strict=True)]
    found = [count or 0 for count in said]
    silent = [process for process, count in enumerate(said) if count is None]
    for _ in range(chips - sum(found)):
        room = [process for process in silent if found[process] < most[process]]
        if room:
            found[min(room, key=lambda process: found[process])] += 1
    if sum(found) != chips or 0 in found:
        raise LaunchError(
            f"{chips} chips were asked for, and {len(said)} processes bring {_list(found)}: "
            "each is to bring at least one, and all together that many"
        )
    return found


def _list(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _start(hosts: Hosts) -> None:
    """Start JAX's own runtime over all processes; who is lost, `hosts` finds out before it does."""
    place = hosts.gathered.place
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By its host's name, which may stand for the loopback, a process is not found by others.
    _jax.make_gloo_tcp_collectives = partial(
        _jax.make_gloo_tcp_collectives, hostname=hosts.gathered.own
    )
    # The service would take a SIGTERM for a notice and go on.
    jax.config.update("jax_enable_preemption_service", False)
    # What goes to a coordinator on the loopback goes through no proxy.
    jax.config.update("jax_check_proxy_envs", False)
    os.environ.setdefault("no_grpc_proxy", LOOPBACK)
    jax.distributed.initialize(
        coordinator_address=hosts.gathered.door.jax,
        coordinator_bind_address=hosts.gathered.door.jax,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=place.local_chips,
        cluster_detection_method="deactivate",
        initialization_timeout=DAY,
        heartbeat_timeout_seconds=DAY,
        shutdown_timeout_seconds=max(60, math.ceil(place.timeout)),
    )


def _meet(mesh: Mesh) -> None:
    """Add one chip to another, now that all processes are here: connections are made the first
    time, and who comes half a minute later finds nobody."""
    everyone = PartitionSpec(CHIP)
    add = jax.shard_map(
        lambda ones: jax.lax.psum(ones, CHIP),
        mesh=mesh,
        in_specs=everyone,
        out_specs=PartitionSpec(),
    )
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, everyone), lambda index: np.ones(1, np.float32)
    )
    jax.jit(add)(ones).block_until_ready()
