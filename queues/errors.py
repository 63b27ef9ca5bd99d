"""Error tree of queues, messages and the servers that hold them.

PerdureError                    every error that Perdure raises on purpose
├── QueueError                  queues, messages and servers
│   ├── Unavailable             Redis is unreachable, or the connection broke
│   │   ├── ServerFull          its memory is full: new tasks are refused, outcomes are stored
│   │   ├── NotOpen             the connection is closed, or was never opened: nothing was sent
│   │   └── NotReplicated       the write is stored, but too few replicas confirmed it in time
│   ├── Refused                 Redis refused the client or a command, or would lose acknowledged tasks
│   │   └── WrongType           a key has a value of another type, which another program has put there
│   ├── EventLoopError          a connection was used on another event loop than its own
│   ├── EmbeddedServerError     the embedded server cannot be started, shared or stopped
│   ├── PayloadTooLarge         arguments, result or record exceed the size limit
│   ├── LargeValueLost          a chunk of a large value is missing or damaged
│   ├── UnreadableEnvelope      a stream entry is not a task that this version can read
│   ├── UnreadableCheckpoint    a task's checkpoint has content that no version has written
│   ├── UnreadableRecord        a field of a task's record has a value that no version has written
│   ├── NewerVersionNeeded      a task needs a worker that knows a later data format
│   ├── DecryptionError         encrypted data cannot be decrypted by this process
│   │   ├── KeyMissing          it was encrypted with a key that this process does not have
│   │   ├── TamperedData        it was changed, or belongs to another task, step or kind
│   │   │   └── ChangedCheckpoint  events, step records or the snapshot of a task are missing or were changed
│   │   └── NotEncrypted        it is plain, and only encrypted data is accepted
│   ├── NoKey                   a message to encrypted data, from a process without a key
│   ├── LeaseLost               a write was refused because another worker has the delivery
│   │   └── StoreFenced         a later run of the task has used the namespace of the key-value store
│   ├── StoreError              an entry of the key-value store cannot be stored or read
│   │   ├── StoreConflict       it has another version than the caller expected; nothing was changed
│   │   └── StoreFull           the namespace has the most entries that it may have
│   ├── EntriesLost             a write was refused because Redis has lost entries of the checkpoint
│   ├── HandOffRefused          a task cannot be continued as the task asked for
│   ├── StillRunning            a task that has not ended cannot be restarted
│   ├── TaskExists              the requested id is another task's
│   ├── QueueFull               as many tasks wait as max_depth allows
│   ├── InvalidUniqueKey        the arguments make no key for a unique task
│   ├── InvalidLimitUse         the arguments make no key for a limit of the task, or its cost is too large
│   ├── InvalidBudgetUse        the arguments make no key for a budget of the task, or there are too many
│   ├── LimitNotFound           no worker has published a limit of this name
│   ├── BudgetNotFound          nothing was charged to a budget of this name, key or task yet
│   ├── CatalogError            a task enqueued by name has no known queue, or other arguments
│   ├── JobError                a job over many tasks is unknown, its name is taken, or it has ended
│   ├── ScheduleError           a schedule is unknown, its name is taken, or it cannot be read
│   │   └── ScheduleNotFound    there is no schedule of this name
│   ├── ChangedMeanwhile        what a caller wants to change was changed since it was read
│   ├── PauseError              a pause cannot be stored or removed
│   ├── TaskNotFound            there is no record of the id: never enqueued, or retention has passed
│   ├── StreamTrimmed           items of a stream that a reader asked for are not kept any more
│   ├── CannotResolve           a person's decision about a step cannot be stored
│   ├── InboxFull               the task has too many unread messages
│   ├── TaskEnded               the task has ended and reads no messages
│   ├── ValueRefused            a named value of a task cannot be set: it is too large, or one too many
│   ├── AnswerRefused           a wait takes no answer: it has one, was closed, or its time has passed
│   │   ├── ApproverNeeded      an approver must sign the answer, and this caller has no key of one who may
│   │   ├── WaitNotFound        the task has no open wait of this id or token, or several of this name
│   │   └── InvalidAnswer       the answer does not fit the JSON schema of the wait
│   ├── TaskOutcome             an awaited task ended without a result
│   │   ├── TaskFailed          it is a dead letter
│   │   └── TaskCancelled       it was cancelled
│   └── SessionError            a session cannot be used, such as one of another app
│       ├── SessionNotFound     no message was sent to it, or it was forgotten
│       ├── SessionFailed       one of its turns is a dead letter
│       ├── SessionFull         too many messages wait for their turn
│       ├── TurnRefused         the task of a turn cannot run, since the turn has ended
│       └── TurnEarly           Redis has lost the claim of a turn, which is claimed again
├── ConfigurationError          a setting, an address, a key or an APP that cannot be used
└── ...                         the worker's own errors: see `worker/errors.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .wording import listed


class PerdureError(Exception):
    """Base of every error that Perdure raises on purpose."""


class QueueError(PerdureError):
    """Base of the errors of queues, messages and the servers that hold them."""


class ConfigurationError(PerdureError, ValueError):
    """A setting, an address or an encryption key is not valid or contradicts another one, or an APP cannot be loaded.

    Also raised for a setting that needs a package which is not installed.
    """


class Unavailable(QueueError):
    """Redis is unreachable, the connection broke before the reply, or the server's memory or disk is full.

    The server may or may not have executed the command.

    Attributes:
        problem: The text without the remedy.
    """

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


class NotOpen(Unavailable):
    """The connection is closed or was never opened, so nothing was sent, and waiting does not help."""


class EventLoopError(QueueError):
    """A connection was used on another event loop than its own, or a blocking call would block its own."""


class ServerFull(Unavailable):
    """The server's memory is full and its policy evicts nothing; nothing was stored.

    Workers finish their running tasks, since the server accepts outcomes.
    """

    def __init__(self, shown: str, reply: str) -> None:
        super().__init__(
            f"the memory of Redis at {shown} is full ({reply}): raise its maxmemory, or make room: purge dead letters "
            "(perdure dlq purge) or queues, or keep results for less time; running tasks can end, new ones are refused"
        )


class NotReplicated(Unavailable):
    """A write with `durability="replicated"` is stored, but too few replicas confirmed it before the timeout.

    A failover now may lose the write. A task enqueued again under its id (and its key, if it had one) is not stored
    twice, and the replicas are asked again.
    """

    def __init__(self, shown: str, found: int, wanted: int, timeout: float, task_ids: Sequence[str] = ()) -> None:
        """Args:
        found: number of replicas that confirmed the write.
        wanted: number of replicas that must confirm it.
        timeout: seconds.
        task_ids: the tasks, if the write enqueued tasks.
        """
        what = f"task {task_ids[0]} is" if len(task_ids) == 1 else f"{len(task_ids)} tasks are" if task_ids else "it is"
        super().__init__(
            f"{what} stored on {shown}, but {found} of {wanted} replicas confirmed it within {timeout:g} s: "
            "check the replicas, or wait for fewer or longer (PERDURE_REPLICAS, PERDURE_REPLICATION_TIMEOUT)"
        )
        self.shown = shown
        self.found = found
        self.wanted = wanted
        self.timeout = timeout
        self.task_ids = tuple(task_ids)
        self.reply: object = None
        """The reply to the write."""

    def of_tasks(self, task_ids: Sequence[str]) -> NotReplicated:
        """Return the same error with the ids of the tasks."""
        return NotReplicated(self.shown, self.found, self.wanted, self.timeout, task_ids)


class Refused(QueueError):
    """Redis refused the client or a command: wrong password, missing rights, version too old.

    Also raised for a server that would lose acknowledged tasks, since it evicts keys or is not durable as required.
    """


class WrongType(Refused):
    """A key has a value of another type, which another program has put there."""


class EmbeddedServerError(QueueError):
    """The embedded server could not be found, started, shared or stopped."""


class PayloadTooLarge(QueueError, ValueError):
    """The data exceeds the size limit; nothing was sent. size, limit: bytes. setting: the one that has the limit."""

    def __init__(
        self, what: str, size: int, limit: int, setting: str = "payload_limit", *, remedy: str | None = None
    ) -> None:
        if remedy is None:
            remedy = f"store it elsewhere and pass a reference, or raise PERDURE_{setting.upper()}"
        super().__init__(f"size of {what} is {size:,} bytes, over the limit of {limit:,} bytes: {remedy}")
        self.what, self.size, self.limit, self.setting = what, size, limit, setting


class LargeValueLost(QueueError):
    """A chunk of large arguments or of a large result is missing in Redis, or is not what was stored."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"could not read {what}: {problem}; replay the task with --fresh, or enqueue it again")


