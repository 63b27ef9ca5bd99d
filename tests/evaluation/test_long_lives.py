"""Long lives: what a step, the state and a resume cost an agent that has taken 100, 1,000 and 10,000 steps."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

import pytest
import redis
from perdure import Agent, AgentState, App, Context, PlanStep, Settings, Snooze, Worker
from perdure.queues import TaskHandle

pytestmark = [pytest.mark.evaluation, pytest.mark.integration, pytest.mark.app(lease=60.0)]

AT = (100, 1_000, 10_000)
"""Steps after which the cost is measured."""

WINDOW = 20
"""Steps, and then resumes, over which it is averaged: two archivings, and more than one snapshot.

A resume reads the events since the last snapshot, so one alone may cost a fifth more than another."""

MOST = 1.2
"""Largest ratio of a cost at 10,000 steps to the same cost at 100, of a resume at 1,000."""


def fetch(page: int) -> str:
    return "y" * 100


@dataclass
class Reading:
    """Counters at one moment. sent: bytes that Redis has received."""

    calls: int
    cpu: float
    sent: int


class Meter:
    """Reads what was counted. Calls of Python functions and of C functions are counted within a window only."""

    def __init__(self, settings: Settings) -> None:
        self._client = redis.Redis.from_url(settings.redis_url, protocol=2)
        self._calls = 0

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self._calls += 1

    def read(self, *, counting: bool) -> Reading:
        """Return the counters, and count calls from now on, or no longer."""
        sys.setprofile(None)
        reading = Reading(self._calls, time.process_time(), int(self._stats()["total_net_input_bytes"]))
        if counting:
            sys.setprofile(self._count)
        return reading

    def served(self) -> tuple[int, int]:
        """Return how many commands Redis has served, those in scripts too, and the microseconds of all."""
        found: dict[str, Any] = self._client.info("commandstats")
        others = [stats for name, stats in found.items() if name != "cmdstat_info"]
        return sum(one["calls"] for one in others), sum(one["usec"] for one in others)

    def stored(self, task_id: str) -> tuple[int, int, int]:
        """Return the bytes of memory of a task's keys, its log entries and the fields of its checkpoint."""
        keys = [key for key in self._client.scan_iter(f"*{task_id}", count=1000) if self._client.type(key) != b"zset"]
        total = sum(int(self._client.memory_usage(key, samples=0) or 0) for key in keys)
        log = next(key for key in keys if b":log:" in key)
        steps = next(key for key in keys if b":steps:" in key)
        return total, int(self._client.xlen(log)), int(self._client.hlen(steps))

    def received(self) -> int:
        """Return the bytes that Redis has sent."""
        return int(self._stats()["total_net_output_bytes"])

    def _stats(self) -> dict[str, Any]:
        return self._client.info("stats")


class Traveller(AgentState):
    taken: int = 0


