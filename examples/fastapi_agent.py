"""A FastAPI page that shows an agent live: its steps, the words of its answer, and a question that a person answers.

    pip install "perdure[embedded]" fastapi uvicorn
    perdure worker run examples/fastapi_agent.py:app &
    uvicorn --app-dir examples fastapi_agent:web      # then open http://127.0.0.1:8000, and kill -9 the worker

The page reads the events of the task as server-sent events. When it is refreshed, or the web server is restarted, it
shows the task of its address from the first event on; when only its connection breaks, the browser names the last event
that it has.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, FastAPI, Header, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from perdure import App, Context, TaskEnded, TaskFailed, TaskHandle
from perdure.queues import AnswerRefused

app = App("trips")

PAUSE = float(os.environ.get("PAUSE", "0.5"))
"""Seconds that a call of the scripted model takes, in place of a real one."""


async def search(place: str) -> list[str]:
    await asyncio.sleep(PAUSE)
    return [f"08:10 to {place}, 40 euros", f"09:30 to {place}, 25 euros"]


@app.task
async def plan_trip(ctx: Context, place: str) -> str:
    trains = await ctx.tool("search", search, place)
    for word in f"The 09:30 train to {place} is the cheapest .".split():
        await asyncio.sleep(PAUSE / 5)
        await ctx.emit(word, to="words")
    agreed = await ctx.wait_for("booking", bool, who="the traveller", why=f"Book {trains[-1]}?")
    if not agreed:
        return "not booked"
    return await ctx.step("book", lambda: f"booked: {trains[-1]}")


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with app:
        yield


web = FastAPI(lifespan=lifespan)

PAGE = """<!doctype html><html lang="en"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>Trips</title>
<main><h1>Trips</h1>
<form id="start"><label>To <input id="place" value="Lyon" required></label> <button>Plan</button></form>
<ol id="events"></ol><p id="words"></p>
<p id="question" hidden><span id="why"></span> <button value="true">Yes</button> <button value="false">No</button></p>
<p id="result" role="status"></p></main>
<script>
let source
const send = (path, body) => fetch(path, {method: "POST", headers: {"Content-Type": "application/json"}, body})
function follow() {
  source?.close(); events.replaceChildren(); words.textContent = result.textContent = ""; question.hidden = true
  if (!location.hash) return
  source = new EventSource(`/trips/${location.hash.slice(1)}/events`)   // connects again after an error
  source.onmessage = ({data}) => {
    const {type, step, data: told} = JSON.parse(data)
    if (type === "emitted") { if (told.kind === "item") words.append(told.value + " "); return }
    events.append(Object.assign(document.createElement("li"), {textContent: `${type} ${step ?? ""}`}))
    question.hidden = type !== "waiting"; why.textContent = told?.why ?? ""
  }
  source.addEventListener("end", ({data}) => {
    source.close(); question.hidden = true; result.textContent = JSON.parse(data)
  })
}
start.onsubmit = async submitted => {
  submitted.preventDefault()
  location.hash = (await (await send("/trips", JSON.stringify(place.value))).json()).id
}
question.onclick = ({target}) => target.value && send(`/trips/${location.hash.slice(1)}/answer`, target.value)
onhashchange = follow; follow()
</script></html>"""


@web.get("/", response_class=HTMLResponse)
async def page() -> str:
    return PAGE


@web.post("/trips", status_code=202)
async def start(place: Annotated[str, Body(min_length=1, max_length=80)]) -> dict[str, str]:
    return {"id": (await plan_trip.enqueue(place)).id}


@web.post("/trips/{task_id}/answer")
async def answer(task_id: str, agreed: Annotated[bool, Body()]) -> None:
    try:
        await (await find(task_id)).answer("booking", agreed, by="the page")
    except (AnswerRefused, TaskEnded) as error:  # two people have clicked
        raise HTTPException(409, str(error)) from None


@web.get("/trips/{task_id}/events")
async def events(task_id: str, last_event_id: Annotated[str, Header()] = "0-0") -> StreamingResponse:
    handle = await find(task_id)

    async def lines() -> AsyncIterator[str]:
        async for event in handle.events(after=last_event_id, include="emitted"):
            shown = json.dumps({"type": event.type, "step": event.step, "data": event.data})
            yield f"id: {event.id}\ndata: {shown}\n\n"
        try:
            result = await handle.result()
        except TaskFailed as error:
            result = str(error)
        yield f"event: end\ndata: {json.dumps(result)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def find(task_id: str) -> TaskHandle[str]:
    try:
        handle = await app.producer.find(task_id)
    except ValueError as error:  # no task has such an id
        raise HTTPException(400, str(error)) from None
    if handle is None:
        raise HTTPException(404, "no such trip")
    return handle
