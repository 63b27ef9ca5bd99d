"""Writing the checkpoint of a run: what several steps finish at the same time goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...queues import Delivery, Entry, Gateway, LeaseLost, retry_while_unavailable, write_entries
from ..log import log_wait

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """The one writer of a run's checkpoint. Entries are written in the order in which they were put."""

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
        """on_wait: called while Redis is unavailable."""
        self._gateway = gateway
        self._delivery = delivery
        self._task_id = task_id
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        sealer = gateway.encryptor
        self._seal = sealer.of(delivery.partition, task_id) if sealer.active else None
        self._on_wait = log_wait(f"task {task_id}", on_wait)
        self._pending: list[Entry] = []
        self._put = 0
        self._written = 0
        self._writing = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None
        self._replicated = False

    async def put(self, *entries: Entry, wait: bool, replicated: bool = False) -> None:
        """Take entries, which are stored in one act. With `wait` they are stored when this returns, otherwise soon, and
        always before the outcome.

        replicated: stored means that replicas have it too. Raises `LeaseLost`.
        """
        if self._seal is not None:
            entries = tuple([entry.encrypted(self._seal) for entry in entries])
        self._pending += entries
        if replicated:
            self._replicated = True
        self._put += len(entries)
        if wait:
            await self._write_until(self._put)
        elif self._background is None or self._background.done():
            self._background = asyncio.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")

    async def flush(self) -> None:
        """Store everything that was put. Raises `LeaseLost`."""
        await self._write_until(self._put)

    async def close(self) -> None:
        """End the background writing; what it had not written is dropped (the run has lost its lease)."""
        if self._background is not None and not self._background.done():
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)

    async def _write_quietly(self) -> None:
        try:
            while self._written < self._put:  # what was put while a write was under way is written as well
                await self._write_until(self._put)
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
            self._pending[:0] = batch  # not known to be stored: goes out again, which changes nothing if it was
            raise
        self._written += len(batch)
        if cancel:
            self._on_cancel()
