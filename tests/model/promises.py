"""Invariants of every state that the acts can lead to (docs/reference/task-states.md), checked on the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import orjson

from tests.model.later import Value, text_of
from tests.model.ledger import Ledger
from tests.model.shelf import Fields

__all__ = ["broken_promises"]

LIVE = (b"queued", b"scheduled")
PAYLOAD = ("env", "args", "task")


def broken_promises(ledger: Ledger, tasks: Iterable[str]) -> Iterator[str]:
    """Return every violated invariant."""
    entries = {entry.known for entry, _ in ledger.ready.entries}
    yield from (f"{entry!r} is pending without a message" for entry in ledger.pending.keys() - entries)
    for task in tasks:
        yield from (f"{task}: {what}" for what in _of_task(ledger, task))


def _of_task(ledger: Ledger, task: str) -> Iterator[str]:
    held, record = ledger.held, ledger.at.record(task)
    state = ledger.state(task)
    messages = [text_of(entry) for entry, fields in ledger.ready.entries if _names(fields, task)]
    letters = [
        text_of(entry) for entry, fields in held.stream(ledger.at.dead).entries if (b"id", task.encode()) in fields
    ]
    due = task in held.sets.get(ledger.at.due, {})
    payload = [name for name in PAYLOAD if held.get(record, name) is not None]
    last_letter = held.get(record, "dead")
    if len(messages) > (state == b"queued") or due > (state == b"scheduled"):
        yield f"is {state!r}, and in the places {messages}, due {due}"
    if held.exists(record) and task not in held.sets.get(ledger.at.timeline, {}):
        yield f"is {state!r}, and not in the timeline"
    if state == b"queued" and messages != [held.get(record, "entry")]:
        yield f"its record names {held.get(record, 'entry')!r}, its message is {messages}"
    if state == b"scheduled" and not due:
        yield "is nowhere"
    if state == b"dead" and letters and last_letter not in letters and max(letters) > (last_letter or b""):
        yield f"its letter is not {last_letter!r}"
    if (state in (b"dead", None)) == bool(payload):
        yield f"is {state!r}, and its record holds {payload}"
    base = held.get(record, "base")
    if base is not None and held.stream(ledger.at.log(task)).find(base) is None:
        yield f"its log lacks the event {base!r}, from which it starts"
    noticed = [ledger.at.record(task)] if task in held.sets.get(ledger.at.outbox, {}) else []
    for part in (*ledger.parts(task), *ledger.streams(task)):
        if part in noticed and state not in LIVE:
            continue
        if held.exists(part) and (state not in LIVE) != (part in held.deadlines):
            yield f"is {state!r}, and {part} {'expires' if part in held.deadlines else 'is kept for ever'}"


def _names(fields: Iterable[tuple[bytes, Value]] | Fields, task: str) -> bool:
    """Return whether a message belongs to a task. (An undecodable one belongs to none.)"""
    envelope = dict(fields).get(b"env", b"{}")
    try:
        return bool(orjson.loads(text_of(envelope)).get("id") == task)
    except (orjson.JSONDecodeError, AttributeError):
        return False
