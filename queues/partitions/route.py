"""A queue's route: over which partitions it was, is and will be spread. Pure; rerouting.py changes it in Redis.

A route is a list of generations, the oldest first. A generation is a run of partition indexes that were put to use
together; an index is never used again, so a queue that goes from one partition to four has the generations (0) and
(1, 2, 3, 4), and going to two adds (5, 6). Producers write into the oldest generation that is not closed, workers
begin with the oldest that is not read to its end: so tasks of one key keep their order across a change.

In the hash of queues a route is a plain number n while it has the one generation 0..n-1, and JSON otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import orjson

__all__ = ["MOST_PARTITIONS", "SINGLE", "Generation", "Route", "UnreadableRoute", "spread"]

MOST_PARTITIONS: Final = 1024
"""Partitions that one generation may have."""


class UnreadableRoute(ValueError):
    """What stands in the hash of queues is no route that this version knows."""


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
        """The partition that a number (a hash, or a turn) falls to."""
        return self.first + number % self.count


@dataclass(frozen=True, slots=True)
class Route:
    """Generations, the oldest first; there is always one."""

    generations: tuple[Generation, ...]

    @property
    def indexes(self) -> Iterator[int]:
        """Every partition of the queue that may hold anything, the oldest first."""
        return (index for generation in self.generations for index in generation.indexes)

    @property
    def previous(self) -> tuple[Generation, ...]:
        """All generations but the last: those that are closed, or are being closed."""
        return self.generations[:-1]

    @property
    def last(self) -> Generation:
        return self.generations[-1]

    def changed(self, count: int) -> Route:
        """The route that spreads over `count` partitions from now on; itself where it does so already."""
        if not 1 <= count <= MOST_PARTITIONS:
            raise ValueError(f"a queue has 1 to {MOST_PARTITIONS} partitions, not {count}")
        if self.last.count == count:
            return self
        return Route((*self.generations, Generation(self.last.end, count)))

    def joined(self, other: Route) -> Route:
        """This route with what `other` has beyond its end: a server that lost a change is told of it again.

        Where the two disagree, every index of both is kept, so that no task is in a place where nobody looks.
        """
        added = list(self.generations)
        for generation in other.generations:
            first = max(generation.first, added[-1].end)
            if generation.end > first:
                added.append(Generation(first, generation.end - first))
        return Route(tuple(added))

    def without(self, generation: Generation) -> Route:
        """The route after a former generation was retired."""
        return Route(tuple(one for one in self.generations if one != generation or one == self.last))

    def encode(self) -> bytes:
        if len(self.generations) == 1 and self.last.first == 0:
            return str(self.last.count).encode()
        return orjson.dumps({"generations": [[one.first, one.count] for one in self.generations]})

    @classmethod
    def decode(cls, data: bytes) -> Route:
        """Read a route; `UnreadableRoute` for what is none."""
        try:
            found = orjson.loads(data)
            listed = [[0, found]] if isinstance(found, int) else found["generations"]
            generations = tuple(Generation(int(first), int(count)) for first, count in listed)
        except (ValueError, TypeError, LookupError):
            raise UnreadableRoute(f"{data!r} is not a route that this version of Perdure knows") from None
        if not generations or any(one.first < 0 or one.count < 1 for one in generations):
            raise UnreadableRoute(f"{data!r} is not a route: it has an empty generation")
        return cls(generations)


SINGLE: Final = Route((Generation(0, 1),))
"""The route of every queue that nobody has spread."""


def spread(key: str) -> int:
    """The number a key stands for, the same in every process and version (BLAKE2b, RFC 7693, of its UTF-8)."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest())
