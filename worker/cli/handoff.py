"""`perdure task handoff`: where a task stands, for whoever goes on with it."""

from __future__ import annotations

from typing import Annotated

import typer

from ...queues import Producer, Record, State, Trail, read_trail
from ..errors import BadHandoff
from ..journal import HANDOFF, HANDOFF_TOKENS, Handoff, fitted, fitted_text, handoff_of
from ..journal.handoff import RECEIVED, Why
from .connection import connected
from .lookup import find_handle
from .output import AsJson, print_json, print_text, tell
from .parameters import TaskId

__all__ = ["handoff"]


@connected
async def handoff(
    producer: Producer,
    task_id: TaskId,
    *,
    budget: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="No longer than this many tokens (estimated).")
    ] = HANDOFF_TOKENS,
    received: Annotated[bool, typer.Option("--received", help="The one with which another task handed on.")] = False,
    json: AsJson = False,
) -> None:
    """Print a task's handoff as Markdown: what is in progress, decided, next, and waited for.

    It is what the last run has left; where that left none, or something has
    happened since, it is drawn up from the event log.

    Example: perdure task handoff 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --budget 500
    """
    handle = await find_handle(producer, task_id)
    record = await handle.record()
    trail = await read_trail(producer.gateway, handle.partition, task_id)
    found = _stored(trail, task_id, RECEIVED) if received else _current(trail, record)
    if found is None:
        tell(f"task {task_id} goes on from no other task")
        raise typer.Exit(1)
    if json:
        small = fitted(found, budget, form=lambda one: one.to_json().decode())
        print_json(small.model_dump(mode="json"))
    else:
        print_text(fitted_text(found, budget).rstrip())


def _current(trail: Trail, record: Record) -> Handoff:
    """The one that is stored, if nothing has happened since and the task does not run; else one as of now."""
    stored = _stored(trail, record.id, HANDOFF)
    if stored is not None and stored.events == trail.number and record.state is not State.RUNNING:
        return stored
    step = () if record.step is None or record.state is not State.RUNNING else (record.step,)
    why = _why(trail, record)
    drawn = handoff_of(trail, task=record.task or "?", session=record.id, why=why, in_flight=step)
    return drawn if why == "asked" else drawn.model_copy(update={"at": record.finished_at or trail.events[-1].at})


def _why(trail: Trail, record: Record) -> Why:
    if record.state is State.SUCCEEDED:
        return "finished"
    if record.state is State.DEAD:
        return "burial"
    last = trail.events[-1].type if trail.events else ""
    known: dict[str, Why] = {"crashed": "crash", "attempt_failed": "failure", "handed_off": "shutdown"}
    return known.get(last, "asked")


def _stored(trail: Trail, task_id: str, key: str) -> Handoff | None:
    data = trail.saved.get(key)
    if data is None:
        return None
    try:
        return Handoff.from_json(task_id, data)
    except BadHandoff as error:
        tell(f"{error}; this one is from the event log")
        return None
