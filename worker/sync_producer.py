"""Enqueuing from synchronous code: web frameworks, scripts, notebooks, tasks of other queues.

One event loop runs in a background thread of the process while any app needs it. The connections of the apps live
there, and each synchronous call runs as a coroutine on it, while the calling thread waits.

A forked child inherits the memory and the sockets of its parent, but not its threads. It drops all of that state, and
opens its own loop and connections at its first call.
"""

from __future__ import annotations

import atexit
import functools
import operator
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar
from weakref import WeakSet

from ..queues.durations import Moment
from ..queues.errors import EventLoopError, Unavailable
from ..queues.handle import TaskHandle
from ..queues.producer import Key, Producer
from ..queues.transport.replication import Replicated
from ..queues.transport.threadsafe_calls import BackgroundLoop, ThreadsafeCaller
from .app_loops import AppLoops, OpenedApp

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_TIMEOUT: Final = 5.0
"""Seconds that the end of the process waits for a thread that opens the app."""

_background = BackgroundLoop()
"""The event loop of this process for synchronous calls."""

_inherited: list[object] = []
"""State of the parent process. Finalizers must not act on file descriptors and loops that it shares with this one."""


def _blocking(
    method: Callable[Concatenate[Producer, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncProducer, P], R]:
    """Return the synchronous form of a method of the producer."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: SyncProducer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        wanted: Callable[[Producer], Coroutine[Any, Any, R]] = operator.methodcaller(name, *args, **kwargs)
        return self.call(wanted, f"await app.producer.{name}(...)")

    return call


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

    enqueue = _blocking(Producer.enqueue)
    find = _blocking(Producer.find)
    send_message = _blocking(Producer.send_message)

    def enqueue_many(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]],
        *,
        queue: str | None = None,
        delay: Moment = 0.0,
        key: Key = None,
        durability: Replicated | None = None,
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments. See `Producer.enqueue_many`."""
        listed = list(many)  # in this thread: its iterator may use a connection of this thread

        async def enqueue_many(producer: Producer) -> list[TaskHandle[Any]]:
            return await producer.enqueue_many(task, listed, queue=queue, delay=delay, key=key, durability=durability)

        return self.call(enqueue_many, "await app.producer.enqueue_many(...)")

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
