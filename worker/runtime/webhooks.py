"""Webhooks: JSON about resumed, buried and waiting tasks, posted to a URL and signed if there is a secret.

Nothing waits for a post, and nothing fails because of one: events wait in a bounded queue in memory, each is tried a
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
    "WebhookMiddleware",
    "WebhookQueue",
    "WebhookTarget",
    "post",
    "sign",
    "unreadable_event",
]

_MOST: Final = 1000
"""Notices that wait at once; one more is dropped."""

_TRIES: Final = 5
_BACKOFF: Final = Backoff(first=0.5, longest=30.0)
"""Delays between tries."""

_PASSING: Final = frozenset({408, 425, 429})
"""Answers of a client's fault that may be others the next time, as all of a server's may."""

_LAST: Final = 3.0
"""Seconds in which what waits may still be posted when the worker ends."""

DeliveryCallback = Callable[[str | None], Awaitable[None]]
"""Hears how posting came out: None where it was taken, else why it was not."""


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """What there is to tell. told: hears what became of it, once. delivery: the same however often it is posted."""

    about: Mapping[str, Any]
    told: DeliveryCallback | None = None
    delivery: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """Where notices go. secret: signs them, where it is not empty. timeout: seconds that one try may take."""

    url: str = field(repr=False)
    secret: bytes = field(default=b"", repr=False)
    timeout: float = 5.0

    @classmethod
    def of(cls, settings: Settings) -> WebhookTarget | None:
        """As the settings say; None where they name no URL."""
        url = settings.webhook_url.get_secret_value()
        secret = settings.webhook_secret.get_secret_value().encode()
        return cls(url, secret, settings.webhook_timeout) if url else None

    @property
    def shown(self) -> str:
        """The URL without what may be secret in it: user, password, path and query."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/..."


class WebhookQueue:
    """The notices of one worker."""

    def __init__(self, where: WebhookTarget | None) -> None:
        """where: None tells nobody."""
        self._where = where
        self._waiting: deque[WebhookEvent] = deque()
        self._come = anyio.Event()
        self._dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody is to be told."""
        return self._where is not None

    def give(self, notice: WebhookEvent) -> None:
        """Take a notice, which is posted soon. Never waits and never fails."""
        if self._where is None:
            return
        if len(self._waiting) >= _MOST:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("more than {} notices wait for {}: those to come are dropped", _MOST, self._where.shown)
            return
        self._waiting.append(notice)
        self._come.set()

    async def run(self) -> None:
        """Post what is given, one after another, until cancelled; what still waits then has a few seconds."""
        if self._where is None:
            return
        try:
            while True:
                await self._drain(self._where)
                self._come = anyio.Event()
                if not self._waiting:
                    await self._come.wait()
        finally:
            with anyio.move_on_after(_LAST, shield=True):
                await self._drain(self._where)
            if self._waiting:
                logger.warning("{} notices were not posted: the worker ends", len(self._waiting))

    async def _drain(self, where: WebhookTarget) -> None:
        while self._waiting:
            notice = self._waiting[0]
            failed = await post(where, notice)
            self._waiting.popleft()
            self._dropped = 0
            if notice.told is not None:
                try:
                    await notice.told(failed)
                except Exception:  # noqa: BLE001 - whoever hears of it has no say in whether others are told
                    logger.exception("what became of a notice could not be told")


async def post(where: WebhookTarget, notice: WebhookEvent) -> str | None:
    """Post one notice, as often as may help. Returns None, or why it was not taken, which is in the log as well."""
    about = notice.about
    body = orjson.dumps(dict(about))
    delays, failed, again = _BACKOFF.delays(), "", True
    for number in range(1, _TRIES + 1):
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "perdure",
            "Perdure-Event": str(about.get("event", "")),
            "Perdure-Delivery": notice.delivery,
        }
        if where.secret:
            headers["Perdure-Signature"] = sign(where.secret, body, int(time.time()))
        failed, again = await anyio.to_thread.run_sync(_once, where, body, headers, abandon_on_cancel=True)
        if not failed:
            return None
        if not again or number == _TRIES:
            break
        await anyio.sleep(next(delays))
    logger.warning("the notice {!r} could not be posted to {}: {}", about.get("event"), where.shown, failed)
    return failed


def sign(secret: bytes, body: bytes, at: int) -> str:
    """The signature header: `t=SECONDS,v1=HEX`, the HMAC-SHA256 of the time, a dot, and the body."""
    digest = hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_options: Any) -> None:
        """A notice goes where it was sent to, and nowhere else."""


_OPENER: Final = urllib.request.build_opener(_NoRedirect)


def _once(where: WebhookTarget, body: bytes, headers: dict[str, str]) -> tuple[str, bool]:
    """One try, in a thread: why it failed ('' where it did not), and whether another may help."""
    request = urllib.request.Request(where.url, body, headers, method="POST")  # noqa: S310 - http or https: settings.py
    try:
        with _OPENER.open(request, timeout=where.timeout) as answer:
            answer.read(1)
            return "", False
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code}", error.code >= 500 or error.code in _PASSING
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

    async def told(failed: str | None) -> None:
        if not run.closed:
            await run.log_event(Notified(what="resumed", how="webhook", failed=failed))

    about = _about("resumed", run) | {
        "after": resumption.after,
        "gap": resumption.gap,
        "restored": resumption.restored,
        "summary": resumption.summary(),
    }
    return WebhookEvent(about, told)


def _stopped_event(run: Run, outcome: Outcome, handoff: Handoff | None) -> WebhookEvent | None:
    """Return the event of a task that was buried or waits for a person; None for any other outcome."""
    match outcome:
        case Burial(reason=reason, counters=counters, error=error):
            return WebhookEvent(_about("buried", run) | _buried(run.id, reason, counters, error, run))
        case Park() if handoff is not None and any(one.on for one in handoff.waiting_on):
            (waiting,) = [one for one in handoff.waiting_on if one.on][:1]
            told = {"what": waiting.what, "on": waiting.on} | ({} if _sealed(run) else {"why": waiting.why})
            remedy = f"perdure task send {run.id} TEXT --from {waiting.on}"
            return WebhookEvent(
                _about("waiting", run) | told | {"summary": f"it waits for {waiting.on}", "remedy": remedy}
            )
    return None


def unreadable_event(delivery: Delivery, task_id: str, error: BaseException) -> WebhookEvent:
    """Return the event of a buried message that could not be decoded."""
    about = {"event": "buried", "task": None, "id": task_id, "queue": delivery.partition.queue, "at": _now()}
    return WebhookEvent(about | _buried(task_id, Reason.UNREADABLE, Counters(), error, None))


def _about(event: str, run: Run) -> dict[str, Any]:
    queue = run.delivery.partition.queue
    return {"event": event, "task": run.envelope.task, "id": run.id, "queue": queue, "at": _now()}


def _buried(task_id: str, reason: Reason, counters: Counters, error: BaseException, run: Run | None) -> dict[str, Any]:
    evidence = Evidence.of(error, None if run is None else run.redact)
    told = {
        "reason": str(reason),
        "error": evidence.error,
        "attempts": counters.attempts,
        "crashes": counters.crashes,
        "summary": f"given up ({reason}): {evidence.error}",
        "remedy": f"perdure dlq show {task_id}",
    }
    return told if run is None or _sealed(run) else told | {"message": evidence.message}


def _sealed(run: Run) -> bool:
    return run.gateway.encryptor.active


def _now() -> int:
    """Milliseconds since the epoch, by this worker's clock."""
    return round(time.time() * 1000)
