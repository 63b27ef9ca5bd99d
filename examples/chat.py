"""A chat whose conversation survives workers and clients: each user has a session, each message is a turn of it.

    perdure worker run examples/chat.py:app &
    python examples/chat.py ada            # type a line, read the answer; the same session when it is started again

A message that arrives while no worker runs is answered by the next worker. No task exists between two messages. The
model is a function here. Its call is a step: what it has answered is recorded, and not paid for again after a crash.
"""

from __future__ import annotations

import asyncio
import sys

from perdure import Agent, AgentState, App, Context, PlanStep
from perdure.context import Message

app = App("chat")


def model(conversation: list[Message]) -> str:
    """Return the next answer; a real program calls a model here."""
    said = [message.content for message in conversation if message.role == "user"]
    return f"You have said {len(said)} things, the first was {said[0]!r}."


@app.agent
class Chat(Agent[AgentState]):
    """Answers each message from the conversation so far, which the session keeps in `state.messages`."""

    acknowledge_resume = False  # else the answer after a crash begins with a note about the crash

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="answer", title="answer the message")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return await ctx.step("model", model, state.messages)

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["answer"])


async def main(user: str) -> None:
    async with app:
        session = app.session(Chat, user)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if not line.strip():
                continue
            turn = await session.send(line.strip(), sender=user)
            try:
                print(await turn.result(timeout=120))
            except TimeoutError as error:  # the message is kept, and its answer is in the history
                print(error, file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
