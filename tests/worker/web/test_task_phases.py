"""Phases, steps and incidents of tasks, from records and logs that tests write down."""

from __future__ import annotations

from typing import Any

from perdure.queues.event_log import TaskEvent
from perdure.queues.records import Record, State
from perdure.worker.web.task_phases import PhaseKind, TaskPhases, phases_of

NOW = 100_000


def event(at: int, kind: str, step: str | None = None, number: int | None = None, **data: Any) -> TaskEvent:
    return TaskEvent(f"{at}-0", at, kind, step, data, number)


def record(state: State, **fields: Any) -> Record:
    return Record("one", "mail", 0, state, enqueued_at=1_000, **fields)


def shown(found: TaskPhases) -> list[tuple[str, int, int | None]]:
    return [(str(phase.kind), phase.start, phase.end) for phase in found.phases]


def test_a_task_that_waits_for_a_worker_has_one_phase_that_lasts() -> None:
    found = phases_of(record(State.QUEUED), [], NOW)
    assert shown(found) == [("queued", 1_000, None)]
    assert found.total(PhaseKind.QUEUED) == NOW - 1_000


def test_the_record_says_when_the_only_run_began() -> None:
    done = event(5_000, "step_completed", "one", attempt=1)
    found = phases_of(record(State.SUCCEEDED, finished_at=6_000, ran_ms=2_500), [done], NOW)
    assert shown(found) == [("queued", 1_000, 3_500), ("running", 3_500, 6_000)]


def test_a_step_began_so_many_milliseconds_before_its_event() -> None:
    events = [event(5_000, "step_completed", "slow", ms=3_000), event(5_100, "step_completed", "quick", ms=100)]
    found = phases_of(record(State.RUNNING, started_at=1_500), events, NOW)
    assert [(step.key, step.start, step.end, step.exact) for step in found.steps] == [
        ("slow", 2_000, 5_000, True),
        ("quick", 5_000, 5_100, True),
    ]
    assert shown(found) == [("queued", 1_000, 1_500), ("running", 1_500, None)]


def test_a_step_of_an_earlier_version_begins_after_the_one_before() -> None:
    events = [event(4_000, "step_completed", "one", attempt=1), event(5_000, "step_completed", "two", attempt=1)]
    found = phases_of(record(State.RUNNING, started_at=1_500), events, NOW)
    assert [(step.start, step.exact) for step in found.steps][1:] == [(4_000, False)]


def test_a_failed_attempt_is_followed_by_its_delay_and_by_the_wait_for_a_worker() -> None:
    events = [
        event(5_000, "attempt_failed", error="ValueError", message="boom", delay=2.0),
        event(9_000, "resumed", number=1, after="failure", gap=4.0),
    ]
    found = phases_of(record(State.RUNNING, started_at=9_000), events, NOW)
    assert shown(found)[1:] == [("delayed", 5_000, 7_000), ("queued", 7_000, 9_000), ("running", 9_000, None)]
    assert [(mark.kind, mark.text) for mark in found.marks] == [("attempt_failed", "ValueError: boom")]


def test_parked_time_and_the_wait_for_a_worker_are_apart() -> None:
    events = [
        event(5_000, "waiting", number=1, what="answer", until=50_000),
        event(9_000, "resumed", number=2, after="wait", gap=4.0, queued=1.0),
    ]
    found = phases_of(record(State.RUNNING, started_at=9_000), events, NOW)
    assert shown(found)[1:] == [("parked", 5_000, 8_000), ("queued", 8_000, 9_000), ("running", 9_000, None)]
    assert found.phases[1].what == "an answer"


def test_a_crash_without_a_report_ends_the_run_at_its_last_sign_of_life() -> None:
    events = [
        event(5_000, "step_completed", "one", ms=1_000),
        event(20_000, "resumed", number=1, after="crash", gap=14.0),
    ]
    found = phases_of(record(State.RUNNING, started_at=20_000), events, NOW)
    assert shown(found)[1:] == [("running", 4_000, 6_000), ("lost", 6_000, 20_000), ("running", 20_000, None)]
    assert [(mark.at, mark.kind) for mark in found.marks] == [(6_000, "crashed")]


def test_a_crash_cuts_off_the_steps_that_had_started() -> None:
    events = [event(4_000, "step_started", "pay", number=1), event(5_000, "crashed", how="SIGKILL")]
    found = phases_of(record(State.QUEUED), events, NOW)
    assert [(step.key, step.start, step.end, step.outcome) for step in found.steps] == [
        ("pay", 4_000, 5_000, "cut off")
    ]
    assert found.marks[0].text == "worker died: SIGKILL"


def test_a_dead_letter_is_dead_until_its_replay() -> None:
    buried = event(5_000, "buried", error="ValueError", message="boom")
    found = phases_of(record(State.DEAD, finished_at=5_000), [buried], NOW)
    assert shown(found)[-1] == ("dead", 5_000, None)
    found = phases_of(record(State.QUEUED, queued_at=8_000), [buried, event(8_000, "replayed")], NOW)
    assert shown(found)[-2:] == [("dead", 5_000, 8_000), ("queued", 8_000, None)]


def test_a_parked_task_lasts_in_its_wait() -> None:
    events = [event(5_000, "step_completed", "one", ms=1_000)]
    found = phases_of(record(State.WAITING, waits="children"), events, NOW)
    assert shown(found)[-1] == ("parked", 5_000, None)
    assert found.phases[-1].what == "its children"


def test_a_wait_for_children_is_named_by_their_end() -> None:
    events = [
        event(2_000, "children_spawned", number=1, task="leaf", count=2, child="two"),
        event(9_000, "resumed", number=2, after="wait", gap=6.0),
        event(9_100, "children_joined", number=3, count=2),
    ]
    found = phases_of(record(State.RUNNING), events, NOW)
    assert [(phase.start, phase.what) for phase in found.phases if phase.kind is PhaseKind.PARKED] == [
        (3_000, "its children")
    ]


def test_a_running_task_is_in_its_step() -> None:
    found = phases_of(record(State.RUNNING, started_at=2_000, step="fetch", step_at=3_000), [], NOW)
    assert [(step.key, step.start, step.end, step.outcome) for step in found.steps] == [
        ("fetch", 3_000, None, "running")
    ]


def test_events_of_another_form_hide_no_other() -> None:
    events = [
        event(2_000, "resumed", number=1, after=["?"], gap="long", queued=-3),
        event(3_000, "attempt_failed", delay={"a": 1}, error=7, message=None),
        event(3_500, "waiting", number=2, what=None, until="soon"),
        event(4_000, "step_completed", "one", ms="much", attempt="first"),
        TaskEvent("5000-0", 5_000, "tool_called", "two", ["no object"], 3),
        event(6_000, "step_failed", None, 4, error={"x": 1}),
    ]
    found = phases_of(record(State.RUNNING), events, NOW)
    assert [step.key for step in found.steps] == ["one", "two"]
    assert all(phase.end is None or phase.start <= phase.end for phase in found.phases)
