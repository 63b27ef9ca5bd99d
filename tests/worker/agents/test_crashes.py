"""Agents whose worker crashes before or after each entry: the result is the same, and no write applies twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, TaskHandle, Worker
from perdure.queues import Gateway
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import Script
from perdure.worker.agents.journal.history import check_state
from pydantic import Field

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import BOUND, FRESH, bounded, history, recorded_steps, redis_command, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(check_state=True, lease=30.0)]

PATIENT = Retry(max_attempts=3, max_crashes=100, base=0.0)


class Ledger(AgentState):
    """State of the agent: the total of the paid bills, and notes."""

    bills: list[int] = Field(default_factory=list)
    total: int = 0
    notes: list[str] = Field(default_factory=list)
    large: str = ""


class Payer(Agent[Ledger]):
    """An agent that pays bills with a tool and replans once."""

    snapshot_every: ClassVar[int] = 3
    paid: ClassVar[list[int]] = []
    thought: ClassVar[list[int]] = []
    finished: ClassVar[list[int]] = []

    async def plan(self, ctx: Context, state: Ledger) -> list[PlanStep]:
        due = await ctx.step("due", sorted, state.bills)
        state.notes.append("planned")
        return [PlanStep(key=f"pay-{bill}", title=f"pay {bill}", arguments={"bill": bill}) for bill in due]

    async def act(self, ctx: Context, state: Ledger, step: PlanStep) -> dict[str, int]:
        bill = step.arguments["bill"]
        state.notes.append(f"began {bill}")
        await ctx.decide(f"pay {bill}", reasoning="it is due")
        await ctx.tool("pay", self.pay, bill)
        await ctx.discover(f"{bill} was due")
        state.total += bill
        state.large = str(state.total) * 20_000
        state.notes.append(f"ended {bill}")
        return {"paid": bill}

    def pay(self, bill: int) -> int:
        self.paid.append(bill)
        return bill

    async def replan(self, ctx: Context, state: Ledger) -> list[PlanStep] | None:
        if await ctx.step("think", self.think, state.total) != 1:
            return None
        state.notes.append("planned again")
        last = await ctx.step("last", max, state.bills)
        return [PlanStep(key=f"pay-{bill}", title="as planned", arguments={"bill": bill}) for bill in (last, last + 1)]

    def think(self, total: int) -> int:
        self.thought.append(total)
        return total

    async def finish(self, ctx: Context, state: Ledger) -> dict[str, Any]:
        count = await ctx.step("count", len, state.results)
        self.finished.append(count)
        return {"count": count, **state.model_dump(include={"total", "notes", "results", "decisions", "discoveries"})}


EXPECTED = {
    "count": 3,
    "total": 6,
    "notes": [
        "planned",
        "began 1",
        "ended 1",
        "planned again",
        *(f"{what} {bill}" for bill in (2, 3) for what in ("began", "ended")),
    ],
    "results": {f"pay-{bill}": {"paid": bill} for bill in (1, 2, 3)},
}


class Scene:
    """A worker that crashes once, immediately before or after the write of one entry of the checkpoint.

    Entries that wait share a write, and how many do depends on the machine, so the entries are counted, not the writes.
    For Redis the worker is lost: its lease has expired, and Redis refuses its later writes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: App) -> None:
        self.app = app
        self.deadly: int | None = None
        self.last = 0
        """Number of the last entry that was written before the outcome, which may have more."""
        self.when: Literal["before", "after"] = "before"
        self.twice = False
        self.died = asyncio.Event()
        self._run = Gateway.run

        async def run(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if script.name != "write_checkpoint":
                return await self._run(gateway, script, keys, args)
            first, count = int(args[4]), (len(args) - 5) // 4
            self.last = first + count - 1
            if self.deadly not in range(first, first + count) or self.died.is_set():
                if self.twice:  # the first reply is lost
                    await self._run(gateway, script, keys, args)
                return await self._run(gateway, script, keys, args)
            if self.when == "after":
                await self._run(gateway, script, keys, args)
            try:
                await redis_command(app, "XCLAIM", keys[0], GROUP, "dead", 0, args[2], "IDLE", FRESH, "JUSTID")
            finally:  # it is sent; the run may notice the loss, and end this write, before the reply is here
                self.died.set()
            return await self._run(gateway, script, keys, args)

        monkeypatch.setattr(Gateway, "run", run)

    async def play(self, handle: TaskHandle[Any], deadly: int, when: Literal["before", "after"]) -> bool:
        """Crash the worker at an entry and let another worker finish. Return whether there was such an entry."""
        self.deadly, self.when, self.last = deadly, when, 0
        self.died.clear()
        async with Worker(self.app) as worker:
            running = asyncio.create_task(worker.run())
            died = asyncio.create_task(self.died.wait())
            done = asyncio.create_task(handle.result())
            await asyncio.wait([died, done], timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
            worker.stop()
            worker.stop()
            await asyncio.wait_for(running, BOUND)
        for one in (died, done):
            one.cancel()
        await asyncio.gather(died, done, return_exceptions=True)
        self.deadly = None
        await work_off(self.app)
        return self.died.is_set()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, app: App) -> Scene:
    return Scene(monkeypatch, app)


def with_text(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result, with decisions and discoveries as text."""
    assert [one["choice"] for one in result.pop("decisions")] == ["pay 1", "pay 2", "pay 3"]
    assert [one["fact"] for one in result.pop("discoveries")] == ["1 was due", "2 was due", "3 was due"]
    return result


async def entries_of(app: App, handle: TaskHandle[Any]) -> int:
    """Return the number of entries of a task's checkpoint."""
    return int(await redis_command(app, "HGET", handle.partition.record(handle.id), "entries"))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_crash_at_any_entry_does_not_change_the_result(
    app: App, scene: Scene, when: Literal["before", "after"]
) -> None:
    payer = app.agent(name="payer", retry=PATIENT)(Payer)
    deadly = 1
    while True:
        Payer.paid.clear()
        Payer.finished.clear()
        Payer.thought.clear()
        handle = await payer.enqueue("pay", key=f"{when}-{deadly}", bills=[2, 1])
        died = await scene.play(handle, deadly, when)
        assert with_text(await bounded(handle.result())) == EXPECTED, f"entry {deadly}"
        numbers = [event.number for event in await history(handle) if event.number is not None]
        assert numbers == list(range(1, len(numbers) + 1))
        assert await check_state(app.producer.gateway, handle.partition, handle.id) is not None
        assert sorted(set(Payer.paid)) == [1, 2, 3]
        assert len(Payer.thought) <= 3 + (when == "before"), "what was thought of is recorded"
        assert len(Payer.finished) <= 1 + (when == "before"), "it is known that it was finished"
        assert len(Payer.paid) <= 4, "more than the one tool that was cut off was called again"
        if not died:
            break
        deadly += 1
    assert deadly == scene.last + 1 <= await entries_of(app, handle) + 1


class Hearing(Agent[AgentState]):
    """An agent that gets a message in each method, under one id however often the method is called."""

    handle: ClassVar[TaskHandle[Any]]

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        await self.handle.send("in plan", message_id="plan")
        return [PlanStep(key="one", title="one")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        await ctx.step("think", len, state.messages)
        await self.handle.send("in act", message_id="act")

    async def finish(self, ctx: Context, state: AgentState) -> list[str]:
        await self.handle.send("in finish", message_id="finish")
        return [one.content.split("\n")[2] for one in state.messages]


async def test_a_crash_at_any_entry_neither_loses_nor_doubles_a_message(app: App, scene: Scene) -> None:
    hearing = app.agent(name="hearing", retry=PATIENT)(Hearing)
    deadly = 1
    while True:
        Hearing.handle = handle = await hearing.enqueue("listen", key=f"{deadly}")
        await handle.send("early")
        died = await scene.play(handle, deadly, "after" if deadly % 2 else "before")
        assert await bounded(handle.result()) == ["early", "in plan", "in act", "in finish"], f"entry {deadly}"
        assert await handle.pending_messages() == []
        received = [event.data["content"] for event in await history(handle) if event.type == "received"]
        assert received == ["early", "in plan", "in act", "in finish"]
        if not died:
            break
        deadly += 1
    assert deadly == scene.last + 1 <= await entries_of(app, handle) + 1


async def test_writes_with_lost_replies_are_applied_once(app: App, scene: Scene) -> None:
    scene.twice = True
    Payer.paid.clear()
    handle = await app.agent(name="payer", retry=PATIENT)(Payer).enqueue("pay", bills=[2, 1])
    await work_off(app)
    assert with_text(await bounded(handle.result())) == EXPECTED
    assert Payer.paid == [1, 2, 3]
    numbers = [event.number for event in await history(handle) if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_the_checkpoint_of_a_finished_agent_holds_only_the_last_snapshot(app: App) -> None:
    handle = await app.agent(name="payer", retry=PATIENT)(Payer).enqueue("pay", bills=[2, 1])
    await work_off(app)
    await bounded(handle.result())
    left = await recorded_steps(app, handle)
    blobs = {name for name in left if name.startswith("s:#blob:")}
    assert left.keys() - blobs == {"d:#plan", "d:#finish", "s:#state", "s:#tools", "s:#memories:0"}
    assert len(blobs) == 1, "large values that no snapshot refers to any more are dropped"


async def test_an_encrypted_state_is_unreadable_in_redis_and_survives_crashes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App("sealed", settings=with_keys(settings, FIRST)) as app:
        scene = Scene(monkeypatch, app)
        Payer.paid.clear()
        handle = await app.agent(Payer, retry=PATIENT).enqueue("pay", bills=[2, 1])
        assert await scene.play(handle, 9, "after")
        assert with_text(await bounded(handle.result())) == EXPECTED
        stored = await recorded_steps(app, handle)
        log = await redis_command(app, "XRANGE", handle.partition.log(handle.id), "-", "+")
        assert {"s:#state", "d:#finish"} < stored.keys()
        for value in (*stored.values(), *(one for _, fields in log for one in fields)):
            assert b"was due" not in value
            assert b"3333" not in value
