"""Updates of a page while it is shown, over one event stream.

The stream renders the page again and again and sends the part in its block `live` when that has changed, at most once a
second. A page that takes long to read is read less often, so that open pages cost the server little. Relative times do
not count as changes.

Why a page cannot be read is an event of its own, `problem`, shown above that part. So the page keeps what it shows,
also if it came with another request or an earlier stream.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Final

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from ..log import logger
from ..web.problems import Problem
from .page import Html
from .rendering import render

START: Final = "<!-- live -->"
END: Final = "<!-- end of live -->"

INTERVAL: Final = 1.0
"""Seconds between two updates."""

_SHARE: Final = 20
"""A page is read again after this many times the time that reading it took."""

_LONGEST: Final = 30.0
"""Seconds between two updates at most."""

_PING: Final = 15
"""Seconds between two comments, which keep proxies from closing the stream."""

_SEND_TIMEOUT: Final = 30
"""Seconds after which a client that does not read is left."""

_TIME = re.compile(r">[^<>]{0,100}</time>")


def live_part(text: str) -> str:
    """Return the part of a page that is updated; empty if it has none."""
    return text.partition(START)[2].partition(END)[0]


def live_stream(
    read: Callable[[], Awaitable[Html | None]], running: AbstractContextManager[None] | None = None
) -> EventSourceResponse:
    """Return the event stream of a page.

    Args:
        read: Renders it; returns None if the user may not see it any more.
        running: Is entered while the stream lasts.
    """
    sent = _updates(read, running or nullcontext())
    return _LiveResponse(sent, ping=_PING, send_timeout=_SEND_TIMEOUT, headers={"X-Accel-Buffering": "no"})


class _LiveResponse(EventSourceResponse):
    """Event stream that ends without an error if the client reads nothing for too long."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            logger.debug("left a browser that read no updates for {} s", _SEND_TIMEOUT)


async def _updates(
    read: Callable[[], Awaitable[Html | None]], running: AbstractContextManager[None]
) -> AsyncIterator[ServerSentEvent]:
    with running:
        async for event in _changes(read):
            yield event


async def _changes(read: Callable[[], Awaitable[Html | None]]) -> AsyncIterator[ServerSentEvent]:
    shown: str | None = None
    told: str | None = None  # not known: the page may show the problem of an earlier stream
    while True:
        started = monotonic()
        problem = ""
        try:
            found = await read()
            if found is None:
                yield ServerSentEvent("", event="end")
                return
            part = live_part(found.text)
            if (state := _TIME.sub("", part)) != shown:
                yield ServerSentEvent(part, event="live")
                shown = state
        except Problem as error:
            problem = error.detail
        if problem != told:
            yield ServerSentEvent(_shown(problem), event="problem")
            told = problem
        took = monotonic() - started
        share = 0 if problem else _SHARE  # the time of an error is that of its retries
        await anyio.sleep(min(max(INTERVAL, took * share), _LONGEST))


def _shown(problem: str) -> str:
    return render("live_problem.html", "", {"problem": problem}) if problem else ""
