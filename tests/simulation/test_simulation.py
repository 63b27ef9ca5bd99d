"""The simulation itself: a seed is one run, byte for byte, and what goes wrong is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from perdure.queues.transport import scripts
from perdure.queues.transport.scripts import Script
from perdure.worker.runtime.slots import Slots

from .fleet.elements import SupervisorPlan
from .plan import Fault, Plan, TaskPlan, draw
from .shrink import shrink
from .story import narrate
from .world import Outcome, World

_KEPT: list[World] = []


def play(plan: Plan, alter: Callable[[bytes], bytes] | None = None) -> Outcome:
    world = World(plan)
    if alter is not None:
        world.server.alter = alter
    _KEPT.append(world)
    return world.play()


WAITS_WITH_ITS_OUTCOME = 201753
"""Seed in which an outcome waits for Redis while its slot is given to the next task."""


@pytest.mark.parametrize("seed", [*range(4), WAITS_WITH_ITS_OUTCOME])
def test_no_guarantee_is_violated(seed: int) -> None:
    assert play(draw(seed)).violations == []


STOPPED = Plan(
    1,
    2,
    1.0,
    tuple(TaskPlan(f"t{number}", "fan", 0.5, 4, 0.3) for number in range(4)),
    (Fault(1.0, "full", 0, 2.0), Fault(1.2, "stop", 0, 0.5)),
)
"""Plan in which a worker cancels several tasks at once."""

SUPERVISED = replace(
    STOPPED,
    tasks=(*STOPPED.tasks, TaskPlan("bad", "poison", 0.6, 2, 0.2)),
    faults=(
        Fault(1.0, "full", 0, 1.0),
        Fault(1.5, "freeze", 0, 6.0),
        Fault(2.0, "kill", 1, 0.0),
        Fault(3.0, "reload", 0, 0.0),
        Fault(3.5, "kill supervisor", 1, 0.5),
        Fault(4.0, "stop supervisor", 0, 0.0),
    ),
    supervisors=SupervisorPlan(processes=2, isolated=2),
)
"""Plan in which supervisors kill, replace and stop their children."""

IN_ITS_OWN_PROCESS = """
import sys
from tests.simulation.test_simulation import STOPPED, SUPERVISED, play, small
plans = {"stopped": STOPPED, "small": small(), "supervised": SUPERVISED}
print(*sorted({(name, play(plans[name]).digest) for name in sys.argv[1:]}))
"""


def test_a_plan_is_one_run_whatever_was_played_before_and_in_every_process() -> None:
    """The processes run nothing else: what other tests leave behind in this one is no part of a run."""
    orders = {
        "0": ("stopped", "supervised", "small", "stopped", "supervised"),
        "1234": ("small", "stopped", "supervised"),
    }
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", IN_ITS_OWN_PROCESS, *order],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for seed, order in orders.items()
    ]
    plans = set(orders["1234"])
    printed = [run.communicate(timeout=120)[0] for run in runs]
    assert printed[0] == printed[1]
    assert printed[0].count("(") == len(plans), "each plan has one digest"


def test_scripts_that_this_process_has_read_besides_are_no_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = play(small()).digest
    monkeypatch.setitem(scripts._loaded, Path("other.lua"), Script("other", "return 1", "0" * 40))
    assert play(small()).digest == before


def test_the_server_draws_random_members_from_the_randomness_of_the_run() -> None:
    def drawn(seed: int) -> Any:
        _KEPT.append(World(replace(small(), seed=seed)))
        server = _KEPT[-1].server
        members = b" ".join(b"%d member-%d" % (number, number) for number in range(20)).split()
        server.replay(server.now, [b"ZADD", b"all", *members], {})
        return server.replay(server.now, [b"ZRANDMEMBER", b"all", b"20"], {})

    assert drawn(1) == drawn(1) != drawn(2)


MIXES_ERRORS = b"""
local wrong = 0
for number = 1, 3000 do
  local creates = number % 3 == 0
  local reply = creates and redis.pcall('XGROUP', 'CREATE', 'ready', 'workers', '0') or redis.pcall('NONE' .. number)
  if (string.find(tostring(reply.err), 'BUSYGROUP') ~= nil) ~= creates then
    wrong = wrong + 1
  end
