"""Checks of deliveries: fences, delivery counts, leases and the numbers of entries, with each script that runs.

They look at the stored data before and after a command, not at what the scripts check, so that a check that is missing
in a script is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from perdure.queues.keys import GROUP, RESERVED
from perdure.queues.transport.scripts import loaded_scripts

if TYPE_CHECKING:
    from .world import World

__all__ = ["DeliveryChecks"]

_SETTLING: Final = frozenset({"finish", "reschedule", "park", "await_version", "bury"})
"""Scripts that end a delivery, and have the same answer when they are called again."""

_FOLLOWING: Final = {"write_checkpoint": 1, "finish": 0, "release": 0, "reschedule": 0, "park": 0, "bury": 0}
"""Scripts whose fifth argument is the number of an entry, less by how much the last stored one may be."""

_RESTED: Final = 2.0
"""Leases after a trouble of a worker before it counts as healthy again: time to find a dead connection and renew."""


@dataclass(frozen=True, slots=True)
class _Before:
    """State of a delivery before a fenced script runs.

    Attributes:
        owns: Whether the delivery is still the worker's.
        settled: Whether its outcome is stored; released: whether it was released.
    """

    script: str
    owns: bool
    settled: bool
    released: bool
    entries: int


class DeliveryChecks:
    """Checks of the deliveries of one world.

    Args:
        add: Reports a violation: its kind and its text.
    """

    def __init__(self, world: World, add: Callable[[str, str], None]) -> None:
        self._world = world
        self._add = add
        scripts = loaded_scripts()
        self._fenced = {one.sha.encode(): one.name for one in scripts if "local function owned(" in one.source}
        self._claim = next(one.sha.encode() for one in scripts if one.name == "claim")
        self._held: dict[bytes, dict[bytes, tuple[bytes, int]]] = {}
        world.server.before_script = self._before
        world.server.after_script = self._after
        world.server.on_start = self._held.clear

    # fenced scripts

    def _before(self, fields: list[bytes]) -> _Before | None:
        """Return what a fenced script finds; None for other scripts."""
        script = self._fenced.get(fields[1])
        if script is None:
            return None
        keys, args = fields[3 : 3 + int(fields[2])], fields[3 + int(fields[2]) :]
        _, worker, entry, count = args[:4]
        record = self._hash(next(key for key in keys if b":record:" in key))
        fence = entry + b" " + count
        return _Before(
            script,
            self._pending(keys[0]).get(entry) == (worker, int(count)),
            record.get(b"settled") == fence and record.get(b"worker") == worker,
            record.get(b"released") == worker + b" " + fence,
            int(record.get(b"entries", 0)),
        )

    def _after(self, fields: list[bytes], before: _Before, reply: Any, wrote: bool) -> None:
        """Check what a fenced script did."""
        script, args = before.script, fields[3 + int(fields[2]) :]
        shown = f"{script} of {b' '.join(args[1:4]).decode()}"
        if wrote and not before.owns:
            self._add("stale write", f"{shown} wrote, without the delivery")
        if wrote and script in _FOLLOWING and int(args[4]) - _FOLLOWING[script] > before.entries:
            self._add("gap", f"{shown} follows entry {args[4].decode()}, but the last one is {before.entries}")
        if reply == 0 and ((before.settled and script in _SETTLING) or (before.released and script == "release")):
            self._add("refused", f"{shown} was refused, though it is stored")

    # the pending list

    def check_pending(self, fields: list[bytes]) -> None:
        """Check each hand-out of a stream that a command names."""
        for field in fields:
            if field.endswith(b":ready"):
                now, before = self._pending(field), self._held.get(field, {})
                if now != before:
                    self._held[field] = now
                    for entry in now.keys() & before.keys():
                        if now[entry] != before[entry]:
                            self._check_hand_out(entry, before[entry], now[entry], fields)

    def _check_hand_out(
        self, entry: bytes, before: tuple[bytes, int], now: tuple[bytes, int], fields: list[bytes]
    ) -> None:
        (former, count), (worker, raised) = before, now
        shown = f"{entry.decode()}: {former.decode()} had delivery {count}, {worker.decode()} has {raised}"
        if raised < count or (raised == count and former != worker and not worker.startswith(RESERVED.encode())):
            self._add("fence", f"{shown}: the count must grow")
        if former.startswith(RESERVED.encode()) or worker.startswith(RESERVED.encode()):
            return
        rest = _RESTED * self._world.plan.lease
        for process in self._world.processes:
            held = process.holds(former, entry, count)
            if held and former == worker and fields[1] == self._claim:
                self._add("own claim", f"{shown}, and still runs the former one")
            if held and former != worker and self._world.loop.now > process.troubled_until + rest:
                self._add("lease lost", f"{shown}, and the former was healthy")

    def _pending(self, stream: bytes) -> dict[bytes, tuple[bytes, int]]:
        """Return worker and delivery count of each pending entry."""
        item = self._world.server.items.get(stream)
        group = None if item is None else item.value.group_get(GROUP.encode())
        if group is None:
            return {}
        return {
            entry.encode(): (pending.consumer_name, pending.times_delivered) for entry, pending in group.pel.items()
        }

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        item = self._world.server.items.get(key)
        return {} if item is None else item.value._values