class UnreadableEnvelope(QueueError, ValueError):
    """A stream entry is not a task that this version of Perdure can read."""


class UnreadableCheckpoint(QueueError):
    """The checkpoint of a task has content that no version of Perdure has written."""

    def __init__(self, task_id: str, problem: str) -> None:
        self.task_id, self.problem = task_id, problem
        super().__init__(f"could not read checkpoint of task {task_id}: {problem}; replay the dead letter with --fresh")


class UnreadableRecord(QueueError):
    """A field of a task's record, or of another key of the task, has a value that no version has written."""

    def __init__(self, key: str, problem: str, remedy: str = "correct the field, or delete the key") -> None:
        super().__init__(f"could not read {key}: {problem}; {remedy}")


class NewerVersionNeeded(QueueError):
    """A task needs a worker that knows a later data format, or has a later version of the task's code."""

    def __init__(self, task_id: str, needed: int, known: int, task: str | None = None) -> None:
        """task: name of the task if it needs a version of its code."""
        self.task_id, self.needed, self.known, self.task = task_id, needed, known, task
        cause = f"needs data format {needed}, this worker reads up to {known}: upgrade the workers"
        if task is not None:
            cause = f"began with version {needed} of {task!r}, this worker has version {known}: deploy the newer code"
        super().__init__(f"task {task_id} {cause}, then replay the dead letter, which keeps its checkpoint")


