"""The bound on what runs at once."""

from __future__ import annotations

import anyio

__all__ = ["Slots"]


class Slots:
    """As many slots as the worker's concurrency. Only the intake takes them; every execution gives its own back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        self._changed = anyio.Event()

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.taken)

    def take(self) -> None:
        self.taken += 1

    def give(self) -> None:
        self.taken -= 1
        self._announce()

    async def wait_free(self) -> None:
        """Return when a slot is free."""
        while not self.free:
            await self._changed.wait()

    async def wait_empty(self) -> None:
        """Return when nothing runs."""
        while self.taken:
            await self._changed.wait()

    async def wait_change(self) -> None:
        """Return when a slot is given back."""
        await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
