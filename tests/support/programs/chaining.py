"""A worker whose tasks have many short steps, each of which depends on the result of the one before.

Each call of a step is appended to the journal: process, `step`, task id and number of the step.
"""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker
from pydantic import Field

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

PAUSE = 0.02
"""Seconds that a step takes."""

app = App("chaining")


async def link(task_id: str, number: int, before: str) -> str:
    """Return a token that no other call returns."""
    os.write(JOURNAL, f"{os.getpid()} step {task_id}:{number}\n".encode())
    await anyio.sleep(PAUSE)
    return uuid.uuid4().hex


@app.task(name="chain", retry=Retry(max_attempts=1, max_crashes=1000))
async def chain(ctx: Context, length: int) -> list[str]:
    tokens = [""]
    for number in range(length):
        tokens.append(await ctx.step("link", link, ctx.task_id, number, tokens[-1]))
    return tokens[1:]


class Chained(AgentState):
    """State of the agent: its tokens."""

    length: int
    tokens: list[str] = Field(default_factory=list)


class Chaining(Agent[Chained]):
    """An agent with one token per step of its plan."""

    snapshot_every = 20

    async def plan(self, ctx: Context, state: Chained) -> list[PlanStep]:
        return [PlanStep(key=f"link{number}", title="link") for number in range(state.length)]

    async def act(self, ctx: Context, state: Chained, step: PlanStep) -> Any:
        before = state.tokens[-1] if state.tokens else ""
        state.tokens.append(await link(ctx.task_id, len(state.tokens), before))
        return state.tokens[-1]

    async def finish(self, ctx: Context, state: Chained) -> list[str]:
        assert state.tokens[-len(state.results) :] == list(state.results.values())
        return state.tokens


agent = app.agent(Chaining, name="agent", retry=Retry(max_attempts=1, max_crashes=1000))


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
