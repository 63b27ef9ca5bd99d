"""State of an open app per event loop: a connection and the resources of a lifespan belong to one loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from ..deadletter.error_text import error_text
from ..queues.errors import EventLoopError, NotOpen
from ..queues.producer import Producer
from .errors import LifespanError

NO_LIFESPAN: Final = object()
"""The resources where no lifespan is open."""


@dataclass(slots=True)
class OpenedApp:
    """State of an app on one event loop. users: blocks in which it is open; the last one closes it."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    users: int = 0
    producer: Producer | None = None
    resources: Any = NO_LIFESPAN
    stack: AsyncExitStack | None = None


class AppLoops:
    """The event loops on which one app is open.

    After a fork, the loops of the parent stay in `opened`, and no loop of the child is equal to one of them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.opened: dict[asyncio.AbstractEventLoop, OpenedApp] = {}

    async def enter(self, open_app: Callable[[OpenedApp], Awaitable[AsyncExitStack]]) -> None:
        """Open the app on the running event loop, unless it is open there."""
        for loop in list(self.opened):  # of any thread
            if loop.is_closed():  # it ended before the app was left
                self.opened.pop(loop, None)
        opened = self.opened.setdefault(asyncio.get_running_loop(), OpenedApp())
        opened.users += 1
        try:
            async with opened.lock:
                if opened.stack is None:
                    opened.stack = await open_app(opened)
        except BaseException:
            self._drop_user(opened)
            raise

    async def leave(self) -> None:
        """Close the app on the running event loop if this was its last user there."""
        opened = self.here()
        if opened is None:
            raise RuntimeError(f"app {self._name!r} must be entered before it is left")
        with anyio.CancelScope(shield=True):
            async with opened.lock:
                try:
                    if opened.users == 1 and opened.stack is not None:
                        stack, opened.stack = opened.stack, None
                        await stack.aclose()
                finally:
                    self._drop_user(opened)

    def _drop_user(self, opened: OpenedApp) -> None:
        opened.users -= 1
        if not opened.users:
            del self.opened[asyncio.get_running_loop()]

    def here(self) -> OpenedApp | None:
        """Return what is open on the event loop that runs in this thread, if any."""
        try:
            return self.opened.get(asyncio.get_running_loop())
        except RuntimeError:  # no event loop runs here
            return None

    @property
    def producer(self) -> Producer:
        """The producer on the running event loop. Raises `NotOpen` or `EventLoopError`."""
        opened = self.here()
        if opened is not None and opened.producer is not None:
            return opened.producer
        if self.opened:
            raise EventLoopError(
                f"app {self._name!r} is not open on this event loop, but on another one: enter 'async with app:' on "
                "this one too, or call enqueue_sync"
            )
        raise NotOpen(f"app {self._name!r} is not open: enqueue inside 'async with app:', or call enqueue_sync")

    def resources(self) -> Any:
        """Return the resources of the running event loop, else of the first loop that has some.

        A thread of a step, where no event loop runs, so gets those of its worker. Raises `NotOpen`.
        """
        for opened in (self.here(), *self.opened.copy().values()):
            if opened is not None and opened.resources is not NO_LIFESPAN:
                return opened.resources
        raise NotOpen(f"app {self._name!r} is not open: use its resources inside 'async with app:'")


@asynccontextmanager
async def open_lifespan(app: str, lifespan: Callable[[], Any]) -> AsyncIterator[Any]:
    """Open a lifespan, which is closed in the same way whether or not the block raises. Raises `LifespanError`."""
    try:
        manager = lifespan()
        if not isinstance(manager, AbstractAsyncContextManager):
            if inspect.iscoroutine(manager):
                manager.close()
            raise TypeError(f"lifespan must return an async context manager (@asynccontextmanager), got {manager!r}")
        resources = await manager.__aenter__()
    except Exception as error:
        raise LifespanError(_problem(app, "open", error)) from error
    try:
        yield resources
    finally:
        try:
            await manager.__aexit__(None, None, None)
        except Exception as error:
            raise LifespanError(_problem(app, "close", error)) from error


def _problem(app: str, act: str, error: Exception) -> str:
    return f"could not {act} the lifespan of app {app!r}: {type(error).__name__}: {error_text(error)}"
