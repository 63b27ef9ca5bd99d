"""The probe server: health over HTTP for orchestrators, at /livez and /readyz.

/readyz?coherence also fails if an agent that runs here is incoherent. The server has its own threads, so it reports a
blocked event loop (503, with the blocking task). If C code holds the GIL, the probe gets no answer, which fails it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

import orjson

__all__ = ["HealthSource", "ProbeServer"]

_PATIENCE: Final = 5.0
"""Seconds that a client has to send its request."""


_POLL: Final = 0.1
"""Seconds between two checks for shutdown."""


class HealthSource(Protocol):
    """A report of one worker or of several."""

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def coherent(self) -> bool: ...

    def summary(self) -> Mapping[str, Any]: ...


class ProbeServer:
    """Answers `GET /livez`, `GET /readyz` and `GET /readyz?coherence`: 200 or 503, and the report as JSON either way.

    with ProbeServer(worker.health, "127.0.0.1", 8080) as server: ...
    """

    def __init__(self, report: Callable[[], HealthSource], host: str, port: int) -> None:
        """report: called for each request, in a thread. port: 0 for any free port.

        Raises OSError if the address is not available.
        """

        class Handler(_Handler):
            ask = staticmethod(report)

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL,), name="perdure probes", daemon=True
        )

    @property
    def address(self) -> str:
        """The URL, such as `http://127.0.0.1:8080`."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> ProbeServer:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    ask: Callable[[], HealthSource]
    timeout = _PATIENCE
    server_version = "perdure"
    sys_version = ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path not in ("/livez", "/readyz"):
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"no page {path}: use /livez or /readyz"})
            return
        report = self.ask()
        ok = report.live if path == "/livez" else report.ready
        if path == "/readyz" and "coherence" in parse_qs(query, keep_blank_values=True):
            ok = ok and report.coherent
        self._answer(HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, {"ok": ok, **report.summary()})

    do_HEAD = do_GET  # noqa: N815 - the name is given by http.server

    def _answer(self, status: HTTPStatus, body: Mapping[str, Any]) -> None:
        data = orjson.dumps(body) + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""
