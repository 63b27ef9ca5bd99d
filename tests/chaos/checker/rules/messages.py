"""Rule: a message to an agent is in its conversation once, those of a sender in their order, or counted as unread."""

from __future__ import annotations

from collections.abc import Iterator

from ...journal import Line
from ..history import History, Task, Violation

__all__ = ["check_messages"]


def check_messages(history: History) -> Iterator[Violation]:
    """Check the conversations of the agents that have succeeded. Redis may have lost the latest messages."""
    for task in history.tasks.values():
        if task.sent and task.final is not None and task.final["state"] == "succeeded":
            yield from _check(history, task, task.final)


def _check(history: History, task: Task, final: Line) -> Iterator[Violation]:
    turns: list[str] = final["conversation"]
    places: list[int] = []
    missing: list[Line] = []
    for line in task.sent:
        found = [place for place, turn in enumerate(turns) if line["text"] in turn]
        if len(found) > 1:
            what = f"{task.id}: message {line['text']} is {len(found)} times in the conversation"
            yield Violation("message doubled", what, (line, final))
        elif found:
            places += found
        elif not history.lost(line.at, history.end):
            missing.append(line)
    if len(missing) > final["unread"]:
        what = f"{task.id}: {len(missing)} messages are not in the conversation, and {final['unread']} were left unread"
        yield Violation("message lost", what, (*missing, final))
    if places != sorted(places) and not any(history.lost(line.at, history.end) for line in task.sent):
        yield Violation("out of order", f"{task.id}: its messages are in the order {places}", (*task.sent, final))
