"""A worker whose agent is interrupted in its second step, and then reports in which order it loads its context."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker
from perdure.queues import Gateway
from perdure.queues.transport.scripts import Script
from perdure.worker.durable.journal.handoff.document import Handoff
from perdure.worker.durable.steps.current import CURRENT_RUN

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("booting")


class Careful(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="one", title="Go ahead"), PlanStep(key="two", title="Be killed")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
        if step.key == "one":
            await ctx.decide("to the left", reasoning="it is shorter")
            return "done"
        await ctx.step("started", os.getpid)
        if ctx.resumption is None:
            os.write(JOURNAL, f"{os.getpid()} stands {ctx.task_id}\n".encode())
            await asyncio.sleep(600)
        return await look(ctx)

    async def finish(self, ctx: Context, state: AgentState) -> Any:
        return state.results["two"]


async def look(ctx: Context) -> dict[str, Any]:
    """Return the parts of the resume info in order, with the Redis commands of each part."""
    asked = listening()
    boot = ctx.resume_info()
    parts: list[tuple[str, Any, list[str]]] = []
    async for name, part in boot:
        parts.append((name, shown(part), list(asked)))
        asked.clear()
    history = [event.type async for event in boot.history()]
    return {"parts": parts, "history": history, "asked": sorted(set(asked)), "read": len(await ctx.inbox())}


def shown(part: Any) -> Any:
    if isinstance(part, Handoff):
        return [part.why, [step.key for step in part.in_progress]]
    if isinstance(part, AgentState):
        return [part.current, list(part.results), [one.choice for one in part.decisions]]
    return [message.content for message in part]


def listening() -> list[str]:
    """Record the Redis commands and the scripts that read, from now on: those of handlers, not the worker's chores."""
    asked: list[str] = []
    ask, run = Gateway.command, Gateway.run

    async def noted(gateway: Gateway, *command: Any, **options: Any) -> Any:
        if CURRENT_RUN.get() is not None:
            asked.append(str(command[0]))
        return await ask(gateway, *command, **options)

    async def called(gateway: Gateway, script: Script, keys: Any, args: Any) -> Any:
        if CURRENT_RUN.get() is not None and script.name.startswith("read_"):
            asked.append(script.name)
        return await run(gateway, script, keys, args)

    Gateway.command = noted  # type: ignore[method-assign, assignment]
    Gateway.run = called  # type: ignore[method-assign, assignment]
    return asked


app.agent(name="careful", retry=Retry(max_crashes=10), on_message=None)(Careful)


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
