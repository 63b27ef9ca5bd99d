"""Deliveries, their fencing tokens, and the table of the deliveries that this worker holds.

A lease is the time for which a delivery belongs to its worker. It has no key: it is the idle time of the pending entry.
The fence of every write is checked against that entry, too (owner and delivery count).

The touch of a partition: proof that a worker reached it, so that no lease passes while Redis is away.

Heartbeats, sweeps and the promoter touch a partition. The script that finds no touch within half a lease, or that the
clock of Redis was set, restarts every lease of the partition (`seen.lua`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol

from typing_extensions import TypeVar

from ..envelope import Envelope, LimitUse
from ..errors import EntriesLost, LeaseLost, UnreadableEnvelope
from ..keys import GROUP, RELEASED, Partition
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import Script, queue_script

RELEASED_IDLE_MS: Final = 30 * 24 * 3600 * 1000
"""Idle time that a released message shows, so that every claim takes it, whatever the lease."""

_ENDED: Final = 1000
"""Claimed deliveries that a worker remembers: more than it ends while bytes may be on their way."""


@dataclass(slots=True)
class Delivery:
    """One hand-out of a message to one worker. It does not change; a frozen dataclass takes 3 times as long to create.

    Attributes:
        count: Redis' delivery count of the entry, 1 for the first. It is never lowered.
        claimed: Whether it was claimed from another worker, or released by one.
        repeated: Whether this worker read the message, or a later one of the partition, before: it may have run it
            under the same fence.
        requested: Monotonic time at which this worker sent the command. Redis handed the message out later than that.
    """

    partition: Partition
    entry: bytes
    worker: str
    count: int
    fields: Mapping[bytes, bytes] = field(repr=False)
    claimed: bool = False
    repeated: bool = False
    requested: float = field(default_factory=lambda: RUNTIME.monotonic(), compare=False, repr=False)  # noqa: PLW0108 - a simulation replaces the function after the import

    @property
    def fence(self) -> tuple[str, str, bytes, int]:
        return (GROUP, self.worker, self.entry, self.count)

    @property
    def has_history(self) -> bool:
        """Whether the task ran or waited before, so that its record is worth reading."""
        return self.claimed or b"again" in self.fields

    @property
    def task_id(self) -> str | None:
        """The id of the task; None if the message cannot be read."""
        try:
            return Envelope.decode(self.fields.get(b"env", b"")).id
        except UnreadableEnvelope:
            return None

    @property
    def key(self) -> tuple[str, bytes]:
        """Stream and entry id of the message, unique in Redis."""
        return (self.partition.ready, self.entry)


def check_accepted(answer: int, task_id: str, act: str) -> None:
    """Check the answer of a fenced script. Raises `LeaseLost`, and `EntriesLost` if Redis lacks entries of the run."""
    if answer < 0:
        raise EntriesLost(task_id, act, -1 - answer)
    if not answer:
        raise LeaseLost(task_id, act)


class RunStatus(NamedTuple):
    """Status of a run, as others see it.

    Attributes:
        ran: Seconds since it began; None if it has not.
        step: Key of the step that began first of those in flight; empty without any.
        stepped: Seconds since that step began.
    """

    ran: float | None
    step: str = ""
    stepped: float = 0.0


NOT_STARTED: Final = RunStatus(None)


class LimitTokens(Protocol):
    """The tokens of limits that a run holds. `held` and `on_gone` are called in the heartbeat thread."""

    def held(self) -> Sequence[tuple[str, Sequence[LimitUse]]]:
        """Return the tokens that are to be renewed."""
        ...

    def renewal(
        self, tokens: Sequence[tuple[str, Sequence[LimitUse]]], life: float
    ) -> tuple[Script, list[str], list[Argument]]:
        """Return script, keys and arguments that renew tokens of any runs of the worker. life: seconds.

        The reply is a list of positions of tokens that are gone, wholly or in part.
        """
        ...

    def on_gone(self, member: str) -> None:
        """Handle that a token has expired, or was taken away."""

    def close(self) -> None:
        """Release what the handler has left."""


class Holder(Protocol):
    """Holder of a delivery. The methods are called in the heartbeat thread."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def id(self) -> str:
        """The id of the task."""
        ...

    @property
    def tokens(self) -> LimitTokens | None:
        """Its tokens of limits, None without any."""
        ...

    def status(self) -> RunStatus:
        """Return what the run does now."""
        ...

    def on_lost(self) -> None:
        """Handle that the lease has passed to another worker."""

    def on_cancel(self) -> None:
        """Handle a request to cancel the task."""


