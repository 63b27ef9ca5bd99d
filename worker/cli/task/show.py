"""`perdure task show` and `perdure task why`: a task, and the explanation of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ....queues.budgets.definition import UNITS
from ....queues.budgets.store import Ledger
from ....queues.explanation.sentences import Explanation
from ....queues.lanes import NORMAL, lane_of
from ....queues.producer import Producer
from ....queues.records import Record, State
from ....queues.wording import duration, waited_for
from ...durable.promises import promise_text
from ...shown_events import progress_text
from ...shown_task import read_shown_task
from ..artifacts import size_text
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.output import Time, ago, state_text, timestamp
from ..support.runner import Output

_UNIT: Final = {"tokens": "tokens ", "steps": "steps "}

Since = Callable[[int | None], str]


@connected_as_tenant
async def show(producer: Producer, task: TaskOptions) -> Output:
    """Show a task: its state, arguments, result, error and artifacts.

    The field 'why' explains the state; 'perdure task why' prints it alone.

    Example: perdure task show 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    shown = await read_shown_task(producer, await task.find(producer))
    record, explained, plan = shown.record, shown.explained, shown.plan
    since = ago(explained.now)
    error = record.error or {}
    return Output(
        shown.summary(),
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
            "due": None if record.paused_by is not None else Time(record.due_at),
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
            "budget": [_spent(ledger, record.id) for ledger in shown.budgets],
            "steps done": explained.steps or None,
            "plan": plan and plan.text,
            "failed step": explained.failed_step,
            "in doubt": [str(doubt) for doubt in explained.doubts],
            "result": _text(record.shown_result()),
            "artifacts": [f"{link.name}  {size_text(link.size)}  {link.hash}" for link in shown.artifacts],
            "incoherent": [f"{one.check}: {one.detail} ({one.policy}, event {one.n})" for one in shown.findings],
            "promises": [promise_text(promise) for promise in shown.promises],
            "handed to": record.handed_to,
            "reason": record.reason,
            "error": f"{error.get('error')}: {error.get('message')}" if error else None,
        },
        f"\n{error['traceback'].rstrip()}" if error.get("traceback") else None,
        notes=shown.notes,
    )


@connected_as_tenant
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


def _spent(ledger: Ledger, task_id: str) -> str:
    """Return what was spent of a budget: `tokens 150 of 200 (75%)`, and whose it is if it is not that of the task."""
    whose = "" if ledger.ledger == task_id else f"{'' if ledger.name else 'of task '}{ledger.ledger}: "
    return whose + "; ".join(_UNIT.get(unit, "") + ledger.spent_text(unit) for unit in UNITS if unit in ledger.limits)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")
