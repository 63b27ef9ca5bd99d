"""An A2A agent in front of a task: work that goes through crashes, asks its caller, and is answered after a restart.

    pip install 'perdure[embedded,web]' 'a2a-sdk[http-server]'
    perdure worker run examples/a2a_front.py:app &
    python examples/a2a_front.py 8000                   # its card: http://127.0.0.1:8000/.well-known/agent-card.json

The id of the A2A task is that of the Perdure task. What the task waits for is `input-required`; the next message of the
caller in the same A2A task is the answer. A2A tasks are kept in the store of the app, so a restarted front knows them.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from a2a.helpers.proto_helpers import new_task_from_user_message, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import TaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    ListTasksRequest,
    ListTasksResponse,
    Role,
    Task,
)
from perdure import App, Context, TaskHandle
from starlette.applications import Starlette

app = App("a2a")


@app.task
async def order(ctx: Context, text: str) -> str:
    """Order what a text asks for, once its sender has said how many."""
    if any(character.isdigit() for character in text):
        return f"ordered: {text}"
    count = await ctx.wait_for("count", str, why=f"How many for {text!r}?")
    return f"ordered: {count} for {text}"


async def open_question(handle: TaskHandle[str]) -> tuple[str, str] | None:
    """Return name and text of what a task waits for; None if it has its answers."""
    return next(((wait.name, wait.why) for wait in await handle.waits() if not wait.answered), None)


async def follow(handle: TaskHandle[str], updater: TaskUpdater) -> None:
    """Publish how a task comes on, until it ends or asks."""
    async for event in handle.events():
        if event.type == "waiting" and (question := await open_question(handle)):
            await updater.requires_input(new_text_message(question[1], role=Role.ROLE_AGENT))
            return
    try:
        result = await handle.result()
    except Exception as error:  # noqa: BLE001 - the A2A task fails with it
        await updater.failed(new_text_message(str(error), role=Role.ROLE_AGENT))
    else:
        await updater.add_artifact([new_text_part(result)], name="result")
        await updater.complete()


class OrderExecutor(AgentExecutor):  # type: ignore[misc]
    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, text = str(context.task_id), str(context.get_user_input())
        if context.current_task is None:
            await event_queue.enqueue_event(new_task_from_user_message(context.message))
        updater = TaskUpdater(event_queue, task_id, context.context_id)
        await updater.start_work()
        handle: TaskHandle[str] | None = await app.producer.find(task_id)
        if handle is None:
            handle = await order.options(task_id=task_id).enqueue(text)
        elif question := await open_question(handle):
            await handle.answer(question[0], text, by="a2a")
        await follow(handle, updater)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        handle = await app.producer.find(str(context.task_id))
        if handle is not None:
            await handle.cancel()  # one that has ended is left alone
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


class StoredTasks(TaskStore):  # type: ignore[misc]
    """A2A tasks in the key-value store of the app, which all fronts share."""

    async def save(self, task: Task, context: Any) -> None:
        await app.store("a2a-tasks").put(task.id, task.SerializeToString(), ttl=7 * 86_400)

    async def get(self, task_id: str, context: Any) -> Task | None:
        data = await app.store("a2a-tasks").get(task_id)
        return None if data is None else Task.FromString(data)

    async def delete(self, task_id: str, context: Any) -> None:
        await app.store("a2a-tasks").delete(task_id)

    async def list(self, params: ListTasksRequest, context: Any) -> ListTasksResponse:
        found = [Task.FromString(entry.value) async for entry in app.store("a2a-tasks").list(limit=100)]
        return ListTasksResponse(tasks=found)


def front(port: int) -> Starlette:
    """Return the web application."""
    url = f"http://127.0.0.1:{port}/"
    card = AgentCard(
        name="Orders",
        description="Orders what a message asks for, and asks back how many.",
        version="1.0.0",
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version=version) for version in ("1.0", "0.3")
        ],
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[
            AgentSkill(
                id="order", name="Order", description="Order something", tags=["orders"], examples=["two chairs"]
            )
        ],
    )
    handler = DefaultRequestHandler(OrderExecutor(), StoredTasks(), card)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app:
            yield

    rpc = create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True)
    return Starlette(routes=[*create_agent_card_routes(card), *rpc], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(front(int(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[1]))
