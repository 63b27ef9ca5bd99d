"""An event of a task in words, for the command line and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from ..queues.event_log import TaskEvent
from ..queues.wording import short, shown_time

Data = Mapping[str, Any]

_MAX_LENGTH: Final = 160
"""Characters of one value."""


def event_sentence(event: TaskEvent) -> str:
    """Return what an event says, on one line, without its time, number, type and step."""
    data = event.data if isinstance(event.data, dict) else {}
    if event.problem is not None:  # a sentence could state something false: show the raw fields
        text = f"(cannot be read: {event.problem}) {_fields(data)}"
    elif event.data is not None and not isinstance(event.data, dict):
        text = _short(event.data)
    else:
        text = _SENTENCES.get(event.type, _fields)(data)
    return " ".join(text.split())


def event_step(event: TaskEvent) -> str:
    """Return the key of the step that the event is about or happened in; empty without one."""
    step = event.step or ""
    return step.rpartition("/")[0] if event.type == "tool_called" else step


def has_sentence(event: TaskEvent) -> bool:
    """Return whether events of this type have a sentence; of others the fields are shown."""
    return event.type in _SENTENCES


def _short(value: Any, longest: int = _MAX_LENGTH) -> str:
    """Return a value on one line, cut to a length."""
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return short(text[: 4 * longest], longest)


def _fields(data: Data) -> str:
    """Return the fields as NAME=VALUE, for types without a sentence, such as a user's own."""
    shown = (name for name in data if name not in _HIDDEN and data[name] not in (None, "", [], {}))
    return " ".join([*(f"{name}={_short(data[name])}" for name in shown), _changes(data)])


_HIDDEN: Final = frozenset({"traceback", "v", "step", "changes", "own"})


def _changes(data: Data) -> str:
    changes = data.get("changes")
    if not isinstance(changes, list) or not changes:
        return ""
    paths = [str(one.get("path")) if isinstance(one, dict) else "?" for one in changes]
    return _short(f"changes {', '.join(paths)}")


def _because(data: Data, name: str) -> str:
    return f", because {_short(data[name])}" if data.get(name) else ""


def _called(data: Data) -> str:
    named = data.get("arguments")
    given = ", ".join(f"{name}={_short(one, 60)}" for name, one in named.items()) if isinstance(named, dict) else ""
    size = data.get("clipped")
    clipped = "" if size is None else f" (of {size} bytes)"
    tries = f", try {data['attempt']}" if data.get("attempt", 1) != 1 else ""
    result = _short(data.get("result"))
    return f"{_short(data.get('tool'))}({_short(given)}) -> {result}{clipped}{tries}{_because(data, 'reasoning')}"


def _decided(data: Data) -> str:
    left = data.get("alternatives")
    others = f"; left open: {_short(', '.join(map(str, left)))}" if isinstance(left, list) and left else ""
    return f"{_short(data.get('choice'))}{_because(data, 'reasoning')}{others}"


def _discovered(data: Data) -> str:
    return _short(data.get("fact")) + (f" [{_short(data['source'])}]" if data.get("source") else "")


