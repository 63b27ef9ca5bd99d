"""A plain function as the handler of a task."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...errors import TaskDefinitionError
from ..context import Context
from .context import SyncContext
from .session import ThreadSession

P = ParamSpec("P")
R = TypeVar("R")


def call_in_thread(
    name: str, handler: Callable[Concatenate[SyncContext, P], R]
) -> Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]:
    """Return a plain function as an async handler, which calls it in a thread. name: that of the task."""

    @functools.wraps(handler)
    async def call(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        run, sync = ctx._run, SyncContext(ctx)
        session = ThreadSession(run.threads, run.keys, sync)
        value: R = await session.run_handler(functools.partial(handler, sync, *args, **kwargs))
        if inspect.iscoroutine(value):
            value.close()
            raise TaskDefinitionError(f"task {name!r} is a plain function that returned a coroutine: use 'async def'")
        return value

    return call
