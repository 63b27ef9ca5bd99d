"""Remedies for dead letters, by reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..doubts import Doubt, undecided

_REPLAY: Final = "perdure dlq replay {id}"

REMEDIES: Final[Mapping[str, str]] = {
    "attempts_exhausted": f"fix the cause of the error, then run: {_REPLAY}",
    "not_retryable": f"fix the handler or the arguments, then run: {_REPLAY} (with --edit-args JSON for new arguments)",
    "crash_loop": f"find out what kills the worker (memory, native code), then run: {_REPLAY}",
    "timeout": f"raise the task's timeout or split it into steps, then run: {_REPLAY}",
    "unreadable": f"find the producer of the message; {_REPLAY} --fresh drops a checkpoint that cannot be read",
    "newer_version": f"deploy workers of the newer version, then run: {_REPLAY}",
    "invalid_arguments": (
        f"deploy a worker whose code accepts its arguments, then run: {_REPLAY}; or run: {_REPLAY} --edit-args JSON"
    ),
    "unknown_task": f"deploy a worker that has the task, then run: {_REPLAY}",
    "wrong_app": f"start a worker of app {{app}} on its queue, then run: {_REPLAY}",
    "unserialisable_result": (
        f"return JSON data of the declared type and size, or raise the limit that the error names, then run: {_REPLAY}"
    ),
    "undecryptable": f"give the workers the encryption key of the task, then run: {_REPLAY}",
    "incoherent": f"read the findings (perdure task show {{id}}), then run: {_REPLAY}",
    "in_doubt": (
        "find out whether the effect of the step happened, then run: perdure task resolve {id} STEP with "
        f"--result JSON, --failed TEXT or --run-again; then: {_REPLAY}"
    ),
    "orphaned_steps": f"give the steps their former names and run: {_REPLAY}; with --fresh all steps run again",
}
"""Remedy by the reason of a dead letter; `{id}` is the id of the task, `{app}` the name of its app."""


_TOO_LARGE: Final = (
    "pass or return less, such as a reference to an artifact, or raise the limit that the error names and restart the "
    f"workers, then run: {_REPLAY}; it continues after its recorded steps"
)

_DECISION: Final = (
    "replace the decision about the step that the error names (perdure task resolve {id} STEP with --result JSON, "
    f"--failed TEXT or --run-again), then run: {_REPLAY}"
)
_OF_ERRORS: Final = {"PayloadTooLarge": _TOO_LARGE, "ResolutionMismatch": _DECISION, "StepResolvedAsFailed": _DECISION}


def remedy_for(reason: str, task_id: str, error: str = "", app: str | None = None, doubts: Sequence[Doubt] = ()) -> str:
    """Return what an operator can do about a dead letter.

    Args:
        error: Name of its error.
        app: App of the task.
        doubts: Its risky steps that were cut off, as far as they are known.
    """
    if reason == "in_doubt" and doubts:
        return _remedy_of_doubt(task_id, doubts)
    if reason == "not_retryable" and (remedy := _OF_ERRORS.get(error.rpartition(".")[2])):
        return remedy.format(id=task_id)
    remedy = REMEDIES.get(reason, f"fix the cause of the error, then run: {_REPLAY}")
    return remedy.format(id=task_id, app="of the task" if app is None else repr(app))


def _remedy_of_doubt(task_id: str, doubts: Sequence[Doubt]) -> str:
    """Return how to decide about the steps in doubt; after that, how to replay the task."""
    replay = _REPLAY.format(id=task_id)
    left = undecided(doubts)
    if not left:
        return f"run: {replay}; its steps in doubt are resolved"
    first = left[0]
    more = f", and the same for {', '.join(repr(doubt.step) for doubt in left[1:])}" if left[1:] else ""
    return (
        f"find out whether the effect of step {first.step!r} happened (idempotency key {first.idempotency_key}), then "
        f"run: {first.command}{more}; then: {replay}"
    )
