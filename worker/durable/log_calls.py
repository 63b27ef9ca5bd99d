"""Calls that log an event once: decisions, discoveries, messages of a conversation, tool calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from pydantic_core import from_json, to_json

from ...queues import Entry, Kind
from ..journal import Event, StepRecord, redacted
from ..journal.agent_events import ToolCalled
from ..journal.run_events import Orphaned
from ..log import logger
from .run import Run
from .steps.current import check_place
from .steps.execution import run_step
from .steps.matching import digest_of, match_call, read_recorded_steps
from .steps.options import StepOptions

__all__ = ["call_tool", "log_once", "log_orphans"]

_MOST_LOGGED: Final = 16_384
"""Size in bytes of a tool's result in the log; the checkpoint has the whole result."""


_MOST_ORPHANS: Final = 20
"""Keys of an `orphaned` event."""


async def log_once(run: Run, event: Event) -> int:
    """Log an event unless an earlier run has logged it.

    Events of one type are matched by their content, then by order: see `match_call`. The event is stored with the next
    write, and always before the outcome.

    Returns:
        Number of the event.

    Raises `StepOutsideTask`, `LeaseLost`.
    """
    check_place(run, f"#{event.type}", own=True)
    name = f"#{event.type}"
    if event.step is None and (outer := run.keys.within) is not None:
        event = event.model_copy(update={"step": outer})
    if not run.history.records:
        key, entry = run.keys.next(name), run.next_entry(event)
    else:
        content = event if run.redact is None else redacted(event, run.redact)
        key, recorded, _ = await match_call(run, name, digest_of(content.to_json()))
        if recorded is not None:
            return int(recorded)
        entry = run.next_entry(event)
    record = StepRecord(entry.value, digest_of(entry.log)).encode()
    await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), entry, wait=False)
    return int(entry.value)


async def log_orphans(run: Run) -> str | None:
    """Log the recorded steps that the run has not asked for, and return a text if there are any. Raises `LeaseLost`."""
    orphans = run.keys.unasked(await read_recorded_steps(run))
    if not orphans:
        return None
    some = ", ".join(map(repr, orphans[:3]))
    problem = (
        f"the handler did not ask for {len(orphans)} of its recorded steps, such as {some}: "
        "they were renamed or removed, or called with other arguments"
    )
    logger.bind(task=run.envelope.task, id=run.id).warning("{}", problem)
    await run.log_event(Orphaned(steps=tuple(orphans[:_MOST_ORPHANS]), count=len(orphans)))
    return problem


async def call_tool(
    run: Run,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
) -> Any:
    """Run a step that is logged as a call of a tool, with arguments, result and reasoning. See `StepCaller.tool`."""
    named = _arguments(fn, args, kwargs)

    def event_of(key: str, result: Any, attempt: int) -> Event:
        data = to_json(result)
        clipped = len(data) if len(data) > _MOST_LOGGED else None
        if clipped is not None and run.redact is not None:  # before the cut could split a secret
            data = run.redact.head(data.decode(), _MOST_LOGGED).encode()
        return ToolCalled(
            tool=name,
            arguments=named,
            result=result if clipped is None else data[:_MOST_LOGGED].decode("utf-8", "ignore"),
            reasoning=options.reasoning,
            call=options.call,
            attempt=attempt,
            clipped=clipped,
            step=key,
        )

    return await run_step(run, name, fn, args, kwargs, options, event_of, tool=name)


def _arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, as JSON data; a value without a JSON form becomes the name of its type."""
    try:
        named = dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call will raise, or there is no signature
        named = {str(place): value for place, value in enumerate(args)} | kwargs
    found: dict[str, Any] = from_json(
        to_json(named, inf_nan_mode="strings", fallback=lambda one: f"<{type(one).__name__}>")
    )
    return found
