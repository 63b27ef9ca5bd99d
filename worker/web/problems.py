"""Problem details (RFC 9457) of refused requests and of errors.

A problem names its source, so that a caller can tell an error of its own request from one of the task, of Redis and of
the server:

    {"type": "urn:perdure:problem:task-not-found", "title": "Not Found", "status": 404, "source": "request",
     "detail": "could not find task '...' in any queue of namespace 'perdure'"}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from ...queues import errors
from ...queues.errors import PerdureError
from ..log import logger

Source = Literal["request", "server", "redis", "task"]

MEDIA_TYPE: Final = "application/problem+json"


class ProblemError(BaseModel):
    """One invalid input.

    Attributes:
        where: Name of the input, such as `args.order.id`.
    """

    where: str
    message: str


class FailedTask(BaseModel):
    """A task that has ended without a result."""

    id: str
    state: str
    reason: str | None = Field(default=None, description="Reason of the dead letter.")
    error: str | None = Field(default=None, description="Class of what the handler raised.")
    message: str | None = Field(default=None, description="Text of what the handler raised.")


class ProblemView(BaseModel):
    """Problem details of RFC 9457 with the source of the problem."""

    type: str = Field(description="URN of the kind of problem.")
    title: str = Field(description="Phrase of the status code.")
    status: int
    detail: str = Field(description="What is wrong, and the remedy.")
    source: Source = Field(description="What the problem is a problem of.")
    errors: list[ProblemError] = Field([], description="Invalid inputs, one by one.")
    task: FailedTask | None = Field(default=None, description="The task whose problem it is.")


class Problem(Exception):
    """A request that is refused or failed.

    Args:
        status: Status code of HTTP.
        kind: Last part of the problem's type, such as `task-not-found`.
        detail: What is wrong, and the remedy, in one sentence.
        source: What the problem is a problem of.
        fields: Invalid inputs.
        headers: Headers of the response, such as `Retry-After`.
        task: The task whose problem it is.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        source: Source = "request",
        fields: Sequence[ProblemError] = (),
        headers: Mapping[str, str] | None = None,
        task: FailedTask | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.source: Source = source
        self.fields = list(fields)
        self.headers = dict(headers or {})
        self.task = task

    def without_server(self) -> Problem:
        """Return this problem for a user who may not know the server: one of Redis names its address and keys."""
        if self.source != "redis":
            return self
        logger.warning("a problem is shown with status {} only: {}", self.status, self.detail)
        detail = "Redis cannot serve this now, or holds data that cannot be read: try again later"
        return Problem(self.status, self.kind, detail, source="redis", headers=self.headers)

    def view(self) -> ProblemView:
        """Return the problem details."""
        return ProblemView(
            type=f"urn:perdure:problem:{self.kind}",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            source=self.source,
            errors=self.fields,
            task=self.task,
        )


_RETRY: Final = {"Retry-After": "1"}

_STATUS: Final[Sequence[tuple[type[PerdureError], int, Source]]] = (
    (errors.ServerFull, 507, "redis"),
    (errors.NotReplicated, 504, "redis"),
    (errors.Unavailable, 503, "redis"),
    (errors.WrongType, 500, "redis"),
    (errors.Refused, 502, "redis"),
    (errors.PayloadTooLarge, 413, "request"),
    (errors.TaskNotFound, 404, "request"),
    (errors.BudgetNotFound, 404, "request"),
    (errors.LimitNotFound, 404, "request"),
    (errors.ScheduleNotFound, 404, "request"),
    (errors.SessionNotFound, 404, "request"),
    (errors.WaitNotFound, 404, "request"),
    (errors.StreamTrimmed, 410, "request"),
    (errors.InvalidAnswer, 422, "request"),
    (errors.AnswerRefused, 409, "request"),
    (errors.QueueFull, 429, "request"),
    (errors.SessionFull, 429, "request"),
    (errors.InboxFull, 429, "request"),
    (errors.TaskExists, 409, "request"),
    (errors.StillRunning, 409, "request"),
    (errors.TaskEnded, 409, "request"),
    (errors.CannotResolve, 409, "request"),
    (errors.HandOffRefused, 409, "request"),
    (errors.JobError, 409, "request"),
    (errors.ChangedMeanwhile, 409, "request"),
    (errors.ScheduleError, 409, "request"),
    (errors.PauseError, 409, "request"),
    (errors.SessionError, 409, "request"),
    (errors.ValueRefused, 422, "request"),
    (errors.CatalogError, 422, "request"),
    (errors.InvalidUniqueKey, 422, "request"),
    (errors.InvalidLimitUse, 422, "request"),
    (errors.InvalidBudgetUse, 422, "request"),
    (errors.ConfigurationError, 422, "request"),
    (errors.TaskFailed, 409, "task"),
    (errors.TaskCancelled, 409, "task"),
    (errors.NewerVersionNeeded, 501, "server"),
    (errors.UnreadableRecord, 500, "redis"),
    (errors.UnreadableCheckpoint, 500, "redis"),
    (errors.UnreadableEnvelope, 500, "redis"),
    (errors.DecryptionError, 500, "redis"),
    (errors.LargeValueLost, 500, "redis"),
)
"""Class of an error, status code, and source; the first match counts."""


def problem_of(error: PerdureError) -> Problem:
    """Return the problem of an error that Perdure raised on purpose."""
    status: int = 500
    source: Source = "server"
    for kind, code, whose in _STATUS:
        if isinstance(error, kind):
            status, source = code, whose
            break
    headers = _RETRY if status in (429, 503) else None
    task: FailedTask | None = None
    if isinstance(error, errors.TaskFailed):
        evidence = {name: None if (text := error.error.get(name)) is None else str(text) for name in _EVIDENCE}
        task = FailedTask(id=error.task_id, state="dead", reason=error.reason, **evidence)
    elif isinstance(error, errors.TaskCancelled):
        task = FailedTask(id=error.task_id, state="cancelled")
    return Problem(status, _kind(type(error).__name__), str(error), source=source, headers=headers, task=task)


_EVIDENCE: Final = ("error", "message")


@contextmanager
def refused_as(where: str) -> Iterator[None]:
    """Raise a problem of an input for a `ValueError` or `TypeError` that the block raises. where: name of the input."""
    try:
        yield
    except PerdureError:
        raise
    except (ValueError, TypeError) as error:
        field = ProblemError(where=where, message=str(error))
        raise Problem(422, "invalid-input", f"{where}: {error}", fields=[field]) from None


def _kind(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def invalid_field(where: str, message: str) -> Problem:
    """Return the problem of one invalid input that its model cannot check. message: what it must be."""
    return invalid([{"loc": (where,), "msg": message}])


def message_of(error: Mapping[str, Any]) -> str:
    """Return the message of an error of pydantic, without the name of the exception that a validator raised."""
    return str(error["msg"]).removeprefix("Value error, ")


def invalid(found: Sequence[Mapping[str, Any]]) -> Problem:
    """Return the problem of inputs that do not fit their model. found: errors of pydantic."""
    fields = [
        ProblemError(where=".".join(map(str, error["loc"])) or "body", message=message_of(error))
        for error in found[:50]
    ]
    listed = "; ".join(f"{field.where}: {field.message}" for field in fields[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return Problem(422, "invalid-input", f"{listed}{more}", fields=fields)
