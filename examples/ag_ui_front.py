"""An AG-UI endpoint in front of a task: its words appear live in each client, also through a killed worker.

    pip install 'perdure[embedded,web]' ag-ui-protocol
    perdure worker run examples/ag_ui_front.py:app &
    python examples/ag_ui_front.py 8000                 # POST http://127.0.0.1:8000/ with a RunAgentInput

The id of the run is that of the task: a client that sends the same run again follows the same task, from the event
after its `Last-Event-ID`. Words of a try that a crash cut off are void: their message ends, and another one begins.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from ag_ui.core import (
    BaseEvent,
    RunAgentInput,
    RunErrorEvent,
    RunFinishedEvent,
    RunStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
)
from perdure import App, Context, TaskHandle, current_step
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

app = App("ag-ui")

ANSWER = "A worker may be killed in the middle of this sentence ."


async def complete(question: str) -> str:
    """Answer word by word; a real program calls a model here."""
    for word in [f"({question})", *ANSWER.split()]:
        await current_step().emit(f"{word} ", to="words")
        await asyncio.sleep(0.05)
    return ANSWER


@app.task
async def answer(ctx: Context, question: str) -> str:
    return await ctx.step("model", complete, question)


async def events(
    run: RunAgentInput, handle: TaskHandle[str], after: str | None
) -> AsyncIterator[tuple[str, BaseEvent]]:
    """Yield the events of a run, each with the position behind it."""
    place, message = after or "0", f"{run.run_id}-{after or 0}"
    yield place, RunStartedEvent(thread_id=run.thread_id, run_id=run.run_id)
    is_open = False
    async for item in handle.stream("words", after=after):
        place = item.cursor
        if item.kind == "item":
            if not is_open:
                is_open, message = True, f"{run.run_id}-{item.cursor}"
                yield place, TextMessageStartEvent(message_id=message, role="assistant")
            yield place, TextMessageContentEvent(message_id=message, delta=str(item.value))
        elif is_open:
            is_open = False
            yield place, TextMessageEndEvent(message_id=message)
    if is_open:
        yield place, TextMessageEndEvent(message_id=message)
    try:
        result = await handle.result()
    except Exception as error:  # noqa: BLE001 - the run ends with it
        yield place, RunErrorEvent(message=str(error), code=type(error).__name__)
    else:
        yield place, RunFinishedEvent(thread_id=run.thread_id, run_id=run.run_id, result=result)


async def run_agent(request: Request) -> StreamingResponse:
    run = RunAgentInput.model_validate_json(await request.body())
    question = str(run.messages[-1].content)
    handle = await answer.options(task_id=f"run-{run.run_id}").enqueue(question)

    async def frames() -> AsyncIterator[str]:
        async for place, event in events(run, handle, request.headers.get("last-event-id")):
            yield f"id: {place}\ndata: {event.model_dump_json(by_alias=True)}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with app:
        yield


web = Starlette(routes=[Route("/", run_agent, methods=["POST"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(web, host="127.0.0.1", port=int(sys.argv[1]))
