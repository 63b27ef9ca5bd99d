"""A chat in the browser whose answers appear word by word, also through a killed worker and a refreshed page.

    perdure worker run examples/chat_stream.py:app &
    python examples/chat_stream.py 8000      # then open http://127.0.0.1:8000, and kill -9 the worker in an answer

Each message is a turn of the user's session, and emits its words into a stream of the turn's task. The page reads it as
server-sent events: the browser names the last event that it has (`Last-Event-ID`) when it connects again, and gets what
follows. A call of the model that is cut off continues from the text that it has saved.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from perdure import Agent, AgentState, App, Context, PlanStep, SessionNotFound, current_step

app = App("chat-stream")

STORY = "Once upon a time a worker was killed in the middle of a sentence , and its readers saw no word twice ."


async def model(question: str, text: str) -> AsyncIterator[str]:
    """Yield the words of an answer after those of a text that begins it; a real program calls a model here."""
    for word in [f"({question})", *STORY.split()][len(text.split()) :]:
        await asyncio.sleep(float(os.environ.get("SECONDS_PER_WORD", "0.3")))
        yield f"{word} "


async def complete(question: str) -> str:
    step = current_step()
    text: str = step.saved or ""  # what an earlier try of this call has saved, before its worker died
    if text:
        await step.emit(text, to="words")  # in place of the words of that try, which are void
    saved_at = time.monotonic()
    async for word in model(question, text):
        text += word
        await step.emit(word, to="words")
        if time.monotonic() - saved_at > 1:
            await step.save(text)
            saved_at = time.monotonic()
    return text


@app.agent
class Chat(Agent[AgentState]):
    acknowledge_resume = False  # else the answer after a crash begins with a note about the crash

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="answer", title="answer the message")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return await ctx.step("model", complete, state.goal)

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["answer"])


session = app.session(Chat, "ada")  # a real program has one for each user who has logged in

PAGE = b"""<!doctype html><title>Chat</title>
<form id=f><input id=q autofocus><button>Send</button></form><div id=log></div>
<script>
function follow(turn) {                       // show a turn from its first word on
  const line = document.createElement("p"); log.append(line); let shown = []
  const events = new EventSource("/turns/" + turn)     // connects again by itself, with the last id that it has seen
  events.onmessage = event => {
    const item = JSON.parse(event.data)
    if (item.kind === "item") shown.push(item); else if (item.kind === "resumed") line.title = item.value
    else if (item.reason === "retried")
      shown = shown.filter(old => old.step !== item.step || old.attempt > item.attempt)
    else if (item.reason === "replayed") shown = shown.filter(old => old.step === null)
    else if (item.kind === "cut_off") { events.close(); line.remove(); follow(turn) }
    else { events.close(); if (item.error) line.append(" " + item.error) ; return }
    line.textContent = shown.map(old => old.value).join("")
  }
}
f.onsubmit = async event => {
  event.preventDefault()
  follow(await (await fetch("/turns", {method: "POST", body: q.value})).json()); q.value = ""
}
fetch("/turns").then(reply => reply.json()).then(turns => { for (let turn = 1; turn <= turns; turn++) follow(turn) })
</script>"""


def turns() -> int:
    try:
        return session.record_sync().sent
    except SessionNotFound:  # no message was sent yet
        return 0


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.reply(json.dumps(session.send_sync(text).number).encode())

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply(PAGE, "text/html")
        elif self.path == "/turns":
            self.reply(json.dumps(turns()).encode())
        else:
            self.stream(int(self.path.rpartition("/")[2]))

    def stream(self, number: int) -> None:
        """Send the items of a turn as server-sent events until it ends; the id of each is its cursor."""
        items = session.turn_sync(number).stream_sync("words", after=self.headers.get("Last-Event-ID"))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for item in items:
            self.wfile.write(f"id: {item.cursor}\ndata: {json.dumps(item.summary())}\n\n".encode())

    def reply(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()
