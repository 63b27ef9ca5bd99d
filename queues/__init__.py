"""Queues: Redis, messages, leases, outcomes. Knows nothing of handlers, agents or policy."""

from .address import Address
from .beat import Beat
from .checkpoint import Entry, History, Kind, last_step, load_history, note_alive, recorded_steps, write_entries
from .consumer import Consumer, Taken
from .coverage import Coverage
from .crashes import CrashReport, report_crash
from .deployment import deployment_id
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
    BadKeys,
    CancelRequested,
    CannotOpen,
    EmbeddedServerError,
    KeyMissing,
    LeaseLost,
    NotReplicated,
    NotSealed,
    PayloadTooLarge,
    PerdureError,
    QueueError,
    Refused,
    SealBroken,
    ServerFull,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskOutcome,
    Unavailable,
    UnreadableEnvelope,
)
from .events import TaskEvent, read_events, read_last_events
from .form import Form
from .gateway import Gateway, Reader
from .handle import TaskHandle
from .inspection import QueueStats, find_task, list_queues, list_tasks, queue_partitions
from .keys import Namespace, Partition, check_name
from .leases import Delivery, Leases
from .marks import Marks, hide, keep_hidden, marked_values, read_marks
from .place import default_address, default_data_dir, default_namespace, default_sealer
from .presence import WorkerInfo, announce, list_workers, present_workers, withdraw
from .producer import Key, Producer, key_of, map_each
from .reading import OneConnection, Reading, read_partitions
from .records import Record, State, opened_error, pairs, plain_data, read_record, shown_arguments
from .redaction import Redaction
from .replication import Replicated, Replication
from .rerouting import close_former, load_route, load_routes, retire_generation, set_partitions
from .revealing import SECRET, has_secret, reveal, shows_mask
from .routes import MOST_PARTITIONS, Generation, Route, spread
from .saved import saved_fields, saved_fields_of_all
from .scripts import Script, load_script
from .sealing import ERROR, MARK, NO_KEYS, NO_SEAL, Seal, Sealer, arguments_of, is_sealed
from .sealing_keys import generate_key, make_sealer
from .sending import Message
from .settlement import Counters, cancelled, release, reschedule, succeed
from .supervision import (
    ChildInfo,
    SupervisorInfo,
    SupervisorState,
    count_crash,
    list_supervisors,
    paused_supervisors,
    resume_supervisor,
    supervise,
    withdraw_supervisor,
)
from .suspects import Suspect, acquit, set_aside, take_suspect
from .turns import take_turns

__all__ = [
    "DEFAULT_PAYLOAD_LIMIT",
    "ERROR",
    "FORMAT_VERSION",
    "LONGEST",
    "MARK",
    "MOST_PARTITIONS",
    "NO_KEYS",
    "NO_SEAL",
    "SECRET",
    "Address",
    "BadAddress",
    "BadKeys",
    "Beat",
    "CancelRequested",
    "CannotOpen",
    "ChildInfo",
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
    "KeyMissing",
    "Kind",
    "LeaseLost",
    "Leases",
    "Marks",
    "Message",
    "Namespace",
    "NotReplicated",
    "NotSealed",
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
    "Redaction",
    "Refused",
    "Replicated",
    "Replication",
    "Route",
    "Script",
    "Seal",
    "SealBroken",
    "Sealer",
    "ServerFull",
    "State",
    "SupervisorInfo",
    "SupervisorState",
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
    "arguments_of",
    "cancelled",
    "check_name",
    "check_size",
    "check_task_id",
    "close_former",
    "count_crash",
    "default_address",
    "default_data_dir",
    "default_namespace",
    "default_sealer",
    "deployment_id",
    "encode_arguments",
    "find_task",
    "generate_key",
    "has_secret",
    "hide",
    "is_sealed",
    "keep_hidden",
    "key_of",
    "last_step",
    "list_queues",
    "list_supervisors",
    "list_tasks",
    "list_workers",
    "load_history",
    "load_route",
    "load_routes",
    "load_script",
    "make_sealer",
    "map_each",
    "marked_values",
    "new_task_id",
    "note_alive",
    "opened_error",
    "pairs",
    "paused_supervisors",
    "plain_data",
    "present_workers",
    "promote_due",
    "queue_partitions",
    "read_events",
    "read_last_events",
    "read_marks",
    "read_partitions",
    "read_record",
    "recorded_steps",
    "release",
    "report_crash",
    "reschedule",
    "resume_supervisor",
    "retire_generation",
    "reveal",
    "saved_fields",
    "saved_fields_of_all",
    "set_aside",
    "set_partitions",
    "shown_arguments",
    "shows_mask",
    "spread",
    "succeed",
    "supervise",
    "take_suspect",
    "take_turns",
    "watch_due",
    "withdraw",
    "withdraw_supervisor",
    "write_entries",
]
