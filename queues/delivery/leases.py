"""Deliveries, their fence, and the table of those this worker holds.

A lease is the time for which a delivery is its worker's alone. It has no key of its own: it is the idle time of the
pending entry, and the fence that guards every write is read from that entry too (owner and delivery count).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol

from typing_extensions import TypeVar

from ..keys import GROUP, Partition

__all__ = ["Delivery", "Holder", "Leases"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One handing of a message to one worker.

    count: Redis' delivery count of the entry, 1 for the first. claimed: it was taken over from another worker, or
    given back by one. history: the task ran or waited before, so there is a record worth reading.
    """

    partition: Partition
    entry: bytes
    worker: str
    count: int
    fields: Mapping[bytes, bytes] = field(repr=False)
    claimed: bool = False

    @property
    def fence(self) -> tuple[str, str, bytes, int]:
        return (GROUP, self.worker, self.entry, self.count)

    @property
    def has_history(self) -> bool:
        return self.claimed or b"again" in self.fields

    @property
    def key(self) -> tuple[str, bytes]:
        """What names the message in all of Redis: its stream and its entry."""
        return (self.partition.ready, self.entry)


class Holder(Protocol):
    """Whoever holds a delivery. The callbacks are called in the beat thread."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def record(self) -> str: ...

    def on_lost(self) -> None:
        """The lease has passed to another."""

    def on_cancel(self) -> None:
        """Somebody asked for the task's cancellation."""


H = TypeVar("H", bound=Holder, default=Holder)


class Leases(Generic[H]):
    """The deliveries a worker holds. Shared between the event loop and the beat thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, bytes], H] = {}

    def hold(self, holder: H) -> H | None:
        """Have the holder's lease renewed from now on. Returns who held the same message here before, if anybody."""
        key = holder.delivery.key
        with self._lock:
            former = self._held.get(key)
            self._held[key] = holder
        return former

    def drop(self, holder: H) -> None:
        """Stop renewing: the delivery was settled, given back or lost."""
        key = holder.delivery.key
        with self._lock:
            if self._held.get(key) is holder:
                del self._held[key]

    def holds(self, partition: Partition, entry: bytes) -> bool:
        with self._lock:
            return (partition.ready, entry) in self._held

    def by_partition(self) -> dict[Partition, list[H]]:
        """What is held now, for one beat."""
        grouped: dict[Partition, list[H]] = {}
        for holder in self.holders():
            grouped.setdefault(holder.delivery.partition, []).append(holder)
        return grouped

    def holders(self) -> list[H]:
        """Who holds something now."""
        with self._lock:
            return list(self._held.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)