class Walk(Agent[Traveller]):
    """An agent that plans five steps at a time, has an inner step and two messages in each, and never ends early."""

    keep_messages: ClassVar[int | None] = 200
    meter: ClassVar[Meter]
    readings: ClassVar[dict[int, Reading]] = {}
    sizes: ClassVar[dict[int, int]] = {}
    resumed: ClassVar[dict[int, int]] = {}
    snoozed: ClassVar[set[int]] = set()
    stopped: ClassVar[dict[int, tuple[int, int, int]]] = {}
    served: ClassVar[dict[int, tuple[int, int]]] = {}
    stored: ClassVar[dict[int, tuple[int, int, int]]] = {}

    def following(self, state: Traveller) -> list[PlanStep]:
        first = state.taken
        return [
            PlanStep(key=f"s{n}", title=f"read page {n}") for n in range(first, min(first + 5, AT[-1] + 3 * WINDOW))
        ]

    async def plan(self, ctx: Context, state: Traveller) -> list[PlanStep]:
        return self.following(state)

    async def replan(self, ctx: Context, state: Traveller) -> list[PlanStep] | None:
        return self.following(state) if state.plan[-1].status == "done" else None

    async def act(self, ctx: Context, state: Traveller, step: PlanStep) -> dict[str, Any]:
        number = int(step.key[1:])
        for at in AT:
            if number in (at, at + WINDOW - 1) and number not in self.readings:
                self.readings[number] = self.meter.read(counting=number == at)
                self.sizes[number] = len(state.model_dump_json())
        if any(0 <= number - at - 2 * WINDOW < WINDOW for at in AT) and number not in self.snoozed:
            self.snoozed.add(number)
            self.stored[number] = self.meter.stored(ctx.task_id)
            self.stopped[number] = (*self.meter.served(), self.meter.received())
            raise Snooze(0)
        if number in self.snoozed:
            (calls, micros), received = self.meter.served(), self.meter.received()
            before = self.stopped[number]
            self.served[number] = (calls - before[0], micros - before[1])
            self.resumed[number] = received - before[2]
        await ctx.add_message("assistant", f"reading page {number}")
        await ctx.step("fetch", fetch, number)
        await ctx.add_message("user", "continue with the next one")
        state.taken += 1
        return {"page": number, "found": "x" * 200}

    async def finish(self, ctx: Context, state: Traveller) -> dict[str, Any]:
        first, kept = await ctx.recall_step("s0"), await ctx.recall_step(f"s{state.archive.retired}")
        assert first is not None and first.retired and kept is not None
        return {"taken": state.taken, "archived": state.archive.steps, "kept": kept.result["page"]}


async def test_a_step_costs_the_same_after_10_000_steps(
    app: App, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    Walk.meter = Meter(settings)
    handle: TaskHandle[Any] = await app.agent(name="walk")(Walk).enqueue("walk on")
    try:
        async with Worker(app) as worker:
            await worker.run(burst=True)
    finally:
        sys.setprofile(None)
    result = await handle.result(60)
    assert result["taken"] == AT[-1] + 3 * WINDOW
    assert result["kept"] > AT[-1] / 2
    costs = {at: _cost(at) for at in AT}
    with capsys.disabled():
        print("\n  steps   state bytes   calls/step   bytes to Redis/step   CPU ms/step   bytes read at a resume")
        for at, cost in costs.items():
            print(f"{at:7,} {Walk.sizes[at]:13,} {cost[0]:12,.0f} {cost[1]:21,.0f} {cost[2]:13.2f} {cost[3]:24,}")
        print("\n  steps   bytes in Redis   log entries   checkpoint fields   commands of a resume   Redis ms of it")
        for at in AT:
            size, entries, fields = Walk.stored[number := at + 2 * WINDOW]
            calls, micros = Walk.served[number]
            print(f"{number:7,} {size:16,} {entries:13,} {fields:19,} {calls:22,} {micros / 1000:16.1f}")
    first, last = costs[AT[0]], costs[AT[-1]]
    assert Walk.sizes[AT[-1]] <= MOST * Walk.sizes[AT[0]]
    assert last[0] <= MOST * first[0], "calls per step"
    assert last[1] <= MOST * first[1], "bytes sent to Redis per step"
    # After 100 steps the whole checkpoint is one page, of 512 fields; of a larger one, a resume reads the first again.
    assert last[3] <= MOST * costs[AT[1]][3], "bytes read at a resume"


def _cost(at: int) -> tuple[float, float, float, int]:
    """Return calls, bytes and milliseconds of CPU per step, and the mean of the bytes that a resume read."""
    start, end = Walk.readings[at], Walk.readings[at + WINDOW - 1]
    steps = WINDOW - 1
    calls, sent, cpu = end.calls - start.calls, end.sent - start.sent, end.cpu - start.cpu
    first = at + 2 * WINDOW
    resumed = int(mean(Walk.resumed[number] for number in range(first, first + WINDOW)))
    return calls / steps, sent / steps, 1000 * cpu / steps, resumed
