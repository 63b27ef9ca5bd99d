"""Workers with different settings, and a lease that is stored for all of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from perdure import Worker
from perdure.queues import QueueError
from perdure.queues.keys import Namespace
from perdure.queues.shared_config import SharedConfig, read_seconds, set_config
from perdure.worker.runtime.shared_settings import WorkerTimings

from ..app import NAMESPACE

if TYPE_CHECKING:
    from ..plan import Fault
    from ..world import World

__all__ = ["REREAD", "check_settings", "lease_change_left", "set_lease", "store_lease", "worker_type"]

_KEY: Final = Namespace(NAMESPACE).config.encode()

_CHANGE: Final = 60.0
"""Seconds for which a change of the lease is in progress: several registrations, also of a worker in trouble."""

_AGE: Final = 100.0
"""Seconds before the run at which the lease was stored, so that no restart of the server loses it."""

_REGISTRATIONS: Final = 3
"""Registrations after the last fault within which a worker reads the stored lease."""

REREAD: Final = _REGISTRATIONS * 5.0
"""Seconds within which each worker has read a stored lease: the longest heartbeat is 5 s."""


@cache
def worker_type(sweep: float, clean: float) -> type[Worker]:
    """Return the class of workers that sweep and clean up so often, in seconds."""
    timings = WorkerTimings(sweep_interval=sweep, clean_interval=clean, clean_lock=0.4 * clean)
    return type("Worker", (Worker,), {"timings": timings})


def store_lease(world: World, lease: float) -> None:
    """Let the server have a stored lease before the run."""
    at, fields = world.server.now - _AGE, [b"HSET", _KEY, b"lease", b"%.15g" % lease]
    world.server.replay(at, fields, {})
    world.server.record(at, fields, ago=_AGE)


async def set_lease(world: World, fault: Fault) -> None:
    """Store another lease for all workers, as an operator does."""

    async def act() -> None:
        if (producer := world.producer) is not None:
            try:
                await set_config(producer.gateway, producer.namespace, "lease", fault.size, change=_CHANGE)
            except QueueError as error:
                world.tell(f"storing the lease: {error}")

    world.on_producer(act)


def lease_change_left(world: World) -> float:
    """Return the seconds for which a change of the lease is in progress; negative since it ended."""
    return (read_seconds(_stored(world).get(b"lease_changed_at")) or 0.0) / 1000 - world.server.now


def _stored(world: World) -> dict[bytes, bytes]:
    item = world.server.items.get(_KEY)
    return {} if item is None else item.value._values


def check_settings(world: World) -> None:
    """Check that each worker uses the stored lease, unless a fault kept it from reading that."""
    config = SharedConfig.decode(_stored(world), round(world.server.now * 1000))
    changed = world.loop.now + lease_change_left(world)
    quiet = max(world.struck, world.repaired, changed if changed < world.loop.now else 0.0)
    for process in world.processes:
        if process.worker is None:
            continue
        read = process.connected > quiet or world.loop.now > quiet + _REGISTRATIONS * process.plan.heartbeat
        shared = process.worker._shared
        found, wanted = (shared.renewal_lease, shared.claim_lease), config.leases(process.plan.lease)
        if read and found != wanted:
            world.checks.add("stored lease", f"{process.name} renews and claims by {found}, not by {wanted}")
