"""Connections to Redis: addresses, clients, pipelining, scripts, Sentinel and Cluster."""

from __future__ import annotations

from .address import Address
from .backoff import Backoff, jittered, retry_while_unavailable
from .clients import COMMAND_TIMEOUT, is_read_only, sync_client, translated
from .gateway import BLOCK, Argument, BlockingConnection, Command, Gateway, is_missing_group
from .replication import Replicated, Replication
from .scripts import Script, load_script, pairs, queue_script

__all__ = [
    "BLOCK",
    "COMMAND_TIMEOUT",
    "Address",
    "Argument",
    "Backoff",
    "BlockingConnection",
    "Command",
    "Gateway",
    "Replicated",
    "Replication",
    "Script",
    "is_missing_group",
    "is_read_only",
    "jittered",
    "load_script",
    "pairs",
    "queue_script",
    "retry_while_unavailable",
    "sync_client",
    "translated",
]
