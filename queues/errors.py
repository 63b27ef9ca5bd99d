"""What can go wrong between a program and its queues.

PerdureError                    everything Perdure raises on purpose
├── QueueError                  this room's errors
│   ├── Unavailable             Redis cannot be reached, or left in the middle
│   │   ├── ServerFull          its memory is full: what is new is refused, outcomes are taken
│   │   └── NotReplicated       it was stored, but too few replicas are known to have it
│   ├── Refused                 Redis answered, and said no (password, rights, version)
│   ├── BadAddress              a URL that names no server Perdure can use
│   ├── EmbeddedServerError     the embedded server cannot be started, shared or stopped
│   ├── PayloadTooLarge         arguments, result or record over the size limit
│   ├── UnreadableEnvelope      an entry on a stream that is not a task this version can read
│   ├── InvalidKey                 keys of encryption that cannot be used
│   ├── DecryptionError              sealed data that this process cannot open
│   │   ├── KeyMissing          it was sealed with a key that this process has not
│   │   ├── TamperedData          it was changed, or belongs to another task, step or kind
│   │   └── NotEncrypted           it is not sealed, where only sealed data is accepted
│   ├── LeaseLost               a write was refused because the delivery passed to another worker
│   ├── HandOffRefused          a task that cannot be handed on, or was in a circle
│   ├── StillRunning            a task that was to be begun afresh has not ended
│   ├── TaskExists              an id that was asked for is another task's
│   ├── TaskNotFound            no record of that id: never enqueued, or past its retention
│   ├── InboxError              a message that cannot be sent, or used
│   │   ├── InboxFull           the task has as many unused ones as an inbox holds
│   │   ├── TaskEnded           the task has its outcome, and will read no more
│   │   └── UnreadableMessage   one that is there is broken, or sealed with a key that is missing
│   └── TaskOutcome             a task that was waited for has ended without a result
│       ├── TaskFailed          it is a dead letter
│       └── TaskCancelled       it was cancelled
├── ConfigurationError          a setting or an APP that cannot be used
└── ...                         the worker's own errors: see `worker/errors.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BadAddress",
    "ConfigurationError",
    "DecryptionError",
    "EmbeddedServerError",
    "HandOffRefused",
    "InboxError",
    "InboxFull",
    "InvalidKey",
    "KeyMissing",
    "LeaseLost",
    "NotEncrypted",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "QueueError",
    "Refused",
    "ServerFull",
    "StillRunning",
    "TamperedData",
    "TaskCancelled",
    "TaskEnded",
    "TaskExists",
    "TaskFailed",
    "TaskNotFound",
    "TaskOutcome",
    "Unavailable",
    "UnreadableEnvelope",
    "UnreadableMessage",
]


class PerdureError(Exception):
    """Base of every error that Perdure raises on purpose."""


class QueueError(PerdureError):
    """Base of the errors of queues, messages and the servers that hold them."""


class ConfigurationError(PerdureError, ValueError):
    """A setting is not valid or contradicts another one, or an application cannot be loaded."""


class Unavailable(QueueError):
    """Redis cannot be reached, the connection broke before the reply came, or memory or disk of the server are full.

    A command that met this error may or may not have been carried out.
    """


class ServerFull(Unavailable):
    """The server's memory is full, and it throws nothing away; nothing was stored.

    Workers go on finishing what they run, since outcomes are let through.
    """

    def __init__(self, shown: str, said: str) -> None:
        super().__init__(
            f"the memory of Redis at {shown} is full ({said}): raise its maxmemory, or make room: purge dead letters "
            "(perdure dlq purge) or queues, or keep results for less time; what runs can end, nothing new is stored"
        )


class NotReplicated(Unavailable):
    """What was asked to be replicated is stored, but too few replicas were known to have it when the time was over.

    A failover now may lose it. task_ids: of the tasks, where tasks were enqueued; enqueued again under its id (and with
    the same key, if it had one), a task is not stored twice, and the replicas are asked again.
    """

    def __init__(self, shown: str, found: int, wanted: int, timeout: float, task_ids: Sequence[str] = ()) -> None:
        """found, wanted: replicas. timeout: seconds."""
        what = f"task {task_ids[0]} is" if len(task_ids) == 1 else f"{len(task_ids)} tasks are" if task_ids else "it is"
        super().__init__(
            f"{what} stored on {shown}, but {found} of {wanted} replicas were known to have it after {timeout:g} s: "
            "look after the replicas, or wait for fewer or longer (PERDURE_REPLICAS, PERDURE_REPLICATION_TIMEOUT)"
        )
        self.shown = shown
        self.found = found
        self.wanted = wanted
        self.timeout = timeout
        self.task_ids = tuple(task_ids)

    def of_tasks(self, task_ids: Sequence[str]) -> NotReplicated:
        """The same, saying which tasks it is about."""
        return NotReplicated(self.shown, self.found, self.wanted, self.timeout, task_ids)


class Refused(QueueError):
    """Redis was reached and said no: wrong password, missing rights, too old."""


class BadAddress(QueueError, ValueError):
    """A URL that names no server Perdure can connect to."""


class EmbeddedServerError(QueueError):
    """The embedded server could not be found, started, shared or stopped."""


class PayloadTooLarge(QueueError, ValueError):
    """What should be stored is larger than the limit; nothing was sent."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} is {size:,} bytes, over the limit of {limit:,} bytes: "
            "store it elsewhere and pass a reference, or raise payload_limit"
        )
        self.what = what
        self.size = size
        self.limit = limit


