"""Fleet locks: one worker does a chore for all of them.

A lock saves work and protects nothing, since every chore may be done twice. So a lock has a TTL and needs no release:
if its holder dies, the next worker acquires it after the TTL. If the clock of Redis was set back, a lock lasts longer
than its TTL, and the next worker takes it over; so it does with a lock that another program wrote, without a TTL or of
another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from ..errors import Refused, ServerFull
from ..transport.gateway import Gateway
from ..transport.pipelining import Command

T = TypeVar("T")


async def acquire_fleet_locks(
    gateway: Gateway, locks: Mapping[T, str], worker: str, ttl: float, *, renew: bool = False, take_over: bool = False
) -> dict[T, float]:
    """Acquire the locks that are free. Return for each the seconds to wait for it: 0 if this worker holds it now.

    If a reply is lost, a lock may stay unused until its TTL has passed. If the server is full, no lock can be stored,
    and each worker holds all of them.

    Args:
        locks: Name of each lock, with its key.
        ttl: Seconds for which a lock is held.
        renew: Extend locks that this worker holds already. A worker that only finds another holder writes nothing.
        take_over: Acquire locks that another worker holds, too.
    """
    px = max(1, round(ttl * 1000))
    waits: dict[T, float] = {}
    owned: set[T] = set()
    if renew and not take_over:
        replies = await gateway.pipeline([(name, key) for key in locks.values() for name in ("GET", "PTTL")])
        for lock, holder, left_ms in zip(locks, replies[::2], replies[1::2], strict=True):
            if holder == worker.encode() or _outlasts(left_ms, px):
                owned.add(lock)
            elif holder is not None:
                waits[lock] = max(1, left_ms) / 1000
    wanted = [lock for lock in locks if lock not in waits]
    if not wanted:
        return waits
    commands: list[Command] = []
    for lock in wanted:
        commands.append(("SET", locks[lock], worker, "PX", px, *(() if take_over or lock in owned else ("NX",))))
        commands.append(("PTTL", locks[lock]))
    try:
        replies = await gateway.pipeline(commands)
        held = [
            (lock, left_ms)
            for lock, reply, left_ms in zip(wanted, replies[::2], replies[1::2], strict=True)
            if reply is None
        ]
        outlasting = [lock for lock, left_ms in held if _outlasts(left_ms, px)]
        if outlasting:
            with suppress(Refused):  # such as a user without the right to RENAME
                await gateway.set_keys_aside(locks[lock] for lock in outlasting)
        await gateway.pipeline([("SET", locks[lock], worker, "PX", px) for lock in outlasting])
    except ServerFull:
        return waits | dict.fromkeys(wanted, 0.0)
    refused = {lock for lock, _ in held} - set(outlasting)
    return waits | {lock: ttl if lock in refused else 0.0 for lock in wanted}


def _outlasts(left_ms: int, px: int) -> bool:
    """Whether no worker has set a lock so: it has far more than its TTL left, or none (-1).

    The clock of Redis was set back, or another program wrote it. Workers may differ in the TTL.
    """
    return left_ms == -1 or left_ms > 4 * px
