"""The checker of the chaos suite: given journals written by hand, it finds each promise that they break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.chaos.checker.counts import counted
from tests.chaos.checker.faults import LOSSES
from tests.chaos.checker.history import history
from tests.chaos.checker.verdict import verdict, violations
from tests.chaos.journal import JOURNAL_NAME, SECOND, JournalWriter, Line, parse, read_journal
from tests.chaos.schedule import WEIGHTS, schedule

INJECTOR, FIRST, SECOND_ONE, THIRD, PRODUCER = 1, 10, 11, 12, 20
"""Processes."""

ENTRY = "1000-0"


class Story:
    """A journal as a test writes it: what happened to one task, in seconds."""

    def __init__(self, kind: str = "chain") -> None:
        self.kind = kind
        self.task = f"{kind}-1"
        self.lines: list[dict[str, Any]] = []
        self.inject(0, "begins", lease=2.0)
        for pid in (FIRST, SECOND_ONE, THIRD):
            self.inject(0, "started", child=pid, role="worker", number=pid, version="this", processes=0)
        self.add(1, PRODUCER, "enqueue", kind=kind, key=None)
        self.add(1.1, PRODUCER, "acknowledged", kind=kind, queue="default", partition=0, key=None)

    def add(self, at: float, pid: int, what: str, **more: Any) -> Story:
        self.lines.append({"at": round(at * SECOND), "pid": pid, "what": what, "task": self.task, **more})
        return self

    def inject(self, at: float, what: str, **more: Any) -> Story:
        self.lines.append({"at": round(at * SECOND), "pid": INJECTOR, "what": what, **more})
        return self

    def run(self, at: float, pid: int, *, count: int = 1, attempt: int = 1, entry: str = ENTRY) -> Story:
        return self.add(
            at,
            pid,
            "run",
            kind=self.kind,
            run=f"{pid}.1",
            attempt=attempt,
            crashes=count - 1,
            queue="default",
            partition=0,
            entry=entry,
            count=count,
            worker=f"w{pid}",
        )

    def begin(self, at: float, pid: int, step: str, *, trial: int = 1) -> Story:
        token = f"{pid}.1/{step}/{trial}"
        return self.add(at, pid, "begin", run=f"{pid}.1", step=step, trial=trial, token=token, inputs=[])

    def effect(self, at: float, pid: int, step: str, *, trial: int = 1) -> Story:
        return self.add(at, pid, "effect", run=f"{pid}.1", step=step, token=f"{pid}.1/{step}/{trial}")

    def value(self, at: float, pid: int, step: str, *, by: int | None = None, durability: str = "sync") -> Story:
        token = f"{by or pid}.1/{step}/1"
        return self.add(at, pid, "value", run=f"{pid}.1", step=step, token=token, durability=durability)

    def step(self, at: float, pid: int, step: str, durability: str = "sync") -> Story:
        """A step from its beginning to its value, in a fifth of a second."""
        return self.begin(at, pid, step).effect(at + 0.1, pid, step).value(at + 0.2, pid, step, durability=durability)

    def left(self, at: float, pid: int, error: str = "ValueError") -> Story:
        return self.add(at, pid, "left", run=f"{pid}.1", error=error, text="")

    def returned(self, at: float, pid: int, result: list[str]) -> Story:
        return self.add(at, pid, "returned", run=f"{pid}.1", result=result)

    def fault(self, at: float, until: float, kind: str, *pids: int) -> Story:
        number = len(self.lines)
        self.inject(at, "fault", number=number, kind=kind, pids=list(pids) or None, fresh=False)
        return self.inject(until, "fault_over", number=number)

    def exited(self, at: float, pid: int, code: int = -9) -> Story:
        return self.inject(at, "exited", child=pid, role="worker", code=code, closing=False)

    def outcome(self, at: float, state: str = "succeeded", **more: Any) -> Story:
        return self.add(at, PRODUCER, "outcome", state=state, **more)

    def seen(self, at: float, state: str) -> Story:
        return self.add(at, INJECTOR, "seen", state=state, since=round(at * SECOND))

    def final(self, state: str, **more: Any) -> Story:
        printed: dict[str, Any] = {
            "attempts": 1,
            "crashes": 0,
            "replays": 0,
            "reason": None,
            "result": None,
            "worker": None,
            "steps": {},
            "kept": 86_400.0,
        }
        return self.add(100, INJECTOR, "final", kind=self.kind, state=state, **printed | more)

    def read(self) -> list[Line]:
        lines = [*self.lines, {"at": 101 * SECOND, "pid": INJECTOR, "what": "ends"}]
        return parse(orjson.dumps(line) for line in lines)

    def rules(self) -> set[str]:
        """The rules that it breaks."""
        return {violation.rule for violation in violations(self.read())}


STEPS = {"step-0": "10.1/step-0/1", "step-1": "11.1/step-1/1"}
RESULT = list(STEPS.values())


def taken_over(story: Story | None = None) -> Story:
    """The first worker records a step and is killed in the next; the second one takes the task over."""
    story = story or Story()
    story.run(2, FIRST).step(2.1, FIRST, "step-0").begin(2.4, FIRST, "step-1").seen(2.5, "running")
    story.fault(2.6, 2.7, "kill", FIRST).exited(2.7, FIRST)
    story.run(5, SECOND_ONE, count=2).value(5.1, SECOND_ONE, "step-0", by=FIRST)
    return story


def finished() -> Story:
    """Taken over, and brought to its end: nothing is wrong with it."""
    story = taken_over().step(5.2, SECOND_ONE, "step-1").returned(5.5, SECOND_ONE, RESULT)
    story.outcome(5.6, result=RESULT).outcome(5.6, result=RESULT).seen(5.7, "succeeded")
    return story.final("succeeded", result=RESULT, steps=STEPS, crashes=1, worker="w11")


def test_a_journal_of_what_should_happen_breaks_nothing() -> None:
    assert finished().rules() == set()


def lost() -> Story:
    return taken_over()


def never_ended() -> Story:
    return taken_over().final("running")


def unknown_to_a_waiter() -> Story:
    return finished().outcome(6, "unknown", reason="TaskNotFound")


def vanished() -> Story:
    return finished().seen(5.65, "nowhere")


def two_outcomes() -> Story:
    return finished().outcome(6, result=["another"])


def delivered_after_its_end() -> Story:
    return finished().run(6, THIRD, count=3)


def result_without_a_run() -> Story:
    return taken_over().outcome(6, result=["made up"]).final("succeeded", result=["made up"], worker="w11")


def recorded_step_again() -> Story:
    return finished().begin(5.15, SECOND_ONE, "step-0")


def recorded_step_again_in_its_run() -> Story:
    return finished().begin(2.35, FIRST, "step-0", trial=2)


def background_record_again() -> Story:
    """A later step of the same run had been recorded, so this one had been."""
    story = Story("hasty").run(2, FIRST).step(2.1, FIRST, "step-0", "async").step(2.4, FIRST, "step-1")
    story.fault(2.7, 2.8, "kill", FIRST).exited(2.8, FIRST).run(5, SECOND_ONE, count=2)
    return story.begin(5.1, SECOND_ONE, "step-0").final("cancelled").add(4, PRODUCER, "cancel")


def earlier_delivery_again() -> Story:
    """The first worker begins a recorded step, and nothing kept it from knowing that the task is another's."""
    story = Story().run(2, THIRD).run(3, SECOND_ONE, count=2).step(3.1, SECOND_ONE, "step-0")
    story.begin(4, THIRD, "step-0").returned(5, SECOND_ONE, ["11.1/step-0/1"])
    return story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})


