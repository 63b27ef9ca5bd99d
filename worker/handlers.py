"""Handlers of tasks: async functions, and plain ones, which run in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, get_args

from ..deadletter.policy import Retry
from ..queues.defaults import unknown_option
from .arguments import CALL_OPTIONS, type_hints
from .durable.context import Context
from .durable.steps.options import Durability
from .durable.sync.context import SyncContext
from .durable.sync.handler import call_in_thread
from .errors import TaskDefinitionError

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]
SyncHandler = Callable[Concatenate[SyncContext, P], R]

_WORDS: Final[Mapping[str, str]] = {
    **{option: f"the options of each call: options({option}=...).enqueue(...)" for option in CALL_OPTIONS},
    **dict.fromkeys(("attempts", "max_attempts", "max_retries", "retries", "tries"), "retry=Retry(max_attempts=...)"),
    **dict.fromkeys(("backoff", "retry_delay"), "retry=Retry(base=..., factor=...)"),
    "max_crashes": "retry=Retry(max_crashes=...)",
    "strict_order": "it for functions only, since a plan may change",
    "time_limit": "timeout",
}
"""Remedies for options of a call and for names that options of a task have elsewhere."""


def refuse_unknown(method: Callable[..., Any], unknown: Collection[str]) -> None:
    """Raise `TaskDefinitionError` if a method that registers a task is given options that it does not have."""
    if unknown:
        parameters = inspect.signature(method).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        raise TaskDefinitionError(unknown_option(f"option of app.{method.__name__}", unknown, known, _WORDS))


def check_options(name: str, *, retry: object, durability: object, on_orphan: object, strict_order: object) -> None:
    """Check options of a task that are not times. Raises `TaskDefinitionError`."""
    if not isinstance(retry, Retry):
        raise TaskDefinitionError(f"task {name!r}: retry must be a Retry, such as Retry(max_attempts=3), got {retry!r}")
    known = {"durability": (durability, get_args(Durability)), "on_orphan": (on_orphan, ("warn", "fail"))}
    for what, (given, allowed) in known.items():
        if given not in allowed:
            raise TaskDefinitionError(f"task {name!r}: {what} must be one of {', '.join(allowed)}, got {given!r}")
    if not isinstance(strict_order, bool):
        raise TaskDefinitionError(f"task {name!r}: strict_order must be True or False, got {strict_order!r}")


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
