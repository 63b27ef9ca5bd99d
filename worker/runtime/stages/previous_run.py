"""The previous run: the stages that load its checkpoint and derive from its log why it stopped.

A task that runs for the first time has none. For any other, the last events of its log are read together with its
checkpoint. Every planned stop writes an event; if the newest event is one of a working run instead, that run was cut
off by a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from ....queues.delivery.checkpoint import History, load_history
from ....queues.derived_tasks import confirm_successor
from ....queues.errors import DecryptionError, LargeValueLost, ServerFull, Unavailable, UnreadableCheckpoint, WrongType
from ....queues.event_log import TaskEvent, read_log_tail
from ....queues.inbox import CORRECTION, InboxMessage
from ....queues.json_form import as_json
from ....queues.keys import SNAPSHOT, Namespace
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.gateway import Gateway
from ....queues.transport.large_values import LargeValue
from ....queues.transport.pipelining import Command
from ...durable.continuation import HANDING
from ...durable.emitting import notices_of_resume
from ...durable.ended_task import ON_END
from ...durable.joining import CHILDREN, SpawnedChildren
from ...durable.journal.event import RECORDED
from ...durable.journal.failure_record import FailureRecord, is_failure, is_unhandled
from ...durable.journal.handoff.document import HANDOFF, RECEIVED, REMEDY, CompletedStep, Handoff, UnreadMessage, Why
from ...durable.journal.resumption import Resumption
from ...durable.journal.run_events import Resumed
from ...durable.journal.step_record import PLANNED, VERSION, StepRecord, result_text
from ...durable.journal.tool_notes import TOOLS, open_calls
from ...durable.messaging import unread_messages
from ...durable.promises import PROMISES
from ...durable.run import Run, goal_of
from ...durable.stop_reasons import STOP_RULES, StopReason, stop_of_event
from ...errors import BadHandoff
from ...log import LineLimit, log_wait, logger
from ...on_demand import draft_handoff
from ..outcome import Cancelled, Outcome
from .execution import Execution

_READ_FIRST: Final = (RECEIVED, HANDOFF, HANDING, SNAPSHOT, TOOLS, PROMISES, PLANNED, VERSION, ON_END, CHILDREN)
"""Saved values that are needed before the handler starts, also of a large checkpoint."""


_MAX_MESSAGES: Final = 10
"""Unread messages that a function's previous run shows."""


class LoadHistory:
    """Stage: load the counters, the checkpoint and the last events. A task that was cancelled does not run.

    A successor that has recorded nothing yet is confirmed to the task that it continues.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, execution: Execution) -> Outcome | None:
        run = execution.run
        load = partial(load_history, self._gateway, run.delivery, run.id)
        run.load(await retry_while_unavailable(load, on_wait=log_wait(f"task {run.id}")))
        if (pages := run.history.pages) is not None:
            pages.on_wait = log_wait(f"task {run.id}", run.touch)
            await run.history.read_unfinished(*_READ_FIRST)
        source = run.history.handed_from
        if source is not None and run.history.entries == 0:
            namespace = Namespace(run.delivery.partition.namespace)
            confirm = partial(confirm_successor, self._gateway, namespace, source)
            await retry_while_unavailable(confirm, on_wait=log_wait(f"task {run.id}"))
        if CHILDREN in run.history.saved:
            SpawnedChildren.of(run)  # closes their joins at the end of the attempt, without the handler too
        if not run.history.cancel:
            return None
        cleans_up = run.envelope.on_end or ON_END in run.history.saved
        if cleans_up and run.envelope.task not in run.host.tasks:
            return None  # it returns to the queue, for a worker that can enqueue its clean-up task
        return Cancelled(run.history.counters)


class Resume:
    """Stage: set `ctx.resumption`, and log that the run resumes.

    After the end of a worker with many tasks, its log has a line for some of them and one that counts the others.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.lines = LineLimit("resumed {} further tasks in {:.0f} s")

    async def __call__(self, execution: Execution) -> Outcome | None:
        await resume(self._gateway, execution.run, self.lines)
        return None