def stale_record() -> Story:
    """A frozen worker's record was accepted though another one had the task."""
    story = Story().run(2, FIRST).begin(2.1, FIRST, "step-0").fault(2.2, 6, "freeze", FIRST)
    story.run(5, SECOND_ONE, count=2).step(5.1, SECOND_ONE, "step-0")
    story.effect(6.1, FIRST, "step-0").value(6.2, FIRST, "step-0").returned(7, SECOND_ONE, ["11.1/step-0/1"])
    return story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})


def overwritten_record() -> Story:
    story = finished()
    story.lines[-1]["steps"] = STEPS | {"step-0": "12.1/step-0/1"}
    return story


def value_without_a_step() -> Story:
    story = finished()
    story.lines = [line for line in story.lines if line["what"] != "effect" or line["step"] != "step-0"]
    return story


def repeated_without_a_fault() -> Story:
    story = finished()
    story.lines = [line for line in story.lines if line["what"] not in ("fault", "fault_over", "exited")]
    return story


def repeated_for_a_harmless_fault() -> Story:
    return repeated_without_a_fault().fault(2.5, 2.6, "cut_all", FIRST)


def started_twice_in_one_run() -> Story:
    return finished().begin(5.25, SECOND_ONE, "step-1")


def charged_twice() -> Story:
    story = Story("payment").run(2, FIRST).begin(2.1, FIRST, "charge").effect(2.2, FIRST, "charge")
    story.left(2.3, FIRST).run(5, SECOND_ONE, count=1, attempt=2, entry="1001-0")
    story.begin(5.1, SECOND_ONE, "charge").effect(5.2, SECOND_ONE, "charge").value(5.3, SECOND_ONE, "charge")
    story.add(100, INJECTOR, "ledger", tokens=["10.1/charge/1", "11.1/charge/1"])
    story.returned(5.4, SECOND_ONE, ["11.1/charge/1"])
    return story.final("succeeded", result=["11.1/charge/1"], worker="w11", steps={"charge": "11.1/charge/1"})


