"""Webhook receiver for tests: an HTTP server that keeps what is posted to it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anyio.to_thread
import orjson

from tests.support.workers import BOUND

__all__ = ["Listener", "listening"]


@dataclass
class Listener:
    """HTTP server at the url. answers: status codes of its replies in order; afterwards 204."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    taken: queue.Queue[tuple[dict[str, str], bytes]] = field(default_factory=queue.Queue)

    async def heard(self) -> tuple[dict[str, str], Any]:
        """Wait for the next request; return its headers and its JSON."""
        headers, body = await anyio.to_thread.run_sync(lambda: self.taken.get(timeout=BOUND))
        return headers, orjson.loads(body)


@contextmanager
def listening() -> Iterator[Listener]:
    """Run a webhook server for the duration of the block."""
    found = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.taken.put((dict(self.headers), body))
            self.send_response(found.answers.pop(0) if found.answers else 204)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/hook?token=x"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