async def resume(gateway: Gateway, run: Run, lines: LineLimit) -> None:
    """Set the run's resumption, and log it: in the event log, and in the worker's log as far as `lines` admits."""
    received, left = (_stored(run, RECEIVED), _stored(run, HANDOFF)) if run.history.saved else (None, None)
    if left is not None and left.events != run.history.events:
        left = None  # something has happened since
    found = _stopped(run, received, left)
    if found is None:
        return
    stop, at = found
    rule = STOP_RULES[stop]
    if rule.after is None or rule.why is None:
        raise AssertionError(f"{stop} ends no run that can be resumed")
    first = received is not None and not run.history.events
    handoff = received if first else left or await _draft_handoff(gateway, run, rule.why, at)
    if handoff is not None and not first and handoff.agent is None:
        handoff = await _completed(run, handoff)
    if rule.after == "replay" and handoff is not None:
        kept = tuple(one for one in handoff.attention if not one.startswith(REMEDY))
        handoff = handoff.model_copy(update={"attention": kept})
    resumption = Resumption(
        after=rule.after,
        at=at,
        gap=None if at is None else max(0.0, (run.history.read_at - at) / 1000),
        restored=_restored(run.history, handoff),
        task=run.envelope.task,
        goal=(not first and handoff is not None and handoff.goal) or goal_of(run),
        handoff=handoff,
        received=received,
    )
    run.resume_from(resumption)
    if not (resumption.interrupted or resumption.restored):
        return  # the previous run failed or waited before it recorded anything, which the log says already
    summary = resumption.summary()
    level = "INFO" if resumption.interrupted and lines.admits() else "DEBUG"
    logger.bind(task=run.envelope.task, id=run.id).log(level, "{}", summary)
    event = Resumed(
        after=rule.after,
        gap=resumption.gap,
        queued=_queued(run, at),
        restored=resumption.restored,
        summary=summary,
        text=resumption.notice(),
    )
    await _log_resumed(run, event, tell=resumption.interrupted)


def _queued(run: Run, ended: int | None) -> float | None:
    """Return the seconds for which the task's message waited for this run; None if an earlier delivery was lost."""
    if run.history.lost > 0 or ended is None:
        return None
    since = max(ended, int(run.delivery.entry.partition(b"-")[0]))
    return max(0.0, (run.history.read_at - since) / 1000)


async def _log_resumed(run: Run, event: Resumed, *, tell: bool) -> None:
    """Put the event into the log at once, without delaying the run. tell: whether readers of streams get its text.

    A full server certainly refuses it: the event is dropped, or a task that needs no memory to finish would wait for
    some. If Redis is unavailable, the write may or may not have arrived: it is repeated under the same number.
    """
    entry = run.next_entry(event)
    notices = notices_of_resume(run, run.events, event.text) if tell and run.emits else []
    try:
        if await run.recorder.put_or_drop(entry, *notices):
            run.cancel(StopReason.CANCELLED)
    except ServerFull:
        run.withdraw(entry)
    except Unavailable:
        await run.recorder.put(entry, *notices, wait=True)


def _stopped(run: Run, received: Handoff | None, left: Handoff | None) -> tuple[StopReason, int | None] | None:
    """Return why and when the previous run stopped; None if there was none. left: that run's own handoff."""
    history, again = run.history, run.history.lost > 0
    for event in history.latest:
        stop = stop_of_event(event.type)
        if stop is None and not _of_a_run(event):
            continue
        if stop is None and not again and (parked := _parked(left)) is not None:
            return parked
        if stop is None or (again and STOP_RULES[stop].new_message):
            return StopReason.LOST, max(event.at, history.alive_at or 0)
        since = _buried_at(history.latest) if stop is StopReason.REPLAYED else None
        return stop, since or event.at
    if again:
        return StopReason.LOST, history.alive_at
    if received is not None:
        return StopReason.RELEASED, received.at
    return None


def _parked(left: Handoff | None) -> tuple[StopReason, int | None] | None:
    """Return when a run was parked from outside its handler, which writes no event of its own."""
    return (StopReason.PARKED, left.at) if left is not None and left.why == STOP_RULES[StopReason.PARKED].why else None


def _of_a_run(event: TaskEvent) -> bool:
    """Whether a working run wrote the event."""
    return event.number is not None or event.type == "step_completed"


def _buried_at(latest: Sequence[TaskEvent]) -> int | None:
    return next((event.at for event in latest if event.type == "buried"), None)


def _stored(run: Run, key: str) -> Handoff | None:
    data = run.history.saved.get(key)
    if data is None:
        return None
    try:
        return Handoff.from_json(run.id, data)
    except BadHandoff as error:
        logger.bind(task=run.envelope.task, id=run.id).warning("{}", error)
        return None


async def _draft_handoff(gateway: Gateway, run: Run, why: Why, at: int | None) -> Handoff | None:
    """Return a handoff drafted from the log and the checkpoint, for a previous run that left none.

    at: time of its end in milliseconds.
    """
    history = run.history
    if not (history.records or history.saved or history.intents or _events(history)):
        return None
    read = partial(read_log_tail, gateway, run.delivery.partition, run.id, checkpoint=False)
    tail = await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}"))
    is_agent = SNAPSHOT in history.saved
    done: set[str] = set()
    try:
        if is_agent:
            await history.read_all()  # which it needs anyway
        else:
            done = await _done_of_plan(gateway, run)
            started = {event.step or "" for event in tail.events if event.type == "step_started"}
            await history.read_unfinished(*started, *open_calls(history.saved.get(TOOLS)))
    except (DecryptionError, UnreadableCheckpoint):
        return None  # the handler raises it again
    if history.pages is None or is_agent:
        done.update(history.done)
    else:  # most of its records are read later
        done.update(
            history.done, (event.step for event in tail.events if event.type in RECORDED and event.step is not None)
        )
    handoff = draft_handoff(
        replace(tail, done=done, intents=history.intents, saved=history.saved),
        task=run.envelope.task,
        session=run.id,
        why=why,
        goal=goal_of(run),
        at=at,
        in_flight=() if (step := history.crash.get("step")) is None else (str(step),),
    )
    if history.pages is None or is_agent or handoff.total:
        return handoff
    return handoff.model_copy(update={"steps": await history.pages.count_steps()})


