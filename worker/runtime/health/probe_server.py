"""The probe server: health over HTTP for orchestrators, at /livez and /readyz, and metrics at /metrics.

/readyz?coherence also fails if an agent that runs here is incoherent. The server has an event loop in a thread of its
own, so it reports a blocked event loop of the worker (503, with the blocking task). If C code holds the GIL, the probe
gets no answer, which fails it too.

A connection has one request, of limited size and time. Of too many connections the oldest is closed: a probe sends its
request at once, so slow clients displace each other and no probe.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

import orjson

from ....queues.errors import ConfigurationError
from ...log import FirstOfEach, logger

_PATIENCE: Final = 5.0
"""Seconds that a client has to send its request, and to read the answer."""

_MAX_CONNECTIONS: Final = 64
_MAX_LINE_LENGTH: Final = 4_096
_MAX_LINES: Final = 100
"""Largest number of lines of a request."""

_BACKLOG: Final = 512
"""Connections that the kernel keeps until they are accepted."""


class HealthSource(Protocol):
    """A report of one worker or of several."""

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def coherent(self) -> bool: ...

    @property
    def reasons(self) -> Sequence[str]: ...

    def summary(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ProbePage:
    """A page of text, such as metrics."""

    kind: str
    text: bytes


class _BadRequest(Exception):
    """Request that gets no report."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class ProbeServer:
    """Answers `GET /livez`, `GET /readyz` and `GET /readyz?coherence`: 200 or 503, and the report as JSON either way.

    `GET /metrics` has what `metrics` returns, and 501 where that raises `ConfigurationError`: the extra is missing.

    On a loopback address it answers requests for a loopback host only, so that no web page can read the report through
    a name that resolves to this host (DNS rebinding).

    with ProbeServer(worker.health, "127.0.0.1", 8080) as server: ...
    """

    def __init__(
        self,
        report: Callable[[], HealthSource],
        host: str,
        port: int,
        metrics: Callable[[], ProbePage] | None = None,
    ) -> None:
        """report, metrics: called for each request, in a thread. host: address or name. port: 0 for any free port.

        Raises OSError if the address is not available.
        """
        self._report = report
        self._metrics = metrics
        self._errors = FirstOfEach()
        self._socket = _listening(host, port)
        on_loopback = ipaddress.ip_address(self._socket.getsockname()[0].partition("%")[0]).is_loopback
        self._hosts = {"localhost", host.casefold()} if on_loopback else None
        """Names of this host in a request, besides addresses; None: any name."""
        self._open: dict[asyncio.StreamWriter, None] = {}
        """Connections, the oldest first."""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="perdure probes", daemon=True)

    @property
    def address(self) -> str:
        """The URL, such as `http://127.0.0.1:8080`."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> ProbeServer:
        self._loop = asyncio.SelectorEventLoop()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the thread has ended by an error, which it has logged
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop or asyncio.SelectorEventLoop()) as runner:
            runner.get_loop().set_exception_handler(_log_context)
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=_MAX_LINE_LENGTH, backlog=_BACKLOG)
        async with server:
            await self._stop.wait()
            for writer in list(self._open):
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_PATIENCE):
                writer.write(await self._reply(reader))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            logger.debug("closed a connection to the health port: {!r}", error)
        finally:
            writer.transport.abort()
            self._open.pop(writer, None)

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        """Read a request; return the reply."""
        method = "GET"
        try:
            method, target, host = await _read_request(reader)
            if method not in ("GET", "HEAD"):
                raise _BadRequest(HTTPStatus.METHOD_NOT_ALLOWED, f"method {method} is not supported: use GET or HEAD")
            if self._hosts is not None and not _names_host(host, self._hosts):
                raise _BadRequest(HTTPStatus.MISDIRECTED_REQUEST, "the header Host must be localhost or an IP address")
            status, page = self._answer(target)
        except _BadRequest as refused:
            status, page = refused.status, _json({"error": str(refused)})
        data = page.text
        head = (
            f"HTTP/1.1 {status} {status.phrase}\r\n"
            "Server: perdure\r\n"
            f"Content-Type: {page.kind}\r\n"
            f"Content-Length: {len(data)}\r\n"
            "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else data)

    def _answer(self, target: str) -> tuple[HTTPStatus, ProbePage]:
        path, _, query = target.partition("?")
        if path == "/metrics" and self._metrics is not None:
            return self._measure(self._metrics)
        if path not in ("/livez", "/readyz"):
            raise _BadRequest(HTTPStatus.NOT_FOUND, f"no page {path}: use /livez, /readyz or /metrics")
        status, body = self._check(path, query)
        return status, _json(body)

    def _measure(self, metrics: Callable[[], ProbePage]) -> tuple[HTTPStatus, ProbePage]:
        try:
            return HTTPStatus.OK, metrics()
        except ConfigurationError as error:  # the extra is missing
            raise _BadRequest(HTTPStatus.NOT_IMPLEMENTED, str(error)) from None
        except Exception as error:  # noqa: BLE001 - the next probe needs the server
            if self._errors.is_first("metrics", type(error).__name__):
                logger.opt(exception=error).error("could not report the metrics")
            text = f"could not report: {type(error).__name__}"
            raise _BadRequest(HTTPStatus.INTERNAL_SERVER_ERROR, text) from None

    def _check(self, path: str, query: str) -> tuple[HTTPStatus, Mapping[str, Any]]:
        try:
            report = self._report()
            ok = report.live if path == "/livez" else report.ready
            if path == "/readyz" and "coherence" in parse_qs(query, keep_blank_values=True):
                ok = ok and report.coherent
            return HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE, {
                "ok": ok,
                "reasons": report.reasons,
                **report.summary(),
            }
        except Exception as error:  # noqa: BLE001 - the next probe needs the server
            if self._errors.is_first(type(error).__name__):
                logger.opt(exception=error).error("could not report the health")
            return HTTPStatus.SERVICE_UNAVAILABLE, {"ok": False, "error": f"could not report: {type(error).__name__}"}


def _json(body: Mapping[str, Any]) -> ProbePage:
    return ProbePage("application/json", orjson.dumps(body) + b"\n")


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of the host, of IPv4 if it has one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _log_context(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    logger.debug("health port: {}", context.get("message"))


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, str]:
    """Return method, target and host of a request."""
    parts = (await _line(reader)).split(" ")
    if len(parts) != len(("method", "target", "version")) or not parts[2].startswith("HTTP/1."):
        raise _BadRequest(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.1")
    host = ""
    for _ in range(_MAX_LINES):
        if not (line := await _line(reader)):
            return parts[0], parts[1], host
        name, _, value = line.partition(":")
        if name.casefold() == "host":
            host = value.strip()
    raise _BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_LINES} header fields")


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except ValueError:
        raise _BadRequest(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a line has more than {_MAX_LINE_LENGTH} bytes"
        ) from None
    if not line.endswith(b"\n"):
        raise ConnectionError("the client has closed the connection")
    return line.decode("latin-1").rstrip("\r\n")


def _names_host(written: str, names: Collection[str]) -> bool:
    """Return whether a Host header, with or without a port, has an IP address, one of the names, or nothing."""
    host = written.casefold()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return not host or host in names
    return True
