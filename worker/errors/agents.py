"""Errors of agents: state, context of a model, handoff."""

from __future__ import annotations

from collections.abc import Sequence

from ...queues import PerdureError

__all__ = [
    "BadHandoff",
    "BadHistory",
    "BadSnapshot",
    "CompactionFailed",
    "ContextError",
    "ContextTooLarge",
    "IdentityConflict",
    "IdentityError",
    "StateBusy",
    "StateDrift",
    "StateError",
    "StateMismatch",
    "StateTooLarge",
    "StateUnstorable",
]


class ContextError(PerdureError):
    """Base of errors in the context of a model."""


class ContextTooLarge(ContextError, ValueError):
    """A layer of the context does not fit. layer: its name. tokens: its size. budget: the limit in tokens."""

    def __init__(self, layer: str, tokens: int, budget: int, remedy: str) -> None:
        super().__init__(f"context layer {layer!r} has {tokens} tokens, the budget is {budget}: {remedy}")
        self.layer, self.tokens, self.budget = layer, tokens, budget


class CompactionFailed(ContextError):
    """The summarizer returned no usable summary. Nothing was replaced.

    first, last: numbers of the first and last event to summarize.
    """

    def __init__(self, task_id: str, first: int, last: int, problem: str) -> None:
        super().__init__(f"task {task_id}: events {first} to {last} could not be summarized and were kept: {problem}")
        self.task_id, self.first, self.last = task_id, first, last


class StateError(PerdureError):
    """Base of errors in the state of an agent. Retrying does not help."""


class BadSnapshot(StateError):
    """The stored state of an agent cannot be read. It was not changed."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the state of task {task_id} cannot be read: {problem}; it was not changed")
        self.task_id, self.problem = task_id, problem


class BadHistory(StateError):
    """An event of the log is missing, cannot be read, or does not fit the events before it."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(problem)
        self.task_id = task_id


class StateMismatch(StateError):
    """The stored state of an agent does not fit its class. It was not changed."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        """problem: starts with the name of the field."""
        super().__init__(
            f"the state of task {task_id} does not fit agent {agent!r}: {problem}; it was not changed. Give new "
            "fields a default, and changed fields a validator that accepts the previous form, then replay the task"
        )
        self.task_id, self.problem = task_id, problem


class StateTooLarge(StateError):
    """The state of an agent exceeds the size limit. size, limit: bytes of JSON. largest: largest fields, as text."""

    def __init__(self, task_id: str, agent: str, size: int, limit: int, largest: Sequence[tuple[str, int]]) -> None:
        """largest: fields with their bytes, largest first."""
        fields = ", ".join(f"{name} ({bytes_:,} bytes)" for name, bytes_ in largest)
        super().__init__(
            f"the state of agent {agent!r}, task {task_id}, has {size:,} bytes, the limit is {limit:,}; largest "
            f"fields: {fields}. Store large data in artifacts or files and keep a reference in the state; run: perdure "
            f"task compact {task_id}, or raise PERDURE_PAYLOAD_LIMIT of the workers"
        )
        self.size, self.limit, self.largest = size, limit, fields


class StateBusy(StateError):
    """The state of an agent cannot be changed from outside: a worker has the task or may take it, or it has ended."""

    def __init__(self, task_id: str, state: str | None) -> None:
        """state: of the task; None if there is no such task."""
        super().__init__(
            f"the state of task {task_id} could not be changed: the task must be waiting, scheduled or dead, got "
            f"{state or 'no such task'}"
        )
        self.task_id = task_id


class StateUnstorable(StateError, TypeError):
    """A field of an agent's state has no JSON form or a value of the wrong type, or a later run could not read it."""

    def __init__(self, task_id: str, agent: str, problem: str) -> None:
        super().__init__(f"the state of agent {agent!r}, task {task_id}, cannot be stored: {problem}")


class StateDrift(StateError):
    """The state of an agent differs from the reduction of its event log, or from what a later run reads."""

    def __init__(self, task_id: str, number: int, differences: Sequence[str]) -> None:
        """number: the first event after which they differ. differences: paths of the differing values."""
        super().__init__(
            f"the state of task {task_id} differs from its event log since event {number}: {', '.join(differences)}"
        )
        self.number = number


class BadHandoff(PerdureError):
    """A stored handoff document cannot be read. It was not changed; the event log has the same facts."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"the handoff document of task {task_id} cannot be read: {problem}; it was not changed")
        self.task_id, self.problem = task_id, problem


class IdentityError(PerdureError):
    """The identity of an agent is too large, or its stored form cannot be read."""


class IdentityConflict(IdentityError):
    """The stored identity has another version than the caller expected; nothing was changed.

    Attributes:
        expected: Version that the caller expected; 0 for none.
        version: Version that is stored; 0 for none.
    """

    def __init__(self, agent: str, expected: int, version: int) -> None:
        super().__init__(
            f"the identity of agent {agent!r} was expected to have version {expected} and has {version}; read it again "
            "and repeat the change"
        )
        self.expected = expected
        self.version = version
