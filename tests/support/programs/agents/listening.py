"""A worker of an agent that asks a model in each step, writes down its prompts, and is killed in its first run."""

from __future__ import annotations

import asyncio
import os
import sys

import anyio
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, Worker
from perdure.context import Prompt

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("listening")


class Listening(Agent[AgentState]):
    builder = ContextBuilder(window=16_000)

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=key, title=key) for key in ("before", "asked", "after")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        await ctx.step("look", os.getpid)

        async def model(prompt: Prompt) -> str:
            if step.key == "asked" and ctx.resumption is None:
                os.write(JOURNAL, f"{os.getpid()} asked {ctx.task_id}\n".encode())
                await asyncio.sleep(600)
            text = "\n".join(message.content for message in prompt.messages)
            await anyio.Path(f"{os.environ['JOURNAL']}.{step.key}").write_text(text)
            return "answered"

        return await self.builder.ask(ctx, state, model)

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "\n".join(message.content for message in state.messages if message.name == "inbox")


app.agent(name="listening", retry=Retry(max_crashes=10))(Listening)


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