class DecryptionError(QueueError):
    """Encrypted data cannot be decrypted by this process. `what` names the data and its task."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"could not decrypt {what}: {problem}")
        self.what = what

    @property
    def of_arguments(self) -> bool:
        """Whether the data is the arguments of a task."""
        return self.what.startswith("the arguments ")


class KeyMissing(DecryptionError):
    """The data was encrypted with a key that this process does not have; another process may have it."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(
            what, f"{how}; set PERDURE_ENCRYPTION_KEYS (or PERDURE_ENCRYPTION_KEY_FILE) to all keys in use"
        )


class TamperedData(DecryptionError):
    """The data was changed after it was encrypted, or belongs to another task, step or kind of data."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "it was changed in Redis, or moved there from another task, step or field")


class ChangedCheckpoint(TamperedData):
    """Events, step records or the snapshot of a task are missing, or were changed in Redis by another program."""

    def __init__(self, task_id: str, problem: str) -> None:
        self.what = f"the checkpoint of task {task_id}"
        Exception.__init__(
            self,
            f"the checkpoint of task {task_id} was changed in Redis by another program: {problem}; restore it, or "
            "replay the dead letter with --fresh",
        )


class NotEncrypted(DecryptionError):
    """The data is not encrypted, and PERDURE_ENCRYPTION_REQUIRED is set."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "it is not encrypted, and PERDURE_ENCRYPTION_REQUIRED is set")


class NoKey(QueueError):
    """A process without a key sends to a task or a session whose data is encrypted; nothing was sent."""

    def __init__(self, what: str, owner: str) -> None:
        """owner: what has the encrypted data."""
        super().__init__(
            f"could not send {what}: the data of {owner} is encrypted, and this process has no key; set "
            "PERDURE_ENCRYPTION_KEYS (or PERDURE_ENCRYPTION_KEY_FILE) to the keys of its workers"
        )


class LeaseLost(QueueError):
    """Another worker has the delivery; the write was refused and changed nothing."""

    def __init__(self, task_id: str, act: str) -> None:
        super().__init__(f"task {task_id}: {act} refused, the lease has passed to another worker")
        self.task_id = task_id
        self.act = act


class StoreFenced(LeaseLost):
    """A later run of the task has used the namespace of the key-value store; nothing was changed."""

    def __init__(self, task_id: str, namespace: str) -> None:
        super().__init__(task_id, f"use of namespace {namespace!r} of the key-value store")


class StoreError(QueueError):
    """An entry of the key-value store cannot be stored or read."""