def innocent_buried() -> Story:
    return taken_over().final("dead", reason="crash_loop", crashes=51)


def failing_succeeds() -> Story:
    return Story("fails").run(2, FIRST).returned(3, FIRST, []).final("succeeded", result=[], worker="w10")


def too_few_attempts() -> Story:
    return Story("fails").run(2, FIRST).left(3, FIRST).final("dead", reason="attempts_exhausted", attempts=3)


def buried_too_early() -> Story:
    return Story("fails").run(2, FIRST).left(3, FIRST).final("dead", reason="attempts_exhausted", attempts=1)


def crashes_without_a_fault() -> Story:
    return Story("fragile").run(2, FIRST).final("dead", reason="crash_loop", crashes=7)


def crashes_within_the_limit() -> Story:
    return Story("fragile").run(2, FIRST).final("dead", reason="crash_loop", crashes=1)


def timeouts_without_a_cause() -> Story:
    return Story("overtime").run(2, FIRST).left(3, FIRST, "CancelledError").final("dead", reason="timeout", attempts=2)


def poison_that_kills_on() -> Story:
    """Five processes, where the third death should have been the last."""
    story = Story("poison")
    for count, pid in enumerate(range(30, 35), 1):
        story.run(count, pid, count=count).begin(count + 0.1, pid, "suicide")
        story.add(count + 0.2, pid, "kills", run=f"{pid}.1", step="suicide")
    return story.final("dead", reason="crash_loop", crashes=5)


def doubt_without_a_fault() -> Story:
    story = Story("doubtful").run(2, FIRST).step(2.1, FIRST, "order").begin(2.4, FIRST, "charge")
    return story.final("dead", reason="in_doubt")


def cancelled_unasked() -> Story:
    return Story().final("cancelled")


def run_after_cancellation() -> Story:
    story = Story().add(2, PRODUCER, "cancel").add(2.1, PRODUCER, "answer", state="cancelled")
    return story.run(3, FIRST).final("cancelled")


def cancelled_and_yet_not() -> Story:
    return finished().add(2, PRODUCER, "cancel").add(2.1, PRODUCER, "answer", state="cancelled")


def in_two_places() -> Story:
    return finished().add(3, INJECTOR, "misplaced", problem="places: ['ready', 'due']")


def back_from_its_end() -> Story:
    return finished().seen(6, "queued")


def back_from_the_dead() -> Story:
    """No replay explains it."""
    return finished().seen(2.2, "dead")


