"""Lanes of a queue: one for each priority, and one for idle tasks. Pure; a queue without priorities has one lane.

A lane is a set of partitions of the queue. The index of a partition says which lane it belongs to, so a task that is
retried, delayed, parked or put back stays in its lane, and every script works on it as on any other partition. The
route of a queue names the lanes that were ever used; see partitions/route.py. The envelope of a task names its lane, so
every path that stores a task (a child, a turn of a session, a copy) finds the partitions of its lane.
"""

from __future__ import annotations

from typing import Final, Literal

import orjson

Priority = Literal["high", "normal", "low"]
Lane = Literal["high", "normal", "low", "idle"]

NORMAL: Final[Lane] = "normal"
IDLE: Final[Lane] = "idle"

LANES: Final[tuple[Lane, ...]] = ("high", "normal", "low", "idle")
"""All lanes, in the order in which workers read them."""

LANE_SIZE: Final = 1_000_000
"""Indexes of partitions per lane. Part of the data format."""

_BLOCKS: Final[tuple[Lane, ...]] = ("normal", "high", "low", "idle")
"""Lanes in the order of their indexes: the partitions of a queue without priorities are the first ones."""

_RANKS: Final = tuple(LANES.index(lane) for lane in _BLOCKS)


def first_index(lane: Lane) -> int:
    """Return the smallest index of a lane's partitions."""
    return _BLOCKS.index(lane) * LANE_SIZE


def lane_of(index: int) -> Lane:
    """Return the lane of a partition. Raises `IndexError` for an index of no lane."""
    return _BLOCKS[index // LANE_SIZE]


def lane_rank(index: int) -> int:
    """Return the position of a partition's lane in `LANES`; an index of no lane counts as normal."""
    return _RANKS[index // LANE_SIZE if index < len(_RANKS) * LANE_SIZE else 0]


def index_text(index: int) -> str:
    """Return a partition's index as people read it: `3`, or `high 0` for the first one of a lane."""
    lane, number = _BLOCKS[index // LANE_SIZE] if index < len(_BLOCKS) * LANE_SIZE else NORMAL, index % LANE_SIZE
    return str(index) if lane == NORMAL else f"{lane} {number}"


def check_lane(priority: object, idle: object) -> Lane | None:
    """Return the lane that two options name, None if neither does. Raises `ValueError`.

    priority: None, "high", "normal" or "low". idle: None, or whether the task runs on spare slots only.
    """
    if priority is not None and priority not in ("high", "normal", "low"):
        raise ValueError(f"priority must be 'high', 'normal' or 'low', got {priority!r}")
    if idle is not None and not isinstance(idle, bool):
        raise ValueError(f"idle must be True or False, got {idle!r}")
    if idle and priority is not None:
        raise ValueError(f"idle=True has no priority: an idle task starts after all others, got priority={priority!r}")
    if idle:
        return IDLE
    if priority is not None:
        return priority
    return None if idle is None else NORMAL


def read_lane(text: object) -> Lane:
    """Return the lane that stored data names; the normal one for what no version of Perdure wrote."""
    return text if text in LANES else NORMAL


def lane_in(envelope: bytes) -> Lane:
    """Return the lane that an encoded envelope names."""
    if b'"lane"' not in envelope:  # nearly always
        return NORMAL
    try:
        return read_lane(orjson.loads(envelope).get("lane"))
    except (orjson.JSONDecodeError, AttributeError):
        return NORMAL
