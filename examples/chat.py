"""Chat sessions: one task for each user, which waits for messages for as long as a day without a slot of a worker.

    perdure worker run examples/chat.py:app &
    python examples/chat.py ada            # type a line, read the answer; the same session when it is started again

The conversation survives workers and clients: what was said is recorded, and a message that arrives while no worker
runs is answered by the next one. The model is a function here. An agent needs no such task: `app.session(...)` keeps
its conversation for as long as it is wanted, see docs/how-to/sessions.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from perdure import App, Context, TaskHandle
from perdure.context import Message

app = App("chat")


def model(conversation: list[Message]) -> str:
    """Return the next answer; a real program calls a model here."""
    said = [message.content for message in conversation if message.role == "user"]
    return f"You have said {len(said)} things, the first was {said[0]!r}."


@app.task(timeout=86_400)
async def chat(ctx: Context, user: str) -> int:
    """Answer a user until a day has passed without a message. Returns the length of the conversation."""
    conversation: list[Message] = []
    while messages := await ctx.inbox(wait=86_400, why=f"a message of {user}"):
        for message in messages:
            conversation.append(await ctx.add_message("user", str(message.content)))
            answer = await ctx.step("answer", model, conversation)
            conversation.append(await ctx.add_message("assistant", answer))
    return len(conversation)


async def answers(handle: TaskHandle[int]) -> AsyncIterator[str]:
    """Yield all answers of the session, those of the past first."""
    async for event in handle.events():
        message = event.data.get("message", {}) if event.type == "message_added" else {}
        if message.get("role") == "assistant":
            yield message["content"]


async def main(user: str) -> None:
    async with app:
        handle = await chat.options(task_id=f"chat-{user}").enqueue(user)  # the same task each time
        said = sum([1 async for event in handle.events(follow=False) if event.type == "received"])
        replies = answers(handle)
        for _ in range(said):
            await anext(replies)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await handle.send(line, sender=user)
            print(await anext(replies))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