def out_of_order() -> Story:
    story = Story("keyed")
    story.lines[-2]["key"] = "k"
    story.run(2, FIRST, entry="1005-0").final("cancelled").add(2, PRODUCER, "cancel")
    story.task = "keyed-2"
    story.add(1.5, PRODUCER, "enqueue", kind="keyed", key="k").run(3, SECOND_ONE, entry="1003-0")
    return story.final("cancelled").add(2, PRODUCER, "cancel")


def worker_ended_by_itself() -> Story:
    return finished().exited(8, THIRD, code=1)


def gap_in_a_checkpoint() -> Story:
    """The next run finds the second step and not the first one, though both are what Redis has lost."""
    story = Story().run(2, FIRST).step(2.1, FIRST, "step-0").step(2.4, FIRST, "step-1")
    redis_loses(story, 2.7).fault(2.7, 2.8, "kill", FIRST).exited(2.8, FIRST)
    story.run(5, SECOND_ONE, count=2).step(5.1, SECOND_ONE, "step-0").value(5.4, SECOND_ONE, "step-1", by=FIRST)
    result = ["11.1/step-0/1", "10.1/step-1/1"]
    steps = dict(zip(("step-0", "step-1"), result, strict=True))
    return story.returned(5.5, SECOND_ONE, result).final("succeeded", result=result, worker="w11", steps=steps)


def settings_stored(story: Story, at: float, *started: int) -> Story:
    """Settings are stored, and workers start afterwards that were given others."""
    story.fault(at - 0.5, at - 0.1, "settings").inject(at, "stored", lease=2.0, result_ttl=43_200.0)
    for pid in started:
        more = {"role": "worker", "version": "this", "package": "", "parent": INJECTOR}
        story.lines.append({"at": round((at + 0.1) * SECOND), "pid": pid, "what": "process", **more})
    return story


def shorter_lease_than_stored() -> Story:
    """A worker claims a task of another one that is alive."""
    story = settings_stored(Story(), 1.5, SECOND_ONE).run(2, FIRST).begin(2.1, FIRST, "step-0")
    story.run(3, SECOND_ONE, count=2).step(3.1, SECOND_ONE, "step-0").returned(4, SECOND_ONE, ["11.1/step-0/1"])
    steps = {"step-0": "11.1/step-0/1"}
    return story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps=steps, kept=43_200.0)


def own_result_ttl() -> Story:
    return settings_stored(finished(), 1.5, SECOND_ONE)


def progress_lost() -> Story:
    """The second worker finds less than the first one had saved."""
    story = Story("saves").run(2, FIRST).begin(2.1, FIRST, "pieces")
    story.add(2.2, FIRST, "saved", run="10.1", step="pieces", token="10.1/pieces/1", pieces=7)
    story.fault(2.6, 2.7, "kill", FIRST).exited(2.7, FIRST).run(5, SECOND_ONE, count=2).begin(5.1, SECOND_ONE, "pieces")
    return story.add(5.1, SECOND_ONE, "found", run="11.1", step="pieces", token="11.1/pieces/1", pieces=5)


