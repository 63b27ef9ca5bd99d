"""Opening what a delivery brought: its arguments, and what earlier runs left; and hearing of the secrets among them."""

from __future__ import annotations

from typing import Any

from ...queues import MARK, Redaction, arguments_of, marked_values
from ..durable import Run
from ..registry import Task

__all__ = ["open_arguments", "open_history"]


def open_history(run: Run) -> None:
    """Open the records of earlier runs. Raises `CannotOpen`."""
    run.history.open(run.gateway.sealer.of(run.delivery.partition, run.id))


def open_arguments(run: Run, task: Task[Any, Any]) -> dict[str, Any]:
    """The arguments by name; from now on the run keeps their secrets out of what it tells.

    Raises `CannotOpen`, `InvalidArguments`.
    """
    data = run.delivery.fields.get(b"args", b"{}")
    sealer = run.gateway.sealer
    if data[:1] == MARK or sealer.required:
        data = sealer.of(run.delivery.partition, run.id).open(arguments_of(task.name), data)
    marks, known = run.envelope.secrets, task.arguments
    if marks:
        run.redact = Redaction(marked_values(data, marks))
    arguments = known.decode(data)
    if known.has_secrets and not marks:  # its producer did not know
        run.redact = Redaction(known.secret_values(arguments))
    return arguments
