"""Posting of webhooks: the events of a process, posted to one URL in parallel, each with a few tries.

An event waits in a bounded queue in memory, so nothing waits for a webhook. A try has a total deadline, and a receiver
that hangs on one event delays no other: several are posted at once, and one that waits for its next try occupies no
slot. Of a reply only the status is read; redirects are not followed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.to_thread
import orjson

from ...queues.transport.backoff import Backoff
from ...queues.wording import listed
from ..log import logger
from ..settings import Settings

if TYPE_CHECKING:
    from ssl import SSLContext

_TRANSIENT: Final = frozenset({408, 425, 429})
"""Client errors that may not repeat; every server error may not repeat either."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})\b")
_MAX_LINE_LENGTH: Final = 8_192
_MAX_LINES: Final = 64
"""Largest number of lines of a reply that are read: interim replies (1xx) precede the one that counts."""

_LISTED: Final = 10
"""Largest number of events that the log lists by their ids."""

DeliveryCallback = Callable[[str | None], Awaitable[None]]
"""Called once with the result of posting: None if it was accepted, else why it was not."""


_BACKOFF: Final = Backoff(first=0.5, longest=30.0)


@dataclass(frozen=True, slots=True)
class WebhookLimits:
    """Limits of the queue and of posting.

    Args:
        queued: events that wait at once.
        parallel: events that are posted at once.
        tries: posts of one event.
        backoff: delays between them.
        grace: seconds for what still waits when the process stops.
    """

    queued: int = 1000
    parallel: int = 8
    tries: int = 5
    backoff: Backoff = _BACKOFF
    grace: float = 3.0


DEFAULT_LIMITS: Final = WebhookLimits()


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """One event to post. on_posted: called once. delivery: an id that stays the same however often it is posted."""

    data: Mapping[str, Any]
    on_posted: DeliveryCallback | None = None
    delivery: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def label(self) -> str:
        """Its kind, and the id of its task or supervisor."""
        return f"{self.data.get('event')} {self.data.get('id') or self.data.get('supervisor') or '-'}"


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """The URL that events are posted to. secret: key of the signature, if any. timeout: seconds for one try."""

    url: str = field(repr=False)
    secret: bytes = field(default=b"", repr=False)
    timeout: float = 5.0

    @classmethod
    def of(cls, settings: Settings) -> WebhookTarget | None:
        """Return the target of the settings; None if they name no URL."""
        url = settings.webhook_url.get_secret_value()
        secret = settings.webhook_secret.get_secret_value().encode()
        return cls(url, secret, settings.webhook_timeout) if url else None

    @property
    def shown(self) -> str:
        """Scheme, host and port of the URL: its path and query may be secret."""
        try:
            parts = urlsplit(self.url)
            return f"{parts.scheme}://{_host(parts)}"
        except ValueError:  # its text quotes the URL
            return "PERDURE_WEBHOOK_URL"