BROKEN: list[tuple[Callable[[], Story], str]] = [
    (lost, "lost"),
    (never_ended, "lost"),
    (unknown_to_a_waiter, "lost"),
    (vanished, "lost"),
    (two_outcomes, "finished twice"),
    (delivered_after_its_end, "finished twice"),
    (result_without_a_run, "finished twice"),
    (cancelled_and_yet_not, "finished twice"),
    (run_after_cancellation, "finished twice"),
    (recorded_step_again, "recorded step run again"),
    (recorded_step_again_in_its_run, "recorded step run again"),
    (background_record_again, "recorded step run again"),
    (earlier_delivery_again, "recorded step run again"),
    (stale_record, "stale write"),
    (overwritten_record, "stale write"),
    (value_without_a_step, "stale write"),
    (repeated_without_a_fault, "repeated without a fault"),
    (repeated_for_a_harmless_fault, "repeated without a fault"),
    (started_twice_in_one_run, "repeated without a fault"),
    (progress_lost, "saved progress lost"),
    (gap_in_a_checkpoint, "gap in a checkpoint"),
    (shorter_lease_than_stored, "repeated without a fault"),
    (own_result_ttl, "stored setting ignored"),
    (charged_twice, "charged twice"),
    (innocent_buried, "unexplained dead letter"),
    (too_few_attempts, "unexplained dead letter"),
    (buried_too_early, "unexplained dead letter"),
    (crashes_without_a_fault, "unexplained dead letter"),
    (crashes_within_the_limit, "unexplained dead letter"),
    (timeouts_without_a_cause, "unexplained dead letter"),
    (poison_that_kills_on, "unexplained dead letter"),
    (doubt_without_a_fault, "unexplained dead letter"),
    (failing_succeeds, "impossible outcome"),
    (cancelled_unasked, "cancelled unasked"),
    (in_two_places, "not in one place"),
    (back_from_its_end, "impossible state"),
    (back_from_the_dead, "impossible state"),
    (out_of_order, "out of order"),
    (worker_ended_by_itself, "ended by itself"),
]


@pytest.mark.parametrize(("story", "rule"), BROKEN, ids=[story.__name__ for story, _ in BROKEN])
def test_each_broken_promise_is_found(story: Callable[[], Story], rule: str) -> None:
    assert rule in story().rules()


@pytest.mark.parametrize(("exits", "rules"), [(45, set()), (75, {"ended by itself"})])
def test_a_worker_that_cannot_reach_redis_may_end_soon_after_it_was_loaded(exits: float, rules: set[str]) -> None:
    """On a busy machine, the import alone takes long."""
    story = finished().fault(20, 80, "redis_kill").add(25, THIRD, "process", role="worker", version="this", parent=1)
    assert story.exited(exits, THIRD, code=1).rules() == rules


@pytest.mark.parametrize(("exits", "rules"), [(45, set()), (75, {"ended by itself"})])
def test_a_supervisor_may_end_soon_after_its_first_child_was_loaded(exits: float, rules: set[str]) -> None:
    story = finished().fault(20, 80, "redis_kill").add(25, 4711, "process", role="worker", version="this", parent=THIRD)
    assert story.exited(exits, THIRD, code=1).rules() == rules


