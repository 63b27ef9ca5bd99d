"""Groups of dead letters that have the same cause, by the fingerprint of the error: see `letters.fingerprint`."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any

from ..queues.wording import iso_time
from .letters import DeadLetter


@dataclass(slots=True)
class LetterGroup:
    """Dead letters with the same fingerprint. Times are milliseconds of Redis' clock.

    Attributes:
        newest: the one that died last.
        queues: names of their queues.
    """

    fingerprint: str
    count: int
    first: int
    last: int
    newest: DeadLetter
    queues: set[str]

    def summary(self) -> dict[str, Any]:
        """Return the group as plain data; times as ISO 8601."""
        return {
            "group": self.fingerprint,
            "count": self.count,
            "task": self.newest.task,
            "reason": str(self.newest.reason),
            "error": self.newest.error,
            "message": self.newest.message,
            "queues": sorted(self.queues),
            "first": iso_time(self.first),
            "last": iso_time(self.last),
            "newest": self.newest.id,
        }


async def group_letters(letters: AsyncIterable[DeadLetter]) -> list[LetterGroup]:
    """Return the groups of dead letters, the largest first. Memory grows with the number of groups only."""
    groups: dict[str, LetterGroup] = {}
    async for letter in letters:
        found = groups.get(letter.fingerprint)
        if found is None:
            at = letter.died_at
            groups[letter.fingerprint] = LetterGroup(letter.fingerprint, 1, at, at, letter, {letter.partition.queue})
            continue
        found.count += 1
        found.queues.add(letter.partition.queue)
        found.first = min(found.first, letter.died_at)
        if letter.died_at > found.last:
            found.last, found.newest = letter.died_at, letter
    return sorted(groups.values(), key=lambda group: (-group.count, -group.last))
