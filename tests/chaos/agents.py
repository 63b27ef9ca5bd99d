"""Agents of the run: plans of steps whose results build on each other, read from the agent's state.

A result is logged as a value when the agent finds it in its state: its record is stored then, with the state.
"""

from __future__ import annotations

from typing import Any

import anyio
from perdure import Agent, AgentState, Context, PlanStep
from perdure.worker.middleware import CallNext, Middleware

from .instrumentation import began, got, logged_run, made, returned

__all__ = ["ChaosAgent", "RunLog", "state_step"]


def state_step(key: str) -> str:
    """Return the name of the step that makes the result of a step of the plan."""
    return f"{key}/work"


class RunLog(Middleware):
    """Middleware that logs each run of an agent: its delivery, and how it ended."""

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        if ctx.task != "agent":
            return await call_next()
        with logged_run(ctx) as name:
            result = await call_next()
        returned(ctx, name, result)
        return result


class Progress(AgentState):
    """State of an agent of the run. steps: their number. pause: seconds that each takes."""

    steps: int = 0
    pause: float = 0.0


class ChaosAgent(Agent[Progress]):
    """Agent whose steps each take the results before them. It stores a snapshot every few events."""

    snapshot_every = 7

    def __init__(self) -> None:
        self._found: set[str] = set()

    async def plan(self, ctx: Context, state: Progress) -> list[PlanStep]:
        return [PlanStep(key=f"part-{number}", title=f"part {number}") for number in range(state.steps)]

    async def act(self, ctx: Context, state: Progress, step: PlanStep) -> str:
        inputs = self._results(ctx, state)
        await ctx.decide(f"take {step.key}", reasoning=f"{len(inputs)} parts are done")
        return await ctx.step("work", _work, inputs, state.pause)

    async def finish(self, ctx: Context, state: Progress) -> list[str]:
        return self._results(ctx, state)

    def _results(self, ctx: Context, state: Progress) -> list[str]:
        for key, token in state.results.items():
            if key not in self._found:
                self._found.add(key)
                got(ctx, state_step(key), token, "sync")
        return list(state.results.values())


async def _work(inputs: list[str], pause: float) -> str:
    token = began(inputs)
    await anyio.sleep(pause)
    return made(token)
