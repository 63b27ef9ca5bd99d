"""Writer of a run's checkpoint, which batches the entries of concurrent steps.

Redis may lose what it has confirmed: its last second after a power cut (`appendfsync everysec`), or what a replica did
not have yet when it was promoted. Each entry has a number, and Redis refuses entries that would leave a gap. So the
writer keeps what it wrote in the last seconds, and sends again what is missing, in one act with what is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from ...queues import Delivery, EntriesLost, Entry, Gateway, LeaseLost, retry_while_unavailable, write_entries
from ...queues.delivery.checkpoint import Written
from ...queues.runtime import RUNTIME
from ..log import log_wait, logger

__all__ = ["PROGRESS_INTERVAL", "CheckpointWriter"]

PROGRESS_INTERVAL: Final = 1.0
"""Seconds between two writes of a run's progress, unless other entries are written in between."""

_KEPT_SECONDS: Final = 15.0
"""Seconds for which written entries are kept at least, unless there are too many: more than Redis loses."""

_KEPT_BYTES: Final = 2 * 1024 * 1024
"""Bytes of written entries in one batch. The last two batches are kept."""

_ENTRY_BYTES: Final = 2 * 1024
"""Bytes that an entry counts for in addition to its data, which bounds the number of small ones."""


class CheckpointWriter:
    """The one writer of a run's checkpoint. Entries are written in the order of their `put`."""

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        task_id: str,
        *,
        last: int,
        on_lost: Callable[[], None],
        on_gap: Callable[[EntriesLost], None],
        on_cancel: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Create the writer.

        Args:
            last: Number of the last entry that earlier runs wrote.
            on_lost: Called when a write is refused because the lease was lost.
            on_gap: Called when Redis has lost entries that are not kept any more.
            on_cancel: Called when a write reports that the task was cancelled.
            on_wait: Called while Redis is unavailable.
        """
        self._gateway = gateway
        self._delivery = delivery
        self._task_id = task_id
        self._on_lost = on_lost
        self._on_gap = on_gap
        self._on_cancel = on_cancel
        encryptor = gateway.encryptor
        self._cipher = encryptor.of(delivery.partition, task_id) if encryptor.active else None
        self._on_wait = log_wait(f"task {task_id}", on_wait)
        self._first: tuple[Entry, ...] = ()
        self._progress: Entry | None = None
        self._progress_due = RUNTIME.monotonic() + PROGRESS_INTERVAL if last else 0.0  # a resumed run first catches up
        self._progress_timer: asyncio.TimerHandle | None = None
        self._pending: list[Entry] = []
        self._added = 0
        self._written = 0
        self._last = last
        self._kept: list[Entry] = []
        self._kept_before: list[Entry] = []
        self._kept_bytes = 0
        self._kept_until = RUNTIME.monotonic() + _KEPT_SECONDS
        self._writing = asyncio.Lock()
        self.large_values = asyncio.Lock()
        """Held while the chunks of a value are put, so that no write has those of several."""
        self._background: asyncio.Task[None] | None = None
        self._replicated = False
        self.logged = 0
        """Bytes of data that were added to the log."""
        self.mail = 0
        """Number of the last message to the task when it was last written; 0 if it had none."""

    @property
    def last(self) -> int:
        """Number of the last entry that Redis has confirmed."""
        return self._last

    def put_first(self, entry: Entry) -> None:
        """Store an entry in one act with the first ones that are put; never without them."""
        self._first = (entry,)

    def report(self, progress: Entry) -> None:
        """Store the latest progress: with the next entries, at most `PROGRESS_INTERVAL` after the last one.

        A later one replaces it before it is written, however long Redis is unavailable.
        """
        self._progress = progress
        if self._progress_timer is None:
            self._put_progress()

    def _put_progress(self) -> None:
        """Add the latest progress, or try again when the last one is old enough and written."""
        self._progress_timer = None
        if self._progress is None:
            return
        now, loop = RUNTIME.monotonic(), asyncio.get_running_loop()
        busy = self._background is not None and not self._background.done()
        if busy or now < self._progress_due:
            delay = max(PROGRESS_INTERVAL / 10, self._progress_due - now)
            self._progress_timer = loop.call_later(delay, self._put_progress)
            return
        self._add_progress()
        self._background = loop.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")

    def _add_progress(self) -> None:
        latest, self._progress = self._progress, None
        if latest is not None:
            self._progress_due = RUNTIME.monotonic() + PROGRESS_INTERVAL
            self._pending.append(latest if self._cipher is None else latest.encrypted(self._cipher))
            self._added += 1

    async def put(self, *entries: Entry, wait: bool, replicated: bool = False) -> None:
        """Add entries, which are stored in one act.

        Args:
            wait: Return after they are stored; otherwise they are stored soon, and always before the outcome.
            replicated: Count them as stored only if replicas have them too.

        Raises:
            LeaseLost: Another worker has the task.
            EntriesLost: Redis has lost entries that are not kept any more.
        """
        if self._progress is not None:
            self._add_progress()
        if self._first:
            entries, self._first = entries + self._first, ()  # last: `entries` may be stored already, see put_or_drop
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
        """Store all added entries, and the latest progress. Raises `LeaseLost`, `EntriesLost`."""
        if self._progress is not None:
            self._add_progress()
        await self._write_until(self._added)

    async def put_or_drop(self, *entries: Entry) -> bool:
        """Store entries in one try; if it fails, they are dropped, and the next entry has the number of the first.

        If the reply was lost, they may be stored all the same: then the same entries must follow first, or an outcome.

        Returns:
            Whether the task was cancelled.

        Raises:
            QueueError: The entries are not stored, or it is not known.
        """
        if self._cipher is not None:
            entries = tuple([entry.encrypted(self._cipher) for entry in entries])
        while True:
            await self.flush()
            async with self._writing:
                try:
                    written = await self._write(entries)
                except EntriesLost as lost:
                    self._rewind(lost)
                else:
                    self._keep(entries)
                    self.mail = written.mail
                    return written.cancel

    async def send_again(self, lost: EntriesLost) -> None:
        """Store the entries that Redis has lost. Raises `LeaseLost`, `EntriesLost` if they are not kept any more."""
        async with self._writing:
            self._rewind(lost)
        await self.flush()

    async def close(self) -> None:
        """Cancel the background write. Unwritten entries are dropped, since the run has lost its lease."""
        if self._progress_timer is not None:
            self._progress_timer.cancel()
        if self._background is not None and not self._background.done():
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)

    async def _write_quietly(self) -> None:
        try:
            while self._written < self._added:  # includes entries added during a write
                await self._write_until(self._added)
        except LeaseLost:
            self._on_lost()
        except EntriesLost as lost:
            self._on_gap(lost)

    async def _write_until(self, position: int) -> None:
        while self._written < position:
            async with self._writing:
                if self._written < position:
                    await self._write_pending()

    async def _write_pending(self) -> None:
        batch, self._pending = self._pending, []
        replicated, self._replicated = self._replicated, False
        try:
            written = await retry_while_unavailable(
                partial(self._write, batch, replicated=replicated), on_wait=self._on_wait
            )
        except LeaseLost:
            self._on_lost()
            raise
        except BaseException as error:
            self._replicated = self._replicated or replicated
            self._pending[:0] = batch  # maybe stored: writing them again changes nothing
            if not isinstance(error, EntriesLost):
                raise
            try:
                self._rewind(error)
            except EntriesLost as lost:
                self._on_gap(lost)
                raise
            return
        self._keep(batch)
        self._written += len(batch)
        self.mail = written.mail
        if written.cancel:
            self._on_cancel()

    def _write(self, batch: Sequence[Entry], *, replicated: bool = False) -> Awaitable[Written]:
        """Write the next entries."""
        return write_entries(
            self._gateway, self._delivery, self._task_id, batch, first=self._last + 1, replicated=replicated
        )

    def _keep(self, batch: Sequence[Entry]) -> None:
        """Number entries as stored, and keep them for a while."""
        self._last += len(batch)
        self._kept += batch
        for entry in batch:
            self._kept_bytes += _ENTRY_BYTES + len(entry.value) + len(entry.log)
            self.logged += len(entry.log)
        now = RUNTIME.monotonic()
        if now > self._kept_until or self._kept_bytes > _KEPT_BYTES:
            self._kept_before, self._kept, self._kept_bytes = self._kept, [], 0
            self._kept_until = now + _KEPT_SECONDS

    def _rewind(self, lost: EntriesLost) -> None:
        """Add the entries that Redis has lost to those to write. Raises `EntriesLost` if one of them is not kept."""
        kept = self._kept_before + self._kept
        count = max(0, self._last - lost.last)  # 0: another write has noticed the loss
        first = len(kept) - count
        if first < 0:
            raise lost
        bound = logger.bind(id=self._task_id)
        bound.warning("Redis had lost entries {} to {} of the checkpoint: sent again", lost.last + 1, self._last)
        self._kept_before, self._kept, self._kept_bytes = kept[:first], [], 0
        self._pending[:0] = kept[first:]
        self._written -= count
        self._last -= count