end
return wrong
"""


def test_a_script_gets_the_error_of_its_own_command() -> None:
    """Not that of an earlier one, after Lua has collected garbage."""
    _KEPT.append(World(small()))
    server = _KEPT[-1].server
    server.replay(server.now, b"XGROUP CREATE ready workers 0 MKSTREAM".split(), {})
    assert server.replay(server.now, [b"EVAL", MIXES_ERRORS, b"0"], {}) == 0


def small(*faults: Fault, kind: str = "chain") -> Plan:
    return Plan(1, 2, 1.0, (TaskPlan("t0", kind, 0.5, 4, 0.3),), faults)


def test_a_killed_worker_leaves_its_task_to_another() -> None:
    outcome = play(small(Fault(1.0, "kill", 0, 3.0), Fault(1.1, "kill", 1, 3.0)))
    assert outcome.violations == []
    runs = [entry.run for entry in _KEPT[-1].journal.entries if entry.what == "run"]
    assert len(runs) == 2
    assert [entry.value for entry in _KEPT[-1].journal.entries if entry.what == "result"] != []


def test_a_run_that_stood_still_before_its_handler_may_repeat_what_another_one_recorded_meanwhile() -> None:
    """The worker notices only after the first callbacks that it has lost the task."""
    plan = Plan(1, 2, 1.0, (TaskPlan("t0", "dozes", 0.5, 2, 0.3),), (Fault(1.0, "freeze", 0, 4.0, "write_checkpoint"),))
    outcome = play(plan)
    effects = [entry.step for entry in _KEPT[-1].journal.entries if entry.what == "effect"]
    assert effects.count("step-1") == 2
    assert outcome.violations == []


def test_a_frozen_run_may_read_a_confirmation_that_is_older_than_the_loss_of_its_record() -> None:
    tasks = (TaskPlan("t0", "chain", 0.5, 2, 0.4), TaskPlan("t1", "chain", 0.51, 2, 0.4))
    faults = (Fault(0.7, "freeze", 0, 4.0, "write_checkpoint"), Fault(0.7, "lose tail", 0, 0.05, "write_checkpoint"))
    outcome = play(Plan(1, 3, 1.0, tasks, faults, slots=1))
    journal = _KEPT[-1].journal.entries
    got = [entry.value for entry in journal if (entry.what, entry.task) == ("got", "t0")]
    made = [entry.value for entry in journal if (entry.what, entry.task, entry.step) == ("effect", "t0", "step-0")]
    assert len(made) == 2
    assert set(made) <= set(got)
    assert outcome.violations == []


@pytest.mark.parametrize("variant", range(3))
def test_no_fence_occurs_twice_when_redis_loses_it_twice(variant: int) -> None:
    """Redis loses a hand-out, and then the next fence of the same message as well."""
    tasks = (TaskPlan("t0", "chain", 0.5, 1, 0.3), TaskPlan("t1", "chain", 0.55, 2, 0.4))
    faults = (Fault(0.6, "lose tail", 0, 0.0002, "XREADGROUP"), Fault(0.7, "lose tail", 0, 0.1, "raise_count"))
    assert play(Plan(1, 1, 4.0, tasks, faults, variant=variant, slots=1)).violations == []


def test_a_clock_that_was_set_back_does_not_make_the_lost_tail_longer() -> None:
    play(small(Fault(0.8, "step clock back", 0, 7.0), Fault(0.9, "lose tail", 0, 0.05)))
    server = _KEPT[-1].server
    assert 0 < len(server.lost) < 10
    assert any(b"queues" in field for _, fields in server.log[:10] for field in fields)


@pytest.mark.parametrize(
    ("faults", "doubted"),
    [
        ([Fault(0.8, "lose tail", 0, 0.1)], False),
        ([Fault(0.8, "lose tail", 0, 0.1), Fault(1.4, "lose tail", 0, 0.1)], True),
        ([Fault(0.8, "lose tail", 0, 0.1), Fault(2.4, "lose tail", 0, 0.1)], False),
        ([Fault(0.8, "step clock", 0, 100.0)], False),
        ([Fault(0.8, "set lease", 0, 2.0), Fault(0.9, "step clock", 0, 20.0)], False),
        ([Fault(0.8, "set lease", 0, 2.0), Fault(0.9, "step clock", 0, 100.0)], True),
    ],
    ids=["one loss", "two", "two, apart", "a clock step", "in a change of the lease", "beyond its end"],
)
def test_leases_are_doubted_where_they_are_not_guaranteed(faults: list[Fault], *, doubted: bool) -> None:
    assert play(small(*faults)).violations == []
    assert (_KEPT[-1].doubted_until > 0) is doubted


def without_line(line: bytes) -> Callable[[bytes], bytes]:
    """Return a change of scripts that leaves out a line."""
    return lambda source: b"\n".join(one for one in source.split(b"\n") if one.strip() != line)


def test_a_script_is_altered_whatever_its_limits_are() -> None:
    _KEPT.append(World(replace(small(), restarts=1)))
    server = _KEPT[-1].server
    server.alter = lambda source: source.replace(b"MAX_RESTARTS = 250", b"MAX_RESTARTS = 250 + 0")
    assert server.executed_source(b"local MAX_RESTARTS = 250\n") == b"local MAX_RESTARTS = 1 + 0\n"


def test_a_worker_that_runs_more_tasks_than_it_has_slots_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(small(), slots=1, workers=1)
    plan = replace(plan, tasks=(*plan.tasks, TaskPlan("t1", "chain", 0.6, 2, 0.3)))
    assert play(plan).violations == []
    monkeypatch.setattr(Slots, "free", 2)
    assert {violation.kind for violation in play(plan).violations} == {"slots"}


def test_a_task_in_two_places_is_seen_at_once() -> None:
    kinds = {
        violation.kind for violation in play(small(), without_line(b"redis.call('XDEL', KEYS[1], ARGV[3])")).violations
    }
    assert "one place" in kinds


def test_a_record_that_is_not_stored_is_seen() -> None:
    """A checkpoint script that stores no field: the step runs again after a crash."""
    plan = small(Fault(1.2, "kill", 0, 3.0), Fault(1.3, "kill", 0, 3.0))

    def stores_nothing(source: bytes) -> bytes:
        return re.sub(rb"redis\.call\('HSET', KEYS\[3\], 'd:' \.\. step, [^)]*\)", b"", source)

    assert {violation.kind for violation in play(plan, stores_nothing).violations} >= {"repeated"}


def test_a_run_shrinks_to_what_its_violation_needs() -> None:
    plan = small(Fault(1.0, "kill", 0, 3.0))
    plan = replace(plan, tasks=(*plan.tasks, TaskPlan("t1", "hasty", 0.6, 2, 0.0)))
    alter = without_line(b"redis.call('XDEL', KEYS[1], ARGV[3])")
    smallest = shrink(plan, StringIO(), alter)
    assert len(plan.faults) > len(smallest.faults) == 0
    assert len(smallest.tasks) == 1


def test_the_story_names_what_happened() -> None:
    plan = small(Fault(1.0, "kill", 0, 3.0))
    outcome = play(plan)
    story = "\n".join(narrate(_KEPT[-1], outcome))
    assert "fault:   1.00 s  kill" in story
    assert "t0 is stored" in story
    assert f"digest {outcome.digest}" in story


def test_shrinking_leaves_a_sound_run_alone() -> None:
    plan = small()
    assert shrink(plan, StringIO()) is plan
