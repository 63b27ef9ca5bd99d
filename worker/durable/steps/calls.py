"""Calls of step functions: in the event loop or in a thread, within their time-out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import anyio

from ....queues.runtime import RUNTIME
from ...errors import StepStillRunning, StepTimeout
from ..run import Run
from .codec import is_async
from .current import Step, step_here
from .options import AlreadyDone
from .step_thread import StepThread
from .variables import contained


def call_function(
    step: Step,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    digest: str,
    called: str | None,
) -> Awaitable[Any]:
    """Call an async function in the event loop, any other in a thread. called: its name if that is not the step's key.

    Raises `StepTimeout`, and what the function raises.
    """
    if timeout is not None:
        return _call_within(step, run, fn, args, kwargs, timeout, digest, called)
    if is_async(fn):
        return contained(fn(*args, **kwargs))
    call = partial(_call_to_its_end, fn, *args, **kwargs)
    return _in_thread(run, StepThread(run.id, called or step.key, digest, call))


async def _call_within(
    step: Step,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    digest: str,
    called: str | None,
) -> Any:
    with anyio.move_on_after(timeout):
        return await call_function(step, run, fn, args, kwargs, None, digest, called)
    raise StepTimeout(step.key, timeout)


async def call_in_step(run: Run, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function in a thread for the running step, which is not tried again beside it."""
    step = step_here()
    return await _in_thread(run, StepThread(run.id, "" if step is None else step.key, "", partial(fn, *args)))


async def _in_thread(run: Run, call: StepThread) -> Any:
    return await _completed(await run.threads.run(call))


def _call_to_its_end(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; an iterator that it returns is read into a list, while it may block and its time-out holds."""
    value = fn(*args, **kwargs)
    return list(value) if isinstance(value, Iterator) else value


async def _completed(value: Any) -> Any:
    """Return what a plain function returned: an awaitable is awaited, an async iterator is read into a list."""
    if isinstance(value, AsyncIterator):
        return [item async for item in value]
    return await contained(value) if isinstance(value, Awaitable) else value


def late_call(run: Run, step: Step, digest: str, called: str | None) -> StepThread | None:
    """Return the call of an earlier try that runs on, or whose result nothing has used yet.

    called: name of a part of another step: the part is identified by its arguments as well.
    """
    late = run.threads.late
    return late.find(run.id, step.key) if called is None else late.find(run.id, called, digest)


async def late_result(run: Run, late: StepThread, digest: str, timeout: float | None) -> AlreadyDone[Any] | None:
    """Wait for a late call and return or raise its result; return None if it had other arguments.

    Raises `StepStillRunning` if it exceeds the time-out again.
    """
    with anyio.move_on_after(timeout):
        await late.wait()
    if not late.ended:
        raise StepStillRunning(late.step, RUNTIME.monotonic() - late.late_since)
    if late.digest != digest:
        run.threads.late.drop(late)
        return None
    run.threads.late.remove(late)
    return AlreadyDone(await _completed(late.result()))
