"""Writer of a run's checkpoint, which batches the entries of concurrent steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...queues import Delivery, Entry, Gateway, LeaseLost, retry_while_unavailable, write_entries
from ..log import log_wait

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """The one writer of a run's checkpoint. Entries are written in the order of their `put`."""

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        task_id: str,
        *,
        on_lost: Callable[[], None],
        on_cancel: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Create the writer.

        Args:
            on_lost: Called when a write is refused because the lease was lost.
            on_cancel: Called when a write reports that the task was cancelled.
            on_wait: Called while Redis is unavailable.
        """
        self._gateway = gateway
        self._delivery = delivery
        self._task_id = task_id
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        encryptor = gateway.encryptor
        self._cipher = encryptor.of(delivery.partition, task_id) if encryptor.active else None
        self._on_wait = log_wait(f"task {task_id}", on_wait)
        self._pending: list[Entry] = []
        self._added = 0
        self._written = 0
        self._writing = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._replicated = False

    async def put(self, *entries: Entry, wait: bool, replicated: bool = False) -> None:
        """Add entries, which are stored in one act.

        Args:
            wait: Return after they are stored; otherwise they are stored soon, and always before the outcome.
            replicated: Count them as stored only if replicas have them too.

        Raises `LeaseLost`.
        """
        if self._cipher is not None:
            entries = tuple([entry.encrypted(self._cipher) for entry in entries])
        self._pending += entries
        if replicated:
            self._replicated = True
        self._added += len(entries)
        if wait:
            await self._write_until(self._added)
        elif self._background is None or self._background.done():
            self._background = asyncio.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")

    async def flush(self) -> None:
        """Store all added entries. Raises `LeaseLost`."""
        await self._write_until(self._added)

    async def close(self) -> None:
        """Cancel the background write. Unwritten entries are dropped, since the run has lost its lease."""
        if self._background is not None and not self._background.done():
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)

    async def _write_quietly(self) -> None:
        try:
            while self._written < self._added:  # includes entries added during a write
                await self._write_until(self._added)
        except LeaseLost:
            self._on_lost()

    async def _write_until(self, position: int) -> None:
        while self._written < position:
            async with self._writing:
                if self._written < position:
                    await self._write_pending()

    async def _write_pending(self) -> None:
        batch, self._pending = self._pending, []
        replicated, self._replicated = self._replicated, False
        try:
            cancel = await retry_while_unavailable(
                lambda: write_entries(self._gateway, self._delivery, self._task_id, batch, replicated=replicated),
                on_wait=self._on_wait,
            )
        except LeaseLost:
            self._on_lost()
            raise
        except BaseException:
            self._replicated = self._replicated or replicated
            self._pending[:0] = batch  # maybe stored: writing them again changes nothing
            raise
        self._written += len(batch)
        if cancel:
            self._on_cancel()
