"""Deliveries, their fence, and the table of those this worker holds.

A lease is the time for which a delivery is its worker's alone. It has no key of its own: it is the idle time of the
pending entry, and the fence that guards every write is read from that entry too (owner and delivery count).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .keys import GROUP, Partition

__all__ = ["Delivery", "Leases"]


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
    def history(self) -> bool:
        return self.claimed or b"again" in self.fields

    @property
    def key(self) -> tuple[Partition, bytes]:
        return (self.partition, self.entry)


@dataclass(slots=True)
class _Held:
    delivery: Delivery
    record: str
    on_lost: Callable[[], None]
    on_cancel: Callable[[], None]


class Leases:
    """The deliveries a worker holds. Shared between the event loop and the beat thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Partition, bytes], _Held] = {}

    def hold(
        self, delivery: Delivery, record: str, *, on_lost: Callable[[], None], on_cancel: Callable[[], None]
    ) -> None:
        """Have the delivery's lease renewed from now on. The callbacks are called in the beat thread."""
        with self._lock:
            self._held[delivery.key] = _Held(delivery, record, on_lost, on_cancel)

    def drop(self, delivery: Delivery) -> None:
        """Stop renewing: the delivery was settled, given back or lost."""
        with self._lock:
            held = self._held.get(delivery.key)
            if held is not None and held.delivery is delivery:
                del self._held[delivery.key]

    def holds(self, partition: Partition, entry: bytes) -> bool:
        with self._lock:
            return (partition, entry) in self._held

    def by_partition(self) -> dict[Partition, list[_Held]]:
        """What is held now, for one beat."""
        grouped: dict[Partition, list[_Held]] = {}
        with self._lock:
            for held in self._held.values():
                grouped.setdefault(held.delivery.partition, []).append(held)
        return grouped

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)
