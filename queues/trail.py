"""What a task has left behind, as far as a short account of it needs it: the end of its log, and what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from .errors import CannotOpen
from .events import TaskEvent, opened_events
from .gateway import Gateway
from .keys import Partition

__all__ = ["LATEST_EVENTS", "Trail", "read_trail"]

LATEST_EVENTS: Final = 200
"""Events of the log that an account is made from."""


@dataclass(frozen=True, slots=True)
class Trail:
    """events: the latest, the oldest of them first, none from before a fresh start. number: of the last event that a
    run wrote. done, intents: keys of steps. saved: what is saved under names that begin with `#`, opened; what cannot
    be opened is not there. now: milliseconds of Redis' clock. unread: messages in the inbox.
    """

    events: tuple[TaskEvent, ...]
    number: int
    done: frozenset[str]
    intents: frozenset[str]
    saved: Mapping[str, bytes]
    now: int
    unread: int


async def read_trail(gateway: Gateway, partition: Partition, task_id: str, limit: int = LATEST_EVENTS) -> Trail:
    """Read a task's trail, in two round trips; it may be running meanwhile."""
    record, steps, log = partition.record(task_id), partition.steps(task_id), partition.log(task_id)
    names, (number, mail, used), entries, time = await gateway.pipeline(
        [
            ("HKEYS", steps),
            ("HMGET", record, "events", "mail", "used"),
            ("XREVRANGE", log, "+", "-", "COUNT", limit),
            ("TIME",),
        ],
        node_of=record,
    )
    own = [name for name in names if name.startswith(b"s:#")]
    values = await gateway.command("HMGET", steps, *own) if own else []
    seal = gateway.sealer.of(partition, task_id)
    saved: dict[str, bytes] = {}
    for name, value in zip(own, values, strict=True):
        key = name.decode().removeprefix("s:")
        try:
            if value is not None:
                saved[key] = seal.open(f"s:{key}", value)
        except CannotOpen:
            continue
    events = takewhile(lambda event: not event.starts_afresh, opened_events(entries, task_id, seal))
    return Trail(
        events=tuple(reversed([*events])),
        number=int(number or 0),
        done=frozenset(name.decode().removeprefix("d:") for name in names if name.startswith(b"d:")),
        intents=frozenset(name.decode().removeprefix("i:") for name in names if name.startswith(b"i:")),
        saved=saved,
        now=int(time[0]) * 1000 + int(time[1]) // 1000,
        unread=max(0, int(mail or 0) - int(used or 0)),
    )
