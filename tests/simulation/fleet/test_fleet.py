"""Each check of an element can fail: a small run with the element is sound, and its check reports what is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.keys import Namespace, Partition
from perdure.queues.partitions.assignment import PartitionAssignment
from perdure.queues.partitions.router import PartitionRouter
from perdure.queues.sessions import turns
from perdure.queues.shared_config import SharedConfig
from perdure.worker.runtime.shared_settings import SharedSettings
from perdure.worker.runtime.stages.task_lookup import CheckTaskVersion

from ..app import NAMESPACE
from ..plan import Fault, Plan, TaskPlan
from ..sensitivity.defects import DEFECTS, replacement
from ..world import World
from .elements import SessionPlan, WorkerPlan

_KEPT: list[World] = []


def kinds(plan: Plan, alter: Callable[[bytes], bytes] = bytes) -> list[str]:
    """Play a plan; return the kinds of violations in the order in which they were reported, each once."""
    world = World(plan)
    world.server.alter = alter
    _KEPT.append(world)
    return [*dict.fromkeys(violation.kind for violation in world.play().violations)]


def chain(name: str, at: float, steps: int = 2, pause: float = 0.3, key: str = "") -> TaskPlan:
    return TaskPlan(name, "chain", at, steps, pause, key=key)


# differing settings

SETTINGS: Final = (WorkerPlan(1.0, 2, heartbeat=1.0), WorkerPlan(6.0, 2, heartbeat=1.0))


def test_a_worker_that_uses_its_own_lease_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(1, 2, 2.0, (chain("t0", 0.5),), (), settings=SETTINGS, stored_lease=2.0)
    assert kinds(plan) == []
    monkeypatch.setattr(SharedSettings, "apply", lambda settings, config: False)
    assert kinds(plan) == ["stored lease"]


def test_a_worker_that_claims_by_the_new_lease_while_others_use_the_old_one_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = Fault(1.0, "set lease", 0, 0.6)
    plan = Plan(1, 2, 1.0, (chain("t0", 0.5),), (changed,), settings=SETTINGS)
    assert kinds(plan) == []
    apply = SharedSettings.apply
    at_once: Callable[[SharedSettings, SharedConfig], bool] = lambda settings, config: apply(  # noqa: E731
        settings, replace(config, changing=0.0)
    )
    monkeypatch.setattr(SharedSettings, "apply", at_once)
    assert kinds(plan) == ["stored lease"]


def test_a_lease_that_was_stored_long_before_the_run_is_not_lost() -> None:
    plan = Plan(1, 2, 1.0, (chain("t0", 0.2),), (Fault(0.3, "lose tail", 0, 1.5),), settings=SETTINGS, stored_lease=2.0)
    assert kinds(plan) == []
    world = _KEPT[-1]
    assert world.server.lost
    assert world.server.items[Namespace(NAMESPACE).config.encode()].value._values[b"lease"] == b"2"


# resharding

SPREAD: Final = Fault(1.0, "reshard", 1, 0.0)
"""From one partition to two."""


def test_a_task_with_two_records_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that knows the new route does not look for the task in the closed partition. Both copies run."""
    tasks = (chain("t0", 0.5), chain("t1", 0.5), chain("t2", 1.5), chain("t3", 1.5))
    plan = Plan(1, 1, 1.0, tasks, (SPREAD,), again=2.0)
    assert kinds(plan) == []
    monkeypatch.setattr(PartitionRouter, "closed_partitions", lambda router, number: ())
    assert kinds(plan) == ["two records", "other result", "repeated", "two results"]


