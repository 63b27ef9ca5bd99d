"""Checks of deliveries: fences, delivery counts, leases and the numbers of entries, with each script that runs.

They look at the stored data before and after a command, not at what the scripts check, so that a check that is missing
in a script is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from perdure.queues.delivery.leases import RELEASED_IDLE_MS, Delivery
from perdure.queues.keys import GROUP, RELEASED, RESERVED
from perdure.queues.transport.scripts import loaded_scripts

from .fleet.releases import in_releases

if TYPE_CHECKING:
    from .world import World

__all__ = ["DeliveryChecks"]

_FENCE: Final = b"local function owned("
"""Part of each fenced script, which is sent whole to a server that does not know it."""

_SETTLING: Final = frozenset({"finish", "reschedule", "park", "await_version", "await_resume", "bury"})
"""Scripts that end a delivery, and have the same answer when they are called again."""

_FOLLOWING: Final = {"write_checkpoint": 1, "finish": 0, "release": 0, "reschedule": 0, "park": 0, "bury": 0}
"""Scripts whose fifth argument is the number of an entry, less by how much the last stored one may be."""

_ANSWERED: Final = _SETTLING | {"release", "write_checkpoint"}
"""Scripts whose caller takes everything for stored, unless they refuse it."""


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
        fenced = {one.sha.encode(): one.name for one in scripts if _FENCE.decode() in one.source}
        self._fenced = {digest: name for first, name in fenced.items() for digest in in_releases(first)}
        # Deletes the task of a forgotten session in whatever state it is; the worker that runs such a task does so too.
        deletion = next(one for one in scripts if one.name == "forget_task")
        self._deletion = deletion.source.encode().partition(b"-- KEYS")[0]
        self._deletions = in_releases(deletion.sha.encode())
        self._claims = in_releases(next(one.sha.encode() for one in scripts if one.name == "claim"))
        self._held: dict[bytes, dict[bytes, tuple[bytes, int]]] = {}
        self._since: dict[tuple[bytes, bytes, int], float] = {}
        world.server.before_script = self._before
        world.server.after_script = self._after
        world.server.on_start = self._held.clear
        world.server.on_script_error = lambda text: self._add("script failed", text)

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
            record.get(b"released") == worker + b" " + fence
            or self._pending(keys[0]).get(entry) == (RELEASED.encode(), int(count)),
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
        stored = (before.settled and script in _SETTLING) or (before.released and script == "release")
        if reply == 0 and stored:
            self._add("refused", f"{shown} was refused, though it is stored")
        accepted = isinstance(reply, list) or (isinstance(reply, int) and reply > 0)
        if accepted and script in _ANSWERED and not (before.owns or stored):
            self._add("accepted", f"{shown} was accepted, without the delivery")

    # the pending list

    def check_pending(self, fields: list[bytes]) -> None:
        """Check each hand-out of a stream that a command names."""
        for field in fields:
            if field.endswith(b":ready"):
                self._check_released(field)
                now, before = self._pending(field), self._held.get(field, {})
                if now != before:
                    self._held[field] = now
                    for entry, (worker, count) in now.items():
                        self._since.setdefault((entry, worker, count), self._world.loop.now)
                    if not self._may_end(fields[1]):
                        self._check_taken(before, now)
                    for entry in now.keys() & before.keys():
                        if now[entry] != before[entry]:
                            self._check_hand_out(entry, before[entry], now[entry], fields)

    def _may_end(self, script: bytes) -> bool:
        """Return whether a script may end a delivery that a worker runs. script: its digest, or all of it."""
        return script in self._fenced or _FENCE in script or script in self._deletions or self._deletion in script

    def since(self, delivery: Delivery) -> float:
        """Return when the server handed out a delivery."""
        return self._since.get((delivery.entry, delivery.worker.encode(), delivery.count), self._world.loop.now)

    def _check_taken(self, before: Mapping[bytes, tuple[bytes, int]], now: Mapping[bytes, tuple[bytes, int]]) -> None:
        """Check that a command without a fence ends no delivery which a worker runs."""
        for entry in before.keys() - now.keys():
            worker, count = before[entry]
            if any(process.holds(worker, entry, count) for process in self._world.processes):
                self._add("taken", f"{entry.decode()}, delivery {count}, from {worker.decode()}, which runs it")

    def _check_hand_out(
        self, entry: bytes, before: tuple[bytes, int], now: tuple[bytes, int], fields: list[bytes]
    ) -> None:
        (former, count), (worker, raised) = before, now
        shown = f"{entry.decode()}: {former.decode()} had delivery {count}, {worker.decode()} has {raised}"
        if raised < count or (raised == count and former != worker and not worker.startswith(RESERVED.encode())):
            self._add("fence", f"{shown}: the count must grow")
        if former.startswith(RESERVED.encode()) or worker.startswith(RESERVED.encode()):
            return
        for process in self._world.processes:
            held = process.holds(former, entry, count)
            if held and former == worker and fields[1] in self._claims:
                self._add("own claim", f"{shown}, and still runs the former one")
            if held and former != worker and self._world.is_healthy(process):
                self._add("lease lost", f"{shown}, and the former was healthy")

    def _check_released(self, stream: bytes) -> None:
        """Check that each released message can be claimed at once."""
        oldest = self._world.server.now * 1000 - RELEASED_IDLE_MS / 2
        for entry, (worker, since, _) in self._entries(stream):
            if worker == RELEASED.encode() and since > oldest:
                self._add("not claimable", f"{entry.encode().decode()} was released, and waits for a lease")

    def _pending(self, stream: bytes) -> dict[bytes, tuple[bytes, int]]:
        """Return worker and delivery count of each pending entry."""
        return {entry.encode(): (worker, count) for entry, (worker, _, count) in self._entries(stream)}

    def _entries(self, stream: bytes) -> Iterable[tuple[Any, tuple[bytes, int, int]]]:
        """Return worker, time of the last renewal and delivery count of each pending entry."""
        item = self._world.server.items.get(stream)
        group = None if item is None else item.value.group_get(GROUP.encode())
        return () if group is None else group.pel.items()

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        item = self._world.server.items.get(key)
        return {} if item is None else item.value._values
