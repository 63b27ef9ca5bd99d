"""A task as operators see it: its record and explanation, and what its checkpoint has for them.

What the user of Redis may not read, or this process cannot decrypt, is left out, and a note says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from ..queues.budgets.store import BudgetStore, Ledger
from ..queues.envelope import shown_data
from ..queues.errors import DecryptionError, Refused
from ..queues.event_log import read_log_tail
from ..queues.explanation.sentences import Explanation
from ..queues.handle import TaskHandle
from ..queues.inspection.views import checkpoint_fields
from ..queues.keys import Partition
from ..queues.producer import Producer
from ..queues.records import Record
from ..queues.transport.gateway import Gateway
from .agents.coherence.findings import StoredFinding, stored_findings
from .agents.journal.draft import failed_steps, open_promises_in
from .artifacts.links import ArtifactLink, task_links
from .defined_secrets import mask_defined
from .durable.journal.function_plan import FunctionPlan, PlannedItem
from .durable.journal.handoff.document import OpenPromise
from .durable.journal.step_record import PLANNED

T = TypeVar("T")


class ShownPlan(NamedTuple):
    """Plan of a function, and where the task stands in it."""

    items: Sequence[PlannedItem]
    text: str


@dataclass(slots=True)
class ShownTask:
    """A task as operators see it.

    Attributes:
        record: Secrets that the definition of the task marks are masked as well.
        budgets: What was spent of the budgets of the task and of its parents.
        notes: Sentences about what is left out.
    """

    record: Record
    explained: Explanation
    artifacts: Sequence[ArtifactLink] = ()
    findings: Sequence[StoredFinding] = ()
    promises: Sequence[OpenPromise] = ()
    plan: ShownPlan | None = None
    budgets: Sequence[Ledger] = ()
    notes: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return it as plain data, times as ISO 8601."""
        return self.record.summary() | {
            "crashes": self.explained.crashes,
            "result": shown_data(self.record.shown_result()),
            "artifacts": [describe_link(link) for link in self.artifacts],
            "incoherent": [_describe_finding(finding) for finding in self.findings],
            "promises": [promise.model_dump(mode="json", exclude={"wait"}) for promise in self.promises],
            "plan": None if self.plan is None else [item._asdict() for item in self.plan.items],
            "budgets": [ledger.summary() for ledger in self.budgets],
            "explanation": self.explained.summary(),
        }


def describe_link(link: ArtifactLink) -> dict[str, object]:
    """Return a link as plain data."""
    return {"name": link.name, "size": link.size, "media_type": link.media_type, "hash": link.hash}


def _describe_finding(finding: StoredFinding) -> dict[str, object]:
    return {"check": finding.check, "detail": finding.detail, "policy": finding.policy, "event": finding.n}


async def read_shown_task(producer: Producer, handle: TaskHandle[Any]) -> ShownTask:
    """Read a task. Raises `TaskNotFound`."""
    record, explained = (await mask_defined(producer))(await handle.record()), await handle.explain()
    shown = ShownTask(record, explained)
    damaged: list[str] = []
    at = (producer.gateway, handle.partition, handle.id)
    refused = "artifacts are not shown: this user of Redis may not read checkpoints"
    shown.artifacts = await _readable(shown, task_links(*at, damaged), (), refused)
    shown.notes += damaged_links(damaged)
    shown.findings = await _readable(shown, stored_findings(*at), ())
    if record.handed_to is None:  # else the successor has the promises
        shown.promises = await _readable(shown, _promises(*at), ())
    shown.plan = await _readable(shown, _plan(*at), None)
    shown.budgets = await _readable(shown, _budgets(producer, handle), ())
    return shown


async def _readable(shown: ShownTask, read: Awaitable[T], otherwise: T, refused: str = "") -> T:
    """Return what can be read. refused: note in case that the user of Redis may not read it."""
    try:
        return await read
    except DecryptionError as error:
        shown.notes.append(str(error))
    except Refused:
        if refused:
            shown.notes.append(refused)
    return otherwise


_SHOWN_DAMAGED: Final = 10


def damaged_links(damaged: Sequence[str]) -> list[str]:
    """Return the problems of links that are left out, the first ones and the number of the others."""
    more = len(damaged) - _SHOWN_DAMAGED
    return [*damaged[:_SHOWN_DAMAGED], *([f"and {more} more links that cannot be read"] if more > 0 else [])]


async def _promises(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[OpenPromise]:
    return open_promises_in(task_id, await read_log_tail(gateway, partition, task_id))


async def _plan(gateway: Gateway, partition: Partition, task_id: str) -> ShownPlan | None:
    saved = await checkpoint_fields(gateway, partition, task_id, PLANNED)
    if (plan := FunctionPlan.decode(saved.get(PLANNED))) is None:
        return None
    tail = await read_log_tail(gateway, partition, task_id)
    known = {"running": tail.intents.keys(), "failed": failed_steps(tail)}
    items = plan.items(tail.done, **known)
    number, total, step = plan.position(tail.done, **known)
    if step is None:
        return ShownPlan(items, f"all {total} steps have ended")
    title = "" if step.title == step.key else f" {step.title}"
    return ShownPlan(items, f"step {number} of {total}: {step.key}{title}")


async def _budgets(producer: Producer, handle: TaskHandle[Any]) -> Sequence[Ledger]:
    envelope = await producer.gateway.command("HGET", handle.partition.record(handle.id), "env")
    return await BudgetStore(producer.gateway, producer.namespace).of_task(handle.id, envelope)
