"""`perdure task replay`: the state of a task as any of its events left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import orjson
import typer

from ...queues import Producer, TaskHandle
from ..journal import Past, check_state, diff, state_at
from .connection import connected
from .failures import Misuse
from .lookup import find_handle
from .output import AsJson, print_fields, print_json, print_text, tell
from .parameters import TaskId

__all__ = ["replay"]


@connected
async def replay(
    producer: Producer,
    task_id: TaskId,
    *,
    at: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="As event N left it. Else as the latest did.", show_default=False),
    ] = None,
    difference: Annotated[
        tuple[int, int] | None,
        typer.Option("--diff", metavar="N M", help="What changed from event N to event M.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the stored snapshot with what the log comes to.")
    ] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out events that cannot be read, or are missing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show the state of a task as one of its events left it.

    The numbers of events are those that 'perdure task events' shows as #N.
    Of a function, the state has what it told: decisions, discoveries, messages.

    Example: perdure task replay 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --at 12

    Example: perdure task replay 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --diff 12 40
    """
    if (at is not None) + (difference is not None) + check > 1:
        raise Misuse("--at, --diff and --check are three questions: ask one at a time")
    if check and skip_unreadable:
        raise Misuse("--check is about all events: leave --skip-unreadable out")
    handle = await find_handle(producer, task_id)
    if check:
        await _check(handle, producer, json=json)
    elif difference is not None:
        await _compare(handle, producer, *difference, lenient=skip_unreadable, json=json)
    else:
        past = await state_at(producer.gateway, handle.partition, task_id, at, lenient=skip_unreadable)
        _warn(past)
        if json:
            print_json({"id": task_id, "event": past.number, "agent": past.agent, "state": past.state})
        else:
            _print_state(past)


async def _check(handle: TaskHandle[Any], producer: Producer, *, json: bool) -> None:
    stored = await check_state(producer.gateway, handle.partition, handle.id)
    if stored is None:
        past = await state_at(producer.gateway, handle.partition, handle.id)
        tell(f"task {handle.id} has no snapshot; its log is sound, {past.number} events")
    else:
        tell(f"task {handle.id}: the snapshot at event {stored.number} is what the log comes to")
    if json:
        print_json({"id": handle.id, "sound": True, "snapshot": None if stored is None else stored.number})


async def _compare(
    handle: TaskHandle[Any], producer: Producer, first: int, second: int, *, lenient: bool, json: bool
) -> None:
    if min(first, second) < 0:
        raise Misuse("events are numbered from 1, and 0 stands for before all of them")
    found = [
        await state_at(producer.gateway, handle.partition, handle.id, number, lenient=lenient)
        for number in (first, second)
    ]
    _warn(found[first < second])
    changes = diff(found[0].state, found[1].state)
    if json:
        print_json({"id": handle.id, "from": first, "to": second, "changes": changes})
        return
    if not changes:
        tell(f"nothing changed from event {first} to event {second}")
    for change in changes:
        value = "" if change["op"] == "remove" else f" {_shown(change['value'])}"
        print_text(f"{change['op']:8}{change['path'] or '/'}{value}")


def _warn(past: Past) -> None:
    for problem in past.skipped[:_MOST]:
        tell(f"left out: {problem}")
    if len(past.skipped) > _MOST:
        tell(f"left out: {len(past.skipped) - _MOST} more")


_MOST: Final = 5
_LONGEST: Final = 200


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _print_state(past: Past) -> None:
    """The state for people: each field by its name, lists one item to a line."""
    shown: dict[str, str | None] = {"event": str(past.number), "agent": past.agent}
    for name, value in past.state.items():
        if value in (None, "", [], {}):
            continue
        shown[name.replace("_", " ")] = _field(name, value)
    print_fields(shown)


def _field(name: str, value: Any) -> str:
    describe = _ITEMS.get(name)
    if isinstance(value, list):
        return "\n".join(describe(one) if describe and isinstance(one, dict) else _shown(one) for one in value)
    if isinstance(value, Mapping) and name != "waiting_for":
        return "\n".join(f"{key}: {_shown(one)}" for key, one in value.items())
    return _shown(value)


def _step(step: Mapping[str, Any]) -> str:
    tries = f", try {step['attempts']}" if step.get("attempts", 0) > 1 else ""
    error = f": {_shown(step['error'])}" if step.get("error") else ""
    return f"[{step.get('status')}{tries}] {step.get('key')}: {_shown(step.get('title'))}{error}"


def _decision(one: Mapping[str, Any]) -> str:
    why = f", because {_shown(one['reasoning'])}" if one.get("reasoning") else ""
    return f"#{one.get('n')} {_shown(one.get('choice'))}{why}"


def _discovery(one: Mapping[str, Any]) -> str:
    return f"#{one.get('n')} {_shown(one.get('fact'))}" + (f" [{_shown(one['source'])}]" if one.get("source") else "")


def _turn(one: Mapping[str, Any]) -> str:
    calls: Sequence[Any] = one.get("tool_calls") or ()
    asks = f" (asks for {', '.join(str(call.get('name')) for call in calls)})" if calls else ""
    return f"{one.get('role')}: {_shown(one.get('content', ''))}{asks}"


_ITEMS: Final = {"plan": _step, "decisions": _decision, "discoveries": _discovery, "messages": _turn}