class UnreadableEnvelope(QueueError, ValueError):
    """An entry on a stream that is not a task this version of Perdure can read."""


class InvalidKey(QueueError, ValueError):
    """Keys of encryption that cannot be used: not 32 bytes in base64, in a file open to all, or without the package."""


class DecryptionError(QueueError):
    """Encrypted data that this process cannot decrypt. what: which data of which task."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"could not decrypt {what}: {problem}")
        self.what = what


class KeyMissing(DecryptionError):
    """The data was encrypted with a key that this process does not have; another process may have it."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(
            what, f"encrypted {how}; set PERDURE_ENCRYPTION_KEYS (or PERDURE_ENCRYPTION_KEY_FILE) to all keys in use"
        )


class TamperedData(DecryptionError):
    """The data was changed after it was encrypted, or belongs to another task, step or kind of data."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "it was changed in Redis, or moved there from another task, step or field")


class NotEncrypted(DecryptionError):
    """The data is not encrypted, and PERDURE_ENCRYPTION_REQUIRED is set."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "it is not encrypted, and PERDURE_ENCRYPTION_REQUIRED is set")


class LeaseLost(QueueError):
    """The delivery has passed to another worker; the write was refused and changed nothing."""

    def __init__(self, task_id: str, act: str) -> None:
        super().__init__(f"task {task_id}: {act} refused, the lease has passed to another worker")
        self.task_id = task_id
        self.act = act


class StillRunning(QueueError):
    """A task that was to be begun afresh has not ended: it is queued, scheduled or running."""

    def __init__(self, task_id: str, state: str) -> None:
        super().__init__(
            f"task {task_id} is {state} and can be begun afresh only when it has ended: wait for it, or cancel it"
        )
        self.task_id = task_id
        self.state = state


class TaskExists(QueueError, ValueError):
    """An id was asked for that another task has; nothing was stored."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"there is a task {task_id} already: leave the id out, or give another one")
        self.task_id = task_id


class HandOffRefused(QueueError):
    """A task cannot be handed on to another, or its hand-offs lead nowhere."""


class TaskNotFound(QueueError, LookupError):
    """There is no record of the task: it was never enqueued here, or its retention has passed."""

    def __init__(self, task_id: str, where: str) -> None:
        super().__init__(
            f"no task {task_id} in {where}: check the id, the queue and the namespace "
            "(finished tasks are kept until their retention passes)"
        )
        self.task_id = task_id


class InboxError(QueueError):
    """Base of what can be wrong with a message to a task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class InboxFull(InboxError):
    """The task has as many unused messages as an inbox holds; nothing was sent. held: how many."""

    def __init__(self, task_id: str, held: int) -> None:
        super().__init__(
            task_id,
            f"the inbox of task {task_id} is full: {held:,} messages wait there to be used; send again when it has "
            f"read some (ctx.inbox), or take the oldest out (perdure task inbox {task_id} --drop N)",
        )
        self.held = held


class TaskEnded(InboxError):
    """The task has its outcome and reads no messages any more; nothing was sent. state: `succeeded` or `cancelled`."""

    def __init__(self, task_id: str, state: str) -> None:
        super().__init__(task_id, f"task {task_id} reads no messages any more: it is {state}")
        self.state = state


class UnreadableMessage(InboxError):
    """A message in an inbox that cannot be read; it stays there. number: its own."""

    def __init__(self, task_id: str, number: int, problem: str) -> None:
        super().__init__(
            task_id,
            f"message {number} in the inbox of task {task_id} cannot be read: {problem}; to go on without it: "
            f"perdure task inbox {task_id} --drop {number}",
        )
        self.number = number
        self.problem = problem


class TaskOutcome(QueueError):
    """A task that somebody waited for has ended without a result."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class TaskFailed(TaskOutcome):
    """The task is a dead letter. `reason` says why; `error` holds the evidence (error, message, traceback, ...)."""

    def __init__(self, task_id: str, reason: str, error: Mapping[str, Any]) -> None:
        kind, text = error.get("error"), error.get("message")
        what = f": {kind}: {text}" if kind else ""
        super().__init__(task_id, f"task {task_id} is a dead letter ({reason}){what}")
        self.reason = reason
        self.error = error


class TaskCancelled(TaskOutcome):
    """The task was cancelled before it had a result."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id, f"task {task_id} was cancelled")
