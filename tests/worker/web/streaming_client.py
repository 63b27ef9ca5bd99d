"""Client of event streams, in the process of the test: it may read slowly, and leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from perdure.web import Role
from starlette.types import ASGIApp, Message

from tests.support.workers import bounded


class SentFrame(NamedTuple):
    """A frame as the client gets it; a comment has only data."""

    id: str
    event: str
    data: Any


def frames_of(text: str) -> list[SentFrame]:
    """Parse an event stream."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            found.append(SentFrame(fields["id"], fields["event"], json.loads(fields["data"])))
    return found


class StreamClient:
    """A client that has sent its request. started, served: set at its start and end."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self.started = asyncio.Event()
        self.served = asyncio.Event()
        self._gone = asyncio.Event()
        self._asked = False
        self._frames: list[SentFrame] = []

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a part of the response; wait until the client has read the one before."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started.set()
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        if message.get("body"):
            await self._chunks.put(message["body"])
        if not message.get("more_body"):
            await self._chunks.put(None)

    def leave(self) -> None:
        self._gone.set()

    async def chunk(self) -> bytes | None:
        """Return the next part of the body; None at the end."""
        return await bounded(self._chunks.get())

    async def frame(self) -> SentFrame | None:
        """Return the next frame; None at the end."""
        while not self._frames:
            chunk = await self.chunk()
            if chunk is None:
                return None
            self._frames = frames_of(chunk.decode())
        return self._frames.pop(0)

    async def frames(self) -> list[SentFrame]:
        """Return the frames until the end."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
        return found


@asynccontextmanager
async def stream_client(
    api: ASGIApp, path: str, *roles: Role, name: str = "ada", headers: Mapping[str, str] | None = None
) -> AsyncIterator[StreamClient]:
    """Send a GET; at the end of the block the client has left, and the server has noticed it."""
    path, _, query = path.partition("?")
    sent = {"x-user": name, "x-roles": " ".join(roles or (Role.VIEWER,)), **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "server": ("api.test", 80),
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(key.lower().encode(), value.encode()) for key, value in sent.items()],
    }
    client = StreamClient()
    serving = asyncio.ensure_future(api(scope, client.receive, client.send))
    serving.add_done_callback(lambda _: client.served.set())
    try:
        yield client
    finally:
        client.leave()
        await bounded(serving)
