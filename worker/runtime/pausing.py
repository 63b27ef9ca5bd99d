"""Pauses of operators in one worker: which queues it leaves out, and which tasks it parks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from ...queues.admission import leave_out
from ...queues.delivery.consumer import Consumer
from ...queues.delivery.paused_tasks import Woken, wake_paused
from ...queues.keys import Namespace, Partition
from ...queues.pauses import PauseRule, Pauses
from ...queues.transport.gateway import Gateway
from ..log import FirstOfEach, logger
from .executor import Executor
from .reclaim import ReclaimSchedule

_SHOWN: Final = 5
"""Pauses that a health report names."""


class WorkerPauses:
    """The pauses that a worker knows. It is created when the namespace has had any."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        consumer: Consumer,
        reclaim: ReclaimSchedule,
        executor: Executor,
        queues: Sequence[str],
    ) -> None:
        """queues: those of the worker, for its log."""
        self._gateway = gateway
        self._namespace = namespace
        self._consumer = consumer
        self._reclaim = reclaim
        self._executor = executor
        self._queues = queues
        self._stored: Mapping[bytes, bytes] = {}
        self._problems = FirstOfEach()
        self.known = Pauses()

    async def apply(self, stored: Mapping[bytes, bytes]) -> None:
        """Use the stored pauses from now on."""
        if stored == self._stored:
            return
        before, self.known = self.known, Pauses.decode(self._gateway, self._namespace, stored)
        self._stored = stored
        for name, problem in self.known.problems.items():
            if self._problems.is_first(name, problem):
                logger.error("a pause is ignored: {}", problem)
        if before.of_tasks != self.known.of_tasks:
            self._executor.hold(self.known.of_tasks)
        if before.queues.keys() != self.known.queues.keys():
            leave_out(self._gateway, self.known.queues)
            await self._consumer.pause(self.known.queues)
            if before.queues.keys() - self.known.queues.keys():
                self._reclaim.request()  # of lost workers, and what was released when the queue was paused
        self._log(before)

    def _log(self, before: Pauses) -> None:
        """Log the changes that concern this worker."""
        known, former = ({rule.number: rule for rule in pauses.rules} for pauses in (self.known, before))
        for rule in known.values():
            if rule.number not in former and self._concerns(rule):
                logger.warning("{}", _sentence(rule))
        for rule in former.values():
            if rule.number not in known and self._concerns(rule):
                logger.info("resumed: {}", rule.target)

    def sentences(self) -> list[str]:
        """Return the pauses that concern this worker, for its health report: a few of them. Thread-safe."""
        rules = [rule for rule in self.known.rules if self._concerns(rule)]
        found = [_sentence(rule, _since(rule)) for rule in rules[:_SHOWN]]
        return found if len(rules) <= _SHOWN else [*found, f"{len(rules) - _SHOWN} more pauses: perdure queue list"]

    def _concerns(self, rule: PauseRule) -> bool:
        return rule.queue is None or rule.queue in self._queues

    async def wake_left(self, partition: Partition) -> Woken:
        """Make tasks due that a worker has parked after their rule was removed, or that the command did not wake."""
        return await wake_paused(self._gateway, partition, self.known)


def _sentence(rule: PauseRule, since: str = "") -> str:
    by, why = rule.by or "an operator", f": {rule.why}" if rule.why else ""
    return f"paused by {by}{since}: {rule.target}{why}; to end that: {rule.command}"


def _since(rule: PauseRule) -> str:
    return f" since {datetime.fromtimestamp(rule.at / 1000, UTC).isoformat(timespec='seconds')}" if rule.at else ""