def _message_added(data: Data) -> str:
    message = data.get("message")
    if not isinstance(message, dict):
        return _fields(data)
    calls = message.get("tool_calls")
    names = [str(one.get("name")) for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    requested = f" (calls {', '.join(names)})" if names else ""
    return f"{message.get('role')}: {_short(message.get('content', ''))}{requested}"


def _planned(data: Data) -> str:
    steps = data.get("steps")
    keys = [str(one.get("key")) for one in steps if isinstance(one, dict)] if isinstance(steps, list) else []
    again = "again: " if data.get("again") else ""
    return f"{again}{_short(', '.join(keys))}{_because(data, 'why')}"


def _resolved(data: Data) -> str:
    decision = data.get("decision")
    if decision == "result":
        return f"with result {_short(data.get('result'))}{_by(data)}"
    if decision == "failed":
        return f"as failed: {_short(data.get('failed', ''))}{_by(data)}"
    return f"to run again{_by(data)}"


def _forked(data: Data) -> str:
    return f"from task {data.get('source')} at event {data.get('at')}"


def _compacted(data: Data) -> str:
    count, first, last = (data.get(name) for name in ("messages", "first", "last"))
    return f"{count} messages (events {first} to {last}) to: {_short(data.get('summary', ''))}"


def _waiting(data: Data) -> str:
    source = f" from {_short(data['on'])}" if data.get("on") else ""
    why = f": {_short(data['why'])}" if data.get("why") else ""
    if data.get("what") == "time" and isinstance(data.get("until"), int):
        return f"until {shown_time(data['until'])}"
    instead = f", in place of {_short(data['withdrawn'])}" if data.get("withdrawn") else ""
    wait = f" {data['wait']}" if data.get("wait") else ""
    return f"for {_short(data.get('what') or 'something')}{wait}{source}{why}{instead}"


def _answered(data: Data) -> str:
    by = f" by {_short(data['by'])}" if data.get("by") else ""
    return f"{data.get('wait')}{by}: {_short(data.get('value', data.get('why', '')))}"


def _received(data: Data) -> str:
    sender = f" from {_short(data['sender'])}" if data.get("sender") else ""
    return f"message {data.get('number')}{sender}: {_short(data.get('content', ''))}"


def _sent(data: Data) -> str:
    return f"to task {data.get('to')}, message {data.get('number')}: {_short(data.get('content', ''))}"


def _promised(data: Data) -> str:
    """Return what is promised, by and to whom, and until when."""
    by = "" if data.get("by", "me") == "me" else f"{_short(data['by'])}: "
    to = "" if data.get("to", "me") == "me" else f" (to {_short(data['to'])})"
    due = f", due {_short(data['due'])}" if data.get("due") else ""
    return f"{by}{_short(data.get('what', ''))}{to}{due}"


def progress_text(data: Data) -> str:
    """Return how much is done, of how much, and the note."""
    done, total = data.get("done"), data.get("total")
    share = f" of {_amount(total)} ({min(1.0, done / total):.0%})" if total and isinstance(done, (int, float)) else ""
    note = f": {_short(data['note'])}" if data.get("note") else ""
    return f"{_amount(done)}{share}{note}"


def _amount(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _joined(data: Data) -> str:
    what = str(data["child"]) if data.get("child") else f"{data.get('count', 0)} of them"
    return what if not data.get("failed") else f"{what}, {data['failed']} without a result"


def _by(data: Data) -> str:
    return f" (by {_short(data['by'])})" if data.get("by") else ""


_SENTENCES: Final[dict[str, Callable[[Data], str]]] = {
    "corrected": lambda data: f"{', '.join(map(str, data.get('paths', ())))}{_by(data)}",
    "correction_refused": lambda data: f"{_short(data.get('why', ''))}{_by(data)}",
    "tool_called": _called,
    "waiting": _waiting,
    "answered": _answered,
    "answer_dropped": _answered,
    "received": _received,
    "promised": _promised,
    "promise_kept": _promised,
    "left_promises": lambda data: f"{data.get('count', 0)}: {'; '.join(map(_promised, data.get('promises', ())))}",
    "message_sent": _sent,
    "children_spawned": lambda data: f"{data.get('count', 0)} of task {_short(data.get('task'))}",
    "children_joined": _joined,
    "decided": _decided,
    "discovered": _discovered,
    "message_added": _message_added,
    "withdrawn": lambda data: f"what events {', '.join(map(str, data.get('numbers', ())))} had added",
    "planned": _planned,
    "forked": _forked,
    "step_resolved": _resolved,
    "failures_dropped": lambda data: f"of {data.get('count', 0)} steps: {', '.join(map(str, data.get('steps', ())))}",
    "compacted": _compacted,
    "progress": progress_text,
    "value_set": lambda data: f"{data.get('name')} = {_short(orjson.dumps(data.get('value')).decode())}{_by(data)}",
}
