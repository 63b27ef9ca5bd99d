"""`perdure task show` and `perdure task why`: a task, and the explanation of its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ....queues.budgets.definition import UNITS
from ....queues.budgets.store import BudgetStore, Ledger
from ....queues.defaults import MAX_SECONDS
from ....queues.envelope import shown_data
from ....queues.errors import DecryptionError, Refused
from ....queues.event_log import read_log_tail
from ....queues.explanation.sentences import Explanation
from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import Partition
from ....queues.lanes import NORMAL, lane_of
from ....queues.producer import Producer
from ....queues.records import Record, State
from ....queues.transport.gateway import Gateway
from ....queues.wording import duration, waited_for
from ...agents.coherence.findings import StoredFinding, stored_findings
from ...agents.journal.draft import failed_steps, open_promises_in
from ...artifacts.links import ArtifactLink, task_links
from ...defined_secrets import mask_defined
from ...durable.journal.function_plan import FunctionPlan, PlannedItem
from ...durable.journal.handoff.document import OpenPromise
from ...durable.journal.step_record import PLANNED
from ...durable.promises import promise_text
from ...shown_events import progress_text
from ..artifacts import describe_link, note_damaged, size_text
from ..budget import spent_line
from ..support.connection import TaskOptions, connected
from ..support.output import Time, ago, note, state_text, timestamp
from ..support.runner import Output

_UNIT: Final = {"tokens": "tokens ", "steps": "steps "}

Since = Callable[[int | None], str]


@connected
async def show(producer: Producer, task: TaskOptions) -> Output:
    """Show a task: its state, arguments, result, error and artifacts.

    The field 'why' explains the state; 'perdure task why' prints it alone.

    Example: perdure task show 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    record, explained = (await mask_defined(producer))(await handle.record()), await handle.explain()
    links = await _links(producer.gateway, handle.partition, handle.id)
    findings = await _findings(producer.gateway, handle.partition, handle.id)
    handed = record.handed_to is not None  # then the successor has the promises
    promises = () if handed else await _promises(producer.gateway, handle.partition, handle.id)
    plan = await _plan(producer.gateway, handle.partition, handle.id)
    budgets = await _budgets(producer, handle.partition, handle.id)
    since = ago(explained.now)
    error = record.error or {}
    return Output(
        record.summary()
        | {
            "crashes": explained.crashes,
            "result": shown_data(record.shown_result()),
            "artifacts": [describe_link(link) for link in links],
            "incoherent": [_describe_finding(finding) for finding in findings],
            "promises": [promise.model_dump(mode="json", exclude={"wait"}) for promise in promises],
            "plan": None if plan is None else [item._asdict() for item in plan.items],
            "budgets": [ledger.summary() for ledger in budgets],
            "explanation": explained.summary(),
        },
        {
            "id": record.id,
            "task": record.task,
            "app": record.app,
            "state": state_text(record.state),
            "since": Time(explained.since),
            "why": explained.sentence,
            "remedy": explained.remedy,
            "queue": record.queue,
            "partition": record.partition,
            "priority": None if (lane := lane_of(record.partition)) == NORMAL else lane,
            "arguments": _text(record.shown_arguments()),
            "headers": ", ".join(f"{name}: {value}" for name, value in record.headers.items()) or None,
            "key": record.key,
            "tags": ", ".join(record.tags) or None,
            "attempts": _of(record.attempts, explained.max_attempts),
            "crashes": _of(explained.crashes, explained.max_crashes),
            "replays": record.replays or None,
            "enqueued": Time(record.enqueued_at),
            "waits": _wait(explained, since),
            "due": None if _waits_forever(record) or record.paused_by is not None else Time(record.due_at),
            "inbox": _inbox(record),
            "answers": f"{record.unused_answers} unused, see perdure task waiting {record.id}"
            if record.unused_answers
            else None,
            "finished": Time(record.finished_at),
            "ran for": None if record.ran_ms is None else duration(record.ran_ms / 1000),
            "worker": record.worker,
            "heard of": Time(explained.heard_at),
            "step": _step(explained),
            "progress": _progress(record, since),
            "budget": [_spent(ledger, record.id) for ledger in budgets],
            "steps done": explained.steps or None,
            "plan": plan and plan.text,
            "failed step": explained.failed_step,
            "in doubt": [str(doubt) for doubt in explained.doubts],
            "result": _text(record.shown_result()),
            "artifacts": [f"{link.name}  {size_text(link.size)}  {link.hash}" for link in links],
            "incoherent": [f"{one.check}: {one.detail} ({one.policy}, event {one.n})" for one in findings],
            "promises": [promise_text(promise) for promise in promises],
            "handed to": record.handed_to,
            "reason": record.reason,
            "error": f"{error.get('error')}: {error.get('message')}" if error else None,
        },
        f"\n{error['traceback'].rstrip()}" if error.get("traceback") else None,
    )


