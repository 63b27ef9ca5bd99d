"""A worker whose agent uses every means to continue, and kills its own process once at each such place.

Its arguments: how many tasks at once. From the environment: DEATHS, a folder in which a file is made for each death, so
that none comes twice; without it, nothing dies. BILL, a file with a line for each call that costs something.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perdure import Agent, AgentState, App, Coherence, Context, ContextBuilder, PlanStep, Retry, Worker
from perdure.context import CompactionRequest
from perdure.memory import NewMemory
from perdure.worker.artifacts.store import ArtifactStore
from perdure.worker.durable.journal.handoff.document import Handoff
from perdure.worker.runtime.stop_signals import stop_on_signals
from pydantic import Field

DEATHS = os.environ.get("DEATHS")
BILL = os.open(os.environ["BILL"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)


def die(place: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill this process, once for each place."""
    if DEATHS is not None and not (grave := Path(DEATHS, place)).exists():
        grave.touch()
        os.kill(os.getpid(), how)


def pay(what: str) -> str:
    os.write(BILL, f"{what}\n".encode())
    return f"{what}, paid"


async def pay_gladly(what: str) -> str:
    return pay(what)


def summarize(turns: CompactionRequest) -> str:
    pay("summary")
    return f"{len(turns.messages)} turns"


class Continued(AgentState):
    """after: why the former run had stopped, each time. boots: what was found then, in its order."""

    count: int = 0
    after: list[str] = Field(default_factory=list)
    boots: list[list[str]] = Field(default_factory=list)
    said: list[str] = Field(default_factory=list)


class Continuing(Agent[Continued]):
    snapshot_every = 7
    coherence = Coherence(repeats=3)
    context = ContextBuilder(window=700, identity="You go on.", summarizer=summarize, keep=4)

    async def plan(self, ctx: Context, state: Continued) -> list[PlanStep]:
        keys = [
            "checkpoint",
            "events",
            "memory",
            "artifact",
            "handoff",
            "boot",
            "coherence",
            "compaction",
            "notification",
            "end",
        ]
        return [PlanStep(key=key, title=key) for key in keys]

    async def act(self, ctx: Context, state: Continued, step: PlanStep) -> Any:
        state.count += 1
        return await getattr(self, f"do_{step.key}")(ctx, state)

    async def finish(self, ctx: Context, state: Continued) -> dict[str, Any]:
        die("finish")
        return {
            "count": state.count,
            "results": state.results,
            "decisions": [one.choice for one in state.decisions],
            "discoveries": [one.fact for one in state.discoveries],
            "artifacts": [(one.name, one.hash) for one in state.artifacts],
            "messages": [one.content.rpartition("]\n")[2] for one in state.messages],  # without numbers of events
            "said": state.said,
        }

    async def remember(self, ctx: Context, state: Continued) -> list[NewMemory | str]:
        return ["agents go on where they stood"]

    async def do_checkpoint(self, ctx: Context, state: Continued) -> str:
        state.said.append("on the way")  # undone where the process dies
        paid: str = await ctx.options(reasoning="it is due").tool("pay", pay_gladly, "first")
        die("checkpoint")
        return paid

    async def do_events(self, ctx: Context, state: Continued) -> int:
        await ctx.decide("continue", reasoning="much is done", alternatives=["stop"])
        await ctx.discover("it is dark", source="the window")
        await ctx.step("stored", os.getpid)
        die("events")
        return len(state.decisions) + len(state.discoveries)

    async def do_memory(self, ctx: Context, state: Continued) -> int:
        async def learn() -> int:
            await ctx.memory.add("the stove is hot", type="fact")
            die("memory")
            return len(await (await ctx.memory.store()).search("stove"))

        return await ctx.step("learn", learn)

    async def do_artifact(self, ctx: Context, state: Continued) -> str:
        return (await ctx.artifacts.save("report.md", b"all is well")).hash

    async def do_handoff(self, ctx: Context, state: Continued) -> bool:
        die("handoff", signal.SIGTERM)
        while DEATHS is not None and (ctx.resumption is None or ctx.resumption.after != "hand_off"):
            await ctx.step("pause", asyncio.sleep, 0.01)  # the worker is stopping: here, before a step
        return ctx.resumption is None or isinstance(ctx.resumption.handoff, Handoff)

    async def do_boot(self, ctx: Context, state: Continued) -> list[Any]:
        await ctx.step("started", os.getpid)
        die("boot")
        state.boots.append([name async for name, _ in ctx.resume_info()])
        return [message.content for message in await ctx.inbox()]

    async def do_coherence(self, ctx: Context, state: Continued) -> None:
        for _ in range(3):
            await ctx.tool("look", int, "1")
        await ctx.step("stored", os.getpid)
        die("coherence")

    async def do_compaction(self, ctx: Context, state: Continued) -> int:
        for number in range(12):
            await ctx.add_message("user" if number % 2 == 0 else "assistant", f"{number}: {'words ' * 30}")
        await self.context.build(ctx, state)
        die("compaction")
        return len(state.messages)

    async def do_notification(self, ctx: Context, state: Continued) -> None:
        await ctx.step("stored", os.getpid)
        die("notification")
        if ctx.resumption is not None:
            state.after.append(ctx.resumption.after)

    async def do_end(self, ctx: Context, state: Continued) -> str:
        paid: str = await ctx.step("last", pay, "last")
        die("end")
        return paid


class DyingStore:
    """Backend that kills the process after it stored the bytes of an artifact, before they are recorded."""

    save = ArtifactStore.save

    @staticmethod
    async def save_and_die(store: ArtifactStore, *given: Any, **named: Any) -> Any:
        stored = await DyingStore.save(store, *given, **named)
        die("artifact")
        return stored


ArtifactStore.save = DyingStore.save_and_die  # type: ignore[method-assign, assignment]

app = App("continuing")
app.agent(name="continuing", retry=Retry(max_crashes=3, base=0.0), on_message=None)(Continuing)


async def main() -> None:
    worker = Worker(app, concurrency=int(sys.argv[1]))
    async with stop_on_signals(worker.stop), worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