H = TypeVar("H", bound=Holder, default=Holder)

_NOWHERE: Final = (-1, -1)
"""Before the first id of a stream."""


class Leases(Generic[H]):
    """Deliveries that a worker holds. Shared by the event loop and the heartbeat thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, bytes], H] = {}
        self._reached: dict[str, tuple[int, int]] = {}
        self._ended: dict[tuple[tuple[str, bytes], int], None] = {}

    def hold(self, holder: H) -> H | None:
        """Renew the holder's lease from now on. Return the previous holder of the same message here, if any."""
        key = holder.delivery.key
        with self._lock:
            previous = self._held.get(key)
            self._held[key] = holder
        if previous is not None:  # it may still write
            self._remember(previous.delivery)
        return previous

    def drop(self, holder: H) -> None:
        """Stop renewing: the delivery was settled, released or lost."""
        key = holder.delivery.key
        with self._lock:
            if self._held.get(key) is holder:
                del self._held[key]
        self._remember(holder.delivery)

    def note_read(self, partition: Partition, entry: bytes) -> bool:
        """Note that this worker has got a message for the first time. Return whether it had got it, or a later one.

        A consumer group hands out messages in the order of their ids, unless Redis has lost that it did. A reply that
        was given up may arrive after all, too.
        """
        time, _, number = entry.partition(b"-")
        position = (int(time), int(number))
        if position <= self._reached.get(partition.ready, _NOWHERE):
            return True
        self._reached[partition.ready] = position
        return False

    def _remember(self, delivery: Delivery) -> None:
        """Remember a fence that a run had; `note_read` covers those of first deliveries."""
        if delivery.count > 1:
            self._ended[delivery.key, delivery.count] = None
            if len(self._ended) > _ENDED:
                del self._ended[next(iter(self._ended))]

    def holds(self, partition: Partition, entry: bytes) -> bool:
        with self._lock:
            return (partition.ready, entry) in self._held

    def had_fence(self, delivery: Delivery) -> bool:
        """Return whether a run of this worker has this fence, or may have had it.

        Where Redis has lost that it handed out a message, it may hand it to this worker again, under the same fence.
        """
        held = self._held.get(delivery.key)
        return (
            delivery.repeated
            or (held is not None and held.delivery.fence == delivery.fence)
            or (delivery.count > 1 and (delivery.key, delivery.count) in self._ended)
        )

    def by_partition(self) -> dict[Partition, list[H]]:
        """Return the current holders, by partition."""
        grouped: dict[Partition, list[H]] = {}
        for holder in self.holders():
            grouped.setdefault(holder.delivery.partition, []).append(holder)
        return grouped

    def holders(self) -> list[H]:
        """Return the current holders."""
        with self._lock:
            return list(self._held.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)


_TOUCH = queue_script("touch")


class Touch(NamedTuple):
    """Result of a touch, in seconds.

    Attributes:
        time: Time of Redis.
        gap: Time since the previous touch by any worker, by the clock of Redis; 0 if no touch is known.
        restarted: Number of leases that were restarted.
        sent: Monotonic time at which this worker sent the script.
        received: Monotonic time at which it had the reply.
    """

    time: float
    gap: float
    restarted: int
    sent: float
    received: float

    @classmethod
    def of(cls, reply: Sequence[int], sent: float) -> Touch:
        """Return the touch that is part of a script's reply."""
        now, gap, restarted = reply
        return cls(now / 1000, gap / 1000, restarted, sent, RUNTIME.monotonic())


OnTouch = Callable[[Partition, Touch], None]


def ignore_touch(partition: Partition, touch: Touch) -> None:
    """Do nothing with a touch."""


async def touch_partition(gateway: Gateway, partition: Partition, lease_ms: int) -> Touch:
    """Touch a partition."""
    sent = RUNTIME.monotonic()
    return Touch.of(await gateway.run(_TOUCH, [partition.ready, partition.seen], [GROUP, lease_ms, RELEASED]), sent)
