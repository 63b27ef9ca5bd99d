"""Checks of limits: after each write, at each start in a limit, and at the end of a run.

What is stored is checked by itself: the live tokens of a limit are never more than it allows, and no rate is ahead of
what its burst allows. What the handlers do is checked beside it: those that run in a limit at one time, of which one
more may be in a process that stands still until it notices that its token has lapsed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .limits import BOUNDS, LIMITED, limits_of, tenant_of

if TYPE_CHECKING:
    from ..app import Entry
    from ..plan import TaskPlan
    from ..world import World

__all__ = ["LimitChecks"]

_RELEASED_WITHIN: Final = 3.0
"""Seconds after the end of the last task, within which its token is released if no fault occurs."""

_SLOT: Final = b"{sim:~limits:0}:"
_LISTS: Final = re.compile(rb"\{sim:sim:\d+\}:(?:limited|turns):.*|\{sim:sim:\d+\}:(?:rings|kept)")
_ENDED: Final = frozenset({"succeeded", "dead", "cancelled", None})
_LONGEST_LIFE: Final = 60_000.0
"""Milliseconds for which a token lives without a renewal at most."""

_UNSTORED: Final = 200.0
"""Milliseconds by which the time of the limits moves before a script stores it."""

_ROUNDED: Final = 2.0
"""Milliseconds by which times may be rounded."""


@dataclass(frozen=True)
class _Hold:
    """Code that runs in a limit.

    Attributes:
        run: Number of its run.
        step: Step that took the token; empty for the task.
    """

    task: str
    run: int
    machine: str
    name: str
    key: str
    step: str


class LimitChecks:
    """Checks of the limits of one world.

    Attributes:
        called: Virtual time at which the caller first asked for a task, by id.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.called: dict[str, float] = {}
        self._active: list[_Hold] = []
        self._used: dict[tuple[str, str, bytes], int] = {}
        self._rates: dict[bytes, float] = {}
        self._charged: defaultdict[str, float] = defaultdict(float)
        self._resting: dict[str, tuple[str, float]] = {}
        self._ended: float | None = None
        self._left = False
        self._watched = any(task.kind in LIMITED for task in world.plan.tasks)

    # what is stored

    def check_write(self, fields: list[bytes]) -> None:
        """Check the tokens and the rates after a command that names a key of the limits."""
        if not self._watched or not any(_SLOT in field for field in fields[:8]):
            return
        for key in [*self._items]:
            if key.startswith(_SLOT):
                kind, _, rest = key.removeprefix(_SLOT).partition(b":")
                if kind == b"holders":
                    self._check_holders(*_split(rest))
                elif kind in (b"rate", b"cost"):
                    self._check_rate(key, rest.partition(b":")[0].decode())

    def _check_holders(self, name: str, key: str) -> None:
        bound = BOUNDS[name]
        most = bound.running if key else bound.total
        virtual = self._virtual(_UNSTORED)
        live = [member for member, score in self._holders(name, key) if score > virtual]
        if most is not None and len(live) > most:
            self._world.checks.add("above the limit", f"{name} {key} has the tokens {live}, and allows {most}")

    def _check_rate(self, stored: bytes, name: str) -> None:
        bound, now = BOUNDS[name], self._world.server.now * 1000
        arrival, former = float(self._items[stored].value), self._rates.get(stored, 0.0)
        if arrival != former:
            self._rates[stored] = arrival
            self._charged[name] += max(0.0, arrival - max(former, now))
            if arrival > now + bound.burst * bound.every * 1000 + _ROUNDED:
                ahead = (arrival - now) / 1000
                self._world.checks.add("above the rate", f"{stored.decode()} is {ahead:.3f} s ahead")

    def _holders(self, name: str, key: str) -> list[tuple[str, float]]:
        item = self._items.get(_SLOT + f"holders:{name}{':' if key else ''}{key}".encode())
        return [] if item is None else [(member.decode(), float(item.value.get(member))) for member in item.value]

    def _virtual(self, most: float) -> float:
        """Return the time of the limits in ms. most: by how much it has moved since it was stored."""
        item = self._items.get(_SLOT + b"clock")
        if item is None:
            return 0.0
        seen, virtual = item.value.split()[:2]
        return float(virtual) + max(0.0, min(most, self._world.server.now * 1000 - float(seen)))

    @property
    def _items(self) -> dict[bytes, Any]:
        return self._world.server.items

    # what runs

    def check_entry(self, entry: Entry) -> None:
        """Check a start in a limit, and note its end."""
        if entry.what == "run":
            self._check_order(entry)
        elif entry.what == "holds":
            key, used, step = entry.value
            hold = _Hold(entry.task, entry.run, entry.machine, entry.step, key, step)
            self._active = [each for each in self._active if self._lives(each.machine)]
            self._active.append(hold)
            admission = f"{entry.run} {step}".encode() if step else self._message(entry)
            self._used[hold.name, hold.task, admission] = used
            self._check_overlap(hold)
            self._check_seat(hold)
        elif entry.what == "frees":
            self._active.remove(_Hold(entry.task, entry.run, entry.machine, entry.step, entry.value[0], entry.value[2]))
        elif entry.what == "rests":
            self._resting[entry.task] = (entry.value[0], entry.at)
        elif entry.what in ("stirs", "failed", "result"):
            self._resting.pop(entry.task, None)

    def _check_overlap(self, hold: _Hold) -> None:
        """Check how many run at once, unless one of them is in a process that may have lost its token unnoticed."""
        bound = BOUNDS[hold.name]
        beside = [each for each in self._active if each.name == hold.name]
        same = [each for each in beside if each.key == hold.key]
        for most, found in ((bound.total, beside), (bound.running, same)):
            if most is not None and len(found) > most and not self._is_doubtful(found):
                shown = [f"{each.task} (run {each.run} on {each.machine})" for each in found]
                self._world.checks.add("overlap", f"{hold.name} {hold.key!r} allows {most}, and {shown} run")

    def _is_doubtful(self, holds: list[_Hold]) -> bool:
        """Return whether one of the processes may have lost a token without having noticed."""
        world = self._world
        if world.server.lost and world.loop.now < world.server.lost_at + 2 * world.plan.longest_lease:
            return True
        machines = {each.machine for each in holds}
        return any(process.name in machines and not world.is_healthy(process) for process in world.processes)

    def _check_seat(self, hold: _Hold) -> None:
        """Check that none runs in the place of a parked task that keeps its token."""
        for task, (tenant, since) in self._resting.items():
            quiet = since > max(self._world.struck, self._world.repaired) and not self._world.server.lost
            if hold.name == "seat" and hold.key == tenant and hold.task != task and quiet:
                self._world.checks.add("token not kept", f"{hold.task} runs in the seat of {task}, which is parked")

    def _check_order(self, entry: Entry) -> None:
        """Check that each task that was stored before in the same order has ended."""
        world = self._world
        later = next((task for task in self._ordered if task.id == entry.task), None)
        if later is None or world.server.lost or later.id not in self.called:
            return
        acked = self._acked
        for earlier in self._ordered:
            before = acked.get(earlier.id, self.called[later.id]) < self.called[later.id]
            same = (tenant_of(earlier.id), earlier.lane) == (tenant_of(later.id), later.lane)
            if before and same and earlier.id not in world.replays:
                state = world.checks.state(earlier.id)
                if state not in _ENDED:
                    world.checks.add("overtaken", f"{later.id} runs, and {earlier.id}, stored before, is {state}")

    @property
    def _ordered(self) -> list[TaskPlan]:
        return [task for task in self._world.plan.tasks if "orders" in limits_of(task.kind) and not task.delay]

    @property
    def _acked(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for entry in self._world.journal.entries:
            if entry.what == "acked":
                found.setdefault(entry.task, entry.at)
        return found

    def _lives(self, machine: str) -> bool:
        return any(process.name == machine for process in self._world.processes)

    def _message(self, entry: Entry) -> bytes:
        """Return the entry of the message that a run has been handed."""
        for process in self._world.processes:
            if process.name == entry.machine:
                for run in process.runs():
                    if run.id == entry.task:
                        return run.delivery.entry
        return b""

    # at the end

    def left(self, life: float = 0.0) -> list[str]:
        """Return tokens that have not lapsed, and what is left of waiting lists, while no task may run any more.

        Args:
            life: Milliseconds for which a token may still live.
        """
        if not self._watched:
            return []
        now = self._virtual(math.inf) + life
        found = [key.decode() for key in self._items if _LISTS.fullmatch(key)]
        for name, key in self._stored_holders():
            found += [f"token {member} of {name}" for member, score in self._holders(name, key) if score > now]
        return found

    def still_left(self, *, busy: bool) -> list[str]:
        """Return what is left. busy: whether a task may still run; if not, it must be gone soon."""
        found, now = self.left(), self._world.loop.now
        if busy:
            self._ended = None
        elif self._ended is None:
            self._ended = now
        elif found and not self._world.plan.faults and now > self._ended + _RELEASED_WITHIN and not self._left:
            self._left = True
            self._world.checks.add("not released", f"{found} after all tasks have ended, without a fault")
        return found

    def _stored_holders(self) -> list[tuple[str, str]]:
        begin = _SLOT + b"holders:"
        return [_split(key.removeprefix(begin)) for key in self._items if key.startswith(begin)]

    def finish(self) -> None:
        """Check at the end that nothing is left, that each start was charged, and which tasks were cancelled."""
        if not self._watched:
            return
        world = self._world
        # where no task waits for tokens, their clock moves little
        for what in self.left(life=_LONGEST_LIFE):
            world.checks.add("leak", f"{what} is left")
        for name, key in self._stored_holders():
            stored = _SLOT + f"holders:{name}{':' if key else ''}{key}".encode()
            if self._items[stored].expireat is None:
                world.checks.add("leak", f"{stored.decode()} has no TTL, and no task holds a token")
        self._check_charges()
        self._check_replaced()

    def _check_charges(self) -> None:
        """Check that as much was charged as was used. What the server has lost may have been."""
        if self._world.server.lost:
            return
        for name in ("pace", "spend"):
            used = sum(cost for (limit, _, _), cost in self._used.items() if limit == name)
            charged = self._charged[name] / (BOUNDS[name].every * 1000)
            if charged < used - 0.01 * used - 0.1:
                self._world.checks.add("not charged", f"{used} of {name} was used, and {charged:.1f} charged")

    def _check_replaced(self) -> None:
        """Check that the last task of a key was not cancelled in favour of an earlier one."""
        world, acked = self._world, self._acked
        if world.server.lost or world.plan.again:
            return
        tasks = [task for task in world.plan.tasks if task.kind == "latest" and task.id in acked and not task.delay]
        for tenant in {tenant_of(task.id) for task in tasks}:
            same = [task for task in tasks if tenant_of(task.id) == tenant]
            last = max(same, key=lambda task: self.called[task.id])
            if all(acked[task.id] < self.called[last.id] for task in same if task is not last):
                cancelled = world.checks.state(last.id) == "cancelled"
                if cancelled and last.id not in world.cancelled:
                    world.checks.add("wrong outcome", f"{last.id}, the last of {tenant}, is cancelled")


def _split(rest: bytes) -> tuple[str, str]:
    name, _, key = rest.decode().partition(":")
    return name, key
