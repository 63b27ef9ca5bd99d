"""A small server that speaks OpenAI's Chat Completions, streaming, and answers from a script.

It judges every request as a provider does (providers.py), and keeps a log of what it was asked and of what it answered
to the end. A test can have it hold an answer, before its first byte or in the middle.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.provider_rules import openai_problems

Messages = list[dict[str, Any]]
Script = Callable[[Messages], "Reply"]


@dataclass
class Reply:
    """Reply of the model. calls: of tools, by name with their arguments as it writes them. status: of a refusal.

    whole: as one JSON document. cut: the stream ends after so many chunks, without an end.
    """

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    status: int = 200
    whole: bool = False
    cut: int | None = None


@dataclass
class Held:
    """An answer that is held: reached is set when the server has come to it."""

    when: Callable[[Messages], bool]
    after: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)


class LocalModel:
    """asked: the messages of all requests. answered: of those whose answer went out to its end."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.asked: list[Messages] = []
        self.answered: list[Messages] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.problems: list[str] = []
        self._holds: list[Held] = []
        self._ids = 0

    def hold(self, when: Callable[[Messages], bool], after: int = 0) -> Held:
        """Hold the next answer to such a request after `after` chunks, without end: the client must disconnect."""
        self._holds.append(Held(when, after))
        return self._holds[-1]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[LocalModel]:
        """Serve while the block runs."""
        clients: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            client = asyncio.create_task(self._serve(reader, writer))
            clients.add(client)
            client.add_done_callback(clients.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            server.close()
            for client in list(clients):
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert lines[0].startswith("POST /v1/chat/completions ")
            self.headers.append(headers)
            self.bodies.append(body)
            await self._answer(body["messages"], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client disconnected
        finally:
            writer.close()

    async def _answer(self, messages: Messages, writer: asyncio.StreamWriter) -> None:
        self.asked.append(messages)
        self.problems += openai_problems(messages)
        reply = Reply(status=400, text="refused") if openai_problems(messages) else self.script(messages)
        if reply.status != 200:
            await self._document(writer, reply.status, {"error": {"message": reply.text}})
            return
        held = next((one for one in self._holds if one.when(messages)), None)
        if held is not None:
            self._holds.remove(held)
        if reply.whole:
            await self._document(writer, 200, {"choices": [{"message": self._message(reply)}], "usage": _USAGE})
        else:
            await self._stream(writer, self._chunks(reply)[: reply.cut], held)
        self.answered.append(messages)

    async def _document(self, writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, chunks: list[str], held: Held | None) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        for number, data in enumerate(["", *chunks]):
            if held is not None and number == held.after:
                held.reached.set()
                await asyncio.Event().wait()
            if number == 0:
                writer.write(head.encode())
                continue
            for part in (data[: len(data) // 2].encode(), data[len(data) // 2 :].encode()):  # pieces as networks cut
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _message(self, reply: Reply) -> dict[str, Any]:
        calls = [
            {"id": self._fresh(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in reply.calls
        ]
        return {"role": "assistant", "content": reply.text or None, **({"tool_calls": calls} if calls else {})}

    def _chunks(self, reply: Reply) -> list[str]:
        """The answer in small pieces, with a comment between, as servers send to keep a connection alive."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": reply.text[at : at + 7]} for at in range(0, len(reply.text), 7)]
        for index, (name, arguments) in enumerate(reply.calls):
            function = {"name": name, "arguments": ""}
            deltas.append(
                {"tool_calls": [{"index": index, "id": self._fresh(), "type": "function", "function": function}]}
            )
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 5]}}]}
                for at in range(0, len(arguments), 5)
            ]
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        chunks.append(
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if reply.calls else "stop"}]}
        )
        chunks.append({"choices": [], "usage": _USAGE})
        return [": alive\n\n", *(f"data: {json.dumps(one)}\n\n" for one in chunks), "data: [DONE]\n\n"]

    def _fresh(self) -> str:
        self._ids += 1
        return f"call_{self._ids}"


_USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
