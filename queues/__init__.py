"""Queues on Redis: messages, leases, checkpoints and outcomes. No handlers, agents or retry policies.

| module | what it holds |
|---|---|
| `producer`, `enqueueing` | enqueue by name; batches, idempotent storing |
| `derived_tasks` | successors and forks |
| `doubts` | risky steps that were cut off, and decisions about them |
| `step_failures` | recorded failures of steps: how they show, and their removal |
| `handle` | status, result, events and cancellation of a task |
| `inbox`, `waits`, `values` | messages to tasks; what tasks wait for, and the answers; named values of tasks |
| `streams` | readers of the streams of tasks |
| `limits`, `argument_keys` | limits that tasks share; keys that are made of arguments |
| `inspection`, `records`, `event_log` | read-only views: queues, task records, event logs |
| `member_registry` | members with an entry that expires, tolerant of foreign bytes |
| `presence`, `supervisors`, `catalog` | registries of workers, supervisors and the tasks of apps |
| `pubsub` | notifications that wake waiters |
| `depth` | limits of the depth of a queue, and the wait for room |
| `envelope`, `keys`, `errors` | wire format; key names; error tree |
| `defaults`, `durations` | PERDURE_* defaults; durations and points in time |
| `wording` | times, durations, counts and lists in texts |
| `pauses` | rules of operators that hold queues and tasks |
| `shared_config`, `runtime` | settings that workers share; clock, threads and randomness, which a simulation replaces |
| `json_form`, `schemas` | what becomes of a value as JSON; published schemas, read within bounds |
| `junk` | what other programs wrote |
| `regular_files`, `private_files` | files read within bounds; files written for their owner only |
| `sessions`, `explanation` | conversations of many tasks; why a task is in its state |
| `transport`, `security`, `embedded` | connections; encryption and secrets; the embedded server |
| `partitions`, `delivery` | routes of a queue; reading, leases and settlement |
| `lua/` | one script per atomic act; each header has KEYS, ARGV, reply and what is atomic |

Before a change: every move of a task from one place to another is one script; keys are built in `keys.py` only; the
layers in pyproject.toml say which module may import which.
"""

from .catalog import read_catalog
from .defaults import ConnectionSettings, read_settings
from .errors import (
    AnswerRefused,
    ApproverNeeded,
    CannotResolve,
    CatalogError,
    ChangedCheckpoint,
    ConfigurationError,
    DecryptionError,
    EntriesLost,
    HandOffRefused,
    InboxFull,
    InvalidAnswer,
    InvalidLimitUse,
    InvalidUniqueKey,
    KeyMissing,
    LeaseLost,
    NotEncrypted,
    NotReplicated,
    PayloadTooLarge,
    PerdureError,
    QueueError,
    QueueFull,
    Refused,
    ServerFull,
    StillRunning,
    TamperedData,
    TaskCancelled,
    TaskEnded,
    TaskExists,
    TaskFailed,
    TaskNotFound,
    Unavailable,
    UnreadableEnvelope,
    ValueRefused,
    WaitNotFound,
)
from .event_log import TaskEvent
from .handle import TaskHandle
from .inspection.views import QueueStats, find_task, list_queues, list_tasks
from .keys import Namespace, Partition
from .partitions.resharding import set_partitions
from .presence import WorkerInfo, list_workers
from .producer import Producer
from .records import Record, State, read_record
from .security.encryption import Encryptor, make_encryptor
from .security.keyring import generate_key
from .supervisors import SupervisorInfo, list_supervisors
from .transport.address import Address
from .transport.gateway import Gateway

__all__ = [
    "Address",
    "AnswerRefused",
    "ApproverNeeded",
    "CannotResolve",
    "CatalogError",
    "ChangedCheckpoint",
    "ConfigurationError",
    "ConnectionSettings",
    "DecryptionError",
    "Encryptor",
    "EntriesLost",
    "Gateway",
    "HandOffRefused",
    "InboxFull",
    "InvalidAnswer",
    "InvalidLimitUse",
    "InvalidUniqueKey",
    "KeyMissing",
    "LeaseLost",
    "Namespace",
    "NotEncrypted",
    "NotReplicated",
    "Partition",
    "PayloadTooLarge",
    "PerdureError",
    "Producer",
    "QueueError",
    "QueueFull",
    "QueueStats",
    "Record",
    "Refused",
    "ServerFull",
    "State",
    "StillRunning",
    "SupervisorInfo",
    "TamperedData",
    "TaskCancelled",
    "TaskEnded",
    "TaskEvent",
    "TaskExists",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "Unavailable",
    "UnreadableEnvelope",
    "ValueRefused",
    "WaitNotFound",
    "WorkerInfo",
    "find_task",
    "generate_key",
    "list_queues",
    "list_supervisors",
    "list_tasks",
    "list_workers",
    "make_encryptor",
    "read_catalog",
    "read_record",
    "read_settings",
    "set_partitions",
]
