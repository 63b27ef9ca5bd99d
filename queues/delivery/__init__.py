"""Deliveries: reading and claiming messages, leases, checkpoints and settlement."""

from __future__ import annotations

from .checkpoint import Entry, History, Kind, last_step, load_history, recorded_steps, touch_step, write_entries
from .consumer import Consumer
from .due_set import promote_due
from .fleet_locks import acquire_fleet_locks
from .heartbeat import LeaseHeartbeat
from .leases import Delivery, Leases
from .quarantine_store import CrashReport, clear_quarantined, quarantine, report_crash, take_quarantined
from .settlement import Counters, Wake, cancelled, park, release, reschedule, succeed
from .stream_reader import SingleNodeReader, read_partitions

__all__ = [
    "Consumer",
    "Counters",
    "CrashReport",
    "Delivery",
    "Entry",
    "History",
    "Kind",
    "LeaseHeartbeat",
    "Leases",
    "SingleNodeReader",
    "Wake",
    "acquire_fleet_locks",
    "cancelled",
    "clear_quarantined",
    "last_step",
    "load_history",
    "park",
    "promote_due",
    "quarantine",
    "read_partitions",
    "recorded_steps",
    "release",
    "report_crash",
    "reschedule",
    "succeed",
    "take_quarantined",
    "touch_step",
    "write_entries",
]