class StoreConflict(StoreError):
    """An entry has another version than a batch requires; nothing was changed.

    expected: 0 if it must not exist. version: the one that it has, 0 if it does not exist.
    """

    def __init__(self, namespace: str, key: str, expected: int, version: int) -> None:
        found = f"it has version {version}" if version else "it does not exist"
        wanted = f"version {expected}" if expected else "no entry"
        super().__init__(
            f"entry {key!r} of namespace {namespace!r} was not as expected: {found}, expected {wanted}; nothing was "
            "changed: read it again and repeat the change"
        )
        self.namespace, self.key, self.expected, self.version = namespace, key, expected, version


class StoreFull(StoreError):
    """A namespace of the key-value store has the most entries that it may have; nothing was changed."""

    def __init__(self, namespace: str, entries: int) -> None:
        super().__init__(
            f"namespace {namespace!r} of the key-value store has {entries:,} entries, the most that one may have: "
            "delete some, give them a ttl, or spread them over several namespaces"
        )
        self.namespace, self.entries = namespace, entries


class EntriesLost(QueueError):
    """Redis has lost entries of a checkpoint that it had confirmed; the write was refused and changed nothing.

    last: Number of the last entry that Redis has.
    """

    def __init__(self, task_id: str, act: str, last: int) -> None:
        super().__init__(
            f"task {task_id}: {act} refused, Redis has lost what it had stored after entry {last} of the checkpoint; "
            "the task resumes from what Redis has"
        )
        self.task_id = task_id
        self.act = act
        self.last = last


class StillRunning(QueueError):
    """A task cannot be restarted because it has not ended: it is queued, scheduled or running."""

    def __init__(self, task_id: str, state: str, server: str = "") -> None:
        """server: address of the server that has the task."""
        super().__init__(
            f"task {task_id} is {state}{server and f' on {server}'} and can be restarted only after its end: wait for "
            "it, or cancel it"
        )
        self.task_id = task_id
        self.state = state


class TaskExists(QueueError, ValueError):
    """The requested id belongs to a task that has another name or other arguments; nothing was stored under it."""

    def __init__(self, task_id: str, conflict: str = "", others: Sequence[str] = ()) -> None:
        """conflict: how the task with the id differs. others: more ids of the same call for which the same holds."""
        what = f"task {task_id} exists already{conflict and f' {conflict}'}"
        if others:
            what += f", and {len(others)} more of these tasks have such a conflict ({listed(others, _SHOWN_IDS)})"
        remedy = "call again with the same task and arguments" if conflict else "omit the id"
        super().__init__(f"{what}; nothing was stored: {remedy}, or choose another id")
        self.task_id = task_id
        self.task_ids = (task_id, *others)


_SHOWN_IDS: Final = 10


class HandOffRefused(QueueError):
    """A task cannot be continued as the requested task, or its chain of successors has no end."""


class QueueFull(QueueError):
    """As many tasks wait in a queue as its `max_depth` allows, and nothing more was stored.

    Attributes:
        queue: Name of the queue.
        depth: Number of its waiting tasks.
        max_depth: The limit.
        stored: Ids of the tasks of the call that were stored before, in their order.
    """

    def __init__(
        self, queue: str, depth: int, max_depth: int, *, waited: float = 0.0, stored: Sequence[str] = (), left: int = 0
    ) -> None:
        """waited: seconds without room. left: tasks of the call that were not stored, 0 if that is unknown."""
        after = f" after {waited:g} s" if waited else ""
        waits = "1 task waits" if depth == 1 else f"{depth:,} tasks wait"
        done = "1 task of the call was" if len(stored) == 1 else f"{len(stored):,} tasks of the call were"
        some = f"; {done} stored, {left:,} {'was' if left == 1 else 'were'} not" if left > 1 or stored else ""
        remedy = "start more workers" if waited else "wait for room (when_full)"
        super().__init__(
            f"queue {queue!r} is full{after}: {waits}, and max_depth is {max_depth:,}{some}; enqueue again "
            f"later, {remedy}, or raise max_depth"
        )
        self.queue, self.depth, self.max_depth = queue, depth, max_depth
        self.stored = tuple(stored)
        self._waited = waited

    def of_call(self, stored: Sequence[str], left: int) -> QueueFull:
        """Return the error of a call of several tasks."""
        return QueueFull(self.queue, self.depth, self.max_depth, waited=self._waited, stored=stored, left=left)


