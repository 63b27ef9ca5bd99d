"""Explanations: one sentence per state and cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from perdure.deadletter.policy import Reason
from perdure.queues import Record, State, TaskEvent, WorkerInfo
from perdure.queues.catalog import Catalog, CatalogTask
from perdure.queues.delivery.lost_tasks import Place
from perdure.queues.explanation.facts import Facts, published_lease
from perdure.queues.explanation.sentences import REMEDIES, Explanation, explain_facts
from perdure.queues.keys import RELEASED, SUSPECTS
from perdure.queues.open_joins import JoinProgress
from perdure.queues.pauses import PauseRule, Pauses

NOW = 1_763_836_000_000
ERROR = {"error": "builtins.ValueError", "message": "no such file"}


def record(state: State, **fields: Any) -> Record:
    known: dict[str, Any] = dict.fromkeys(Record.__dataclass_fields__)
    known |= {"id": "x", "queue": "reports", "partition": 0, "task": "report", "headers": {}, "unused": 0}
    known |= {
        "attempts": 0,
        "crashes": 0,
        "replays": 0,
        "deliveries": 0,
        "secrets": (),
        "cipher": None,
        "enqueued_at": NOW - 60_000,
    }
    known |= {"state": state} | fields
    return Record(**known)


def worker(name: str = "w1", **fields: Any) -> WorkerInfo:
    made = WorkerInfo(
        name, "app", "host", 7, "1", ("reports",), concurrency=4, in_flight=0, started=0, seen=1.0, lease=15.0
    )
    return replace(made, **fields)


def event(kind: str, ago: float, data: Any = None, step: str | None = None) -> TaskEvent:
    return TaskEvent("1-1", NOW - round(ago * 1000), kind, step, data)


WORKERS = (worker(),)


def explain(known: Record, *events: TaskEvent, workers: Any = WORKERS, **fields: Any) -> Explanation:
    catalog = Catalog([[CatalogTask("report", "reports", max_attempts=5, max_crashes=3, app="app")]])
    given: dict[str, Any] = {"catalog": catalog, "workers": workers} | fields
    return explain_facts(Facts(known, NOW, events, **given))


QUEUED = record(State.QUEUED, queued_at=NOW - 60_000)
DEAD_WORKER = worker("w0", seen=40.0)
RUNNING = record(
    State.RUNNING,
    worker="w1",
    holder="w1",
    idle_ms=2_000,
    started_at=NOW - 180_000,
    step="fetch",
    step_at=NOW - 12_000,
    alive_at=NOW - 2_000,
)
SILENT = replace(RUNNING, idle_ms=11_000, alive_at=NOW - 11_000)
FAILED = record(State.SCHEDULED, attempts=2, due_at=NOW + 40_000, error=ERROR)
STEP_FAILED = event("step_failed", 9, {"attempt": 1} | ERROR, "fetch")
WAITING = record(State.WAITING, waits="approval", due_at=NOW + 3_600_000)
UNFIT = {"error": "perdure.worker.errors.InvalidArguments", "message": "task 'report': month: Field required"}
UNKNOWN = {"error": "perdure.worker.errors.UnknownTask", "message": "no handler"}
DEAD = record(State.DEAD, reason="timeout", error=ERROR, attempts=3, finished_at=NOW - 5_000)


@pytest.mark.parametrize(
    ("found", "cause", "text"),
    [
        (explain(QUEUED), "ready", "it is queued, and 1 worker serves queue 'reports' and will take it"),
        (
            explain(replace(QUEUED, partition=1_000_000)),
            "ready",
            "1 worker serves queue 'reports' and will take it; its priority is high",
        ),
        (
            explain(replace(QUEUED, partition=3_000_001), workers=(worker(in_flight=3),)),
            "idle",
            "will take it, an idle task, once no other waits and half of the slots are free (1 of 4 are)",
        ),
        (
            explain(replace(QUEUED, partition=3_000_001), workers=(worker(capacity={"free_slots": 1}),)),
            "idle",
            "half of the slots are free (1 of 4 are)",
        ),
        (
            explain(QUEUED, workers=(worker(in_flight=1, capacity={"free_slots": 0, "memory": None}),)),
            "busy",  # a task that takes several slots
            "all 4 slots of the worker of queue 'reports' are",
        ),
        (
            explain(QUEUED, workers=(worker(capacity={"free_slots": 0, "memory": 96, "memory_limit": 100}),)),
            "busy",
            "1 worker serves queue 'reports' without reading new tasks now: memory is short, 96% of the limit is used",
        ),
        (explain(QUEUED, workers=(worker(capacity={"free_slots": "x"}),)), "ready", "1 worker serves queue"),
        (explain(QUEUED, workers=()), "no_worker", "it is queued, and no worker serves queue 'reports'"),
        (explain(QUEUED, workers=(DEAD_WORKER,)), "no_worker", "(the last one was heard of 40 s ago)"),
        (
            explain(QUEUED, workers=(), paused=("prod",)),
            "no_worker",
            "paused after too many crashes: supervisor 'prod'",
        ),
        (explain(QUEUED, workers=(worker(in_flight=4),)), "busy", "all 4 slots of the worker of queue 'reports' are"),
        (explain(QUEUED, workers=None), "queued", "it is queued, and no worker of queue 'reports' has taken it yet"),
        (
            explain(replace(QUEUED, task="rebort")),
            "wrong_app",
            "queue 'reports' has workers of app 'app' only, which has no task 'rebort'",
        ),
        (
            explain(replace(QUEUED, holder=RELEASED), event("crashed", 3), crash={"how": "SIGKILL", "step": "fetch"}),
            "ready",
            "it is queued after its worker died (SIGKILL) in step 'fetch' 3 s ago, and 1 worker",
        ),
        (
            explain(replace(QUEUED, holder=RELEASED), event("handed_off", 3)),
            "ready",
            "after its worker returned it 3 s",
        ),
        (
            explain(replace(QUEUED, holder=SUSPECTS, idle_ms=3_000)),
            "quarantined",
            "because its workers kept dying: a process of its own runs it next",
        ),
        (explain(replace(QUEUED, holder=SUSPECTS, idle_ms=3_000)), "quarantined", "it has been in quarantine since "),
        (
            explain(QUEUED, workers=(worker(in_flight=1, concurrency=1),)),
            "busy",
            "the only slot of the worker of",
        ),
        (explain(record(State.SCHEDULED, due_at=NOW + 7_200_000)), "delay", "enqueued with a delay; it is due in 2 h"),
        (
            explain(FAILED, event("attempt_failed", 8, ERROR), STEP_FAILED),
            "retry",
            "attempt 2 of 5 failed in step 'fetch' with ValueError: no such file; attempt 3 starts in 40 s",
        ),
        (
            explain(replace(FAILED, max_attempts=2), event("attempt_failed", 8, ERROR), workers=()),
            "retry",
            "attempt 2 of 2 failed with ValueError: no such file; attempt 3 starts in 40 s; no worker serves queue",
        ),
        (explain(FAILED, event("snoozed", 8, ERROR)), "snooze", "asked to run again later; it runs again in 40 s"),
        (explain(FAILED, event("returned", 8, ERROR)), "returned", "its worker could not run it (ValueError: no such"),
        (
            explain(replace(FAILED, error=UNFIT), event("returned", 8, UNFIT | {"returns": 3, "max_returns": 9})),
            "invalid_arguments",
            "and went back to its queue (InvalidArguments: task 'report': month: Field required); delivery 4 of",
        ),
        (
            explain(replace(FAILED, error=UNKNOWN), event("returned", 8, UNKNOWN)),
            "unknown_task",
            "that has its task, and went back to its queue (UnknownTask: no handler); its next delivery starts",
        ),
        (
            explain(replace(FAILED, crashes=2), event("crash_backoff", 8, ERROR)),
            "crash_backoff",
            "it crashed 2 times; it runs again in 40 s",
        ),
        (
            explain(replace(FAILED, due_at=NOW - 3_000), event("attempt_failed", 8, ERROR), workers=()),
            "no_worker",
            "attempt 3 starts now (overdue by 3 s), but no worker serves queue 'reports'",
        ),
        (
            explain(WAITING, event("waiting", 90, {"what": "approval", "on": "finance", "why": "over 1000"})),
            "approval",
            "(over 1000); without one it continues at ",
        ),
        (explain(replace(WAITING, waits="message", due_at=None)), "message", "it is waiting for a message"),
        (
            explain(replace(WAITING, waits="message or time")),
            "message or time",
            "it is waiting for a message or its time; without",
        ),
        (
            explain(replace(WAITING, waits="time"), event("waiting", 90, {"what": "time"})),
            "time",
            "it has been asleep since 18:25; it continues at 19:26 (in 60 min)",
        ),
        (
            explain(replace(WAITING, waits="time", due_at=NOW - 3_000), event("waiting", 90, {"what": "time"})),
            "time",
            "; its time has come, and a worker takes it next",
        ),
        (
            explain(replace(WAITING, waits="version 2")),
            "version",
            "a worker that reads data format 2; it becomes a dead",
        ),
        (explain(replace(WAITING, waits="version 3 of report")), "version", "that has version 3 of task 'report'; it"),
        (
            explain(RUNNING),
            "running",
            "(3 min), in step 'fetch' for 12 s, on worker w1 (process 7 on host), last heard of 2 s ago",
        ),
        (
            explain(RUNNING, event("step_completed", 1, {}, "fetch")),
            "running",
            "(3 min), 1 s after step 'fetch', on worker w1",
        ),
        (explain(RUNNING, cancel=True), "cancelling", "it was cancelled, and its worker is stopping it"),
        (
            explain(SILENT, workers=(worker(), worker("w2"))),
            "worker_lost",
            "on worker w1 (process 7 on host), but its worker was last heard of 11 s ago; another worker claims it in",
        ),
        (explain(SILENT), "worker_lost", "no other worker serves queue 'reports'"),
        (
            explain(RUNNING, workers=(replace(DEAD_WORKER, id="w1"), worker("w2"))),
            "worker_lost",
            "its worker was last heard of 40 s ago; another worker claims it in 13 s unless it renews its lease",
        ),
        (
            explain(replace(SILENT, idle_ms=20_000), workers=(worker("w2"),)),
            "worker_lost",
            "another worker claims it now",
        ),
        (
            explain(record(State.SUCCEEDED, attempts=1, finished_at=NOW - 5_000), expires_at=NOW + 9_000_000),
            "succeeded",
            "it succeeded 5 s ago in attempt 1; its record is kept until ",
        ),
        (
            explain(record(State.SUCCEEDED, handed_to="y", finished_at=NOW - 5_000)),
            "continued",
            "task y has continued its work since ",
        ),
        (explain(record(State.CANCELLED, finished_at=NOW - 5_000)), "cancelled", "it was cancelled 5 s ago"),
        (
            explain(DEAD, event("buried", 5, ERROR), STEP_FAILED),
            "dead",
            "(timeout): ValueError: no such file in step 'fetch', after 3 attempts",
        ),
        (
            explain(replace(DEAD, reason="crash_loop", crashes=3), crash={"how": "SIGKILL", "step": "fetch"}),
            "dead",
            "(crash_loop): its worker died (SIGKILL) in step 'fetch', after 3 attempts and 3 crashes",
        ),
        (explain(DEAD), "dead", "it has been a dead letter since "),
        (explain(RUNNING), "running", "it has been running since "),
        (
            explain(QUEUED, place=Place.NO_MESSAGE),
            "lost",
            "its message is gone from the stream: another program has deleted it; a worker puts it back, mostly within",
        ),
        (
            explain(QUEUED, place=Place.SKIPPED, workers=()),
            "no_worker",
            "another program has read or acknowledged it; a worker puts it back, but no worker serves queue 'reports'",
        ),
        (explain(FAILED, place=Place.NOT_DUE), "lost", "it is scheduled, but gone from the due set: another program"),
        (explain(WAITING, place=Place.NOT_DUE), "lost", "it is scheduled, but gone from the due set: another program"),
        (explain(QUEUED, place=Place.NO_PAYLOAD), "lost", "its record has no arguments, so that no worker can put it"),
        (explain(RUNNING, place=Place.NO_MESSAGE), "running", "it has been running since "),  # read just before
        (explain(QUEUED, place=None), "ready", "it is queued, and 1 worker serves queue 'reports'"),
    ],
)
def test_each_cause_has_its_sentence(found: Explanation, cause: str, text: str) -> None:
    assert found.cause == cause
    assert text in found.sentence


def test_an_explanation_has_fields_for_programs() -> None:
    found = explain(RUNNING, steps=4).summary()
    assert (found["state"], found["cause"], found["worker"]) == ("running", "running", "w1")
    assert (found["step"], found["steps"], found["max_attempts"], found["max_crashes"]) == ("fetch", 4, 5, 3)
    assert found["heard_at"] == "2025-11-22T18:26:38.000Z"
    assert found["failed_step"] is None


def test_the_failed_step_is_that_of_the_error_that_ended_the_attempt() -> None:
    other = event("step_failed", 9, {"error": "builtins.KeyError", "message": "'a'"}, "tried")
    assert explain(FAILED, event("attempt_failed", 8, ERROR), other, STEP_FAILED).failed_step == "fetch"
    assert explain(FAILED, event("attempt_failed", 8, ERROR), other).failed_step is None
    resumed = event("resumed", 8.5)
    assert explain(FAILED, event("attempt_failed", 8, ERROR), resumed, STEP_FAILED).failed_step is None


def test_a_crash_names_the_step_in_which_the_worker_died() -> None:
    known = replace(FAILED, crashes=2)
    assert explain(known, event("crash_backoff", 8, ERROR), crash={"step": "fetch"}).failed_step == "fetch"


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_of_a_dead_letter_has_a_remedy_with_its_id(reason: Reason) -> None:
    found = explain(replace(DEAD, reason=str(reason), app="books"))
    assert found.remedy == REMEDIES[reason].format(id="x", app="'books'")
    assert "perdure dlq replay x" in (found.remedy or "")
    assert f"({reason})" in found.sentence


def test_a_parked_task_that_waits_for_a_limit_names_what_holds_it() -> None:
    explanation = explain(
        replace(WAITING, waits="limit crm", due_at=NOW + 5_000), event("waiting", 90, {"what": "limit crm"})
    )
    assert explanation.cause == "limit"
    assert "it has been waiting for limit crm since" in explanation.sentence
    assert "it asks again" in explanation.sentence
    assert explanation.remedy == "see what holds it: perdure limit show crm"


def test_a_value_over_a_limit_has_a_remedy_of_its_own() -> None:
    error = {"error": "perdure.queues.errors.PayloadTooLarge", "message": "raise PERDURE_LARGE_LIMIT"}
    found = explain(replace(DEAD, reason="not_retryable", error=error))
    assert "raise the limit that the error names and restart the workers, then run: perdure dlq replay x;" in (
        found.remedy or ""
    )


@pytest.mark.parametrize(
    ("holder", "deliveries", "returned", "crashes"),
    [("w1", 1, 0, 2), ("w1", 4, 1, 4), (RELEASED, 2, 1, 3), (None, 0, 0, 2)],
)
def test_crashes_of_the_present_message_count(holder: str | None, deliveries: int, returned: int, crashes: int) -> None:
    known = replace(RUNNING, holder=holder, deliveries=deliveries, crashes=2)
    assert explain(known, returned=returned).crashes == crashes


def test_the_lease_is_that_of_the_workers_that_were_lost_if_no_other_is_there() -> None:
    lost, live = worker("w1", lease=6.0, seen=60.0), worker("w2", lease=20.0)
    assert published_lease([lost], "reports") == 6
    assert published_lease([lost, live], "reports") == 20
    assert published_lease([lost, live], "other") == published_lease([], "reports") == 15


def test_a_parent_waits_for_its_children() -> None:
    parked = record(State.WAITING, waits="children", due_at=None)
    joins = [JoinProgress(total=100, ended=37, open="page-7")]
    found = explain(parked, joins=joins)
    assert found.cause == "children"
    assert found.sentence == "it is waiting for 100 children, of which 37 have ended; one that has not: page-7"
    assert found.remedy == "see why it has not ended: perdure task why page-7"
    failed = [JoinProgress(total=3, ended=1, failed="page-2", open="page-3")]
    spawned = event("children_spawned", 600, {"count": 3})
    found = explain(replace(parked, due_at=NOW - 1), spawned, joins=failed)
    assert found.since == spawned.at
    assert "waiting for 3 children, of which 1 have ended since " in found.sentence
    assert found.sentence.endswith("; page-2 has failed; a worker takes it next")


def test_a_task_waits_for_the_result_of_another_one() -> None:
    parked = record(State.WAITING, waits="result", due_at=NOW + 60_000)
    found = explain(parked, joins=[JoinProgress(total=1, ended=0, open="page-7")])
    assert "waiting for the result of another task; one that has not: page-7" in found.sentence


PAUSED = Pauses(
    [PauseRule("reports", number=1, at=NOW - 300_000, by="ann", why="a move"), PauseRule(task="t", number=2)]
)
QUEUE_PAUSED = "queue 'reports' is paused by ann 5 min ago (a move)"
END = "end the pause: perdure queue resume reports"


@pytest.mark.parametrize(
    ("found", "cause", "text", "remedy"),
    [
        (explain(QUEUED, pauses=PAUSED), "paused", f"it is queued, and {QUEUE_PAUSED}", END),
        (explain(QUEUED, pauses=PAUSED, workers=()), "paused", QUEUE_PAUSED, END),
        (explain(replace(FAILED, due_at=NOW - 1000), pauses=PAUSED), "paused", f", but {QUEUE_PAUSED}", END),
        (explain(FAILED, pauses=PAUSED), "delay", f"in 40 s; {QUEUE_PAUSED}", None),
        (explain(SILENT, pauses=PAUSED), "worker_lost", f"11 s ago; {QUEUE_PAUSED}", END),
        (explain(RUNNING, pauses=PAUSED), "running", "it has been running", None),
        (explain(replace(WAITING, due_at=NOW - 1000), pauses=PAUSED), "paused", QUEUE_PAUSED, END),
        (
            explain(replace(FAILED, paused_by=2), pauses=PAUSED),
            "paused",
            "it is parked: tasks 't' are paused by an operator",
            "end the pause: perdure queue resume --task t",
        ),
        (
            explain(replace(FAILED, paused_by=7), pauses=PAUSED),
            "paused",
            f"it was parked by a pause that has ended; it is queued again within a minute; {QUEUE_PAUSED}",
            None,
        ),
        (explain(replace(FAILED, paused_by=7)), "paused", "it is parked: an operator has paused such tasks", None),
    ],
)
def test_a_pause_is_explained_with_the_command_that_ends_it(
    found: Explanation, cause: str, text: str, remedy: str | None
) -> None:
    assert (found.cause, text in found.sentence, found.remedy) == (cause, True, remedy), found.sentence
