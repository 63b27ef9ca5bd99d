"""Admission of limited tasks: from the waiting lists of a partition to its ready stream, with tokens of their limits.

A task that has limits waits in a list of its partition (lua/limited.lua), not on the stream. A mover admits tasks: the
worker that promotes the partition, or one that has just released a token. It takes three acts, each of which may be the
last one of its process:

1. The look (look_limited.lua) only reads: which tasks have their turn.
2. Tokens are taken in the slot of the limits, for all of these tasks in one script. What is blocked is noted there as
   waiting, so that the next release names it. A token that is not used expires: after its life, and twice the time for
   which messages of the partition wait at present.
3. The admission (admit_limited.lua) compares state and place of each task, adds it to the stream with its token, and
   notes when the other KEYIDs are looked at again. A token of a task that was not admitted is released.

A waiter that was named may leave its place free: it was cancelled, another limit blocks it, its queue has no worker, or
its process has died. Then the next ones are named. Hints of releases may be lost: each KEYID that waits has a time at
which it is looked at in any case.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from .envelope import LimitUse
from .keys import GROUP, Namespace, Partition
from .limits.parked import wake_parked
from .limits.store import BreakerChange, LimitStore, Released, ReleaseRequest, TakeAnswer, TakeRequest, token_member
from .runtime import RUNTIME
from .transport.gateway import Gateway
from .transport.pipelining import Argument
from .transport.scripts import queue_script

TOKEN_FIELD: Final = b"token"
"""Field of the message of an admitted task: the nonce of its token, see `token_member`."""

_LOOK = queue_script("look_limited")
_ADMIT = queue_script("admit_limited")

_BATCH: Final = 100
"""Tasks of one look."""

_LEAST: Final = 8
"""Tasks of a look for the hints of one release, at least."""

_ROUNDS: Final = 20
"""Looks of one call: the other chores of the worker come next."""

_ORDERED_LOOK: Final = 60_000
"""Milliseconds until a look at an ordered KEYID whose next task has not ended; its end gives it an earlier turn."""

_AS_IT_IS: Final = -1
_AFTER_ALL_OTHERS: Final = 0

_OFFERS: Final = 100
"""Largest number of times that released tokens are offered to further waiters."""

_NOTICE: Final = 0.1
"""Seconds in which a call that waits in memory takes the token that it was notified of, unless its process has died."""

_WINDOW_TTL: Final = 5.0
"""Seconds for which the number of tasks of an ordered key that may run side by side is not read again."""

OnDropped = Callable[[Partition, str, str], Awaitable[None]]
"""Called with partition, id and limit of a task that had to wait and is not to."""

OnChange = Callable[[BreakerChange], None]
"""Called with each change of a breaker."""


class _Candidate(NamedTuple):
    """A task that has its turn. place: as it is stored. fence: of its last delivery; empty if it had none."""

    task_id: str
    key_id: str
    ring: str
    place: bytes
    uses: tuple[LimitUse, ...]
    fence: bytes
    nonce: str


class _Line(NamedTuple):
    """A KEYID that was looked at. more: whether tasks of it are left that may start. gone: members that do not wait."""

    key_id: str
    ring: str
    score: bytes
    more: bool
    gone: Sequence[bytes]


class _Round(NamedTuple):
    """Outcome of a look.

    Attributes:
        number: Of admitted tasks.
        wait: Seconds until the next look, None if no task waits.
        looked: Number of tasks or KEYIDs that had their turn.
        served: KEYID and RING of each admitted task.
    """

    number: int
    wait: float | None
    looked: int
    served: set[tuple[str, str]]


class Admitted(NamedTuple):
    """Outcome of a call. number: of admitted tasks. wait: seconds until the next call, None if no task waits."""

    number: int
    wait: float | None


_left_out: WeakKeyDictionary[Gateway, Collection[str]] = WeakKeyDictionary()
"""Queues whose tasks are not admitted, see `leave_out`."""


def leave_out(gateway: Gateway, queues: Collection[str]) -> None:
    """Admit no tasks of these queues from now on, but of all others: nothing would run them, and they hold tokens."""
    _left_out[gateway] = frozenset(queues)


_windows: WeakKeyDictionary[Gateway, dict[str, tuple[int, float]]] = WeakKeyDictionary()
"""Numbers of tasks of ordered keys that may run side by side, by limit, and when they were read."""


class Admission:
    """Admission of the limited tasks of a namespace.

    Args:
        life: Seconds for which a token is held before the worker that starts the task confirms it.
        on_dropped: Cancels a task; None leaves it waiting.
        on_change: Called with each change of a breaker.
    """

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        *,
        life: float,
        on_dropped: OnDropped | None = None,
        on_change: OnChange | None = None,
    ) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._store = LimitStore(gateway, namespace, life)
        self._life = life
        self._on_dropped = on_dropped
        self._on_change = on_change
        self._windows = _windows.setdefault(gateway, {})
        self._left_out = _left_out.get(gateway, ())

    async def admit_due(self, partition: Partition) -> Admitted:
        """Admit the tasks of a partition whose turn it is and whose limits have room, a bounded number."""
        if partition.queue in self._left_out:
            return Admitted(0, None)
        admitted = 0
        wait: float | None = 0.0
        for _ in range(_ROUNDS):
            done = await self._round(partition, _BATCH, ())
            admitted, wait = admitted + done.number, done.wait
            if not done.looked or wait != 0:
                break
        return Admitted(admitted, wait)

    async def start_waiting(self, released: Released) -> int:
        """Start what waited for tokens that were released. Return the number of admitted and woken tasks.

        Places that a waiter leaves free are offered to the next ones, until they are taken or no one waits for them.
        """
        started, places = 0, released.places
        for _ in range(_OFFERS):
            number, used = await self._follow(released.hints)
            started += number
            if released.published:
                await asyncio.sleep(_NOTICE)
            elif used >= len(released.hints):
                break
            released = await self._store.offer(places)
        return started

    async def admit_now(self, hints: Sequence[str]) -> int:
        """Admit tasks that waited for tokens which were released. Return their number.

        Args:
            hints: Waiters that a release returned, `QUEUE/PARTITION/KEYID/RING`. Others are ignored.
        """
        return (await self._admit_hinted(hints, attended=False))[0]

    async def _follow(self, hints: Sequence[str]) -> tuple[int, int]:
        """Wake and admit waiters. Return how many tasks were, and how many of the waiters have used their hint."""
        woken = await wake_parked(self._gateway, self._namespace, hints)
        admitted, used = await self._admit_hinted(hints, attended=True)
        return woken + admitted, woken + used

    async def _admit_hinted(self, hints: Sequence[str], *, attended: bool) -> tuple[int, int]:
        """Return how many tasks were admitted, and for how many of the hints."""
        admitted = used = 0
        for partition, lines in _by_partition(self._namespace, hints).items():
            if partition.queue in self._left_out:
                continue
            most, served = max(_LEAST, 2 * len(lines)), set[tuple[str, str]]()
            for _ in range(_ROUNDS):
                done = await self._round(partition, most, lines, attended=attended)
                admitted += done.number
                served |= done.served
                if done.number == 0 or done.number < done.looked:
                    break
            used += len(served.intersection(lines))
        return admitted, used

    async def _round(
        self, partition: Partition, most: int, hints: Sequence[tuple[str, str]], *, attended: bool = False
    ) -> _Round:
        """Look, take and admit once.

        attended: only if a worker promotes the tasks of the partition; else its KEYIDs have their turn when one comes.
        """
        windows = [part for name, (number, _) in self._windows.items() for part in (name, number)]
        args: list[Argument] = [GROUP, most, "1" if attended else "", len(windows) // 2, *windows]
        args += (part for hint in hints for part in hint)
        reply = await self._gateway.run(_LOOK, [partition.rings, partition.ready, partition.promote_lock], args)
        looked_at, waited, tasks, found, rings, wait_ms = reply
        if not rings:
            return _Round(0, None if wait_ms < 0 else wait_ms / 1000, 0, set())
        candidates = [_candidate(task) for task in tasks]
        lines = [_line(line) for line in found]
        requests = [_request(partition, candidate) for candidate in candidates]
        # A task that is admitted waits as long as the others on the stream, and its token with it.
        store = LimitStore(self._gateway, self._namespace, self._life + 2 * waited / 1000)
        taken = await store.take(requests) if requests else None
        answers = [] if taken is None else taken.answers
        wait_ms, served = await self._admit(partition, candidates, answers, lines, rings, looked_at)
        if taken is not None and (on_change := self._on_change) is not None:
            for change in taken.changes:
                on_change(change)
        await self._drop(partition, candidates, answers)
        await self._read_windows(lines)
        looked = len(candidates) or len(lines)
        return _Round(len(served), None if wait_ms < 0 else wait_ms / 1000, looked, set(served))

    async def _admit(
        self,
        partition: Partition,
        candidates: Sequence[_Candidate],
        answers: Sequence[TakeAnswer],
        lines: Sequence[_Line],
        rings: Sequence[Sequence[bytes]],
        looked_at: bytes,
    ) -> tuple[int, list[tuple[str, str]]]:
        """Move the tasks that have tokens, and release those of tasks that were not moved.

        Return the milliseconds until the next look, and KEYID and RING of each admitted task.
        """
        granted = [candidate for candidate, answer in zip(candidates, answers, strict=True) if answer.granted]
        next_looks, full = _next_looks(candidates, answers, lines)
        args: list[Argument] = [len(granted), len(lines), len(rings), looked_at]
        for candidate in granted:
            args += (
                candidate.task_id,
                candidate.key_id,
                candidate.ring,
                candidate.place,
                candidate.fence,
                candidate.nonce,
            )
        for line, next_look in zip(lines, next_looks, strict=True):
            args += (line.key_id, line.ring, line.score, next_look, len(line.gone), *line.gone)
        for ring, score in rings:
            args += (ring, score, full.get(ring.decode(), 0))
        keys = [partition.rings, partition.ready, *(partition.turns(ring.decode()) for ring, _ in rings)]
        keys += [partition.limited(line.key_id) for line in lines]
        keys += [partition.record(candidate.task_id) for candidate in granted]
        wait_ms, moved = await self._gateway.run(_ADMIT, keys, args)
        if unused := [candidate for candidate, done in zip(granted, moved, strict=True) if not done]:
            await self._give_back(partition, unused)
        served = [(task.key_id, task.ring) for task, done in zip(granted, moved, strict=True) if done]
        return wait_ms, served

    async def _give_back(self, partition: Partition, unused: Sequence[_Candidate]) -> None:
        """Release tokens of tasks that another mover has admitted, or that were cancelled."""
        requests = [ReleaseRequest(_member(partition, candidate), candidate.uses) for candidate in unused]
        released = await self._store.release(requests)
        await self.start_waiting(released)

    async def _drop(
        self, partition: Partition, candidates: Sequence[_Candidate], answers: Sequence[TakeAnswer]
    ) -> None:
        if self._on_dropped is None:
            return
        for candidate, answer in zip(candidates, answers, strict=True):
            if not answer.granted and not candidate.fence and any("d" in use.flags for use in candidate.uses):
                await self._on_dropped(partition, candidate.task_id, candidate.uses[answer.use].name)

    async def _read_windows(self, lines: Sequence[_Line]) -> None:
        """Read how many tasks of ordered keys may run side by side, if that was some time ago."""
        now = RUNTIME.monotonic()
        old = {line.ring for line in lines if line.key_id.startswith("o")}
        old = {name for name in old if name not in self._windows or now - self._windows[name][1] > _WINDOW_TTL}
        if not old:
            return
        limits, names = self._namespace.limits, sorted(old)
        keys = [key for name in names for key in (limits.control(name), limits.limit(name))]
        reads = [("HMGET", key, "running", "total") for key in keys]
        found = await self._gateway.pipeline(reads, node_of=limits.clock)
        for name, control, defined in zip(names, found[::2], found[1::2], strict=True):
            numbers = (control[0], defined[0], control[1], defined[1])
            number = next((int(value) for value in numbers if value is not None and value.isdigit()), 1)
            self._windows[name] = (max(1, number), now)


def _by_partition(namespace: Namespace, hints: Iterable[str]) -> dict[Partition, list[tuple[str, str]]]:
    found: dict[Partition, list[tuple[str, str]]] = defaultdict(list)
    for hint in hints:
        parts = hint.split("/")
        if len(parts) == 4 and parts[1].isdigit() and parts[0] != "memory" and not parts[2].startswith("task:"):
            found[namespace.partition(parts[0], int(parts[1]))].append((parts[2], parts[3]))
    return found


def _candidate(parts: Sequence[bytes]) -> _Candidate:
    task_id, key_id, ring, place, limits, fence = parts
    uses = tuple(LimitUse(name, key, int(cost), flags) for name, key, cost, flags in orjson.loads(limits))
    return _Candidate(task_id.decode(), key_id.decode(), ring.decode(), place, uses, fence, RUNTIME.token(8))


def _line(parts: Sequence[bytes]) -> _Line:
    key_id, ring, score, more, *gone = parts
    return _Line(key_id.decode(), ring.decode(), score, more == b"1", gone)


def _member(partition: Partition, candidate: _Candidate) -> str:
    return token_member(partition, candidate.task_id, candidate.nonce)


def _request(partition: Partition, candidate: _Candidate) -> TakeRequest:
    waiter = f"{partition.queue}/{partition.index}/{candidate.key_id}/{candidate.ring}"
    return TakeRequest(_member(partition, candidate), candidate.uses, waiter=waiter)


_OF_THE_LIMIT: Final = ("total", "hold", "open", "unknown")
"""Reasons for which no task of a limit can start, whatever its key."""


def _next_looks(
    candidates: Sequence[_Candidate], answers: Sequence[TakeAnswer], lines: Sequence[_Line]
) -> tuple[list[int], dict[str, int]]:
    """Return what comes next for each KEYID (see admit_limited.lua), and for how many ms each full ring is full."""
    blocked: dict[tuple[str, str], int] = {}
    served: set[tuple[str, str]] = set()
    full: dict[str, int] = {}
    for candidate, answer in zip(candidates, answers, strict=True):
        name = (candidate.key_id, candidate.ring)
        if answer.granted:
            served.add(name)
            continue
        use, retry = candidate.uses[answer.use], max(1, round(answer.retry * 1000))
        if use.name in candidate.ring.split(",") and (answer.reason in _OF_THE_LIMIT or use.key == "-"):
            full.setdefault(candidate.ring, retry)
        else:
            blocked.setdefault(name, retry)
    found: list[int] = []
    for line in lines:
        name = (line.key_id, line.ring)
        if name in blocked:
            found.append(blocked[name])
        elif line.key_id.startswith("o") and not line.more and line.ring not in full:
            found.append(_ORDERED_LOOK)
        else:
            found.append(_AFTER_ALL_OTHERS if name in served or line.ring not in full else _AS_IT_IS)
    return found, full
