"""Handlers of tasks: async functions, and plain ones, which run in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from ..deadletter import Retry
from .arguments import type_hints
from .durable import Context, Durability
from .durable.sync import SyncContext, call_in_thread
from .errors import TaskDefinitionError

__all__ = ["Handler", "P", "R", "SyncHandler", "as_async", "check_options"]

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
SyncHandler = Callable[Concatenate[SyncContext, P], R]


def check_options(name: str, *, retry: object, durability: object, on_orphan: object) -> None:
    """Check options of a task that are not times. Raises `TaskDefinitionError`."""
    if not isinstance(retry, Retry):
        raise TaskDefinitionError(f"task {name!r}: retry must be a Retry, such as Retry(max_attempts=3), got {retry!r}")
    known = {"durability": (durability, get_args(Durability)), "on_orphan": (on_orphan, ("warn", "fail"))}
    for what, (given, allowed) in known.items():
        if given not in allowed:
            raise TaskDefinitionError(f"task {name!r}: {what} must be one of {', '.join(allowed)}, got {given!r}")


def as_async(name: str, handler: Callable[..., Any]) -> Handler[..., Any]:
    """Return a handler as an async function; a plain one runs in a thread. Raises `TaskDefinitionError`."""
    is_async = inspect.iscoroutinefunction(handler)
    if not is_async and (not inspect.isroutine(handler) or _yields(handler)):
        raise TaskDefinitionError(f"task {name!r} must be an 'async def' or a 'def', without 'yield', got {handler!r}")
    wrong: type = SyncContext if is_async else Context
    if wrong in type_hints(name, handler).values():
        remedy = "Context: async def f(ctx: Context, ...)" if is_async else "SyncContext: def f(ctx: SyncContext, ...)"
        raise TaskDefinitionError(f"task {name!r}: the first parameter must be the {remedy}")
    return handler if is_async else call_in_thread(name, handler)


def _yields(handler: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler)
