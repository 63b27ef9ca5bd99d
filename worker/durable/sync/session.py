"""Thread sessions: a thread of synchronous code, and the asyncio task that makes its calls.

One of the two acts at a time. The thread asks the asyncio task to await something, and blocks until that has returned.
What is awaited may ask the thread to call the function of a step, which may ask the asyncio task again: the calls nest
as those of one thread do. So all that a handler awaits runs in the handler's asyncio task, with its context variables
and its cancellation. Context variables that the thread has set are set there during each of its calls.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio

from ...errors import RunStopped, StepOutsideTask
from ..steps.keys import StepKeys
from ..steps.step_thread import StepThread
from ..steps.threads import CURRENT_SESSION, Threads

T = TypeVar("T")
C = TypeVar("C")

_LOCAL = threading.local()


class _Ended:
    """The end of a call: a value or an error."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    @classmethod
    def of(cls, function: Callable[[], Any]) -> _Ended:
        try:
            return cls(function())
        except BaseException as error:  # noqa: BLE001 - the other side raises it
            return cls(error=error)

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self._error = None  # no cycle with the traceback


class ThreadSession(Generic[C]):
    """The calls between one thread and the asyncio task that creates the session.

    A session whose asyncio task is cancelled is closed: its thread gets `CancelledError` from the call that it waits
    for, or from the next one. A call that raises `RunStopped` closes it, too: the thread gets that.

    Attributes:
        context: the context of the handler, for code in the thread.
    """

    def __init__(self, threads: Threads, keys: StepKeys, context: C) -> None:
        self.context = context
        self._threads = threads
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._to_loop: asyncio.Queue[_Ended | Callable[[], Awaitable[Any]]] = asyncio.Queue()
        self._to_thread: SimpleQueue[_Ended | Callable[[], Any] | None] = SimpleQueue()
        self._closed = self._unwinding = False
        self._refusal: type[BaseException] = asyncio.CancelledError
        self._inherited = Context()  # of the thread, when the function that it runs now began

    # called in the event loop

    async def run_handler(self, function: Callable[[], Any]) -> Any:
        """Call the handler in a thread, and make its calls until it returns."""
        return await self._run(self._threads.run_handler(partial(self._main, function), self._threads.held()))

    async def call(self, function: StepThread) -> Any:
        """Call the function of a step, in the thread of the session where nothing may end the wait for it.

        A step with a time-out, or one of several concurrent ones, gets a thread of its own.
        """
        if asyncio.current_task() is self._task and anyio.current_effective_deadline() == math.inf:
            function.shares_thread = True
            context = copy_context()
            self._to_thread.put(lambda: context.run(self._call, function))
            return await self._serve()
        return await self.branch(function)

    async def branch(self, function: Callable[[], Any]) -> Any:
        """Call a function in a thread of its own, and make its calls in the asyncio task that awaits this."""
        inner = ThreadSession(self._threads, self._keys, self.context)
        return await inner._run(self._threads.run_step(partial(inner._main, function)))

    async def _run(self, thread: Awaitable[_Ended]) -> Any:
        token = CURRENT_SESSION.set(self)
        running = asyncio.ensure_future(thread)
        running.add_done_callback(self._on_end)
        try:
            with self._keys.keep_scope():
                return await self._serve()
        except BaseException:
            self._close(unwinding=False)
            if not self._unwinding:
                raise
            await asyncio.wait([running])  # it cleans up; the next cancellation ends this wait
            return running.result().result()
        finally:
            CURRENT_SESSION.reset(token)
            running.cancel()  # no effect if the thread has ended, else it is lost

    async def _serve(self) -> Any:
        """Make the calls of the thread until the function that it runs now has ended; return or raise its result."""
        while True:
            try:
                message = await self._to_loop.get()
            except BaseException:
                self._close(unwinding=False)
                raise
            if isinstance(message, _Ended):
                return message.result()
            try:
                reply = _Ended(await message())
            except Exception as error:  # noqa: BLE001 - the thread raises it
                reply = _Ended(error=error)
            except BaseException as error:
                if isinstance(error, RunStopped):
                    self._refusal = RunStopped
                self._close(unwinding=True)
                raise
            if self._closed:
                raise asyncio.CancelledError
            self._to_thread.put(reply)

    def _close(self, *, unwinding: bool) -> None:
        """Refuse further calls of the thread. unwinding: it waits for a call, and ends now."""
        if not self._closed:
            self._closed, self._unwinding = True, unwinding
            self._to_thread.put(None)

    def _on_end(self, running: asyncio.Future[_Ended]) -> None:
        if running.cancelled():
            return
        error = running.exception()  # such as: no thread can be started
        self._to_loop.put_nowait(running.result() if error is None else _Ended(error=error))

    # called in the thread

    def _main(self, function: Callable[[], Any]) -> _Ended:
        outer, _LOCAL.session = getattr(_LOCAL, "session", None), self
        try:
            return self._call(function)
        finally:
            _LOCAL.session = outer

    def _call(self, function: Callable[[], Any]) -> _Ended:
        outer, self._inherited = self._inherited, copy_context()
        try:
            return _Ended.of(function)
        finally:
            self._inherited = outer

    def await_in_loop(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await what the function returns in the asyncio task; return or raise its result.

        Raises `asyncio.CancelledError` or `RunStopped` if the session is closed.
        """
        if self._closed:
            raise self._refusal("the task was stopped")
        inherited = self._inherited
        if changed := [(one, value) for one, value in copy_context().items() if inherited.get(one, self) is not value]:
            function = partial(_await_with, changed, function)
        self._loop.call_soon_threadsafe(self._to_loop.put_nowait, function)
        while True:
            message = self._to_thread.get()
            if message is None:
                self._to_thread.put(None)  # for the calls around this one
                raise self._refusal("the task was stopped")
            if isinstance(message, _Ended):
                result: T = message.result()
                return result
            self._loop.call_soon_threadsafe(self._to_loop.put_nowait, message())


async def _await_with(variables: Sequence[tuple[ContextVar[Any], Any]], function: Callable[[], Awaitable[T]]) -> T:
    """Await what the function returns, with these values of context variables."""
    tokens = [(one, one.set(value)) for one, value in variables]
    try:
        return await function()
    finally:
        for one, token in tokens:
            one.reset(token)


def current_session() -> ThreadSession[Any]:
    """Return the session of this thread. Raises `StepOutsideTask` in any other thread."""
    session: ThreadSession[Any] | None = getattr(_LOCAL, "session", None)
    if session is None:
        raise StepOutsideTask("a SyncContext must be used in the thread of its handler, while that runs")
    return session


def in_handler_thread() -> bool:
    """Return whether this is the thread of a handler that is a plain function."""
    return getattr(_LOCAL, "session", None) is not None


def call_in_loop(function: Callable[[], Awaitable[T]]) -> T:
    """Await what the function returns, from the thread of a handler."""
    return current_session().await_in_loop(function)
