"""Sentences: why a task is in its state, and what happens next. Pure functions, no Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from ..catalog import CatalogTask
from ..delivery.lost_tasks import Place
from ..doubts import Doubt, undecided
from ..event_log import TaskEvent
from ..inbox import InboxMessage
from ..keys import RELEASED, SUSPECTS, is_reserved
from ..lanes import IDLE, NORMAL, lane_of
from ..pauses import PauseRule
from ..presence import WorkerInfo
from ..records import State
from ..wording import ago_text, at_text, clock, counted, in_text, iso_time, short, since_text, span, waited_for
from .facts import Facts

_MISSED: Final = 0.6
"""Share of the lease without a renewal after which a worker counts as silent: it renews each third."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task is in its state, and what happens next. Times are milliseconds of Redis' clock.

    Attributes:
        cause: A word for programs, such as "no_worker".
        sentence: The explanation.
        remedy: What an operator can do; None if nothing is to be done.
        since: Start of the state. until: time of the next event, as far as it is known.
        worker: Worker that runs the task, or ran it last. heard_at: its last sign of life.
        step, step_at: Current step and its start. steps: number of recorded steps.
        failed_step: Step whose error ended the last attempt, or in which the worker died.
        max_attempts, max_crashes: Limits, as far as a worker has published them.
        waits_for, waits_on, why: What a parked task waits for, from which sender, and the handler's reason.
        app: App whose workers run it; None if any app with a task of this name may.
        successor: Task that continues its work.
        doubts: Risky steps that were cut off, and may have acted.
    """

    id: str
    task: str | None
    app: str | None
    queue: str
    state: State
    cause: str
    sentence: str
    remedy: str | None = None
    now: int = 0
    since: int | None = None
    until: int | None = None
    worker: str | None = None
    heard_at: int | None = None
    step: str | None = None
    step_at: int | None = None
    steps: int = 0
    failed_step: str | None = None
    attempts: int = 0
    max_attempts: int | None = None
    crashes: int = 0
    max_crashes: int | None = None
    waits_for: str | None = None
    waits_on: str | None = None
    why: str | None = None
    successor: str | None = None
    doubts: Sequence[Doubt] = ()

    def summary(self) -> dict[str, Any]:
        """Return the explanation as plain data, times as ISO 8601."""
        shown = {one.name: getattr(self, one.name) for one in fields(self)}
        shown["state"] = str(self.state)
        shown["doubts"] = [doubt.summary() for doubt in self.doubts]
        return shown | {name: iso_time(shown[name]) for name in ("now", "since", "until", "heard_at", "step_at")}


@dataclass(slots=True)
class _Said:
    """The part of an explanation that depends on the state."""

    cause: str
    sentence: str
    remedy: str | None = None
    since: int | None = None
    until: int | None = None
    waits_on: str | None = None
    why: str | None = None


def explain_facts(facts: Facts) -> Explanation:
    """Return the explanation of a task."""
    record = facts.record
    said = _lost(facts) or _STATES[record.state](facts)
    known = descriptions(facts)
    running = record.state is State.RUNNING
    step = current_step(facts) if running else None
    return Explanation(
        id=record.id,
        task=record.task,
        app=record.app,
        queue=record.queue,
        state=record.state,
        cause=said.cause,
        sentence=said.sentence,
        remedy=said.remedy,
        now=facts.now,
        since=said.since,
        until=said.until,
        worker=record.worker,
        heard_at=heard_at(facts) if running else None,
        step=step,
        step_at=record.step_at if step is not None else None,
        steps=facts.steps,
        failed_step=failed_step(facts),
        attempts=record.attempts,
        max_attempts=attempt_limit(facts),
        crashes=record.crashes + unsettled_crashes(facts),
        max_crashes=known[0].max_crashes if known else None,
        waits_for=record.waits,
        waits_on=said.waits_on,
        why=said.why,
        successor=record.handed_to,
        doubts=facts.doubts,
    )


# states


def _lost(facts: Facts) -> _Said | None:
    """Explain a task that another program has taken out of the queue; None for any other task."""
    record = facts.record
    what = _LOST.get(facts.place)
    if what is None or record.state not in (State.QUEUED, State.SCHEDULED, State.WAITING, State.LIMITED):
        return None
    if facts.place is Place.NO_PAYLOAD:
        remedy = f"enqueue it again under another id, and run: perdure task cancel {record.id}"
        return _Said("lost", f"{what}, and its record has no arguments, so that no worker can put it back", remedy)
    if _is_taken(facts):
        return _Said("lost", f"{what}; a worker puts it back, mostly within a minute", None)
    cause, missing, start = next_worker(facts)
    return _Said(cause, f"{what}; a worker puts it back, but {missing}", start)


_LOST: Final[dict[Place | None, str]] = {
    Place.NO_MESSAGE: "its message is gone from the stream: another program has deleted it",
    Place.SKIPPED: "no worker gets its message: another program has read or acknowledged it",
    Place.NOT_DUE: "it is scheduled, but gone from the due set: another program has removed it",
    Place.NO_PAYLOAD: "its message is gone from the stream: another program has deleted it",
    Place.NOT_IN_LIST: "it waits for limits, but is gone from their list: another program has removed it",
    Place.LIST_OF_ANOTHER_TYPE: "it waits for limits, but another program has replaced their list",
}


def _queued(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    latest = facts.events[0] if facts.events else None
    since = record.queued_at
    if record.holder == SUSPECTS:
        since = None if record.idle_ms is None else now - record.idle_ms
        return _Said(
            "quarantined",
            f"it {'is' if since is None else 'has been'} in quarantine{since_text(since, now)}, because its workers "
            f"kept dying: a process of its own runs it next{unless_served(facts)}",
            None if _is_taken(facts) else next_worker(facts)[2],
            since,
        )
    before = ""
    if record.holder == RELEASED and latest is not None:
        since = latest.at
        if latest.type == "crashed":
            before = f" after {crash_text(facts)} {span(now - latest.at)} ago"
        else:
            before = f" after its worker returned it {span(now - latest.at)} ago"
    cause, why, remedy = next_worker(facts)
    return _Said(cause, f"it is queued{before}, and {why}", remedy, since)


def _parked_by_pause(facts: Facts) -> _Said | None:
    """Explain a scheduled task that a pause holds; None for any other task."""
    record = facts.record
    if record.paused_by is None:
        return None
    rule = None if facts.pauses is None else facts.pauses.numbered(record.paused_by)
    if rule is not None:
        text = f"it is parked: {rule.target} are paused {rule.origin(facts.now)}"
        return _Said("paused", text, f"end the pause: {rule.command}", record.enqueued_at, why=rule.why or None)
    if facts.pauses is None:
        return _Said("paused", "it is parked: an operator has paused such tasks", None, record.enqueued_at)
    text = "it was parked by a pause that has ended; it is queued again within a minute"
    return _Said("paused", text + unless_served(facts), None, record.enqueued_at)


def _scheduled(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    if (parked := _parked_by_pause(facts)) is not None:
        return parked
    event = next((one for one in facts.events if one.type in _DELAYS), None)
    cause = "delay" if event is None else _DELAYS[event.type]
    error = error_text(facts)
    step, remedy = failed_step(facts), None
    match cause:
        case "retry":
            limit = attempt_limit(facts)
            of = "" if limit is None else f" of {limit}"
            where = "" if step is None else f" in step {step!r}"
            text = f"attempt {record.attempts}{of} failed{where} with {error}; attempt {record.attempts + 1} starts"
        case "snooze":
            text = "its handler asked to run again later; it runs again"
        case "returned":
            data = event.data if event is not None and isinstance(event.data, dict) else {}
            cause, text, remedy = returned_by(facts, data)
        case "crash_backoff":
            text = f"it crashed {counted(record.crashes, 'time')}; it runs again"
        case _:
            text = "it was enqueued with a delay; it is due"
    since = record.enqueued_at if event is None else event.at
    if record.due_at is not None and record.due_at <= now:
        when = f"now (overdue by {span(now - record.due_at)})"
        if not _is_taken(facts):
            cause, why, remedy = next_worker(facts)
            when += f", but {why}"
    else:
        when = in_text(record.due_at, now) + unless_served(facts)
    return _Said(cause, f"it is scheduled: {text} {when}", remedy, since, record.due_at)


def _limited(facts: Facts) -> _Said:
    record, now, found = facts.record, facts.now, facts.limited
    what = record.waits or "limit" if found is None else found.text
    text = f"it waits for {what}"
    until = None if found is None or found.look is None else found.look
    if until is not None and until > now:
        text += f"; if no task ends before, it is looked at again {in_text(until, now)}"
    remedy = f"see what holds it: perdure limit show {found.names[0]}" if found is not None and found.full else None
    if found is not None and any("no worker has published" in reason for reason in found.full):
        remedy = "start a worker of the app that defines it"
    return _Said("limit", text + unless_served(facts), remedy, record.enqueued_at, until)


def _waiting(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    what = record.waits or "something"
    event, data = _wait_started(facts.events, what)
    on, why = data.get("on") or None, data.get("why") or None
    since = None if event is None else event.at
    until = record.due_at
    if what.startswith("version"):
        number, of, task = what.removeprefix("version ").partition(" of ")
        text = (
            f"it is waiting for a worker that has version {number} of task {task!r}"
            if of
            else (f"it is waiting for a worker that reads data format {number}")
        )
        after = f"; it becomes a dead letter {at_text(until, now)} if none starts" if until is not None else ""
        return _Said("version", text + after, "deploy workers of the newer version", since, until)
    if what == "workspace":
        again = f"; it tries again {in_text(until, now)}" if until is not None else ""
        reason = f": {why}" if why else ""
        text = f"it is waiting because the files of its workspace could not be saved{reason}{again}"
        remedy = "do what the reason says: then it continues by itself"
        return _Said(what, text + unless_served(facts), remedy, since, until, on, why)
    if (said := _of_calls(facts, what, since, until)) is not None:
        return said
    things = "approval" if what == "approval" else waited_for(what)
    text = f"it {'is' if since is None else 'has been'} waiting for {things}"
    text += f" by {on}" if on else ""
    text += f" since {clock(since, now)}" if since is not None else ""
    text += f" ({short(str(why))})" if why else ""
    if record.unused:
        text += f"; {counted(record.unused, 'message is', 'messages are')} unread"
    if facts.unreadable:
        text += _unreadable(facts.unreadable)
    if until is not None and until <= now:
        return _woken(facts, what, text, on, why, since)
    if (kind := what.partition(" ")[0]) in _SHARED:
        when, remedy = _SHARED[kind]
        text += f"; it asks again {at_text(until, now)}, or when {when}" if until is not None else ""
        remedy = f"{remedy} {what.removeprefix(f'{kind} ')}"
        return _Said(kind, text + unless_served(facts), remedy, since, until)
    if until is not None:
        text += f"; without one it continues {at_text(until, now)}"
    remedy = f"answer: perdure task send {record.id} TEXT{f' --from {on}' if on else ''}"
    if what == "compaction":
        limits = "PERDURE_PAYLOAD_LIMIT or PERDURE_LARGE_LIMIT"
        remedy = f"make its state smaller: perdure task compact {record.id}; or raise {limits} first"
    elif what == "confirmation":
        remedy = f"let it continue: perdure task correct {record.id} --continue; --field PATH=VALUE corrects its state"
    return _Said(what, text + unless_served(facts), remedy, since, until, on, why)


_SHARED: Final = {
    "limit": ("a token is released", "see what holds it: perdure limit show"),
    "budget": ("it is raised", "add to it with --tokens, --usd, --steps or --seconds: perdure budget raise"),
}
"""Event that wakes a task which waits for something that tasks share, and the remedy before its name."""


def _wait_started(events: Sequence[TaskEvent], what: str) -> tuple[TaskEvent | None, dict[str, Any]]:
    """Return the latest event that says what a task waits for, with its data. Of several waits, a sleep says least."""
    found = [one for one in events if one.type == "waiting" and isinstance(one.data, dict)]
    telling = [one for one in found if " or " in what and one.data.get("what") != "time"]
    event = next(iter(telling or found), None)
    return event, {} if event is None else event.data


def _asleep(facts: Facts, since: int | None, until: int | None) -> _Said:
    now = facts.now
    text = "it is asleep" if since is None else f"it has been asleep since {clock(since, now)}"
    if until is not None and until <= now:
        return _woken(facts, "time", text, None, None, since)
    text += f"; it continues {at_text(until, now)}"
    return _Said("time", text + unless_served(facts), None, since, until)


def _of_calls(facts: Facts, what: str, since: int | None, until: int | None) -> _Said | None:
    """Explain a task whose calls wait for its time, for answers or for other tasks; None if for anything else."""
    if what == "time":
        return _asleep(facts, since, until)
    if facts.waits:
        return _unanswered(facts, until)
    if facts.joins and what in ("children", "result"):
        return _joining(facts, what, until)
    return None


def _unanswered(facts: Facts, until: int | None) -> _Said:
    """Explain a task that waits for answers: the oldest open wait, and how many there are."""
    record, now = facts.record, facts.now
    left = [wait for wait in facts.waits if not wait.answered]
    first = (left or list(facts.waits))[0]
    text = f"it has been waiting for an answer to {first.id!r}{f' by {first.who}' if first.who else ''}"
    text += f" since {clock(first.opened, now)}{f' ({short(first.why)})' if first.why else ''}"
    if len(facts.waits) > 1:
        text += f", and for {counted(len(facts.waits) - 1, 'other answer')}"
    if first.problem is not None:
        text += f"; this process cannot read the wait ({short(first.problem)})"
    if not left or (until is not None and until <= now):
        return _woken(facts, "answer", text, first.who or None, first.why or None, first.opened)
    if until is not None:
        text += f"; without one it continues {at_text(until, now)}"
    remedy = f"answer: perdure task answer {record.id} {first.id} JSON"
    return _Said(
        "answer", text + unless_served(facts), remedy, first.opened, until, first.who or None, first.why or None
    )


def _joining(facts: Facts, what: str, until: int | None) -> _Said:
    """Explain a parked task that waits for other tasks."""
    now, joins = facts.now, facts.joins
    since = next((event.at for event in facts.events if event.type == "children_spawned"), None)
    total, ended = sum(join.total for join in joins), sum(join.ended for join in joins)
    child = next((join.open for join in joins if join.open is not None), None)
    awaited = f"{counted(total, 'child', 'children')}, of which {ended} have ended"
    if what == "result":
        awaited = "the result of another task"
    text = f"it {'is' if since is None else 'has been'} waiting for {awaited}"
    text += f" since {clock(since, now)}" if since is not None else ""
    if (failed := next((join.failed for join in joins if join.failed is not None), None)) is not None:
        text += f"; {failed} has failed"
    elif child is not None:
        text += f"; one that has not: {child}"
    remedy = None if child is None else f"see why it has not ended: perdure task why {child}"
    if until is not None and until <= now:
        cause, missing, start = (what, "a worker takes it next", None) if _is_taken(facts) else next_worker(facts)
        return _Said(cause, f"{text}; {missing}", start, since, until)
    if until is not None:
        text += f"; without an end of them it continues {at_text(until, now)}"
    return _Said(what, text + unless_served(facts), remedy, since, until)


def _unreadable(messages: Sequence[InboxMessage]) -> str:
    """Return why messages do not answer: they cannot be read."""
    first = messages[0]
    sender = f" from {first.sender!r}" if first.sender else ""
    which = f"message {first.number}{sender}" if first.number else "what no sender wrote"
    more = f", and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"; {which} cannot be read ({short(str(first.problem))}){more}"


def _woken(facts: Facts, what: str, text: str, on: str | None, why: str | None, since: int | None) -> _Said:
    """Explain a parked task that is due: a message has come, or its time. on: the sender for which it waits."""
    senders = facts.senders
    if what == "time":
        came = "its time has come"
    elif facts.waits:
        answered = any(wait.answered for wait in facts.waits)
        came = "an answer is there" if answered else "its time has come"
    elif senders is None:
        came = "a message or its time has come"
    elif any(on in (None, sender) for sender in senders):
        came = "the answer is there" if what == "approval" else f"the {what} is there"
    elif senders:
        came = f"a message has come, but not from {on}"
    else:
        came = "its time has come"
    cause, remedy = what, None
    if _is_taken(facts):
        text += f"; {came}, and a worker takes it next"
    else:
        cause, missing, remedy = next_worker(facts)
        text += f"; {came}, and {missing}"
    return _Said(cause, text, remedy, since, facts.record.due_at, on, why)


def _running(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    heard, lease = heard_at(facts), round(facts.lease * 1000)
    silent = max(0, now - heard)
    worker = next((one for one in facts.workers or () if one.id == record.worker), None)
    name = f"worker {record.worker}" + ("" if worker is None else f" (process {worker.pid} on {worker.host})")
    others = [one for one in serving_workers(facts) if one.id != record.worker]
    since = record.started_at if record.started_at is not None else heard
    step = current_step(facts)
    # A worker that came after an outage restarts all leases: the lease of a lost worker seems to have been renewed.
    gone = worker is not None and worker.presumed_dead
    if gone or silent > lease * _MISSED or (worker is None and facts.workers and silent > lease / 2):
        where = "" if step is None else f" in step {step!r}"
        quiet = max(silent, round(worker.seen * 1000)) if worker is not None and gone else silent
        text = f"it is running{where} on {name}, but its worker was last heard of {span(quiet)} ago"
        if (pause := _queue_pause(facts)) is not None:
            said = f"{text}; queue {record.queue!r} is paused {pause.origin(now)}"
            return _Said("worker_lost", said, f"end the pause: {pause.command}", since)
        if facts.workers is not None and not others:
            return _Said(
                "worker_lost", f"{text}; no other worker serves queue {record.queue!r}", how_to_start(facts), since
            )
        left = lease - silent
        when = f"in {span(left)}" if left > 0 else "now"
        unless = " unless it renews its lease" if quiet > silent else ""
        return _Said("worker_lost", f"{text}; another worker claims it {when}{unless}", None, since, heard + lease)
    text = f"it has been running{since_text(since, now)}"
    if step is not None and record.step_at is not None:
        text += f", in step {step!r} for {span(now - record.step_at)}"
    elif (last := next((one for one in facts.events if one.type == "step_completed"), None)) is not None:
        text += f", {span(now - last.at)} after step {last.step!r}"
    text += f", on {name}, last heard of {span(silent)} ago"
    if facts.cancel:
        return _Said("cancelling", f"{text}; it was cancelled, and its worker is stopping it", None, since)
    return _Said("running", text, None, since)


def _succeeded(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    kept = "" if facts.expires_at is None else f"; its record is kept until {clock(facts.expires_at, now)}"
    if record.handed_to is not None:
        text = (
            f"task {record.handed_to} has continued its work since {clock(record.finished_at, now)} and has the result"
        )
        return _Said(
            "continued", text + kept, f"perdure task why {record.handed_to}", record.finished_at, facts.expires_at
        )
    text = f"it succeeded {ago_text(record.finished_at, now)} in attempt {max(1, record.attempts)}"
    return _Said("succeeded", text + kept, None, record.finished_at, facts.expires_at)


def _cancelled(facts: Facts) -> _Said:
    record = facts.record
    kept = "" if facts.expires_at is None else f"; its record is kept until {clock(facts.expires_at, facts.now)}"
    text = f"it was cancelled {ago_text(record.finished_at, facts.now)}"
    if record.replaced_by is not None:
        text += f", since task {record.replaced_by} of the same key replaced it"
    if record.dropped is not None:
        text += f", since limit {record.dropped} had no room for it"
    return _Said("cancelled", text + kept, None, record.finished_at, facts.expires_at)


def _dead(facts: Facts) -> _Said:
    record, now = facts.record, facts.now
    if record.reason == "crash_loop" and facts.crash:  # its error names the step, too
        cause = crash_text(facts)
    else:
        step = failed_step(facts)
        cause = error_text(facts) + ("" if step is None else f" in step {step!r}")
    text = f"it has been a dead letter since {clock(record.finished_at, now)} ({record.reason}): "
    text += f"{cause}, after {counted(record.attempts, 'attempt')}"
    text += f" and {counted(record.crashes, 'crash', 'crashes')}" if record.crashes else ""
    if facts.expires_at is not None:
        text += f"; it is deleted {at_text(facts.expires_at, now)}"
    error = str((record.error or {}).get("error"))
    remedy = remedy_for(record.reason or "", record.id, error, record.app, facts.doubts)
    return _Said("dead", text, remedy, record.finished_at, facts.expires_at)


_STATES: Final = {
    State.QUEUED: _queued,
    State.SCHEDULED: _scheduled,
    State.WAITING: _waiting,
    State.LIMITED: _limited,
    State.RUNNING: _running,
    State.SUCCEEDED: _succeeded,
    State.CANCELLED: _cancelled,
    State.DEAD: _dead,
}

_DELAYS: Final = {
    "attempt_failed": "retry",
    "snoozed": "snooze",
    "returned": "returned",
    "crash_backoff": "crash_backoff",
}
"""Cause of a delay by the event that says so."""


def serving_workers(facts: Facts) -> Sequence[WorkerInfo]:
    """Return the workers of the task's app and queue that are not presumed dead."""
    return [worker for worker in _on_queue(facts) if worker.runs(facts.record.app)]


