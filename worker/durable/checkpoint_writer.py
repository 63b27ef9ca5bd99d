"""Writer of a run's checkpoint, which batches the entries of concurrent steps.

Redis may lose what it has confirmed: its last second after a power cut (`appendfsync everysec`), or what a replica did
not have yet when it was promoted. Each entry has a number, and Redis refuses entries that would leave a gap. So the
writer keeps what it wrote in the last seconds, and sends again what is missing, before what is new.

Redis executes nothing else while it runs a script. So a write is bounded, and a `put` waits if too many entries do.
Several writes in a row are as safe as one: after a crash in between, Redis has the first entries, without a gap, as if
the run had crashed earlier. Each write ends where a `put` ends, so that the entries of one `put` are stored in one act.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from ...queues.delivery.checkpoint import Entry, Kind, Written, write_entries
from ...queues.delivery.leases import Delivery
from ...queues.errors import EntriesLost, LeaseLost
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Argument
from ..log import log_wait, logger

if TYPE_CHECKING:
    from ...queues.security.hash_chain import ChainHead, HashChain

PROGRESS_INTERVAL: Final = 1.0
"""Seconds between two writes of what a run reports, unless other entries are written in between."""

_KEPT_SECONDS: Final = 15.0
"""Seconds for which written entries are kept at least, unless there are too many: more than Redis loses."""

_KEPT_BYTES: Final = 2 * 1024 * 1024
"""Bytes of written entries in one batch. The last two batches are kept."""

_WRITE_BYTES: Final = 1024 * 1024
"""Bytes of entries in one write, about 500 small ones; a larger `put` is written alone."""

_PENDING_BYTES: Final = 4 * 1024 * 1024
"""Bytes of entries that wait for a write. If there are more, a `put` returns after it is stored."""

_ENTRY_BYTES: Final = 2 * 1024
"""Bytes that an entry counts for in addition to its data, which bounds the number of small ones."""

_Entries: TypeAlias = tuple[Entry, ...]
_Put: TypeAlias = "tuple[_Entries, ChainHead | None]"
"""Entries of one `put`, which are stored in one act, and the head of the hash chain after them."""


class CheckpointWriter:
    """The one writer of a run's checkpoint. Entries are written in the order of their `put`."""

    def __init__(
        self,
        gateway: Gateway,
        delivery: Delivery,
        task_id: str,
        *,
        last: int,
        chain: HashChain | None = None,
        excuse: Entry | None = None,
        on_lost: Callable[[], None],
        on_gap: Callable[[EntriesLost], None],
        on_cancel: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Create the writer.

        Args:
            last: Number of the last entry that earlier runs wrote.
            chain: Hash chain of the events; None without a key.
            excuse: Stored in one act with the first progress: it excuses the crashes of earlier runs.
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
        self._chain = chain
        self._first: _Entries = ()
        self._maybe: _Entries = ()
        """Entries of `put_or_drop` that are dropped, and may be stored all the same."""
        self._excuse = excuse
        self._reported: dict[tuple[Kind, str], tuple[Entry, float]] = {}
        """The latest reports that wait for a write, and their times: progress, and values with their counts."""
        self._progress_due = RUNTIME.monotonic() + PROGRESS_INTERVAL if last else 0.0  # a resumed run first catches up
        self._progress_timer: asyncio.TimerHandle | None = None
        self._pending: deque[_Put] = deque()
        self._pending_bytes = 0
        self._added = 0
        self._written = 0
        self._last = last
        self._kept: list[_Put] = []
        self._kept_before: list[_Put] = []
        self._kept_bytes = 0
        self._kept_until = RUNTIME.monotonic() + _KEPT_SECONDS
        self._writing = asyncio.Lock()
        self.large_values = asyncio.Lock()
        """Held while the chunks of a value are put, so that no write has those of several."""
        self._background: asyncio.Task[None] | None = None
        self._replicated = -math.inf  # a rewind may make `_written` negative
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
        self._first = (*self._first, entry)

    @property
    def holds_first(self) -> bool:
        """Whether entries of `put_first` wait for others."""
        return bool(self._first)

    def report(self, *entries: Entry) -> None:
        """Store the latest report: with the next entries, at most `PROGRESS_INTERVAL` after the last one.

        A later entry of the same kind and name replaces one before that is written, however long Redis is unavailable.
        All that are reported are stored in one act.
        """
        now = RUNTIME.monotonic()
        for entry in entries:
            self._reported[entry.kind, entry.step] = entry, now
        if self._progress_timer is None:
            self._put_reported()

    def _put_reported(self) -> None:
        """Add the latest reports, or try again when the last ones are old enough and written."""
        self._progress_timer = None
        if not self._reported:
            return
        now, loop = RUNTIME.monotonic(), asyncio.get_running_loop()
        busy = self._background is not None and not self._background.done()
        if busy or now < self._progress_due:
            delay = max(PROGRESS_INTERVAL / 10, self._progress_due - now)
            self._progress_timer = loop.call_later(delay, self._put_reported)
            return
        self._add_reported()
        self._background = loop.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")

    def _add_reported(self) -> None:
        now = RUNTIME.monotonic()
        latest = tuple([_aged(entry, now - at) for entry, at in self._reported.values()])
        self._reported, self._progress_due = {}, now + PROGRESS_INTERVAL
        self._add(latest)

    def _sealed(self, entries: _Entries) -> _Put:
        """Return entries as they are stored, with the head of the hash chain after them."""
        head = None if self._chain is None else self._chain.add(entries)
        return entries if self._cipher is None else tuple([entry.encrypted(self._cipher) for entry in entries]), head

    def _add(self, entries: _Entries) -> None:
        put = self._sealed(entries)
        self._pending.append(put)
        self._pending_bytes += _size(put)
        self._added += len(entries)

    async def put(self, *entries: Entry, wait: bool, replicated: bool = False, progress: bool = False) -> None:
        """Add entries, which are stored in one act, after what was reported before.

        Args:
            wait: Return after they are stored; otherwise they are stored soon, and always before the outcome. If too
                many entries wait for a write, this waits as well.
            replicated: Count them as stored only if replicas have them too.
            progress: No earlier run has stored them, so they excuse its crashes.

        Raises:
            LeaseLost: Another worker has the task.
            EntriesLost: Redis has lost entries that are not kept any more.
        """
        if self._reported:
            self._add_reported()
        if self._first:
            entries, self._first = entries + self._first, ()  # last: `entries` may be stored already, see put_or_drop
        if progress and self._excuse is not None:
            entries, self._excuse = (*entries, self._excuse), None
        if entries:
            self._add(entries)
        if replicated:
            self._replicated = self._added
        if not wait and (self._background is None or self._background.done()):
            self._background = asyncio.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")
        if wait or self._pending_bytes > _PENDING_BYTES:
            await self._write_until(self._added)

    def put_soon(self, *entries: Entry) -> None:
        """Add entries, which are stored in one act, soon and always before the outcome. For callers that cannot wait.

        They excuse no crash, and their number must be small: nothing holds the caller back.
        """
        entries, self._first = entries + self._first, ()
        self._add(entries)
        if self._background is None or self._background.done():
            self._background = asyncio.create_task(self._write_quietly(), name=f"perdure record {self._task_id}")

    async def flush(self) -> None:
        """Store all added entries, and the latest reports. Raises `LeaseLost`, `EntriesLost`."""
        if self._reported:
            self._add_reported()
        await self._write_until(self._added)

    async def put_or_drop(self, *entries: Entry) -> bool:
        """Store entries in one try; if it fails, they are dropped, and the next entry has the number of the first.

        If the reply was lost, they may be stored all the same: then the same entries must follow first, or an outcome.

        Returns:
            Whether the task was cancelled.

        Raises:
            QueueError: The entries are not stored, or it is not known.
        """
        chain, put = self._chain, None
        before = None if chain is None else chain.copy()
        try:
            while True:
                await self.flush()
                async with self._writing:
                    if self._pending:  # put meanwhile: the head of the chain has them
                        continue
                    put = put or self._sealed(entries)
                    try:
                        written = await self._write([put])
                    except EntriesLost as lost:
                        self._rewind(lost)
                    else:
                        self._keep([put], _size(put))
                        self.mail = written.mail
                        return written.cancel
        except BaseException:
            if chain is not None and before is not None:
                chain.go_back(before)
                self._maybe = entries
            raise

    def heads_without(self, steps: Collection[str]) -> list[Argument]:
        """Return the heads of the hash chain when the records of these steps are gone, as changes of the checkpoint.

        There are two if the reply to the last entries was lost: the script takes that of the stored ones.
        """
        chain, last = self._chain, self._last
        if chain is None:
            return []
        heads: list[Argument] = [f"head:{last}", chain.seal(chain.without(steps), last)]
        if self._maybe:
            more, last = chain.copy(), last + len(self._maybe)
            more.add(self._maybe)
            heads += (f"head:{last}", more.seal(more.without(steps), last))
        return heads

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
        puts, size = self._take()
        replicated = self._written < self._replicated
        try:
            written = await retry_while_unavailable(
                partial(self._write, puts, replicated=replicated), on_wait=self._on_wait
            )
        except BaseException as error:
            self._put_back(puts, size)  # maybe stored: writing them again changes nothing
            if isinstance(error, LeaseLost):
                self._on_lost()
            if not isinstance(error, EntriesLost):
                raise
            try:
                self._rewind(error)
            except EntriesLost as lost:
                self._on_gap(lost)
                raise
            return
        self._keep(puts, size)
        self._written += sum([len(entries) for entries, _ in puts])
        self.mail = written.mail
        if written.cancel:
            self._on_cancel()

    def _take(self) -> tuple[list[_Put], int]:
        """Remove what the next write has from what waits. Return it, and its bytes."""
        pending = self._pending
        puts = [pending.popleft()]
        if pending:
            size = _size(puts[0])
            while pending and (more := size + _size(pending[0])) <= _WRITE_BYTES:
                puts.append(pending.popleft())
                size = more
        else:
            size = self._pending_bytes
        self._pending_bytes -= size
        return puts, size

    def _put_back(self, puts: Sequence[_Put], size: int) -> None:
        """Write these next."""
        self._pending.extendleft(reversed(puts))
        self._pending_bytes += size

    def _write(self, puts: Sequence[_Put], *, replicated: bool = False) -> Awaitable[Written]:
        """Write the next entries."""
        entries, head = puts[-1]
        batch = entries if len(puts) == 1 else tuple(chain.from_iterable([entries for entries, _ in puts]))
        sealed = b"" if head is None or self._chain is None else self._chain.seal(head, self._last + len(batch))
        place = (self._gateway, self._delivery, self._task_id)
        return write_entries(*place, batch, first=self._last + 1, head=sealed, replicated=replicated)

    def _keep(self, puts: Sequence[_Put], size: int) -> None:
        """Number entries as stored, and keep them for a while."""
        self._kept += puts
        self._kept_bytes += size
        for entries, _ in puts:
            self._last += len(entries)
            for entry in entries:
                self.logged += len(entry.log)
        now = RUNTIME.monotonic()
        if now > self._kept_until or self._kept_bytes > _KEPT_BYTES:
            self._kept_before, self._kept, self._kept_bytes = self._kept, [], 0
            self._kept_until = now + _KEPT_SECONDS

    def _rewind(self, lost: EntriesLost) -> None:
        """Add the entries that Redis has lost to those to write. Raises `EntriesLost` if one of them is not kept."""
        kept = self._kept_before + self._kept
        first, last = len(kept), self._last
        while last > lost.last:  # never, if another write has noticed the loss
            if first == 0:
                raise lost
            first -= 1
            last -= len(kept[first][0])
        bound = logger.bind(id=self._task_id)
        bound.warning("Redis had lost entries {} to {} of the checkpoint: sent again", lost.last + 1, self._last)
        self._kept_before, self._kept, self._kept_bytes = kept[:first], [], 0
        self._put_back(kept[first:], sum(map(_size, kept[first:])))
        self._written -= self._last - last
        self._last = last


def _aged(entry: Entry, seconds: float) -> Entry:
    """Return a report as it is stored after so many seconds: a value that a page has changed meanwhile stays."""
    return entry._replace(log=b"%d" % (seconds * 1000)) if entry.kind is Kind.VALUE else entry


def _size(put: _Put) -> int:
    entries, _ = put
    size = len(entries) * _ENTRY_BYTES
    for entry in entries:
        size += len(entry.value) + len(entry.log)
    return size
