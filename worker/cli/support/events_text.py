"""Text form of a task's event: one line."""

from __future__ import annotations

from ....queues.event_log import TaskEvent
from ...shown_events import event_sentence, event_step, has_sentence
from .output import timestamp


def describe_event(event: TaskEvent, *, of_many: bool = False) -> str:
    """Return the time, number, type, step and content of an event as one line.

    Args:
        of_many: Whether to add the task's id, because events of several tasks are printed.
    """
    task = event.task_id if of_many else ""
    number = "" if event.number is None else f"#{event.number}"
    step = event_step(event)
    place = f"in {step}:" if step and has_sentence(event) else step
    line = " ".join([task, number, event.type, place, event_sentence(event)])
    return f"{timestamp(event.at)}  {' '.join(line.split())}"
