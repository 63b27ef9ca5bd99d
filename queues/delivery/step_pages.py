"""Pages of a large checkpoint: what a run reads when it asks for a step."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeAlias

from ..envelope import DEFAULT_LARGE_LIMIT
from ..errors import Unavailable, UnreadableCheckpoint
from ..keys import Partition
from ..security.encryption import MARK, TaskCipher
from ..transport.backoff import retry_while_unavailable
from ..transport.gateway import Gateway
from ..transport.large_values import SCAN_START, scan_page
from ..transport.pipelining import Command

PAGE: Final = 512
"""Fields of a page. Redis serves no other client meanwhile, for about 0.2 ms."""

MAX_COUNTED: Final = 5_000
"""Fields of a checkpoint up to which its records are counted; above it, all fields count."""

NO_CHUNKS: Final = "[^c]*"
"""Pattern of the fields that are not chunks of large results: those are read when the result is asked for."""

PAGE_BYTES: Final = 4 * DEFAULT_LARGE_LIMIT
"""Largest size of the first page. A page of legitimate records is far below."""

_MAX_SCANNED: Final = 8 * PAGE
"""Fields of a page that has few but chunks."""

_PAGE_BYTES: Final = 1 << 20
"""Size of a page that is aimed at, by the size of the records so far."""

_NUMBER: Final = re.compile(r"[0-9]{1,9}")

_MARK: Final = MARK[0]
_FIRST: Final = itemgetter(0)
"""First byte of a value, which shows whether it is encrypted."""

_Ahead: TypeAlias = "tuple[str, list[str], asyncio.Future[Any]]"
"""A page that is read ahead: what its names have in common, the names, and the future of the records."""


class StepPages:
    """Fields of a checkpoint with more than one page. `read` returns a step's record, and reads others ahead.

    A loop names its steps by numbers (`read#17`, `page-17`), so the records of the next numbers are read with one that
    is asked for. If a step is followed by no such records, the names have no order that is known here, and each further
    read also brings a page of any fields, until all of them are known.

    After a page of which each record was found, the next one is read ahead: the server sends it while the handler is
    given the records of this one. A page whose reply was lost is read again when it is asked for.

    A handler asks for its recorded steps first, so the few other fields (intents, saved progress) are read for a step
    that is not recorded, together with those of the next numbers: new steps in a row share these reads.

    Only a reply for the very name says that a step is not recorded: a record that has not been read yet must not be
    taken for a missing one.
    """

    __slots__ = (
        "_absent",
        "_ahead",
        "_cursor",
        "_gateway",
        "_key",
        "_known",
        "_lock",
        "_numbered",
        "_per_page",
        "_records",
        "_scans",
        "_task_id",
        "cipher",
        "on_wait",
        "take",
        "total",
    )

    def __init__(
        self,
        gateway: Gateway,
        partition: Partition,
        task_id: str,
        known: Mapping[str, dict[str, bytes]],
        total: int,
    ) -> None:
        """known: the fields that are known already, by kind and step; later ones are added. total: number of all."""
        self.total = total
        self._gateway = gateway
        self._key = partition.steps(task_id)
        self._task_id = task_id
        self._known = known
        self._records = known["d"]
        self.take: Callable[[str, None], bytes | None] = self._records.pop
        """Returns a known record, and forgets it unless a scan has started, whose end says that all are known."""
        self._absent: set[str] = set()
        """Steps that were read ahead and are not recorded."""
        self._ahead: _Ahead | None = None
        self._cursor = SCAN_START
        self._scans = False
        self._numbered: set[str] = set()
        """Common parts of the names whose next numbers were found."""
        self._per_page = PAGE // 2
        self._lock = asyncio.Lock()
        self.cipher: TaskCipher | None = None
        """Decrypts fields that are read from now on."""
        self.on_wait: Callable[[Unavailable], None] | None = None
        """Called while Redis is unavailable."""

    async def read(self, step: str) -> bytes | None:
        """Return a step's record; None if the step is not recorded, then its intent and its progress are known.

        Raises `DecryptionError`.
        """
        async with self._lock:
            if step not in self._records and step not in self._absent and not self._is_complete:
                await retry_while_unavailable(partial(self._read_page, step), on_wait=self.on_wait)
            self._absent.discard(step)
            return self._records.get(step)

    async def read_unfinished(self, steps: Sequence[str]) -> None:
        """Read the intents and the saved progress of steps. Raises `DecryptionError`."""
        await retry_while_unavailable(partial(self._read_unfinished, steps), on_wait=self.on_wait)

    async def read_records(self, steps: Sequence[str]) -> None:
        """Read the records of a few steps, whichever page they are in. Raises `DecryptionError`."""
        fields = [f"d:{step}" for step in steps]
        await retry_while_unavailable(partial(self._read_fields, fields), on_wait=self.on_wait)

    async def count_steps(self) -> int:
        """Return the number of recorded steps; of a very large checkpoint, that of all its fields."""
        if self.total > MAX_COUNTED:
            return self.total
        read = partial(self._gateway.command, "HKEYS", self._key)
        return recorded_steps(await retry_while_unavailable(read, on_wait=self.on_wait))

    async def read_all(self) -> None:
        """Read the remaining fields, and the records that were released. Raises `DecryptionError`.

        Raises:
            UnreadableCheckpoint: A field is of no known kind.
        """
        async with self._lock:
            if not self._is_complete:
                self._cursor = SCAN_START
                self._start_scan()
            per_scan = PAGE
            while not self._is_complete:
                found = await retry_while_unavailable(partial(self._scan, per_scan), on_wait=self.on_wait)
                if found < per_scan // 4:  # most fields are chunks, which cost no transfer
                    per_scan = min(2 * per_scan, _MAX_SCANNED)

    def forget_ahead(self) -> None:
        """Forget the page that is read ahead: steps that were recorded since then are asked for again."""
        self._ahead = None

    def _start_scan(self) -> None:
        self._scans, self.take = True, self._records.get

    async def _scan(self, count: int) -> int:
        """Read one page, and return how many fields it had."""
        cursor, fields = await scan_page(self._gateway, self._key, self._cursor, NO_CHUNKS, count)
        self._add(fields.items())
        self._cursor = cursor
        return len(fields)

    @property
    def _is_complete(self) -> bool:
        """Whether all records are known: a scan has ended since the last one was released."""
        return self._scans and self._cursor.is_end

    async def _read_page(self, step: str) -> None:
        page = await self._take_ahead(step)
        if page is None:
            stem, following = _successors(step, self._per_page)
            names = [step, *following]
            asked = self._gateway.pipeline([self._records_of(names)])
            if self._scans and stem not in self._numbered:
                (values,), _ = await asyncio.gather(asked, self._scan(PAGE))  # in one round trip
            else:
                (values,) = await asked
        else:
            stem, names, reply = page
            values = reply.result()
        read = dict(zip(names, values, strict=True))
        missing = [] if all(values) else [name for name in names if read[name] is None]
        found = len(names) - len(missing)
        if found > (values[0] is not None):
            self._numbered.add(stem)
        elif stem not in self._numbered:
            self._start_scan()
        size = sum(map(len, filter(None, values)))
        self._per_page = max(8, min(PAGE // 2 if missing else PAGE, _PAGE_BYTES * found // max(size, 1)))
        if not (missing or self._scans or self._ahead):
            self._send_ahead(stem, names[-1])
        if step in missing:
            await self._read_unfinished(missing)
            self._absent.update(missing)
        self._add_records(read, missing)

    def _records_of(self, steps: Iterable[str]) -> Command:
        return ("HMGET", self._key, *["d:" + step for step in steps])

    def _add_records(self, read: dict[str, bytes], missing: Iterable[str]) -> None:
        """Add the records of a page that are not known yet. Most pages need no line per record."""
        records, cipher = self._records, self.cipher
        for name in [*missing, *(records.keys() & read.keys())]:
            read.pop(name, None)
        plain = cipher is None or (cipher.accepts_plain and all(read.values()))
        if cipher is not None and not (plain and _MARK not in map(_FIRST, read.values())):
            read = {name: cipher.decrypt(f"d:{name}", value) for name, value in read.items()}
        records.update(read)

    def _send_ahead(self, stem: str, last: str) -> None:
        """Have the server read the page after a complete one while the handler uses that."""
        names = _successors(last, self._per_page)[1]
        reply = self._gateway.submit_now(*self._records_of(names))
        reply.add_done_callback(_retrieve)
        self._ahead = (stem, names, reply)

    async def _take_ahead(self, step: str) -> _Ahead | None:
        """Return the page that was read ahead if it has the step, None if its reply was lost: it is read again."""
        if self._ahead is None or step not in self._ahead[1]:
            return None
        ahead, self._ahead = self._ahead, None
        reply = ahead[2]
        if not reply.done():
            await asyncio.wait((reply,))
        return None if reply.cancelled() or reply.exception() is not None else ahead

    async def read_emitted(self, unit: str) -> None:
        """Read the note of what a unit has emitted. Raises `DecryptionError`."""
        await retry_while_unavailable(partial(self._read_fields, [f"e:{unit}"]), on_wait=self.on_wait)

    async def _read_unfinished(self, steps: Iterable[str]) -> None:
        await self._read_fields([kind + step for step in steps for kind in ("i:", "s:", "e:")])

    async def _read_fields(self, fields: Sequence[str]) -> None:
        values = await self._gateway.command("HMGET", self._key, *fields)
        self._add(zip(map(str.encode, fields), values, strict=True))

    def _add(self, fields: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Add fields that are not known yet. None: the field does not exist."""
        broken: list[str] = []
        add_fields(self._known, fields, broken, self.cipher)
        if broken:
            raise UnreadableCheckpoint(self._task_id, broken[0])