class InvalidUniqueKey(QueueError, ValueError):
    """The arguments of a unique task make no key: a part of it is missing, a secret, or no scalar."""


class InvalidLimitUse(QueueError, ValueError):
    """The arguments of a task make no key for one of its limits, or a cost is more than the limit lets pass at once.

    Also raised for an ordering key beside an ordered limit.
    """


class InvalidBudgetUse(QueueError, ValueError):
    """The arguments of a task make no key for one of its budgets, or it would be charged to too many."""


class LimitNotFound(QueueError, LookupError):
    """No worker has published a limit of this name."""


class BudgetNotFound(QueueError, LookupError):
    """There is no budget of this name, or it has no ledger for this key or this task."""


class CatalogError(QueueError, ValueError):
    """A task enqueued by name alone whose queue is not in the catalog, or whose arguments do not fit its schema."""


class JobError(QueueError, ValueError):
    """A job over many tasks cannot be used as asked: it is unknown, its name is taken, or it has ended."""


class ScheduleError(QueueError, ValueError):
    """A schedule cannot be used as asked: it is unknown, its name is taken, or what is stored cannot be read."""


class ScheduleNotFound(ScheduleError, LookupError):
    """There is no schedule of this name."""


class ChangedMeanwhile(QueueError):
    """A limit, a schedule or a budget was changed by someone else since the caller has read it. Nothing was stored."""


class PauseError(QueueError):
    """A pause of a queue or of tasks cannot be stored or removed: there are too many, or others change them."""


class TaskNotFound(QueueError, LookupError):
    """There is no record of the task: it was never enqueued here, or its retention has passed."""

    def __init__(self, task_id: str, where: str) -> None:
        super().__init__(
            f"no task {task_id} in {where}: check the id, the queue and the namespace "
            "(finished tasks are kept until their retention passes)"
        )
        self.task_id = task_id


class StreamTrimmed(QueueError, LookupError):
    """Items that a reader has not read are not kept any more: its cursor is too old, or the reader was too slow.

    Attributes:
        first, last: Numbers of the items that are gone.
        after: Cursor from which everything that is kept can be read.
    """

    def __init__(self, task_id: str, stream: str, first: int, last: int, after: str) -> None:
        which = f"item {first:,}" if first == last else f"items {first:,} to {last:,}"
        super().__init__(
            f"{which} of stream {stream!r} of task {task_id} {'is' if first == last else 'are'} not kept any more, a "
            f"stream keeps its newest items only: read on with after={after!r}"
        )
        self.task_id, self.stream, self.first, self.last, self.after = task_id, stream, first, last, after


class CannotResolve(QueueError):
    """A decision about a step in doubt cannot be stored; nothing was changed."""

    def __init__(self, task_id: str, step: str, problem: str) -> None:
        super().__init__(f"could not resolve step {step!r} of task {task_id}: {problem}")
        self.task_id, self.step = task_id, step


class InboxFull(QueueError):
    """The task's inbox is full of unread messages; nothing was sent. `held`: their number; `size`: their bytes."""

    def __init__(self, task_id: str, held: int, size: int, *, most: tuple[int, int]) -> None:
        """most: the limits of number and bytes."""
        super().__init__(
            f"the inbox of task {task_id} is full: {held:,} messages with {size:,} bytes are unread, and it holds "
            f"{most[0]:,} messages and {most[1]:,} bytes; send again after the task has "
            f"read some (ctx.inbox), or remove the oldest (perdure task inbox {task_id} --drop N)",
        )
        self.task_id, self.held, self.size = task_id, held, size


class TaskEnded(QueueError):
    """The task has ended and takes no messages, answers and values; nothing was sent.

    `state` is `succeeded` or `cancelled`.
    """

    def __init__(self, task_id: str, state: str, what: str = "reads no more messages") -> None:
        super().__init__(f"task {task_id} {what}: it is {state}")
        self.task_id, self.state = task_id, state


class ValueRefused(QueueError, ValueError):
    """A named value of a task is too large, or one too many. Nothing was stored."""


