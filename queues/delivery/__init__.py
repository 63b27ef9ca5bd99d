"""Deliveries: reading and claiming messages, leases, checkpoints and settlement.

| module | what it holds |
|---|---|
| `consumer` | reads new messages, claims those of lost workers, leaves the groups |
| `stream_reader` | blocking XREADGROUP over the partitions of one server or of a cluster |
| `leases` | the delivery with its fencing token; the table of deliveries that this worker holds |
| `heartbeat` | renews the leases from a thread |
| `touch` | proof that workers reach a partition, without which its leases do not expire |
| `checkpoint` | entries of the checkpoint: written by a run, read by the next one |
| `checkpoint_edit` | edit of the checkpoint of a task that no worker has, and its end after an export |
| `step_pages` | step records of a large checkpoint, read when the run asks for them |
| `settlement` | what ends a delivery: succeed, cancel, reschedule, park, release (bury is in `deadletter`) |
| `quarantine_store` | tasks that are suspected of killing workers |
| `due_set` | promotion of scheduled tasks |
| `lost_tasks` | tasks that another program has taken out of the queue, and their return |
| `fleet_locks` | locks that leave a chore to one worker of the fleet |

Before a change: every write for a delivery is made by a script that includes `fence.lua`, and is refused once the lease
has passed. A message is acknowledged only in the script that stores its outcome. Each script may be called twice,
because a reply may be lost, except for those that hand out messages (`run_once`). tests/model checks all of that; a new
script needs a rule there.
"""

from __future__ import annotations

from .checkpoint import Entry, History, Kind, last_step, load_history, recorded_steps, write_entries
from .checkpoint_edit import Position, close_exported, edit_checkpoint, read_mark, read_position
from .consumer import Consumer
from .due_set import CANCEL_REQUEST, promote_due, wake_version
from .fleet_locks import acquire_fleet_locks
from .heartbeat import LeaseHeartbeat, renew_lease
from .leases import NOT_STARTED, Delivery, Leases, RunStatus, check_accepted
from .lost_tasks import Place, find_places, put_back_lost, replace_exhausted
from .quarantine_store import (
    CrashReport,
    clear_quarantined,
    quarantine,
    report_crash,
    take_quarantined,
)
from .settlement import Counters, Wake, await_version, cancelled, park, raise_count, release, reschedule, succeed
from .stream_reader import SingleNodeReader, read_partitions
from .touch import Touch

__all__ = [
    "CANCEL_REQUEST",
    "NOT_STARTED",
    "Consumer",
    "Counters",
    "CrashReport",
    "Delivery",
    "Entry",
    "History",
    "Kind",
    "LeaseHeartbeat",
    "Leases",
    "Place",
    "Position",
    "RunStatus",
    "SingleNodeReader",
    "Touch",
    "Wake",
    "acquire_fleet_locks",
    "await_version",
    "cancelled",
    "check_accepted",
    "clear_quarantined",
    "close_exported",
    "edit_checkpoint",
    "find_places",
    "last_step",
    "load_history",
    "park",
    "promote_due",
    "put_back_lost",
    "quarantine",
    "raise_count",
    "read_mark",
    "read_partitions",
    "read_position",
    "recorded_steps",
    "release",
    "renew_lease",
    "replace_exhausted",
    "report_crash",
    "reschedule",
    "succeed",
    "take_quarantined",
    "wake_version",
    "write_entries",
]
