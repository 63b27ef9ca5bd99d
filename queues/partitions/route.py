"""The route of a queue: the partitions that it was and is spread over. Pure; resharding.py changes it in Redis.

A route is a list of generations, the oldest first. A generation is a range of partition indexes that were added
together. An index is never used again: a queue that grows from one partition to four has the generations (0) and
(1, 2, 3, 4), and shrinking to two adds (5, 6). Producers write into the oldest generation that is not closed, workers
start with the oldest one that is not drained, so tasks of one key keep their order across a change.

Each lane of a queue that was ever used has generations of its own, in its own range of indexes (lanes.py), and changes
like a queue: the last generation of a lane takes its new tasks. The normal lane is always there. A lane that is used
for the first time gets as many partitions as the normal one has.

In the hash of queues, a route with the one generation 0..n-1 is stored as the number n, any other as JSON: the
generations of the normal lane, and by the names of the other lanes theirs.

Retentions of records: for how long a partition of a previous generation may still have a record.

An id is looked up in the partitions of the route only, so a generation leaves the route after its last record has
expired. Each task may have a result TTL of its own, and the ACL role of workers has no SCAN, so each script that gives
a record its retention registers that in the partition (retention.lua). retire_partition.lua knows from that when the
last record expires at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import orjson

from ..lanes import LANE_SIZE, LANES, NORMAL, Lane, first_index, lane_of

MAX_PARTITIONS: Final = 1024
"""Largest number of partitions of one generation."""

_MAX_GENERATIONS: Final = 1000
"""Most generations of a lane: a stored route with more was written by another program."""


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
    """Generations by their indexes, those of one lane from the oldest to the newest; each lane has at least one."""

    generations: tuple[Generation, ...]

    @property
    def indexes(self) -> Iterator[int]:
        """All partitions of the queue that may hold anything, the oldest of each lane first."""
        return (index for generation in self.generations for index in generation.indexes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that were ever used, in the order of `LANES`."""
        found = {lane_of(generation.first) for generation in self.generations}
        return tuple(lane for lane in LANES if lane in found)

    def of(self, lane: Lane) -> Route | None:
        """Return the route of one lane, None if it was never used."""
        if lane == NORMAL and self.generations[-1].first < LANE_SIZE:
            return self
        found = tuple(generation for generation in self.generations if lane_of(generation.first) == lane)
        return Route(found) if found else None

    @property
    def previous(self) -> tuple[Generation, ...]:
        """All generations that a later one of their lane follows: those that are closed, or are being closed."""
        return tuple(
            generation
            for generation, following in zip(self.generations, self.generations[1:], strict=False)
            if lane_of(generation.first) == lane_of(following.first)
        )

    @property
    def latest(self) -> tuple[Generation, ...]:
        """The last generation of each lane: those that take new tasks."""
        previous = self.previous
        return tuple(generation for generation in self.generations if generation not in previous)

    @property
    def last(self) -> Generation:
        """The last generation of the normal lane; of the route of one lane, its last one."""
        return self.latest[0]

    def takes(self, index: int) -> bool:
        """Return whether a partition belongs to the last generation of its lane."""
        return any(index in generation.indexes for generation in self.latest)

    def with_lane(self, lane: Lane) -> Route:
        """Return the route with a lane that is used from now on; itself if it was used before."""
        if lane in self.lanes:
            return self
        return _in_order((*self.generations, Generation(first_index(lane), self.last.count)))

    def changed(self, count: int) -> Route:
        """Return the route with a new generation of `count` partitions in each lane.

        Itself if the last one of each lane has that many. Raises `ValueError`.
        """
        if not 1 <= count <= MAX_PARTITIONS:
            raise ValueError(f"count must be 1 to {MAX_PARTITIONS} partitions, got {count}")
        added = [Generation(last.end, count) for last in self.latest if last.count != count]
        if any(new.first // LANE_SIZE != (new.end - 1) // LANE_SIZE or new.first % LANE_SIZE == 0 for new in added):
            raise ValueError(f"count must leave each lane below {LANE_SIZE} partitions over all changes, got {count}")
        return _in_order((*self.generations, *added)) if added else self

    def joined(self, other: Route) -> Route:
        """Return this route with the generations of `other` after those of the same lane, if a server lost a change.

        If the two differ, all indexes of both are kept, so that every task stays in a partition that workers serve.
        """
        added = list(self.generations)
        ends = {lane_of(generation.first): generation.end for generation in self.generations}
        for generation in other.generations:
            lane = lane_of(generation.first)
            first = max(generation.first, ends.get(lane, generation.first))
            if generation.end > first:
                added.append(Generation(first, generation.end - first))
                ends[lane] = generation.end
        return _in_order(added) if len(added) > len(self.generations) else self

    def without(self, generation: Generation) -> Route:
        """Return the route without a retired generation."""
        latest = self.latest
        return Route(tuple(one for one in self.generations if one != generation or one in latest))

    def encode(self) -> bytes:
        if len(self.generations) == 1 and self.last.first == 0:
            return str(self.last.count).encode()
        form: dict[str, object] = {"generations": _pairs(self.generations, NORMAL)}
        others: list[Lane] = [lane for lane in self.lanes if lane != NORMAL]
        if others:
            form["lanes"] = {lane: _pairs(self.generations, lane) for lane in others}
        return orjson.dumps(form)

    @classmethod
    def decode(cls, data: bytes) -> Route:
        """Decode a route. Raises `UnreadableRoute`."""
        try:
            found = orjson.loads(data)
            listed = [[0, found]] if isinstance(found, int) else found["generations"]
            others = {} if isinstance(found, int) else found.get("lanes", {})
            lanes = {NORMAL: _generations(listed), **{lane: _generations(others[lane]) for lane in others}}
        except (ValueError, TypeError, LookupError):
            raise UnreadableRoute(f"must be a number or JSON with generations, got {_shown(data)}") from None
        for lane, generations in lanes.items():
            if lane not in LANES:
                raise UnreadableRoute(f"must have no lanes but {', '.join(LANES)}, got {_shown(data)}")
            if not 1 <= len(generations) <= _MAX_GENERATIONS:
                raise UnreadableRoute(f"must have 1 to {_MAX_GENERATIONS} generations, got {_shown(data)}")
            end = first_index(lane)
            beyond = end + LANE_SIZE
            for generation in generations:
                if not (end <= generation.first < beyond and 1 <= generation.count <= MAX_PARTITIONS):
                    raise UnreadableRoute(
                        f"must have generations one after the other, each of 1 to {MAX_PARTITIONS} partitions, got "
                        f"{_shown(data)}"
                    )
                end = generation.end
            if end > beyond:
                raise UnreadableRoute(f"must have partitions below {LANE_SIZE} in each lane, got {_shown(data)}")
        return _in_order([generation for generations in lanes.values() for generation in generations])


def _generations(listed: Any) -> list[Generation]:
    return [Generation(int(first), int(count)) for first, count in listed]


def _in_order(generations: Sequence[Generation]) -> Route:
    return Route(tuple(sorted(generations, key=lambda generation: generation.first)))


def _pairs(generations: Sequence[Generation], lane: Lane) -> list[list[int]]:
    found = [generation for generation in generations if lane_of(generation.first) == lane]
    return [[generation.first, generation.count] for generation in found]


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
