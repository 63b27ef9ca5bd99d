"""Goal of a run of a function: the call of its task in short, for handoff documents and coherence checks."""

from __future__ import annotations

from ...queues.records import shown_arguments
from ..journal.handoff.calls import call_text
from .run import Run


def goal_of(run: Run) -> str:
    """Return the task's name with its arguments in short, without secrets: `audit(root="src")`."""
    task, delivery = run.envelope.task, run.delivery
    cipher = run.gateway.encryptor.of(delivery.partition, run.id)
    shown = shown_arguments(cipher, task, delivery.fields.get(b"args"), run.envelope.secrets)
    goal = call_text(task, shown or b"{}")
    return goal if run.redact is None else run.redact(goal)
