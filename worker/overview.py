"""A deployment at one moment: its queues, workers and running tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..queues.inspection.running import running_tasks
from ..queues.inspection.views import QueueStats, list_queues, observed_workers, queue_partitions
from ..queues.presence import WorkerInfo
from ..queues.producer import Producer
from ..queues.records import Record
from ..queues.transport.scripts import milliseconds
from ..queues.wording import iso_time
from .defined_secrets import mask_defined

MAX_RUNNING: Final = 100
"""Running tasks that are read."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A deployment at one moment.

    Attributes:
        now: Milliseconds of Redis' clock.
        running: The tasks that have been running longest, at most `MAX_RUNNING`; secret values are masked.
    """

    now: int
    queues: Sequence[QueueStats]
    workers: Sequence[WorkerInfo]
    running: Sequence[Record]

    @property
    def in_flight(self) -> int:
        """Number of running tasks."""
        return sum(stats.in_flight for stats in self.queues)

    @property
    def live(self) -> int:
        """Number of workers that are not presumed dead."""
        return sum(not info.presumed_dead for info in self.workers)

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "at": iso_time(self.now),
            "queues": [stats.summary() for stats in self.queues],
            "workers": [info.summary() for info in self.workers],
            "running": [record.summary() for record in self.running],
        }


async def read_overview(producer: Producer) -> Overview:
    """Return what runs in a deployment now."""
    gateway, namespace = producer.gateway, producer.namespace
    masked = await mask_defined(producer)
    return Overview(
        milliseconds(await gateway.command("TIME")),
        await list_queues(gateway, namespace),
        await observed_workers(gateway, namespace),
        list(map(masked, await running_tasks(gateway, await queue_partitions(gateway, namespace), MAX_RUNNING))),
    )
