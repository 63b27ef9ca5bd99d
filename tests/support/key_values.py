"""Namespaces of the key-value store for tests."""

from __future__ import annotations

from perdure.queues import Gateway, Namespace
from perdure.queues.store.entries import NamespaceEntries
from perdure.queues.store.names import Name, StoreNames


def namespace_entries(
    gateway: Gateway,
    namespace: Namespace,
    name: Name = ("notes",),
    *,
    payload_limit: int = 1024,
    limit: int = 4 * 1024 * 1024,
) -> NamespaceEntries:
    """Return the entries of a namespace, whose values above a KiB are stored in chunks."""
    names = StoreNames(gateway, namespace)
    return NamespaceEntries(gateway, namespace, name, names, payload_limit=payload_limit, limit=limit)