@connected
async def why(producer: Producer, task: TaskOptions) -> Output:
    """Explain why a task is in its state, and what happens next.

    If an operator can do something about it, a second line says what. Further
    lines name the risky steps that were cut off.

    Example: perdure task why 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    explained = await handle.explain()
    doubts = (f"in doubt: {doubt}" for doubt in explained.doubts)
    return Output(explained.summary(), explained.sentence, explained.remedy, *doubts)


def _inbox(record: Record) -> str | None:
    """Return how many messages are unread, or were left unread when the task ended."""
    if not record.unused:
        return None
    if record.state is State.SUCCEEDED:
        return f"{record.unused} left unread at the end, see perdure task inbox {record.id}"
    return f"{record.unused} unread"


def _waits_forever(record: Record) -> bool:
    """Return whether a task waits without a time limit."""
    return record.waits is not None and (record.due_at or 0) > MAX_SECONDS * 500


def _of(number: int, limit: int | None) -> str:
    return str(number) if limit is None else f"{number} of {limit}"


def _step(explained: Explanation) -> str | None:
    if explained.step is None or explained.step_at is None:
        return explained.step
    return f"{explained.step} for {duration((explained.now - explained.step_at) / 1000)}"


def _progress(record: Record, since: Since) -> str | None:
    progress = record.shown_progress()
    return None if progress is None else f"{progress_text(progress.summary())}, {since(progress.at)}"


def _wait(explained: Explanation, since: Since) -> str | None:
    """Return what a task waits for, from which sender, since when and why."""
    what = explained.waits_for
    if what is None:
        return None
    sender = f" from {explained.waits_on}" if explained.waits_on else ""
    began = "" if explained.since is None else f" since {timestamp(explained.since)} ({since(explained.since)})"
    reason = f": {explained.why}" if explained.why else ""
    if what == "time":
        return f"asleep{began}"
    return f"for {waited_for(what)}{sender}{began}{reason}"


async def _links(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[ArtifactLink]:
    """Return the artifacts of a task. Print why those are left out that cannot be read."""
    damaged: list[str] = []
    try:
        return await task_links(gateway, partition, task_id, damaged)
    except DecryptionError as error:
        damaged.append(str(error))
        return ()
    except Refused:
        note("artifacts are not shown: this user of Redis may not read checkpoints")
        return ()
    finally:
        note_damaged(damaged)


async def _findings(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[StoredFinding]:
    """Return the coherence findings of a task. If they cannot be read, print why and return none."""
    try:
        return await stored_findings(gateway, partition, task_id)
    except DecryptionError as error:
        note(str(error))
        return ()
    except Refused:
        return ()


async def _promises(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[OpenPromise]:
    """Return the open promises of a task; none if this user may not read its checkpoint."""
    try:
        return open_promises_in(task_id, await read_log_tail(gateway, partition, task_id))
    except Refused:
        return ()


class _Plan(NamedTuple):
    """Plan of a function, and where the task stands in it."""

    items: Sequence[PlannedItem]
    text: str


async def _plan(gateway: Gateway, partition: Partition, task_id: str) -> _Plan | None:
    """Return the plan of a function. If it cannot be read, print why and return None."""
    try:
        saved = await checkpoint_fields(gateway, partition, task_id, PLANNED)
    except DecryptionError as error:
        note(str(error))
        return None
    except Refused:
        return None
    if (plan := FunctionPlan.decode(saved.get(PLANNED))) is None:
        return None
    tail = await read_log_tail(gateway, partition, task_id)
    known = {"running": tail.intents.keys(), "failed": failed_steps(tail)}
    items = plan.items(tail.done, **known)
    number, total, step = plan.position(tail.done, **known)
    if step is None:
        return _Plan(items, f"all {total} steps have ended")
    title = "" if step.title == step.key else f" {step.title}"
    return _Plan(items, f"step {number} of {total}: {step.key}{title}")


async def _budgets(producer: Producer, partition: Partition, task_id: str) -> Sequence[Ledger]:
    """Return what was spent of the budgets of a task and of its parents; none if this user may not read them."""
    try:
        envelope = await producer.gateway.command("HGET", partition.record(task_id), "env")
        return await BudgetStore(producer.gateway, producer.namespace).of_task(task_id, envelope)
    except Refused:
        return ()


def _spent(ledger: Ledger, task_id: str) -> str:
    """Return what was spent of a budget: `tokens 150 of 200 (75%)`, and whose it is if it is not that of the task."""
    whose = "" if ledger.ledger == task_id else f"{'' if ledger.name else 'of task '}{ledger.ledger}: "
    return whose + "; ".join(_UNIT.get(unit, "") + spent_line(ledger, unit) for unit in UNITS if unit in ledger.limits)


def _describe_finding(finding: StoredFinding) -> dict[str, object]:
    """Return a finding as plain data."""
    return {"check": finding.check, "detail": finding.detail, "policy": finding.policy, "event": finding.n}


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")
