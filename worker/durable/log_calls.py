"""What a handler tells of its work, recorded once: decisions, discoveries, turns of a conversation, calls of tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from pydantic_core import from_json, to_json

from ...queues import Entry, Kind
from ..journal import Event
from ..journal.agent_events import ToolCalled
from ..journal.step_record import StepRecord
from .run import Run
from .step import Durability, StepOptions, check_place, run_step

__all__ = ["call_tool", "log_once"]

_SHOWN: Final = 16_384
"""Bytes of a tool's result that the log has; the whole is in the checkpoint."""


async def log_once(run: Run, event: Event) -> int:
    """Put an event into the log, unless a former run of the same handler has: the second `decided` is the second.
    Returns its number.

    It goes out with the next write, and before the outcome. Raises `StepOutsideTask`, `LeaseLost`.
    """
    check_place(run, f"#{event.type}", own=True)
    key = run.keys.next(f"#{event.type}")
    if event.step is None and (outer := run.keys.within) is not None:
        event = event.model_copy(update={"step": outer})
    told = run.history.done.get(key)
    if told is not None:
        return int(StepRecord.decode(told).result)
    entry = run.next_entry(event)
    await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, StepRecord(entry.value).encode()), entry, wait=False)
    return int(entry.value)


async def call_tool(
    run: Run,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
    durability: Durability,
    *,
    reasoning: str,
    call: str | None,
) -> Any:
    """A step that the log tells of as the call of a tool: with its arguments, its result and why."""
    named = _arguments(fn, args, kwargs)

    def told(key: str, result: Any, attempt: int) -> Event:
        data = to_json(result)
        clipped = len(data) if len(data) > _SHOWN else None
        if clipped is not None and run.redact is not None:  # before a secret is cut in two
            data = run.redact(data.decode()).encode()
        return ToolCalled(
            tool=name,
            arguments=named,
            result=result if clipped is None else data[:_SHOWN].decode("utf-8", "ignore"),
            reasoning=reasoning,
            call=call,
            attempt=attempt,
            clipped=clipped,
            step=key,
        )

    return await run_step(run, name, fn, args, kwargs, options, durability, told, tool=name)


def _arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, as JSON data; what has no JSON form counts by its type."""
    try:
        named = dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # it takes none such, which calling it will tell; or has no signature to ask
        named = {str(place): value for place, value in enumerate(args)} | kwargs
    found: dict[str, Any] = from_json(
        to_json(named, inf_nan_mode="strings", fallback=lambda one: f"<{type(one).__name__}>")
    )
    return found
