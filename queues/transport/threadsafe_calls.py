"""Blocking calls from synchronous code to coroutine functions on an event loop in another thread.

`blocking` makes the synchronous form of a method. Calls use `asyncio.run_coroutine_threadsafe`: a call through anyio's
`BlockingPortal` takes twice its time, and is not cancelled with the wait for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from ..errors import EventLoopError

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_CHECK_INTERVAL: Final = 1.0
"""Seconds after which a waiting call checks that its event loop still runs."""

_STOP_TIMEOUT: Final = 5.0
"""Seconds to wait for a loop that stops. A name that is being resolved, or code that blocks the loop, holds it up."""


def blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
    run: Callable[[S, Callable[[T], Coroutine[Any, Any, Any]], str], Any],
) -> Callable[Concatenate[S, P], R]:
    """Return the synchronous form of a method, a method itself: `record_sync = blocking(record, _run)`.

    Args:
        run: Method of the object with the synchronous form. It calls a function with the object that has `method`, on
            the event loop of that, and returns the result. It also gets the asynchronous call, such as `record()`, for
            the error of a caller on that event loop.
    """
    name = method.__name__
    parameters = list(inspect.signature(method).parameters.values())[1:]
    optional = all(parameter.default is not parameter.empty for parameter in parameters)
    shown = f"{name}()" if optional else f"{name}(...)"

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = run(self, operator.methodcaller(name, *args, **kwargs), shown)
        return result

    return call


def call_without_loop(coroutine: Coroutine[Any, Any, R], instead: str) -> R:
    """Run a coroutine that needs no event loop of an app in this thread, and return its result.

    On a thread with a running event loop it may not wait for anything.

    Args:
        instead: the asynchronous call for such a thread.

    Raises:
        EventLoopError: the coroutine waits, and would block the event loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    coroutine.close()
    raise EventLoopError(f"this call would block the event loop of this thread: use {instead} there")


class ThreadsafeCaller:
    """Caller of coroutine functions on one event loop from other threads. It is created on that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    def call(self, function: Callable[[], Coroutine[Any, Any, R]], instead: str) -> R:
        """Run a coroutine function on the event loop, and return its result.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine.

        Args:
            instead: the asynchronous call for code that runs on the event loop itself.

        Raises:
            EventLoopError: the caller would block the loop, or the loop has ended or belongs to another process.
        """
        self._check(instead)

        async def run() -> R:  # the function itself, too, is called on the event loop
            return await function()

        coroutine = run()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # closed meanwhile
            coroutine.close()
            raise self._ended() from None
        try:
            while True:
                try:
                    future.exception(timeout=_CHECK_INTERVAL)
                except TimeoutError:
                    if self._loop.is_running():
                        continue
                    raise self._ended() from None
                except CancelledError:  # the loop ended, and cancelled what ran on it
                    raise self._ended() from None
                return future.result()
        finally:
            future.cancel()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function)

    def _check(self, instead: str) -> None:
        if self._pid != os.getpid():
            raise EventLoopError(
                "the connection belongs to the process that forked this one: find the task again by its id, with "
                "app.sync().find(task_id)"
            )
        if not self._loop.is_running():
            raise self._ended()
        if _running_loop() is self._loop:
            raise EventLoopError(f"the call would block the event loop on which it runs: use '{instead}'")

    def _ended(self) -> EventLoopError:
        return EventLoopError(
            "the event loop of the connection has ended: keep the app open for the call, or find the task again by its "
            "id, with app.sync().find(task_id)"
        )


def iterate_blocking(items: AsyncGenerator[R], caller: ThreadsafeCaller, instead: str) -> Iterator[R]:
    """Yield what an asynchronous generator yields on its event loop. instead: see `ThreadsafeCaller.call`."""

    async def next_item() -> tuple[R, ...]:
        async for item in items:
            return (item,)
        return ()

    try:
        while item := caller.call(next_item, instead):
            yield item[0]
    finally:
        caller.call(items.aclose, instead)


class BackgroundLoop:
    """An event loop in a thread of its own, which runs while it has users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread: threading.Thread | None = None
        self._running: tuple[ThreadsafeCaller, asyncio.Event] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop."""
        return self._thread is threading.current_thread()

    def acquire(self) -> ThreadsafeCaller:
        """Return the caller of the loop. The first user starts the loop."""
        with self._lock:
            if self._running is None:
                started: Future[tuple[ThreadsafeCaller, asyncio.Event]] = Future()
                self._thread = threading.Thread(target=_run, args=(started,), name="perdure sync", daemon=True)
                try:
                    self._thread.start()
                    self._running = started.result()
                except BaseException:  # such as KeyboardInterrupt
                    started.add_done_callback(_stop)
                    raise
            self._users += 1
            return self._running[0]

    def release(self) -> None:
        """End the use. After the last one, stop the loop and wait for its thread, but not for ever."""
        with self._lock:
            self._users -= 1
            if self._users or self._running is None or self._thread is None:
                return
            (caller, stop), self._running = self._running, None
            caller.call_soon(stop.set)
            self._thread.join(_STOP_TIMEOUT)


def _stop(started: Future[tuple[ThreadsafeCaller, asyncio.Event]]) -> None:
    """Stop a loop that has no user."""
    if started.exception() is None:
        caller, stop = started.result()
        caller.call_soon(stop.set)


def _run(started: Future[tuple[ThreadsafeCaller, asyncio.Event]]) -> None:
    try:
        asyncio.run(_serve(started))
    except BaseException as error:
        if not started.done():
            started.set_exception(error)  # such as too many open files
        elif threading.main_thread().is_alive():
            raise  # else the process ends: Python 3.12 then refuses the thread that ends those of name resolution


async def _serve(started: Future[tuple[ThreadsafeCaller, asyncio.Event]]) -> None:
    stop = asyncio.Event()
    started.set_result((ThreadsafeCaller(), stop))
    await stop.wait()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
