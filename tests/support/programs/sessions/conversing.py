"""Worker process of an agent that converses: its answer follows from all messages so far and their order."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker

app = App("conversing")


class Conversation(AgentState):
    """Number of messages, and a digest that depends on each of them and on their order."""

    count: int = 0
    digest: str = ""


def answer_after(digest: str, text: str) -> str:
    return hashlib.sha256(f"{digest} {text}".encode()).hexdigest()


async def note(text: str) -> None:
    """Append a line to the journal: the process and the message."""
    journal = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
    os.write(journal, f"{os.getpid()} act {text}\n".encode())
    os.close(journal)
    await anyio.sleep(0.001)


class Talker(Agent[Conversation]):
    """Takes two steps per message."""

    keep_messages = 20
    acknowledge_resume = True

    async def plan(self, ctx: Context, state: Conversation) -> list[PlanStep]:
        return [PlanStep(key=key, title=key) for key in ("note", "count")]

    async def act(self, ctx: Context, state: Conversation, step: PlanStep) -> int:
        if step.key == "note":
            await ctx.step("write", note, state.goal)
        else:
            state.count += 1
            state.digest = answer_after(state.digest, state.goal)
        return state.count

    async def finish(self, ctx: Context, state: Conversation) -> str:
        return f"{state.count} {state.digest}"


app.agent(Talker, retry=Retry(max_attempts=3, max_crashes=1000, base=0.0))


async def main(concurrency: int) -> None:
    async with app, Worker(app, concurrency=concurrency) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
