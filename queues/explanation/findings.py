"""Findings from the facts: which workers can run a task, in which step it is or failed, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..catalog import CatalogTask
from ..keys import is_reserved
from ..presence import WorkerInfo
from ..records import State
from .facts import Facts
from .texts import short, span, times


def serving_workers(facts: Facts) -> Sequence[WorkerInfo]:
    """Return the workers of the task's app and queue that are not presumed dead."""
    return [worker for worker in _on_queue(facts) if worker.runs(facts.record.app)]


def _on_queue(facts: Facts) -> Sequence[WorkerInfo]:
    """Return the workers of the queue, of any app, that are not presumed dead."""
    return [one for one in facts.workers or () if not one.presumed_dead and facts.record.queue in one.queues]


def unless_served(facts: Facts) -> str:
    if facts.workers is None or serving_workers(facts):
        return ""
    of = f" of app {facts.record.app!r}" if _on_queue(facts) else ""
    return f"; no worker{of} serves queue {facts.record.queue!r} now"


def next_worker(facts: Facts) -> tuple[str, str, str | None]:
    """Return the cause, why no worker has taken a queued task yet, and the remedy."""
    record, queue = facts.record, facts.record.queue
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
    depth = 0 if facts.stats is None else facts.stats.depth
    ahead = f"; {depth} tasks are queued in its partition" if depth > 1 else ""
    number, slots = len(serving), sum(one.concurrency for one in serving)
    if all(one.in_flight >= one.concurrency for one in serving):
        used = "the only slot" if slots == 1 else f"all {slots} slots"
        workers = "worker" if number == 1 else f"{number} workers"
        verb = "is" if slots == 1 else "are"
        return "busy", f"{used} of the {workers} of queue {queue!r} {verb} in use{ahead}", None
    workers = times(number, "worker serves", "workers serve")
    return "ready", f"{workers} queue {queue!r} and will take it{ahead}", None


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