def test_tasks_of_a_key_that_are_delivered_out_of_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads from the new partitions before it has read all of the former one."""
    tasks = (*(chain(f"t{number}", 0.5 + 0.01 * number, 3, 0.5, "a") for number in range(4)), chain("t4", 2.0, key="a"))
    plan = Plan(1, 1, 1.0, tasks, (SPREAD,), slots=1)
    assert kinds(plan) == []

    async def is_drained(*args: Any) -> bool:
        return True

    monkeypatch.setattr(PartitionAssignment, "_is_drained", is_drained)
    assert kinds(plan) == ["key order"]


# lanes


def test_a_lane_that_no_worker_reads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = ("idle", "low", "", "high")
    tasks = tuple(replace(chain(f"t{number}", 0.5, 2, 0.1), lane=lane) for number, lane in enumerate(lanes))
    plan = Plan(1, 1, 1.0, tasks, (Fault(0.6, "kill", 0, 0.5),), slots=2)
    assert kinds(plan) == []
    read_from = Consumer._set_read_from

    def without_idle(consumer: Consumer, partitions: Sequence[Partition]) -> None:
        read_from(consumer, [partition for partition in partitions if partition.lane != "idle"])

    monkeypatch.setattr(Consumer, "_set_read_from", without_idle)
    assert kinds(plan) == ["no progress"]


# rolling deployments

DEPLOYED: Final = Fault(0.5, "deploy", 0, 6.0)
"""A worker of release 2 starts; the worker of release 1 is replaced 6 s later."""


def test_an_older_worker_that_runs_a_task_of_a_newer_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tuple(chain(f"t{number}", 1.5 + 0.01 * number, 4, 0.5) for number in range(4))
    plan = Plan(1, 1, 1.0, tasks, (DEPLOYED, Fault(2.4, "kill", 1, 8.0)), slots=4)
    assert kinds(plan) == []

    async def accept(stage: CheckTaskVersion, execution: object) -> None:
        return None

    monkeypatch.setattr(CheckTaskVersion, "__call__", accept)
    assert kinds(plan) == ["older code"]


def test_a_defect_in_the_scripts_of_a_later_release_is_seen() -> None:
    """The checks of deliveries know the digests of these scripts."""
    deployed = replace(DEPLOYED, size=0.1)
    plan = Plan(1, 1, 1.0, (chain("t0", 3.0),), (deployed, Fault(3.1, "cut", 0, 0.0, "finish")))
    assert kinds(plan) == []
    assert kinds(plan, replacement(*DEFECTS["a settled delivery is forgotten"])) == ["refused"]


# sessions

TALK: Final = Plan(1, 1, 1.0, (chain("t0", 0.5),), (), sessions=(SessionPlan("session 0", 0.5, 3, 0.1, 2, 0.3),))


def test_a_turn_that_runs_before_the_former_one_has_ended_is_seen() -> None:
    assert kinds(TALK) == []
    ends_late = replacement(("'ended', n, 'at'", "'ended', n < tonumber(known[2]) and n - 1 or n, 'at'"))
    assert kinds(TALK, ends_late) == ["turns"]


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        pytest.param("if known[6] then", "if false then", id="a message is stored twice"),
        pytest.param("'answered' and 'answer' or 'error'", "'answered' and 'error'", id="a turn has no answer"),
        pytest.param(
            "'answer' or 'error', ARGV[5])", "'answer' or 'error', '[\"yes\"]')", id="the history has another one"
        ),
    ],
)
def test_a_session_that_does_not_answer_each_message_once_is_seen(part: str, broken: str) -> None:
    assert kinds(TALK) == []
    assert kinds(TALK, replacement((part, broken))) == ["session"]


def test_a_session_whose_turn_is_never_stored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(TALK) == []

    async def store_nothing(*args: Any) -> None:
        pass

    monkeypatch.setattr(turns, "enqueue_turn", store_nothing)
    assert kinds(TALK) == ["no progress"]


def test_what_an_idle_session_leaves_behind_is_seen() -> None:
    assert kinds(TALK) == []
    keeps_messages = replacement(("redis.call('HDEL', KEYS[1], 'm:' .. n, 'i:' .. n, 'wake')", ""))
    assert kinds(TALK, keeps_messages) == ["leak"]


def test_a_run_does_not_end_while_a_session_is_busy() -> None:
    """No task has a record between two turns, so only the session shows that a message has no answer yet."""
    late = SessionPlan("session 0", 12.0, 2, 3.0, 1, 0.1)
    assert kinds(replace(TALK, sessions=(late,))) == []