def _on_queue(facts: Facts) -> Sequence[WorkerInfo]:
    """Return the workers of the queue, of any app, that are not presumed dead."""
    return [one for one in facts.workers or () if not one.presumed_dead and facts.record.queue in one.queues]


def _queue_pause(facts: Facts) -> PauseRule | None:
    """Return the pause of the task's whole queue."""
    return None if facts.pauses is None else facts.pauses.queues.get(facts.record.queue)


def _is_taken(facts: Facts) -> bool:
    """Return whether a worker takes the task when it is due, as far as is known."""
    return _queue_pause(facts) is None and (facts.workers is None or bool(serving_workers(facts)))


def unless_served(facts: Facts) -> str:
    if (pause := _queue_pause(facts)) is not None:
        return f"; queue {facts.record.queue!r} is paused {pause.origin(facts.now)}"
    if facts.workers is None or serving_workers(facts):
        return ""
    of = f" of app {facts.record.app!r}" if _on_queue(facts) else ""
    return f"; no worker{of} serves queue {facts.record.queue!r} now"


_SHORT: Final = 0.85
"""Share of the memory limit from which on a worker may read no new task."""


def next_worker(facts: Facts) -> tuple[str, str, str | None]:
    """Return the cause, why no worker has taken a queued task yet, and the remedy."""
    record, queue = facts.record, facts.record.queue
    if (pause := _queue_pause(facts)) is not None:
        return "paused", f"queue {queue!r} is paused {pause.origin(facts.now)}", f"end the pause: {pause.command}"
    if facts.workers is None:
        return "queued", f"no worker of queue {queue!r} has taken it yet", None
    serving = serving_workers(facts)
    if not serving and (others := _on_queue(facts)):
        listed, owner = ", ".join(sorted({repr(worker.app) for worker in others})), record.app
        text = f"queue {queue!r} has workers of app {listed} only, and the task belongs to app {owner!r}"
        return "wrong_app", text, f"start a worker of app {owner!r}: perdure worker run APP --queues {queue}"
    if not serving:
        lost = min((one.seen for one in facts.workers if queue in one.queues), default=None)
        text = f"no worker serves queue {queue!r}"
        text += "" if lost is None else f" (the last one was heard of {span(round(lost * 1000))} ago)"
        if facts.paused:
            names = ", ".join(repr(one) for one in facts.paused)
            text += f"; paused after too many crashes: supervisor {names}"
        return "no_worker", text, how_to_start(facts)
    apps = {one.app for one in serving}
    published = facts.catalog is not None and apps & {one.app for one in facts.catalog.tasks}
    if published and not apps & {one.app for one in descriptions(facts)}:
        listed = ", ".join(sorted(map(repr, apps)))
        text = f"queue {queue!r} has workers of app {listed} only, which has no task {record.task!r}"
        return "wrong_app", text, f"start a worker of the app that has task {record.task!r}, or enqueue it on its queue"
    return _when_taken(facts, serving)


