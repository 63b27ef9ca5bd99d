"""Queues: Redis, messages, leases, outcomes. Knows nothing of handlers, agents or policy."""

from .address import Address
from .beat import Beat
from .checkpoint import Entry, History, Kind, last_step, load_history, note_alive, recorded_steps, write_entries
from .consumer import Consumer, Taken
from .coverage import Coverage
from .crashes import CrashReport, report_crash
from .due import promote_due, watch_due
from .envelope import (
    DEFAULT_PAYLOAD_LIMIT,
    FORMAT_VERSION,
    LONGEST,
    Envelope,
    Options,
    check_size,
    check_task_id,
    encode_arguments,
    new_task_id,
)
from .errors import (
    BadAddress,
    CancelRequested,
    EmbeddedServerError,
    LeaseLost,
    PayloadTooLarge,
    PerdureError,
    QueueError,
    Refused,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskOutcome,
    Unavailable,
    UnreadableEnvelope,
)
from .events import TaskEvent, read_events
from .form import Form
from .gateway import Gateway, Reader
from .handle import TaskHandle
from .inspection import QueueStats, find_task, list_queues, list_tasks, queue_partitions
from .keys import Namespace, Partition, check_name
from .leases import Delivery, Leases
from .place import default_address, default_data_dir, default_namespace
from .presence import WorkerInfo, announce, list_workers, withdraw
from .producer import Key, Producer, key_of, map_each
from .reading import OneConnection, Reading, read_partitions
from .records import Record, State, pairs, plain_data, read_record
from .rerouting import close_former, load_route, load_routes, retire_generation, set_partitions
from .routes import MOST_PARTITIONS, Generation, Route, spread
from .scripts import Script, load_script
from .sending import Message
from .settlement import Counters, cancelled, release, reschedule, succeed
from .suspects import Suspect, acquit, set_aside, take_suspect
from .turns import take_turns

__all__ = [
    "DEFAULT_PAYLOAD_LIMIT",
    "FORMAT_VERSION",
    "LONGEST",
    "MOST_PARTITIONS",
    "Address",
    "BadAddress",
    "Beat",
    "CancelRequested",
    "Consumer",
    "Counters",
    "Coverage",
    "CrashReport",
    "Delivery",
    "EmbeddedServerError",
    "Entry",
    "Envelope",
    "Form",
    "Gateway",
    "Generation",
    "History",
    "Key",
    "Kind",
    "LeaseLost",
    "Leases",
    "Message",
    "Namespace",
    "OneConnection",
    "Options",
    "Partition",
    "PayloadTooLarge",
    "PerdureError",
    "Producer",
    "QueueError",
    "QueueStats",
    "Reader",
    "Reading",
    "Record",
    "Refused",
    "Route",
    "Script",
    "State",
    "Suspect",
    "Taken",
    "TaskCancelled",
    "TaskEvent",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TaskOutcome",
    "Unavailable",
    "UnreadableEnvelope",
    "WorkerInfo",
    "acquit",
    "announce",
    "cancelled",
    "check_name",
    "check_size",
    "check_task_id",
    "close_former",
    "default_address",
    "default_data_dir",
    "default_namespace",
    "encode_arguments",
    "find_task",
    "key_of",
    "last_step",
    "list_queues",
    "list_tasks",
    "list_workers",
    "load_history",
    "load_route",
    "load_routes",
    "load_script",
    "map_each",
    "new_task_id",
    "note_alive",
    "pairs",
    "plain_data",
    "promote_due",
    "queue_partitions",
    "read_events",
    "read_partitions",
    "read_record",
    "recorded_steps",
    "release",
    "report_crash",
    "reschedule",
    "retire_generation",
    "set_aside",
    "set_partitions",
    "spread",
    "succeed",
    "take_suspect",
    "take_turns",
    "watch_due",
    "withdraw",
    "write_entries",
]
