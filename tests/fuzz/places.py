"""Every key of `queues/keys.py`, with its type and its place in a namespace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from perdure.queues import Namespace, Partition
from perdure.queues.keys import LimitKeys, SessionPartition

__all__ = ["NO_KEYS", "TABLES", "Place", "Type", "key_names", "places"]

Type = Literal["hash", "stream", "string", "zset"]

TABLES: Final[dict[type, dict[str, Type]]] = {
    Partition: {
        "ready": "stream",
        "nudge": "stream",
        "timeline": "zset",
        "due": "zset",
        "waiting": "zset",
        "outbox": "zset",
        "joins": "zset",
        "rings": "zset",
        "turns": "zset",
        "limited": "zset",
        "kept": "zset",
        "paused": "zset",
        "checked": "string",
        "seen": "string",
        "dead": "stream",
        "closed": "hash",
        "junk": "stream",
        "mark": "string",
        "retentions": "zset",
        "versions": "zset",
        "task_versions": "zset",
        "fired": "string",
        "promote_lock": "string",
        "clean_lock": "string",
        "sweep_lock": "string",
        "notices_lock": "string",
        "record": "hash",
        "steps": "hash",
        "log": "stream",
        "inbox": "hash",
        "control": "hash",
        "stream": "stream",
        "stream_keys": "zset",
        "upload": "hash",
    },
    SessionPartition: {
        "session": "hash",
        "history": "stream",
        "timeline": "zset",
        "due": "zset",
        "junk": "stream",
        "forgotten": "hash",
        "last_forgotten": "hash",
    },
    LimitKeys: {
        "clock": "string",
        "names": "zset",
        "audit": "stream",
        "limit": "hash",
        "control": "hash",
        "holders": "zset",
        "waiters": "zset",
        "rate": "string",
        "cost": "string",
        "label": "string",
    },
    Namespace: {
        "junk": "stream",
        "session_lock": "string",
        "schedule_lock": "string",
        "schedules": "zset",
        "schedule": "hash",
        "queues": "hash",
        "deployment": "hash",
        "sharing": "zset",
        "workers": "zset",
        "worker": "hash",
        "supervisors": "zset",
        "supervisor": "hash",
        "catalog": "zset",
        "catalog_entry": "string",
        "crashes": "zset",
        "workspace": "hash",
        "workspaces": "zset",
        "identity": "hash",
        "config": "hash",
        "paused": "zset",
        "pause": "hash",
        "pauses": "hash",
        "jobs": "zset",
        "job": "hash",
        "stores": "zset",
    },
}
"""Type of each key, by the attribute or method that makes it."""

NO_KEYS: Final[dict[type, frozenset[str]]] = {
    Partition: frozenset({"namespace", "queue", "index", "run_keys", "shared_keys", "task_keys", "join_keys", "lane"}),
    SessionPartition: frozenset({"namespace", "index", "shared_keys", "lane"}),
    LimitKeys: frozenset({"namespace", "place", "of_uses"}),
    Namespace: frozenset(
        {
            "name",
            "tenant",
            "partition",
            "session_partitions",
            "shared_keys",
            "task_keys",
            "token",
            "unique",
            "ledger",
            "ledger_index",
            "store",
        }
        | {
            "limits",
            "worker_channel",
            "schedule_channel",
            "schedule_place",
            "job_place",
            "pause_channel",
            "pause_place",
        }
    ),
}
"""Public names that make no key: parts of a key, lists of keys, patterns and channels."""

_NAME: Final = "NAME"

STORE: Final = ("notes", "fuzz")
"""Namespace of the key-value store whose keys are mutated."""


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of key in one namespace.

    Attributes:
        key: The key; of a kind with names, the start of each key.
        named: Whether a name follows, such as the id of a task.
    """

    name: str
    type: Type
    key: bytes
    named: bool

    def keys(self, known: list[bytes]) -> list[bytes]:
        """Return the existing keys of this kind."""
        if not self.named:
            return [self.key]
        return [key for key in known if key.startswith(self.key) and len(key) > len(self.key)]


def key_names(owner: type) -> set[str]:
    """Return the public names of a class of `queues/keys.py`."""
    fields = {name for name in getattr(owner, "__dataclass_fields__", {}) if not name.startswith("_")}
    return fields | {name for name in vars(owner) if not name.startswith("_")}


def places(namespace: Namespace, partition: Partition, sessions: SessionPartition) -> Iterator[Place]:
    """Yield each kind of key of a namespace, its limits, one partition of a queue, and one of the sessions."""
    for owner in (partition, sessions, namespace.limits, namespace):
        for name, kind in TABLES[type(owner)].items():
            yield _place(owner, name, kind)
    join, *_ = partition.join_keys(_NAME, _NAME)
    yield Place("Partition.join_keys", "hash", join[: join.index(_NAME)].encode(), named=True)
    token = f"{{{namespace.name}:~tokens:{partition.index}}}:token:"
    yield Place("Namespace.token", "string", token.encode(), named=True)
    unique = f"{{{namespace.name}:~unique:{partition.index}}}:unique:"
    yield Place("Namespace.unique", "string", unique.encode(), named=True)
    budgets = f"{{{namespace.name}:~budgets:{partition.index}}}:"
    ledger_types: dict[str, Type] = {"ledger": "hash", "charged": "zset", "asks": "zset"}
    for name, kind in ledger_types.items():
        yield Place(f"Namespace.ledger.{name}", kind, f"{budgets}{name}:".encode(), named=True)
    store = namespace.store(STORE)
    for name in ("entries", "fences"):
        yield Place(f"Namespace.store.{name}", "hash", getattr(store, name).encode(), named=False)
    for name in ("names", "expiries", "users", "batches", "acts"):
        yield Place(f"Namespace.store.{name}", "zset", getattr(store, name).encode(), named=False)
    yield Place("Namespace.store.upload", "hash", store.upload("").encode(), named=True)
    yield Place("Namespace.store.value", "hash", store.value("").encode(), named=True)
    yield Place("Namespace.ledger_index", "zset", f"{budgets}ledgers".encode(), named=False)


def _place(owner: Any, name: str, kind: Type) -> Place:
    title = f"{type(owner).__name__}.{name}"
    made = getattr(owner, name)
    if isinstance(made, str):
        return Place(title, kind, made.encode(), named=False)
    key: str = made(*[_NAME] * len(inspect.signature(made).parameters))
    return Place(title, kind, key[: key.index(_NAME)].encode(), named=True)
