"""Webhooks: JSON about resumed, buried and waiting tasks, posted to a URL and signed if there is a secret.

No task waits for a webhook, and none fails because of one: events wait in a bounded queue in memory, each is tried a
few times, and one that the receiver does not accept is dropped with a warning in the log. So an event may be lost with
its worker, which an entry of the event log may not; and one whose reply was lost is posted twice, under one delivery
id.

A webhook leaves the deployment. It contains what is readable in Redis anyway (ids, names, counters, reasons); texts of
the task (error messages, why it waits) only if tasks are not encrypted, and never with secrets.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import orjson

from ...deadletter import Evidence, Reason
from ...queues import Backoff, Counters, Delivery
from ..durable import CURRENT_RUN, CallNext, Context, Middleware, Run, Settlement
from ..journal import Handoff
from ..journal.run_events import Notified
from ..log import logger
from ..settings import Settings
from .outcome import Burial, Outcome, Park
from .settlement import RunSettlement

__all__ = [
    "WebhookEvent",
    "WebhookLimits",
    "WebhookMiddleware",
    "WebhookQueue",
    "WebhookTarget",
    "post",
    "sign",
    "unreadable_event",
]

_TRANSIENT: Final = frozenset({408, 425, 429})
"""Client errors that may not repeat; every server error may not repeat either."""

DeliveryCallback = Callable[[str | None], Awaitable[None]]
"""Called once with the result of posting: None if it was accepted, else why it was not."""


_BACKOFF: Final = Backoff(first=0.5, longest=30.0)


@dataclass(frozen=True, slots=True)
class WebhookLimits:
    """Limits of the queue and of posting.

    queued: events that wait at once. tries: posts of one event. backoff: delays between them. grace: seconds for what
    still waits when the worker stops.
    """

    queued: int = 1000
    tries: int = 5
    backoff: Backoff = _BACKOFF
    grace: float = 3.0


_LIMITS: Final = WebhookLimits()


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """One event to post. on_posted: called once. delivery: an id that stays the same however often it is posted."""

    data: Mapping[str, Any]
    on_posted: DeliveryCallback | None = None
    delivery: str = field(default_factory=lambda: str(uuid.uuid4()))


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
        """The URL without the parts that may be secret: user, password, path and query."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/..."


class WebhookQueue:
    """The events of one worker that wait to be posted."""

    def __init__(self, target: WebhookTarget | None, limits: WebhookLimits = _LIMITS) -> None:
        """target: None drops every event."""
        self._target = target
        self._limits = limits
        self._waiting: deque[WebhookEvent] = deque()
        self._added = anyio.Event()
        self._dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether there is a target."""
        return self._target is not None

    def give(self, event: WebhookEvent) -> None:
        """Queue an event. Never waits and never fails."""
        if self._target is None:
            return
        if len(self._waiting) >= self._limits.queued:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "more than {} webhook events wait for {}: further ones are dropped",
                    self._limits.queued,
                    self._target.shown,
                )
            return
        self._waiting.append(event)
        self._added.set()

    async def run(self) -> None:
        """Post the queued events, one after another, until cancelled; then post what still waits, within the grace."""
        if self._target is None:
            return
        try:
            while True:
                await self._drain(self._target)
                self._added = anyio.Event()
                if not self._waiting:
                    await self._added.wait()
        finally:
            with anyio.move_on_after(self._limits.grace, shield=True):
                await self._drain(self._target)
            if self._waiting:
                logger.warning("{} webhook events were not posted: the worker stopped", len(self._waiting))

    async def _drain(self, target: WebhookTarget) -> None:
        while self._waiting:
            event = self._waiting[0]
            failure = await post(target, event, self._limits)
            self._waiting.popleft()
            self._dropped = 0
            if event.on_posted is not None:
                try:
                    await event.on_posted(failure)
                except Exception:  # noqa: BLE001 - a failing callback must not stop the other events
                    logger.exception("could not log the result of a webhook")


async def post(target: WebhookTarget, event: WebhookEvent, limits: WebhookLimits = _LIMITS) -> str | None:
    """Post one event, and repeat it where that may help. Returns None, or why it was not accepted; logs that, too."""
    data = event.data
    body = orjson.dumps(dict(data))
    delays, failure, repeat = limits.backoff.delays(), "", True
    for number in range(1, limits.tries + 1):
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "perdure",
            "Perdure-Event": str(data.get("event", "")),
            "Perdure-Delivery": event.delivery,
        }
        if target.secret:
            headers["Perdure-Signature"] = sign(target.secret, body, int(time.time()))
        failure, repeat = await anyio.to_thread.run_sync(_once, target, body, headers, abandon_on_cancel=True)
        if not failure:
            return None
        if not repeat or number == limits.tries:
            break
        await anyio.sleep(next(delays))
    logger.warning("could not post webhook event {!r} to {}: {}", data.get("event"), target.shown, failure)
    return failure


def sign(secret: bytes, body: bytes, at: int) -> str:
    """Return the signature header: `t=SECONDS,v1=HEX`, the HMAC-SHA256 of the time, a dot, and the body."""
    digest = hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_options: Any) -> None:
        """Refuse redirects: an event is posted to the configured URL only."""


_OPENER: Final = urllib.request.build_opener(_NoRedirect)


def _once(target: WebhookTarget, body: bytes, headers: dict[str, str]) -> tuple[str, bool]:
    """Post once, in a thread. Returns why it failed, '' if it did not, and whether a repetition may help."""
    request = urllib.request.Request(target.url, body, headers, method="POST")  # noqa: S310 - http or https: settings.py
    try:
        with _OPENER.open(request, timeout=target.timeout) as answer:
            answer.read(1)
            return "", False
    except urllib.error.HTTPError as error:
        with error:
            return f"the server replied {error.code}", error.code >= 500 or error.code in _TRANSIENT
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{type(reason).__name__}: {reason}", True
    except ValueError as error:  # a header or URL that cannot be sent
        return f"{type(error).__name__}", False


class WebhookMiddleware(Middleware):
    """Queues the webhooks of a worker's runs."""

    def __init__(self, queue: WebhookQueue) -> None:
        self._queue = queue

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        run = CURRENT_RUN.get()
        if run is not None and (event := _resumed_event(run)) is not None:
            self._queue.give(event)
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if not isinstance(settlement, RunSettlement):
            return
        event = _stopped_event(settlement.run, settlement.outcome, settlement.handoff)
        if event is not None:
            self._queue.give(event)