class AnswerRefused(QueueError):
    """A wait takes no answer: it has one, was closed, or its time has passed. Nothing was stored.

    Attributes:
        wait: Id, name or token of the wait, as the caller gave it.
        task_id: Empty if no task is known.
    """

    def __init__(self, task_id: str, wait: str, problem: str) -> None:
        whose = f" of task {task_id}" if task_id else ""
        super().__init__(f"could not answer wait {wait!r}{whose}: {problem}")
        self.task_id, self.wait = task_id, wait


class ApproverNeeded(AnswerRefused):
    """An approver must sign the answer to a wait, and the caller has no key of one who may. Nothing was stored."""


class WaitNotFound(AnswerRefused, LookupError):
    """The task has no open wait of this id or token, or several of this name; see `TaskHandle.waits`."""


class InvalidAnswer(AnswerRefused, ValueError):
    """The answer does not fit the JSON schema of the wait. `problems`: each with the path of the value."""

    def __init__(self, task_id: str, wait: str, problems: Sequence[str]) -> None:
        super().__init__(task_id, wait, f"the value does not fit: {'; '.join(problems[:5])}")
        self.problems = tuple(problems)


class TaskOutcome(QueueError):
    """Base of the errors of an awaited task that ended without a result."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class TaskFailed(TaskOutcome):
    """The task is a dead letter. `error` holds the evidence for its `reason` (error, message, traceback, ...)."""

    def __init__(self, task_id: str, reason: str, error: Mapping[str, Any]) -> None:
        kind, text = error.get("error"), error.get("message")
        what = f": {kind}: {text}" if kind else ""
        super().__init__(task_id, f"task {task_id} is a dead letter ({reason}){what}")
        self.reason = reason
        self.error = error


class TaskCancelled(TaskOutcome):
    """The task was cancelled before it had a result.

    replaced_by: id of the task in its place, of the same key or limit. dropped: name of the limit that had no
    room for it.
    """

    def __init__(self, task_id: str, replaced_by: str | None = None, dropped: str | None = None) -> None:
        why = "" if replaced_by is None else f", since task {replaced_by} of the same key replaced it"
        why = why if dropped is None else f", since limit {dropped} had no room for it"
        super().__init__(task_id, f"task {task_id} was cancelled{why}")
        self.replaced_by = replaced_by
        self.dropped = dropped


class SessionError(QueueError):
    """Base of errors of sessions. Raised itself for a session of another app, and where nothing is to be confirmed."""


class SessionNotFound(SessionError, LookupError):
    """There is no such session: no message was sent to it, it was forgotten, or its retention has passed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no session {name}: no message was sent to it, it was forgotten, or its retention has passed"
        )
        self.name = name


class SessionFailed(SessionError):
    """A turn of the session is a dead letter. turn: its number. task_id: its task. reason: that of the dead letter."""

    def __init__(self, name: str, turn: int, task_id: str, reason: str) -> None:
        super().__init__(
            f"session {name} stopped at turn {turn}, which failed ({reason}): replay it with 'perdure dlq replay "
            f"{task_id}', or pass over it with send(..., skip_failed=True) or 'perdure session send --skip-failed'"
        )
        self.name, self.turn, self.task_id, self.reason = name, turn, task_id, reason


class SessionFull(SessionError):
    """The session has too many messages that wait for their turn. waiting: their number. size: their bytes."""

    def __init__(self, name: str, waiting: int, size: int, *, most: tuple[int, int]) -> None:
        """most: the limits of number and bytes."""
        super().__init__(
            f"session {name} has {waiting:,} waiting messages with {size:,} bytes, and takes at most {most[0]:,} "
            f"messages and {most[1]:,} bytes: wait for their turns"
        )
        self.name, self.waiting, self.size = name, waiting, size


class TurnRefused(SessionError):
    """The task of a turn cannot run: the turn has ended or was passed over, or its session was forgotten."""

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"task {task_id} was refused: {problem}; nothing was run")
        self.task_id = task_id


class TurnEarly(SessionError):
    """The turn is not claimed: Redis has lost the claim after its task was stored. It is claimed again.

    Attributes:
        now: Time in milliseconds of Redis' clock.
    """

    def __init__(self, turn: str, now: int) -> None:
        super().__init__(f"turn {turn} is not claimed: Redis has lost the claim, which the turn before it makes again")
        self.now = now
