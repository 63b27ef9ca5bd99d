"""Agents that use all features, whose workers crash at random writes: the state is the reduction of the log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pytest
from perdure import Agent, AgentState, AlreadyDone, App, Context, PlanStep, Retry, TaskHandle, Worker
from perdure.queues import Gateway
from perdure.queues.keys import GROUP
from perdure.queues.transport.scripts import Script
from perdure.worker.agents.coherence.checks import View
from perdure.worker.agents.coherence.findings import Coherence
from perdure.worker.agents.journal.history import check_state
from perdure.worker.durable.journal.resumption import Resumption
from pydantic import Field

from tests.support.workers import BOUND, FRESH, bounded, history, redis_command, work_off

pytestmark = [
    pytest.mark.integration,
    # A crash while a thread opens the file of an upload leaves the file to the garbage collector, which closes it.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.app(check_state=True, lease=30.0),
]

PATIENT = Retry(max_attempts=50, max_crashes=100, base=0.0)
STEPS = 5


async def object_sometimes(view: View) -> str | None:
    return "it works a lot" if len(view.calls) % 2 else None


class Busy(AgentState):
    acted: list[str] = Field(default_factory=list)
    large: str = ""


class Everything(Agent[Busy]):
    """An agent with small limits, inner steps, a risky step, messages, a judge, a workspace and findings."""

    snapshot_every: ClassVar[int] = 4
    keep_steps: ClassVar[int | None] = 2
    keep_messages: ClassVar[int | None] = 4
    coherence: ClassVar[Coherence] = Coherence(judge=object_sometimes, judge_every=2, repeats=2)
    handle: ClassVar[TaskHandle[Any]]
    paid: ClassVar[list[str]] = []
    fails: ClassVar[set[str]] = set()
    draw: ClassVar[random.Random]

    def steps(self) -> list[PlanStep]:
        return [PlanStep(key=f"s{n}", title=f"step {n}", risky=n == 3) for n in range(STEPS)]

    async def plan(self, ctx: Context, state: Busy) -> list[PlanStep]:
        await ctx.step("look", len, state.messages)
        return self.steps()

    async def replan(self, ctx: Context, state: Busy) -> list[PlanStep] | None:
        if state.current is not None:
            return None  # a failed step runs again
        await ctx.decide(f"go on after {len(state.acted)}")
        return self.steps() if len(state.acted) % 2 else None

    async def act(self, ctx: Context, state: Busy, step: PlanStep) -> dict[str, str]:
        await ctx.add_message("user", f"## do {step.key}\n```")
        if step.risky:
            self.paid.append(ctx.task_id)
        await ctx.tool("search", str.upper, "same")
        (ctx.workspace.path / f"{step.key}.txt").write_text(step.key)
        if self.draw.random() < 0.4:
            await self.handle.send("# hello\n- obey", message_id=f"in-{step.key}")
        await ctx.add_message("assistant", f"done {step.key}")
        await ctx.discover(f"{step.key} is done", source="```")
        if step.key in self.fails:
            self.fails.discard(step.key)
            raise ConnectionError(step.key)
        state.acted.append(step.key)
        state.large = step.key * 10_000
        return {"of": step.key}

    async def verify(self, ctx: Context, state: Busy, step: PlanStep) -> AlreadyDone[dict[str, str]] | None:
        if ctx.task_id not in self.paid:
            return None
        state.acted.append(step.key)
        return AlreadyDone({"of": step.key})

    async def on_resume(self, ctx: Context, resumption: Resumption) -> str | None:
        return "I am back" if self.draw.random() < 0.5 else None

    async def finish(self, ctx: Context, state: Busy) -> list[str]:
        if self.draw.random() < 0.5:
            await self.handle.send("late", message_id="late")
        return state.acted


class Crashes:
    """Crashes of workers before or after random writes: their leases expire, and Redis refuses their later writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: App, draw: random.Random) -> None:
        self.app, self.draw = app, draw
        self.left = 0
        self.until = 0
        self.died = asyncio.Event()
        self._run = Gateway.run

        async def run(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if script.name != "write_checkpoint" or self.died.is_set():
                return await self._run(gateway, script, keys, args)
            self.until -= 1
            if self.draw.random() < 0.2:  # the first reply is lost
                await self._run(gateway, script, keys, args)
            if self.until != 0:
                return await self._run(gateway, script, keys, args)
            if self.draw.random() < 0.5:
                await self._run(gateway, script, keys, args)
            await redis_command(app, "XCLAIM", keys[0], GROUP, "dead", 0, args[2], "IDLE", FRESH, "JUSTID")
            self.died.set()
            return await self._run(gateway, script, keys, args)

        monkeypatch.setattr(Gateway, "run", run)

    async def play(self, handle: TaskHandle[Any], crashes: int) -> None:
        for _ in range(crashes):
            self.died.clear()
            self.until = self.draw.randint(1, 25)
            async with Worker(self.app) as worker:
                running = asyncio.create_task(worker.run())
                died, done = asyncio.create_task(self.died.wait()), asyncio.create_task(handle.result())
                await asyncio.wait([died, done], timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
                worker.stop()
                worker.stop()
                await asyncio.wait_for(running, BOUND)
            ended = done.done()
            for one in (died, done):
                one.cancel()
            await asyncio.gather(died, done, return_exceptions=True)
            if ended:
                break
        self.until = -1
        await work_off(self.app)


@pytest.mark.parametrize("on_message", ["next_step", "interrupt", "restart"])
async def test_the_state_is_the_reduction_of_the_log_over_random_crashes(
    app: App, monkeypatch: pytest.MonkeyPatch, on_message: Literal["next_step", "interrupt", "restart"]
) -> None:
    draw = random.Random(on_message)
    kind: Any = type("Drawn", (Everything,), {"draw": draw, "paid": [], "fails": {f"s{draw.randrange(STEPS)}"}})
    kind.fails.discard("s3")  # a risky step that failed would be in doubt
    handle = await app.agent(kind, name="everything", retry=PATIENT, on_message=on_message).enqueue("work")
    kind.handle = handle
    await Crashes(monkeypatch, app, draw).play(handle, crashes=4)
    assert await bounded(handle.result()) == [f"s{n}" for n in range(STEPS)]
    assert len(kind.paid) == 1, "the effect of the risky step happened once"
    events = await history(handle)
    features = {"archived", "judged", "planned", "received", "resumed", "snapshot", "workspace_saved"}
    assert features <= {event.type for event in events}
    numbers = [event.number for event in events if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    stored = await check_state(app.producer.gateway, handle.partition, handle.id)
    assert stored is not None
    until = [one for one in events if one.type == "message_added" and (one.number or 0) <= stored.number]
    kept, archived = len(stored.state["messages"]), stored.state["archive"]["messages"]
    assert kept + archived == len(until), "what was archived does not return"
    assert await handle.pending_messages() == []
    received = [event.data["number"] for event in events if event.type == "received"]
    assert received == sorted(set(received)), "each message was delivered once, in order"
    entered = [
        event for event in events if event.type == "message_added" and event.data["message"].get("name") == "inbox"
    ]
    assert len(entered) == len(received)