def _resumed_event(run: Run) -> WebhookEvent | None:
    """Return the event of a run that resumed after an interruption; its posting is logged in the task's event log."""
    resumption = run.resumption
    if resumption is None or not resumption.interrupted:
        return None

    async def log_posting(failed: str | None) -> None:
        if not run.closed:
            await run.log_event(Notified(what="resumed", how="webhook", failed=failed))

    data = _common("resumed", run) | {
        "after": resumption.after,
        "gap": resumption.gap,
        "restored": resumption.restored,
        "summary": resumption.summary(),
    }
    return WebhookEvent(data, log_posting)


def _stopped_event(run: Run, outcome: Outcome, handoff: Handoff | None) -> WebhookEvent | None:
    """Return the event of a task that was buried or waits for a person; None for any other outcome."""
    match outcome:
        case Burial(reason=reason, counters=counters, error=error):
            return WebhookEvent(_common("buried", run) | _buried(run.id, reason, counters, error, run))
        case Park() if handoff is not None and any(one.on for one in handoff.waiting_on):
            (waiting,) = [one for one in handoff.waiting_on if one.on][:1]
            waits = {"what": waiting.what, "on": waiting.on} | ({} if _encrypted(run) else {"why": waiting.why})
            remedy = f"perdure task send {run.id} TEXT --from {waiting.on}"
            return WebhookEvent(
                _common("waiting", run) | waits | {"summary": f"waits for {waiting.on}", "remedy": remedy}
            )
    return None


def unreadable_event(delivery: Delivery, task_id: str, error: BaseException) -> WebhookEvent:
    """Return the event of a buried message that could not be decoded."""
    data = {"event": "buried", "task": None, "id": task_id, "queue": delivery.partition.queue, "at": _now()}
    return WebhookEvent(data | _buried(task_id, Reason.UNREADABLE, Counters(), error, None))


def _common(event: str, run: Run) -> dict[str, Any]:
    queue = run.delivery.partition.queue
    return {"event": event, "task": run.envelope.task, "id": run.id, "queue": queue, "at": _now()}


def _buried(task_id: str, reason: Reason, counters: Counters, error: BaseException, run: Run | None) -> dict[str, Any]:
    evidence = Evidence.of(error, None if run is None else run.redact)
    data = {
        "reason": str(reason),
        "error": evidence.error,
        "attempts": counters.attempts,
        "crashes": counters.crashes,
        "summary": f"buried ({reason}): {evidence.error}",
        "remedy": f"perdure dlq show {task_id}",
    }
    return data if run is None or _encrypted(run) else data | {"message": evidence.message}


def _encrypted(run: Run) -> bool:
    return run.gateway.encryptor.active


def _now() -> int:
    """Return milliseconds since the epoch, by this worker's clock."""
    return round(time.time() * 1000)