def sign(secret: bytes, delivery: str, body: bytes, at: int) -> str:
    """Return the signature header: `t=SECONDS,v1=HEX`, the HMAC-SHA256 of `SECONDS.DELIVERY.BODY`."""
    digest = hmac.new(secret, b"%d.%b.%b" % (at, delivery.encode(), body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


@dataclass(slots=True)
class _Waiting:
    """Event that waits for its next try. due: time of the event loop."""

    event: WebhookEvent
    delays: Iterator[float]
    tries: int = 0
    due: float = 0.0


class WebhookQueue:
    """The events of one process that wait to be posted."""

    def __init__(self, target: WebhookTarget | None, limits: WebhookLimits = DEFAULT_LIMITS) -> None:
        """target: None drops every event."""
        self._target = target
        self._limits = limits
        self._waiting: dict[str, _Waiting] = {}
        """Events by delivery id, the one that has waited longest first."""
        self._changed = anyio.Event()
        self._dropped = 0
        self._posting: list[anyio.CancelScope] = []
        self._stopping = False

    @property
    def wanted(self) -> bool:
        """Whether there is a target."""
        return self._target is not None

    def give(self, event: WebhookEvent) -> None:
        """Queue an event; if the queue is full, drop the one that has waited longest. Never waits and never fails."""
        if self._target is None:
            return
        if len(self._waiting) >= self._limits.queued:
            del self._waiting[next(iter(self._waiting))]
            self._dropped += 1
            if str(self._dropped).rstrip("0") == "1":  # 1, 10, 100
                logger.warning(
                    "more than {} webhook events wait for {}: the oldest are dropped, {} so far",
                    self._limits.queued,
                    self._target.shown,
                    self._dropped,
                )
        self._waiting[event.delivery] = _Waiting(event, self._limits.backoff.delays())
        self._wake()

    async def run(self) -> None:
        """Post the queued events until cancelled; then post what still waits, within the grace."""
        if self._target is None:
            return
        self._posting, self._stopping = [], False
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._limits.parallel):
                    group.start_soon(self._post_events, self._target)
                try:
                    await anyio.sleep_forever()
                finally:
                    self._stopping = True
                    for scope in self._posting:
                        scope.deadline = anyio.current_time() + self._limits.grace
                    self._wake()
        finally:
            self._report_losses()

    def _report_losses(self) -> None:
        if self._waiting:
            left = [waiting.event.label for waiting in self._waiting.values()]
            logger.warning(
                "{} webhook events were not posted before the process stopped: {}", len(left), listed(left, _LISTED)
            )
        if self._dropped:
            logger.warning("{} webhook events were dropped because too many waited", self._dropped)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _post_events(self, target: WebhookTarget) -> None:
        """Post one event after another until the process stops and none waits."""
        with anyio.CancelScope(shield=True) as scope:  # what is being sent is not sent twice because of a stop
            self._posting.append(scope)
            while (waiting := await self._next()) is not None:
                event = waiting.event
                try:
                    failure, repeat = await _attempt(target, event)
                except BaseException:
                    self._waiting.setdefault(event.delivery, waiting)
                    raise
                waiting.tries += 1
                if failure and repeat and waiting.tries < self._limits.tries:
                    waiting.due = anyio.current_time() + next(waiting.delays)
                    self._waiting[event.delivery] = waiting
                    self._wake()
                else:
                    await _report(target, event, failure)

    async def _next(self) -> _Waiting | None:
        """Wait until an event is due, and take it. Return None if the process stops and none waits."""
        while True:
            waiting = min(self._waiting.values(), key=lambda waiting: waiting.due, default=None)
            if waiting is None and self._stopping:
                return None
            delay = float("inf") if waiting is None else waiting.due - anyio.current_time()
            if waiting is not None and delay <= 0:
                return self._waiting.pop(waiting.event.delivery)
            with anyio.move_on_after(delay):
                await self._changed.wait()


async def _report(target: WebhookTarget, event: WebhookEvent, failure: str) -> None:
    if failure:
        logger.warning("could not post webhook event {!r} to {}: {}", event.data.get("event"), target.shown, failure)
    if event.on_posted is not None:
        try:
            await event.on_posted(failure or None)
        except Exception:  # noqa: BLE001 - a failing callback must not stop the other events
            logger.exception("could not log the result of a webhook")


async def _attempt(target: WebhookTarget, event: WebhookEvent) -> tuple[str, bool]:
    """Post once. Return why it failed, '' if it did not, and whether a repetition may help."""
    try:
        with anyio.fail_after(target.timeout):
            status = await _exchange(target, _request(target, event))
    except TimeoutError:
        return f"no reply within {target.timeout:g} s", True
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}", True
    except ValueError:
        return "the URL is not valid", False
    if 200 <= status < 300:
        return "", False
    return f"the server replied {status}", status >= 500 or status in _TRANSIENT


def _request(target: WebhookTarget, event: WebhookEvent) -> bytes:
    """Return the whole request."""
    parts, body = urlsplit(target.url), orjson.dumps(dict(event.data))
    headers = {
        "Host": _host(parts),
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "User-Agent": "perdure",
        "Perdure-Event": str(event.data.get("event", "")),
        "Perdure-Delivery": event.delivery,
    }
    if target.secret:
        headers["Perdure-Signature"] = sign(target.secret, event.delivery, body, int(time.time()))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(head).encode("ascii") + body


async def _exchange(target: WebhookTarget, request: bytes) -> int:
    """Send a request on a connection of its own; return the status of the reply."""
    parts = urlsplit(target.url)
    tls = await anyio.to_thread.run_sync(_tls) if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=_MAX_LINE_LENGTH)
    try:
        writer.write(request)
        await writer.drain()
        for _ in range(_MAX_LINES):
            if not (line := await _line(reader)):
                raise ConnectionError("the server closed the connection without a reply")
            if line.startswith(b"HTTP/"):
                if (found := _STATUS_LINE.match(line)) is None:
                    break
                if (status := int(found[1])) >= 200:
                    return status
        raise ConnectionError("the reply is not HTTP/1.1")
    finally:
        writer.transport.abort()  # a graceful end of TLS would wait for the server


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        raise ConnectionError(f"the reply has a line of more than {_MAX_LINE_LENGTH} bytes") from None


@cache
def _tls() -> SSLContext:
    """Return the context of all connections; it is slow to make."""
    from ssl import create_default_context  # most workers post nothing

    return create_default_context()


def _host(parts: SplitResult) -> str:
    """Return host and port as a URL has them."""
    host = parts.hostname or ""
    return (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
