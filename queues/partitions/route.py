"""The route of a queue: the partitions that it was and is spread over. Pure; resharding.py changes it in Redis.

A route is a list of generations, the oldest first. A generation is a range of partition indexes that were added
together. An index is never used again: a queue that grows from one partition to four has the generations (0) and
(1, 2, 3, 4), and shrinking to two adds (5, 6). Producers write into the oldest generation that is not closed, workers
start with the oldest one that is not drained, so tasks of one key keep their order across a change.

In the hash of queues, a route with the one generation 0..n-1 is stored as the number n, any other as JSON.

Retentions of records: for how long a partition of a previous generation may still have a record.

An id is looked up in the partitions of the route only, so a generation leaves the route after its last record has
expired. Each task may have a result TTL of its own, and the ACL role of workers has no SCAN, so each script that gives
a record its retention registers that in the partition (retention.lua). retire_partition.lua knows from that when the
last record expires at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import orjson

MAX_PARTITIONS: Final = 1024
"""Largest number of partitions of one generation."""

_MAX_GENERATIONS: Final = 1000
_LAST_INDEX: Final = 2**31
"""Limits of a stored route: one beyond them was written by another program."""


class UnreadableRoute(ValueError):
    """The stored route was written by another program: a later format of it would be refused with its namespace."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The partitions first, first + 1, ... first + count - 1."""

    first: int
    count: int

    @property
    def indexes(self) -> range:
        return range(self.first, self.end)

    @property
    def end(self) -> int:
        """The index after its last."""
        return self.first + self.count

    def index_of(self, number: int) -> int:
        """Return the partition of a number: the hash of a key, or a consecutive number."""
        return self.first + number % self.count


@dataclass(frozen=True, slots=True)
class Route:
    """Generations, the oldest first; there is always one."""

    generations: tuple[Generation, ...]

    @property
    def indexes(self) -> Iterator[int]:
        """All partitions of the queue that may hold anything, the oldest first."""
        return (index for generation in self.generations for index in generation.indexes)

    @property
    def previous(self) -> tuple[Generation, ...]:
        """All generations but the last: those that are closed, or are being closed."""
        return self.generations[:-1]

    @property
    def last(self) -> Generation:
        return self.generations[-1]

    def changed(self, count: int) -> Route:
        """Return the route with a new generation of `count` partitions; itself if the last one has that many."""
        if not 1 <= count <= MAX_PARTITIONS:
            raise ValueError(f"count must be 1 to {MAX_PARTITIONS} partitions, got {count}")
        if self.last.count == count:
            return self
        return Route((*self.generations, Generation(self.last.end, count)))

    def joined(self, other: Route) -> Route:
        """Return this route with the generations of `other` after its end, for a server that lost a change.

        If the two differ, all indexes of both are kept, so that every task stays in a partition that workers serve.
        """
        added = list(self.generations)
        for generation in other.generations:
            first = max(generation.first, added[-1].end)
            if generation.end > first:
                added.append(Generation(first, generation.end - first))
        return Route(tuple(added))

    def without(self, generation: Generation) -> Route:
        """Return the route without a retired generation."""
        return Route(tuple(one for one in self.generations if one != generation or one == self.last))

    def encode(self) -> bytes:
        if len(self.generations) == 1 and self.last.first == 0:
            return str(self.last.count).encode()
        return orjson.dumps({"generations": [[one.first, one.count] for one in self.generations]})

    @classmethod
    def decode(cls, data: bytes) -> Route:
        """Decode a route. Raises `UnreadableRoute`."""
        try:
            found = orjson.loads(data)
            listed = [[0, found]] if isinstance(found, int) else found["generations"]
            generations = tuple(Generation(int(first), int(count)) for first, count in listed)
        except (ValueError, TypeError, LookupError):
            raise UnreadableRoute(f"must be a number or JSON with generations, got {_shown(data)}") from None
        if not 1 <= len(generations) <= _MAX_GENERATIONS:
            raise UnreadableRoute(f"must have 1 to {_MAX_GENERATIONS} generations, got {_shown(data)}")
        end = 0
        for generation in generations:
            if not (end <= generation.first <= _LAST_INDEX and 1 <= generation.count <= MAX_PARTITIONS):
                raise UnreadableRoute(
                    f"must have generations one after the other, each of 1 to {MAX_PARTITIONS} partitions, got "
                    f"{_shown(data)}"
                )
            end = generation.end
        return cls(generations)


def _shown(data: bytes) -> str:
    return repr(data[:80])[1:] + ("..." if len(data) > 80 else "")


SINGLE: Final = Route((Generation(0, 1),))
"""The route of a queue that was never spread."""


def spread(key: str) -> int:
    """Return the hash of a key, the same in every process and version (BLAKE2b, RFC 7693, of its UTF-8)."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest())


_STEPS: Final = 4
"""Registered retentions per doubling: a partition has few, and each is at most 19 % above those that it covers."""


@lru_cache(1024)
def registered_retention(ttl: float) -> int:
    """Return the registered retention for a TTL: in milliseconds, rounded up to one of few values."""
    return math.ceil(2 ** (math.ceil(_STEPS * math.log2(max(1.0, ttl * 1000))) / _STEPS))