def test_what_a_frozen_worker_does_before_it_knows_is_no_violation() -> None:
    """It begins a step that another has recorded meanwhile; its record is refused."""
    story = Story().run(2, FIRST).fault(2.1, 6, "freeze", FIRST)
    story.run(5, SECOND_ONE, count=2).step(5.1, SECOND_ONE, "step-0").begin(6.1, FIRST, "step-0")
    story.left(6.2, FIRST, "CancelledError").returned(6, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == set()


def test_a_background_step_whose_record_was_not_yet_written_may_begin_again() -> None:
    story = Story("hasty").run(2, FIRST).step(2.1, FIRST, "step-0", "async")
    story.fault(2.4, 2.5, "kill", FIRST).exited(2.5, FIRST).run(5, SECOND_ONE, count=2)
    story.step(5.1, SECOND_ONE, "step-0", "async").returned(6, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == set()


def test_a_fresh_replay_forgets_the_records() -> None:
    story = Story("fragile").run(2, FIRST).step(2.1, FIRST, "step-0").fault(2.4, 2.5, "kill", FIRST)
    story.exited(2.5, FIRST).outcome(3, "dead", reason="crash_loop").seen(3, "dead").fault(4, 4.5, "replay", INJECTOR)
    story.lines[-2]["fresh"] = True
    story.run(5, SECOND_ONE, entry="2000-0").step(5.1, SECOND_ONE, "step-0").seen(5.2, "running")
    story.returned(6, SECOND_ONE, ["11.1/step-0/1"]).outcome(6.1, result=["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"}, replays=1)
    assert story.rules() == set()
    story.lines = [line | {"fresh": False} if line["what"] == "fault" else line for line in story.lines]
    assert story.rules() == {"recorded step run again", "stale write"}


def redis_loses(story: Story, at: float, kind: str = "lose_tail", *, kept: float | None = None) -> Story:
    """A loss of data. kept: time up to which the data survived, by default 1.2 s before."""
    number = len(story.lines)
    story.inject(at, "fault", number=number, kind=kind, pids=None, seconds=1.2)
    story.inject(at + 0.2, "kept", number=number, until=round((at - 1.2 if kept is None else kept) * SECOND))
    return story.inject(at + 0.3, "fault_over", number=number)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_what_redis_lost_may_be_done_again(kind: str) -> None:
    """The record of a step is lost, and the next delivery runs the step again."""
    story = Story().run(2, FIRST).step(2.1, FIRST, "step-0")
    redis_loses(story, 2.5, kind).fault(2.5, 2.6, "kill", FIRST).exited(2.6, FIRST)
    story.run(5, SECOND_ONE, count=2).step(5.1, SECOND_ONE, "step-0").returned(6, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == set()


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_a_delivery_count_that_redis_lost_does_not_order_runs(kind: str) -> None:
    """Redis loses that it handed out the message, and hands it out with a lower count."""
    story = Story().run(2, FIRST, count=4).step(2.1, FIRST, "step-0").returned(2.2, FIRST, ["12.1/step-0/1"])
    redis_loses(story, 3, kind)
    story.run(8, SECOND_ONE, count=2).step(8.1, SECOND_ONE, "step-0").returned(9, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == set()


@pytest.mark.parametrize(
    ("frozen", "rules"), [(True, set()), (False, {"recorded step run again", "repeated without a fault"})]
)
def test_of_two_runs_with_one_count_neither_is_the_later_delivery(*, frozen: bool, rules: set[str]) -> None:
    """Redis has lost the first delivery; its worker begins after the second one, which only a fault excuses."""
    story = redis_loses(Story(), 1.5)
    story.run(6, SECOND_ONE).begin(6.1, SECOND_ONE, "step-0").effect(6.2, SECOND_ONE, "step-0")
    story.value(6.3, SECOND_ONE, "step-0").run(6.4, FIRST).begin(6.5, FIRST, "step-0")
    if frozen:
        story.fault(1.4, 5.9, "freeze", FIRST)
    story.returned(7, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == rules


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_what_redis_stored_before_it_lost_its_tail_is_not_excused(kind: str) -> None:
    story = Story().run(2, FIRST).step(2.1, FIRST, "step-0")
    redis_loses(story, 12.5, kind).fault(12.5, 12.6, "kill", FIRST).exited(12.6, FIRST)
    story.run(15, SECOND_ONE, count=2).step(15.1, SECOND_ONE, "step-0").returned(16, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == {"recorded step run again", "stale write"}


@pytest.mark.parametrize(
    ("at", "kept", "excused"),
    [(2.5, 2.29, True), (2.5, 2.31, False), (12.5, 2.29, True), (2.5, None, False)],
    ids=["lost", "kept", "long lag", "not measured"],
)
@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_only_what_was_lost_by_measure_is_excused(kind: str, at: float, kept: float | None, *, excused: bool) -> None:
    """The handler was given the value of the step at 2.3 s."""
    story = Story().run(2, FIRST).step(2.1, FIRST, "step-0")
    redis_loses(story, at, kind, kept=kept).fault(at, at + 0.1, "kill", FIRST).exited(at + 0.1, FIRST)
    if kept is None:
        story.lines = [line for line in story.lines if line["what"] != "kept"]
    again = at + 3
    story.run(again, SECOND_ONE, count=2).step(again + 0.1, SECOND_ONE, "step-0")
    story.returned(again + 1, SECOND_ONE, ["11.1/step-0/1"])
    story.final("succeeded", result=["11.1/step-0/1"], worker="w11", steps={"step-0": "11.1/step-0/1"})
    assert story.rules() == (set() if excused else {"recorded step run again", "stale write"})


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_the_order_of_a_message_that_redis_lost_is_not_compared(kind: str) -> None:
    """Its clock was set back before, so the next message has an earlier id."""
    assert redis_loses(out_of_order(), 2.5, kind).rules() == set()
    assert redis_loses(out_of_order(), 12.5, kind).rules() == {"out of order"}


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_a_task_that_redis_lost_is_not_counted_as_lost(kind: str) -> None:
    story = Story()
    assert story.rules() == {"lost"}
    assert redis_loses(story, 1.5, kind).outcome(2, "unknown", reason="TaskNotFound").rules() == set()


def test_a_worker_uses_the_settings_that_were_stored_before_its_start() -> None:
    """One that runs already notices them later."""
    story = finished()
    story.lines[-1]["kept"] = 43_200.0
    assert settings_stored(story, 1.5, SECOND_ONE).rules() == set()
    assert settings_stored(finished(), 5.5, THIRD).rules() == set()


@pytest.mark.parametrize(
    ("begin", "kind", "kept", "excused"),
    [
        (3.5, "redis_freeze", 43_203.4, True),
        (3.5, "redis_freeze", 43_196.6, False),
        (3.5, "redis_freeze", 43_208.0, False),
        (3.5, "redis_kill", 43_203.4, False),
        (6.5, "redis_freeze", 43_203.4, False),
    ],
    ids=["kept longer", "kept shorter", "kept much longer", "killed", "frozen later"],
)
def test_a_result_is_kept_longer_if_redis_stands_still_while_it_stores_it(
    begin: float, kind: str, kept: float, excused: bool
) -> None:
    """It reads the time at the beginning of the script, and sets the TTL at its end."""
    story = finished().fault(begin, begin + 3, kind)
    next(line for line in story.lines if line["what"] == "final")["kept"] = kept
    found = settings_stored(story, 1.5, SECOND_ONE).rules()
    assert found == (set() if excused else {"stored setting ignored"})


def test_a_replayed_poison_task_may_kill_again() -> None:
    story = Story("poison")
    for life, start in enumerate((2, 12)):
        for count in range(1, 4):
            at, pid = start + count, 30 + 10 * life + count
            story.run(at, pid, count=count, entry=f"{1000 + life}-0").begin(at + 0.1, pid, "suicide")
            story.add(at + 0.2, pid, "kills", run=f"{pid}.1", step="suicide")
        story.fault(start + 8, start + 8.5, "replay", INJECTOR)  # the second one hits nothing
    story.final("dead", reason="crash_loop", crashes=3, replays=1)
    assert story.rules() == set()


def test_the_verdict_counts_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(finished().read(), tmp_path) == 0
    printed = capsys.readouterr().out
    assert "tasks: 1 acknowledged, 1 known, 2 runs" in printed
    assert "steps started again: 1: 1 kill; violating: 0" in printed
    assert "kill               1 times, median   2.40 s" in printed
    assert printed.endswith("no guarantee was violated\n")
    assert verdict(recorded_step_again().read(), tmp_path) == 1
    printed = capsys.readouterr().out
    assert "VIOLATED: " in printed
    assert "recorded step run again: chain-1, step step-0: by a later delivery" in printed
    assert "pid 11  begin  task=chain-1 run=11.1 step=step-0" in printed


def test_lines_of_two_writers_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    one, other = JournalWriter(tmp_path), JournalWriter(tmp_path)
    one.write("first", task="t")
    other.write("second", task="t")
    assert [line.what for line in read_journal(tmp_path)] == ["first", "second"]
    with (tmp_path / JOURNAL_NAME).open("a") as journal:
        journal.write('{"at": 1, "pi')
    with pytest.raises(ValueError, match="line 3 of the journal cannot be read"):
        read_journal(tmp_path)


def test_a_seed_gives_one_schedule_with_every_fault() -> None:
    plans = schedule(7, 600, 1.5, 4, list(WEIGHTS))
    assert plans == schedule(7, 600, 1.5, 4, list(WEIGHTS))
    assert plans != schedule(8, 600, 1.5, 4, list(WEIGHTS))
    assert {plan.fault for plan in plans} == set(WEIGHTS)


def test_counts_of_an_empty_journal() -> None:
    assert "recoveries: none" in list(counted(history([])))