def _when_taken(facts: Facts, serving: Sequence[WorkerInfo]) -> tuple[str, str, str | None]:
    """Return the cause, what the workers that may take a queued task wait for, and the remedy."""
    record, queue = facts.record, facts.record.queue
    depth = 0 if facts.stats is None else facts.stats.depth
    ahead = f"; {depth} tasks are queued in its partition" if depth > 1 else ""
    if (lane := lane_of(record.partition)) not in (NORMAL, IDLE):
        ahead += f"; its priority is {lane}"
    number, slots = len(serving), sum(one.concurrency for one in serving)
    if not any(one.free_slots for one in serving):
        share = min(one.memory_share for one in serving)
        if share >= _SHORT and any(one.in_flight < one.concurrency for one in serving):
            text = f"{counted(number, 'worker serves', 'workers serve')} queue {queue!r} without reading new tasks now"
            remedy = "lower --concurrency of the workers, or give them more memory"
            return "busy", f"{text}: memory is short, {share:.0%} of the limit is used{ahead}", remedy
        used = "the only slot" if slots == 1 else f"all {slots} slots"
        workers = "worker" if number == 1 else f"{number} workers"
        verb = "is" if slots == 1 else "are"
        return "busy", f"{used} of the {workers} of queue {queue!r} {verb} in use{ahead}", None
    workers = counted(number, "worker serves", "workers serve")
    cause, when = "ready", "will take it"
    if lane == IDLE:
        free, of = max((one.free_slots, one.concurrency) for one in serving)
        cause = "idle"
        when = f"will take it, an idle task, once no other waits and half of the slots are free ({free} of {of} are)"
    return cause, f"{workers} queue {queue!r} and {when}{ahead}", None


