"""Enqueuing from synchronous code: web frameworks, scripts, notebooks, tasks of other queues.

One event loop runs in a background thread of the process while any app needs it. The connections of the apps live
there, and each synchronous call runs as a coroutine on it, while the calling thread waits.

A forked child inherits the memory and the sockets of its parent, but not its threads. It drops all of that state, and
opens its own loop and connections at its first call.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar
from weakref import WeakSet

import anyio

from ..deadletter.error_text import error_text
from ..queues.durations import Duration, Moment
from ..queues.errors import EventLoopError, NotOpen, Unavailable
from ..queues.handle import TaskHandle
from ..queues.lanes import Priority
from ..queues.producer import Key, Producer
from ..queues.transport.replication import Replicated
from ..queues.transport.threadsafe_calls import BackgroundLoop, ThreadsafeCaller, blocking
from ..queues.unique import Unique
from .errors import LifespanError

if TYPE_CHECKING:
    from ..queues.depth import WhenFull

R = TypeVar("R")

_EXIT_TIMEOUT: Final = 5.0
"""Seconds that the end of the process waits for a thread that opens the app."""

_background = BackgroundLoop()
"""The event loop of this process for synchronous calls."""

_inherited: list[object] = []
"""State of the parent process. Finalizers must not act on file descriptors and loops that it shares with this one."""


class SyncProducer:
    """Producer of an app for synchronous code, for any number of threads.

    with app.sync() as producer:
        report = audit.enqueue_sync("src").result_sync(timeout=60)
        handle = producer.enqueue("send_mail", {"to": "ops"}, queue="mail")

    Outside of a block, the first call opens the connection, and the end of the process closes it.
    """

    def __init__(self, loops: AppLoops, open_app: Callable[[OpenedApp], Awaitable[AsyncExitStack]]) -> None:
        self._loops = loops
        self._open_app = open_app
        self._reset()
        _producers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._caller: ThreadsafeCaller | None = None
        self._users = 0
        self._kept = False
        self._failure: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        self._check_thread("async with app:")
        self._acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def call(self, function: Callable[[Producer], Coroutine[Any, Any, R]], instead: str) -> R:
        """Run a coroutine function on the background loop, where the app is open, and return its result.

        Args:
            instead: the asynchronous call, for the error of a caller on the app's own event loop.
        """
        self._check_thread(instead)
        caller = self._acquire(keep=True)
        try:
            return caller.call(lambda: function(self._loops.producer), instead)
        finally:
            self._release()

    def _run(self, call: Callable[[Producer], Coroutine[Any, Any, R]], instead: str) -> R:
        return self.call(call, f"await app.producer.{instead}")

    enqueue = blocking(Producer.enqueue, _run)
    find = blocking(Producer.find, _run)
    enqueue_group = blocking(Producer.enqueue_group, _run)
    send_message = blocking(Producer.send_message, _run)
    answer = blocking(Producer.answer, _run)
    _enqueue_listed = blocking(Producer.enqueue_many, _run)

    def enqueue_many(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]],
        *,
        queue: str | None = None,
        delay: Moment = 0.0,
        key: Key = None,
        durability: Replicated | None = None,
        unique: Unique | Literal[False] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments. See `Producer.enqueue_many`."""
        listed = list(many)  # in this thread, whose connections its iterator may use
        options: dict[str, Any] = {"delay": delay, "key": key, "durability": durability, "unique": unique}
        options |= {"priority": priority, "idle": idle}
        options |= {"max_depth": max_depth, "when_full": when_full, "wait_limit": wait_limit}
        return self._enqueue_listed(task, listed, queue=queue, **options)

    def _check_thread(self, instead: str) -> None:
        if _background.is_current or self._loops.here() is not None:
            raise EventLoopError(f"the call would block the event loop on which the app is open: use '{instead}'")

    def _acquire(self, *, keep: bool = False) -> ThreadsafeCaller:
        """Return the caller, opened by its first user. keep: leave it open until the process ends if this opens it.

        A thread that waited for the lock while another one could not open it fails likewise, since it would wait as
        long as that one for a server that does not answer.
        """
        failure = self._failure
        with self._lock:
            if self._caller is None:
                if self._failure is not failure:
                    raise Unavailable(*self._failure)
                self._caller = self._open()
                self._kept = keep
            self._users += 1
            return self._caller

    def _open(self) -> ThreadsafeCaller:
        caller = _background.acquire()
        try:
            caller.call(lambda: self._loops.enter(self._open_app), "async with app:")
        except BaseException as error:
            _background.release()
            if isinstance(error, Unavailable):
                self._failure = error.args
            raise
        return caller

    def _release(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)  # in a forked child, a block of the parent ends without its entry
            if self._users or self._kept or self._caller is None:
                return
            caller, self._caller = self._caller, None
        self._close(caller)

    def _close(self, caller: ThreadsafeCaller) -> None:
        try:
            caller.call(self._loops.leave, "async with app:")
        finally:
            _background.release()

    def close(self) -> None:
        """Close the connection, for all users; the next call opens it again. The end of the process calls this."""
        if self._lock.acquire(timeout=_EXIT_TIMEOUT):
            caller, self._caller = self._caller, None
            self._lock.release()
            if caller is not None:
                self._close(caller)

    def forget_parent(self) -> None:
        """Drop the state that a forked child inherited."""
        _inherited.append((self._caller, self._loops.opened))
        self._loops.opened = {}
        self._reset()


_producers: WeakSet[SyncProducer] = WeakSet()


def close_sync_producers() -> None:
    """Close the synchronous producers of all apps of this process; their next calls open them again."""
    for producer in list(_producers):
        producer.close()


def _forget_parent() -> None:
    global _background  # noqa: PLW0603 - one per process
    _inherited.append(_background)
    _background = BackgroundLoop()
    for producer in list(_producers):
        producer.forget_parent()


atexit.register(close_sync_producers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


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
