"""One run of a handler, from delivery to outcome: what it has, and how it can be ended."""

from __future__ import annotations

import time
from enum import Enum

import anyio

from ...queues import Delivery, Envelope, Gateway, History
from .recorder import Recorder

__all__ = ["Ending", "Run"]


class Ending(Enum):
    """Why a run was ended from outside."""

    LOST = "lost"
    """Its lease has passed to another worker."""
    CANCELLED = "cancelled"
    """Somebody asked for its cancellation."""
    HANDED_OFF = "handed_off"
    """The worker is stopping."""


class Run:
    """One run. Belongs to the event loop it runs in; nothing here is called from another thread."""

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        envelope: Envelope,
        history: History,
        *,
        payload_limit: int,
        threads: anyio.CapacityLimiter,
    ) -> None:
        self.gateway = gateway
        self.delivery = delivery
        self.envelope = envelope
        self.history = history
        self.payload_limit = payload_limit
        self.threads = threads
        self.scope = anyio.CancelScope()
        self.ending: Ending | None = None
        self.stopping = False
        self.closed = False
        self.started = time.monotonic()
        self.steps_in_flight: dict[str, float] = {}
        self.steps_recorded = 0
        self.result_ttl: float | None = None
        self._names: dict[str, int] = {}
        self._quiet: anyio.Event | None = None
        self.recorder = Recorder(
            gateway,
            delivery,
            envelope.id,
            on_lost=lambda: self.end(Ending.LOST),
            on_cancel=lambda: self.end(Ending.CANCELLED),
        )

    @property
    def id(self) -> str:
        return self.envelope.id

    def next_key(self, name: str) -> str:
        """The key of the next step of this name: `read`, `read#2`, `read#3`, in the order of the calls."""
        number = self._names[name] = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    def end(self, why: Ending) -> None:
        """Cancel the handler. The first reason counts, but a lost lease beats every other."""
        if self.ending is None or why is Ending.LOST:
            self.ending = why
        self.scope.cancel()

    def stop(self) -> None:
        """Have the run stop at its next step boundary."""
        self.stopping = True

    def step_began(self, key: str) -> None:
        self.steps_in_flight[key] = time.monotonic()

    def step_ended(self, key: str) -> None:
        self.steps_in_flight.pop(key, None)
        if not self.steps_in_flight and self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def boundary(self) -> None:
        """Where a run may be stopped: between steps. Does not return when it is."""
        if not self.stopping:
            return
        while self.steps_in_flight:
            self._quiet = self._quiet or anyio.Event()
            await self._quiet.wait()
        self.end(Ending.HANDED_OFF)
        await anyio.sleep_forever()

    def __repr__(self) -> str:
        return f"<Run {self.envelope.task} {self.id} steps={list(self.steps_in_flight)}>"
