"""Posting of webhooks: one event to one URL, signed if there is a secret, with a few tries."""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio.to_thread
import orjson

from ...queues import Backoff
from ..log import logger
from ..settings import Settings

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

__all__ = ["DEFAULT_LIMITS", "WebhookEvent", "WebhookLimits", "WebhookTarget", "post", "sign"]

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


DEFAULT_LIMITS: Final = WebhookLimits()


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
        """Scheme, host and port of the URL: user, password, path and query may be secret."""
        try:
            parts = urlsplit(self.url)
            return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/..."
        except ValueError:
            return "PERDURE_WEBHOOK_URL"


async def post(target: WebhookTarget, event: WebhookEvent, limits: WebhookLimits = DEFAULT_LIMITS) -> str | None:
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


@cache
def _opener() -> OpenerDirector:
    """Return an opener that refuses redirects: an event is posted to the configured URL only."""
    from urllib.request import HTTPRedirectHandler, build_opener

    class NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_args: Any, **_options: Any) -> None:
            return None

    return build_opener(NoRedirect)


def _once(target: WebhookTarget, body: bytes, headers: dict[str, str]) -> tuple[str, bool]:
    """Post once, in a thread. Returns why it failed, '' if it did not, and whether a repetition may help."""
    import http.client  # the supervisor and most workers post nothing
    import urllib.error
    import urllib.request

    request = urllib.request.Request(target.url, body, headers, method="POST")  # noqa: S310 - http or https: settings.py
    try:
        with _opener().open(request, timeout=target.timeout) as answer:
            answer.read(1)
            return "", False
    except urllib.error.HTTPError as error:
        with error:
            return f"the server replied {error.code}", error.code >= 500 or error.code in _TRANSIENT
    except http.client.InvalidURL:  # its text quotes the path, or user and password
        return "the URL is not valid: encode its special characters", False
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{type(reason).__name__}: {reason}", True
    except ValueError as error:  # a header or URL that cannot be sent
        return f"{type(error).__name__}", False
