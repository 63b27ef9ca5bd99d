"""Calls of the saver and the store: synchronous ones, and those outside a task, which nothing fences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from ....queues.errors import EventLoopError
from ...app import App
from ...durable.steps.current import CURRENT_RUN
from ...errors import StepOutsideTask
from ...log import FirstOfEach, logger

R = TypeVar("R")

_warned = FirstOfEach()

_PAGE: Final = 20
"""Items that are read at once for a synchronous iterator."""


def call_blocking(app: App, function: Callable[[], Coroutine[Any, Any, R]], instead: str) -> R:
    """Run a coroutine function where the app is open, and return its result.

    In a thread of a task that is the event loop of its worker, with the task's fence; else the background loop of
    `app.sync()`.

    Args:
        instead: the asynchronous call, for the error of a caller on an event loop.

    Raises `EventLoopError` on an event loop, which the call would block.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise EventLoopError(f"the call would block the event loop on which it runs: use '{instead}'")
    run = CURRENT_RUN.get()
    if run is not None and not run.closed and run.loop.is_running():
        return asyncio.run_coroutine_threadsafe(function(), run.loop).result()
    return app.sync().call(lambda _: function(), instead)


def iterate(app: App, items: AsyncIterator[R], instead: str) -> Iterator[R]:
    """Yield what an asynchronous iterator yields."""

    async def page() -> list[R]:
        found: list[R] = []
        async for item in items:
            found.append(item)
            if len(found) == _PAGE:
                break
        return found

    while found := call_blocking(app, page, instead):
        yield from found
        if len(found) < _PAGE:
            return


def check_fence(what: str, *, require: bool) -> None:
    """Warn once if no task fences what is written.

    Args:
        what: what is written, for people.
        require: refuse instead.

    Raises `StepOutsideTask`.
    """
    if CURRENT_RUN.get() is not None:
        return
    if require:
        raise StepOutsideTask(f"{what} must be written in a task of Perdure, such as graph_task(app, graph)")
    if _warned.is_first(what):
        logger.warning("{} are written outside a task of Perdure: a frozen program can overwrite newer ones", what)
