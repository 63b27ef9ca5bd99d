"""Groups of dead letters that have the same cause, by a fingerprint of the error.

Letters have the same fingerprint if task, reason and type of the error are the same, and its message too, without what
differs from one task to the next: numbers, ids and times. So do the file and the function that raised it, but not the
line: a change elsewhere in the file makes no other group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..queues.wording import iso_time

if TYPE_CHECKING:
    from .letters import DeadLetter

LENGTH: Final = 10
"""Hexadecimal digits of a fingerprint: by chance, two of a million groups have the same."""

_VARIABLE: Final = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"  # a UUID
    r"|0x[0-9a-f]+"  # an address
    r"|(?=[a-f]*[0-9])[0-9a-f]{8,}"  # a hash, or a long number
    r"|[0-9]+(?:[.,:T_-][0-9]+)*Z?",  # a number, a time, a version, an address of a network
    re.IGNORECASE,
)
_FRAME: Final = re.compile(r'^ *File "([^"\n]*)", line [0-9]+, in (.*)$', re.MULTILINE)

_MESSAGE: Final = 500
"""Characters of the message that make the fingerprint."""


def fingerprint(task: str, reason: str, error: str, message: str, traceback: str) -> str:
    """Return the fingerprint of an error, in hexadecimal digits."""
    first = next(iter(message.strip().splitlines()), "")[: 4 * _MESSAGE]
    frames = _FRAME.findall(traceback)
    file, function = frames[-1] if frames else ("", "")
    place = file.replace("\\", "/").rpartition("/")[2]
    text = "\0".join((task, reason, error, _VARIABLE.sub("0", first)[:_MESSAGE], place, function))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


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
