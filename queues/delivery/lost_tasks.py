"""Tasks that another program has taken out of the queue, and their return.

A client of the server can delete a message (XTRIM, XDEL, DEL, FLUSHDB of a part), acknowledge it in the place of its
worker, delete a consumer with what is pending on it, delete a due time, or use up the ids of a stream. The record of a
task has its payload and says where the task must be, so that the janitor finds such tasks and puts them back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from ..envelope import is_task_id
from ..junk import report_once, split
from ..keys import GROUP, Partition
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from ..wording import listed

_PUT_BACK = queue_script("put_back")
_REPLACE = queue_script("replace_stream")
_logger = logging.getLogger(__name__)

_PAGE: Final = 250
"""Tasks that one script looks at."""

_PAGE_BYTES: Final = 4 * 1024 * 1024
"""Bytes of messages that one script looks at: Redis reads a message as a whole."""

_NEWEST: Final = 2_000
"""Tasks that each round looks at: the last ones that were enqueued, and half as many before the first message."""

_ROUND: Final = 10_000
"""Other tasks that a round looks at. The next one continues after them. Redis needs 3 to 4 us for each."""

_ROUND_BYTES: Final = 64 * 1024 * 1024

_CURSOR_TTL: Final = 3_600_000
"""Milliseconds for which the position of the last round is kept."""

_AHEAD: Final = 86_400_000
"""Milliseconds that the ids of a stream may be ahead of the clock, which may have been set back."""

_KEPT: Final = 64 * 1024 * 1024
"""Largest number of bytes that the new stream gets of the old one: about 50 ms of the server's time."""


class Place(IntEnum):
    """The place of a task that has not ended, compared with its record. See put_back.lua."""

    SOUND = 0
    NO_MESSAGE = 1
    SKIPPED = 2
    """Its message was read, but is not pending, so that no worker gets it."""
    NOT_DUE = 3
    NO_PAYLOAD = 4
    """Its message is gone, and the record cannot replace it."""
    NOT_IN_LIST = 5
    """It waits for limits, and is not in their list, or that has no turn."""
    LIST_OF_ANOTHER_TYPE = 6


async def find_places(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> list[Place]:
    """Return the places of tasks, and change nothing. Of many large ones, only those of the first are returned."""
    return await _look(gateway, partition, task_ids, mend=False, grace=0.0)


async def _look(
    gateway: Gateway, partition: Partition, task_ids: Sequence[str], *, mend: bool, grace: float
) -> list[Place]:
    keys = [partition.ready, partition.due, *map(partition.record, task_ids)]
    args: list[Argument] = [GROUP, int(mend), round(grace * 1000), _PAGE_BYTES, *task_ids]
    return [Place(found) for found in await gateway.run(_PUT_BACK, keys, args)]


async def put_back_lost(gateway: Gateway, partition: Partition, grace: float) -> int:
    """Put tasks back that are not where their records say; return their number.

    Each call looks at the last tasks that were enqueued, at those from before the first message of the stream, which a
    trim removes, and at a part of the others; the next call looks at the next part. If any was lost, it looks at all.

    Args:
        grace: Seconds for which a run is left alone, since its last heartbeat and since its message was found lost: it
            finds out that its lease has passed. 0 puts tasks back at once.
    """
    await replace_exhausted(gateway, partition)
    known, cursor, first = await gateway.pipeline(
        [
            ("ZCARD", partition.timeline),
            ("GET", partition.checked),
            ("XRANGE", partition.ready, "-", "+", "COUNT", 1),
        ]
    )
    start = int(cursor) if cursor is not None and cursor.isdigit() else 0
    start = start if start < known else 0
    walk = _Walk(gateway, partition, grace)
    await walk.go(max(0, known - _NEWEST), known)
    if first:
        at = first[0][0].partition(b"-")[0]
        older = await gateway.command("ZCOUNT", partition.timeline, "-inf", at)
        await walk.go(max(0, older - _NEWEST // 2), older)
    reached = await walk.go(start, min(start + _ROUND, known))
    if walk.put_back:
        await walk.go(0, known, limited=False)
    await gateway.command("SET", partition.checked, 0 if reached >= known else reached, "PX", _CURSOR_TTL)
    if walk.put_back:
        shown = listed(walk.shown, _SHOWN, total=walk.put_back)
        _logger.warning(
            "put %d of the tasks of queue %s, partition %d, back: another program had taken them out of it: %s",
            *(walk.put_back, partition.queue, partition.index, shown),
        )
    return walk.put_back


_SHOWN: Final = 3


class _Walk:
    """A walk through the timeline of a partition, by rank: the oldest task first."""

    def __init__(self, gateway: Gateway, partition: Partition, grace: float) -> None:
        self._gateway = gateway
        self._partition = partition
        self._grace = grace
        self.put_back = 0
        self.shown: list[str] = []

    async def go(self, rank: int, end: int, *, limited: bool = True) -> int:
        """Look at the tasks from a rank to another one; return the rank that was reached within the limit."""
        scripts = _ROUND_BYTES // _PAGE_BYTES + (end - rank) // _PAGE
        while rank < end and (scripts > 0 or not limited):
            found = await self._gateway.command("ZRANGE", self._partition.timeline, rank, min(rank + _PAGE, end) - 1)
            if not found:
                break
            ids = split(found, is_task_id).good  # the trim of the timeline moves the others to the junk
            rank += len(found)
            while ids:
                places = await _look(self._gateway, self._partition, ids, mend=True, grace=self._grace)
                self._note(ids, places)
                await self._free_lists(ids, places)
                ids = ids[len(places) :]
                scripts -= 1
        return rank

    async def _free_lists(self, task_ids: Sequence[str], places: Sequence[Place]) -> None:
        """Move what another program has put under the key of a waiting list: the next round puts the tasks back."""
        for task_id, place in zip(task_ids, places, strict=False):
            if place is not Place.LIST_OF_ANOTHER_TYPE:
                continue
            words = (await self._gateway.command("HGET", self._partition.record(task_id), "gate") or b"").split(b" ")
            if len(words) == 3:
                key_id, ring = (word.decode("utf-8", "replace") for word in words[:2])
                partition = self._partition
                await self._gateway.set_keys_aside([partition.limited(key_id), partition.turns(ring), partition.rings])

    def _note(self, task_ids: Sequence[str], places: Sequence[Place]) -> None:
        for task_id, place in zip(task_ids, places, strict=False):
            if place is Place.NO_PAYLOAD:
                report_once(
                    f"could not put task {task_id} back, whose message was deleted: its record has no arguments"
                )
            elif place not in (Place.SOUND, Place.LIST_OF_ANOTHER_TYPE):
                self.put_back += 1
                if len(self.shown) < _SHOWN:
                    self.shown.append(task_id)


async def replace_exhausted(gateway: Gateway, partition: Partition) -> bool:
    """Replace streams whose ids another program has used up, so that they take entries again. Return whether any was.

    Tasks whose messages cannot be kept are put back next: see `put_back_lost`.
    """
    replaced = False
    for stream, group in ((partition.ready, GROUP), (partition.nudge, GROUP), (partition.dead, "")):
        left = await gateway.run(_REPLACE, [stream], [group, _AHEAD, _KEPT])
        if left >= 0:
            replaced = True
            _logger.warning("replaced stream %s, whose ids were used up; %d entries were not kept", stream, left)
    return replaced