async def _done_of_plan(gateway: Gateway, run: Run) -> set[str]:
    """Return the keys of the known records and of those of the plan, for a large checkpoint of a function."""
    history = run.history
    if history.pages is None or PLANNED not in history.saved:
        return set()
    from ...durable.journal.function_plan import FunctionPlan

    if (plan := FunctionPlan.decode(history.saved[PLANNED])) is None:
        return set()
    steps = run.delivery.partition.steps(run.id)
    names = plan.records()
    ask: list[Command] = [("HEXISTS", steps, f"d:{name}") for name in names]
    read = partial(gateway.pipeline, ask, node_of=steps)
    found = await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}"))
    return {*history.done, *(name for name, exists in zip(names, found, strict=True) if exists)}


async def _completed(run: Run, handoff: Handoff) -> Handoff:
    """Return a function's handoff with the results of its steps and the first messages that came meanwhile.

    An agent has both in its state.
    """
    completed: list[CompletedStep] = []
    with suppress(DecryptionError, UnreadableCheckpoint):  # the handler raises it again
        await run.history.read_records([step.key for step in handoff.completed if step.key not in run.history.done])
    for step in handoff.completed:
        record = run.history.done.get(step.key)
        if record is None or not is_unhandled(record):
            result = "" if record is None else _result(run, record)
            completed.append(step.model_copy(update={"result": result}))
    messages: list[UnreadMessage] = []
    if run.history.mail:

        async def read() -> list[UnreadMessage]:
            found: list[UnreadMessage] = []
            async for message in unread_messages(run):
                if message.kind != CORRECTION:
                    found.append(_unread(run, message))
                if len(found) == _MAX_MESSAGES:
                    break
            return found

        with suppress(WrongType):  # reported when the handler reads the inbox
            messages = await retry_while_unavailable(read, on_wait=log_wait(f"the inbox of task {run.id}", run.touch))
    steps = handoff.steps - (0 if handoff.total else len(handoff.completed) - len(completed))
    return handoff.model_copy(update={"steps": steps, "completed": tuple(completed), "inbox": tuple(messages)})


def _unread(run: Run, message: InboxMessage) -> UnreadMessage:
    return UnreadMessage(sender=message.sender, text=_masked(run, result_text(as_json(message.content))))


def _result(run: Run, record: bytes) -> str:
    """Return the beginning of a recorded result as text."""
    if is_failure(record):
        return _masked(run, f"failed: {FailureRecord.decode(record).text}")
    data = StepRecord.decode(record).result
    try:
        large = LargeValue.decode(data)
    except LargeValueLost:
        return ""
    return _masked(run, result_text(data)) if large is None else f"a result of {large.size:,} bytes"


def _masked(run: Run, text: str) -> str:
    return text if run.redact is None else run.redact(text)


def _events(history: History) -> int:
    """Return how many events the task's runs have logged since its last fresh start."""
    for event in history.latest:
        if event.number is not None:
            break
        if event.restarts:
            return 0
    return history.events


def _restored(history: History, handoff: Handoff | None) -> dict[str, int]:
    """Count what is restored, by kind; what an agent knows is in its state, which its handoff counts.

    The fields of a function's large checkpoint are counted as one kind: most of them are read later.
    """
    events, is_agent = _events(history), handoff is not None and handoff.agent is not None
    if history.pages is not None and not is_agent:
        counts = {"records": history.records, "events": events}
    else:
        names = [key[key.rfind("/") + 1 :] for key in history.done]
        kinds = Counter(name[1:].partition("#")[0] for name in names if name.startswith("#"))
        recorded = len(names) - kinds.total()
        counts = {
            "steps": handoff.steps if handoff is not None and is_agent else recorded,
            "nested steps": recorded if is_agent else 0,
            "events": events,
            "decisions": max(kinds["decided"], _known(handoff, "decisions")),
            "discoveries": max(kinds["discovered"], _known(handoff, "discoveries")),
            "messages": handoff.messages if handoff is not None and is_agent else kinds["message_added"],
            "progress": sum(not key.startswith("#") for key in history.saved),
        }
    return {name: count for name, count in counts.items() if count}


def _known(handoff: Handoff | None, kind: str) -> int:
    return 0 if handoff is None else len(getattr(handoff, kind)) + handoff.left_out.get(kind, 0)