def returned_by(facts: Facts, event: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return the cause, why workers returned a task, and the remedy. event: data of the last return."""
    error = str((facts.record.error or {}).get("error")).rpartition(".")[2]
    needs = _OTHER_CODE.get(error)
    if needs is None:
        return "returned", f"its worker could not run it ({error_text(facts)}); a worker takes it again", None
    cause, worker = needs
    returns, most = event.get("returns"), event.get("max_returns")
    number, last = "its next delivery", ""
    if isinstance(returns, int) and isinstance(most, int):
        number, last = f"delivery {returns + 1} of {most + 1}", f"; else delivery {most + 1} makes it a dead letter"
    text = f"it is waiting for a worker {worker}, and went back to its queue ({error_text(facts)}); {number} starts"
    return cause, text, f"deploy a worker {worker}{last}"


_OTHER_CODE: Final = {
    "InvalidArguments": ("invalid_arguments", "whose code accepts its arguments"),
    "UnknownTask": ("unknown_task", "that has its task"),
}
"""Cause, and what the worker needs, by the error of a task that is for other code."""


def how_to_start(facts: Facts) -> str:
    if facts.paused:
        return f"find out why workers crash, then run: perdure worker resume {facts.paused[0]}"
    return f"start a worker: perdure worker run APP --queues {facts.record.queue}"


def heard_at(facts: Facts) -> int:
    """Return when the worker of a running task got it or renewed its lease last."""
    return facts.now - (facts.record.idle_ms or 0)


def current_step(facts: Facts) -> str | None:
    """Return the step of the last heartbeat, unless the log says that it has ended since."""
    record = facts.record
    ended = (one.step for one in facts.events if record.alive_at is None or one.at >= record.alive_at)
    return None if record.step is None or record.step in ended else record.step


def failed_step(facts: Facts) -> str | None:
    """Return the step whose error ended the last attempt: the log has the same error of a step before that."""
    record = facts.record
    if record.state not in (State.SCHEDULED, State.DEAD, State.QUEUED):
        return None
    if record.reason == "crash_loop" or (facts.events and facts.events[0].type in ("crashed", "crash_backoff")):
        step = facts.crash.get("step")
        return step if isinstance(step, str) else None
    error = record.error or {}
    for event in facts.events:
        if event.type in ("resumed", "replayed"):
            break
        if event.type == "step_failed" and isinstance(event.data, dict) and _same_error(event.data, error):
            return event.step
    return None


def _same_error(one: Any, other: Any) -> bool:
    return bool(one.get("error") == other.get("error") and one.get("message") == other.get("message"))


def crash_text(facts: Facts) -> str:
    how, step = facts.crash.get("how"), facts.crash.get("step")
    text = "its worker died" + (f" ({how})" if how else "")
    return text + (f" in step {step!r}" if step else "")


def error_text(facts: Facts) -> str:
    error = facts.record.error or {}
    name = str(error.get("error") or "an error").rpartition(".")[2]
    message = short(str(error.get("message") or ""))
    return f"{name}: {message}" if message else name


def unsettled_crashes(facts: Facts) -> int:
    """Return the crashes of the present message, which the record counts with its outcome only."""
    record = facts.record
    if record.holder is None:
        return 0
    ended = record.deliveries if is_reserved(record.holder) else record.deliveries - 1
    return max(0, ended - facts.returned)


def attempt_limit(facts: Facts) -> int | None:
    if facts.record.max_attempts is not None:
        return facts.record.max_attempts
    known = descriptions(facts)
    return known[0].max_attempts if known else None


def descriptions(facts: Facts) -> Sequence[CatalogTask]:
    """Return what apps have published about tasks of this name, those on this queue first."""
    name, app = facts.record.task, facts.record.app
    known = facts.catalog.named(name, app) if facts.catalog is not None and name else []
    return sorted(known, key=lambda one: one.queue != facts.record.queue)


_REPLAY: Final = "perdure dlq replay {id}"

REMEDIES: Final[Mapping[str, str]] = {
    "attempts_exhausted": f"fix the cause of the error, then run: {_REPLAY}",
    "not_retryable": f"fix the handler or the arguments, then run: {_REPLAY} (with --edit-args JSON for new arguments)",
    "crash_loop": f"find out what kills the worker (memory, native code), then run: {_REPLAY}",
    "timeout": f"raise the task's timeout or split it into steps, then run: {_REPLAY}",
    "unreadable": f"find the producer of the message; {_REPLAY} --fresh drops a checkpoint that cannot be read",
    "newer_version": f"deploy workers of the newer version, then run: {_REPLAY}",
    "invalid_arguments": (
        f"deploy a worker whose code accepts its arguments, then run: {_REPLAY}; or run: {_REPLAY} --edit-args JSON"
    ),
    "unknown_task": f"deploy a worker that has the task, then run: {_REPLAY}",
    "wrong_app": f"start a worker of app {{app}} on its queue, then run: {_REPLAY}",
    "unserialisable_result": (
        f"return JSON data of the declared type and size, or raise the limit that the error names, then run: {_REPLAY}"
    ),
    "undecryptable": f"give the workers the encryption key of the task, then run: {_REPLAY}",
    "incoherent": f"read the findings (perdure task show {{id}}), then run: {_REPLAY}",
    "in_doubt": (
        "find out whether the effect of the step happened, then run: perdure task resolve {id} STEP with "
        f"--result JSON, --failed TEXT or --run-again; then: {_REPLAY}"
    ),
    "expired": f"start more workers, or give it a later deadline; to run it without one: {_REPLAY}",
    "budget": f"raise a shared budget (perdure budget list), then run: {_REPLAY}; its own budget starts again",
    "orphaned_steps": f"give the steps their former names and run: {_REPLAY}; with --fresh all steps run again",
}
"""Remedy by the reason of a dead letter; `{id}` is the id of the task, `{app}` the name of its app."""


_TOO_LARGE: Final = (
    "pass or return less, such as a reference to an artifact, or raise the limit that the error names and restart the "
    f"workers, then run: {_REPLAY}; it continues after its recorded steps"
)

_DECISION: Final = (
    "replace the decision about the step that the error names (perdure task resolve {id} STEP with --result JSON, "
    f"--failed TEXT or --run-again), then run: {_REPLAY}"
)
_OF_ERRORS: Final = {"PayloadTooLarge": _TOO_LARGE, "ResolutionMismatch": _DECISION, "StepResolvedAsFailed": _DECISION}


def remedy_for(reason: str, task_id: str, error: str = "", app: str | None = None, doubts: Sequence[Doubt] = ()) -> str:
    """Return what an operator can do about a dead letter.

    Args:
        error: Name of its error.
        app: App of the task.
        doubts: Its risky steps that were cut off, as far as they are known.
    """
    if reason == "in_doubt" and doubts:
        return _remedy_of_doubt(task_id, doubts)
    if reason == "not_retryable" and (remedy := _OF_ERRORS.get(error.rpartition(".")[2])):
        return remedy.format(id=task_id)
    remedy = REMEDIES.get(reason, f"fix the cause of the error, then run: {_REPLAY}")
    return remedy.format(id=task_id, app="of the task" if app is None else repr(app))


def _remedy_of_doubt(task_id: str, doubts: Sequence[Doubt]) -> str:
    """Return how to decide about the steps in doubt; after that, how to replay the task."""
    replay = _REPLAY.format(id=task_id)
    left = undecided(doubts)
    if not left:
        return f"run: {replay}; its steps in doubt are resolved"
    first = left[0]
    more = f", and the same for {', '.join(repr(doubt.step) for doubt in left[1:])}" if left[1:] else ""
    return (
        f"find out whether the effect of step {first.step!r} happened (idempotency key {first.idempotency_key}), then "
        f"run: {first.command}{more}; then: {replay}"
    )