def recorded_steps(fields: Iterable[bytes]) -> int:
    """Return how many fields of a step hash are records of steps, and not of events (`read/#decided`)."""
    return sum(field[:2] == b"d:" and field[2:].rpartition(b"/")[2][:1] != b"#" for field in fields)


def _retrieve(reply: asyncio.Future[Any]) -> None:
    """Retrieve the error of a page that is never asked for: asyncio would log it."""
    _ = reply.cancelled() or reply.exception()


def add_fields(
    known: Mapping[str, dict[str, bytes]],
    fields: Iterable[tuple[bytes, bytes | int | None]],
    broken: list[str],
    cipher: TaskCipher | None = None,
) -> None:
    """Add fields of a step hash to those that are known by kind and step, which stay as they are.

    Args:
        fields: Names and values; None for a field that does not exist, its size for one that was too large to be read.
        broken: Receives the problems of fields that no version has written.
        cipher: Decrypts the values.

    Raises `DecryptionError`.
    """
    for name, value in fields:
        if value is None:
            continue
        try:
            kind, _, step = name.decode().partition(":")
            steps = known[kind]
        except (KeyError, UnicodeDecodeError):
            broken.append(f"its field {name!r} is of no known kind")
            continue
        if isinstance(value, int):
            broken.append(f"its field {name!r} has {value:,} bytes")
        elif step not in steps:
            steps[step] = value if cipher is None else cipher.decrypt(f"{kind}:{step}", value)


def _successors(step: str, count: int) -> tuple[str, list[str]]:
    """Return what a step has in common with those that follow it if its last number counts, and their names."""
    numbers = list(_NUMBER.finditer(step))
    if not numbers:
        return f"{step}#", [f"{step}#{number}" for number in range(2, count + 2)]
    head, tail = step[: numbers[-1].start()], step[numbers[-1].end() :]
    last = numbers[-1][0]
    following = range(int(last) + 1, int(last) + 1 + count)
    if last[0] == "0":
        return head + tail, [f"{head}{str(number).zfill(len(last))}{tail}" for number in following]
    return head + tail, [f"{head}{number}{tail}" for number in following]
