"""The workers of a namespace, and what they hold: blocked ones, and lost ones whose tasks others have resumed.

A worker registers from its event loop, and renews its leases from a thread. So one that does the second only is
blocked by the code of a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..errors import Refused
from ..keys import GROUP, Namespace, Partition
from ..presence import WorkerInfo, list_workers
from ..transport.clients import is_missing_group
from ..transport.gateway import Gateway
from .views import queue_partitions

_LATE: Final = 1.5
"""Intervals without a registration after which the leases of a worker are looked at."""

_RENEWED: Final = 0.6
"""Share of the lease within which a worker has renewed it: it does so each third."""

_LISTED: Final = 60.0
"""Seconds for which a lost worker that held nothing is listed."""

_LEASE: Final = 15.0
"""Lease of a worker that does not publish it."""


async def observed_workers(gateway: Gateway, namespace: Namespace) -> list[WorkerInfo]:
    """Return the registered workers, the longest running first, without lost ones whose tasks others have claimed.

    A lost worker is listed while it holds messages, and for a minute if it had none when it registered last.
    """
    registered = await list_workers(gateway, namespace)
    late = {info.id: info for info in registered if info.seen > _LATE * info.interval}
    if not late:
        return registered
    held: dict[str, float] = {}
    try:
        partitions = await queue_partitions(gateway, namespace)
        read = await asyncio.gather(*(_held(gateway, partition, late) for partition in partitions))
    except Refused:  # this user may read the registry only
        return registered
    for found in read:
        for name, idle in found.items():
            held[name] = min(idle, held.get(name, idle))
    return [
        replace(info, blocked=held[info.id] < _RENEWED * (info.lease or _LEASE)) if info.id in held else info
        for info in registered
        if info.id in held or not info.presumed_dead or (info.in_flight == 0 and info.seen < _LISTED)
    ]


async def _held(gateway: Gateway, partition: Partition, late: dict[str, WorkerInfo]) -> dict[str, float]:
    """Return the seconds since each of these workers renewed its leases last, if it holds messages of the partition."""
    try:
        *_, holders = await gateway.command("XPENDING", partition.ready, GROUP)
    except Refused as error:
        if not is_missing_group(error):
            raise
        return {}  # no worker has come yet
    names: Sequence[str] = [name.decode() for name, _ in holders or () if name.decode() in late]
    pages = await gateway.pipeline([("XPENDING", partition.ready, GROUP, "-", "+", 1, name) for name in names])
    return {name: page[0][2] / 1000 for name, page in zip(names, pages, strict=True) if page}
