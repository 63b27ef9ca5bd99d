"""Waits of a run: what its calls wait for, in the handler and in its branches, and when the run parks.

A call that waits records its wait first (`Kind.SAVED`), then awaits `wait_until`, then records the result like a step.
So a later run finds the wait, and continues it. A wait costs no slot while the task is parked. The run parks when it
has open waits and nothing else to do: no step is in progress, and no call of the context began for
`WaitBoard.park_after` seconds. Code outside steps runs again in the next run anyway. Where only the handler's own
asyncio task makes calls, it parks at once. Until then the waits are held in memory: the record's channel notifies of
messages, answers and children.

The saved value of a wait says that it is one, so that `close_waits` closes what a cancelled branch has left open, also
where an earlier run opened it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import anyio
import orjson

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import TIME, WakeCondition
from ...queues.pubsub import LOST, TaskNotifications
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.scripts import milliseconds
from ..log import log_wait
from ..resume_warning import warn_once
from .attempt_end import OPEN_CHILD
from .journal.run_events import Waited
from .run import Run
from .steps.keys import Match, forget_steps
from .steps.matching import match_call
from .stop_reasons import ParkReason, StopReason


class WaitEnd(Enum):
    """Results of a look, and of a wait, that are no value."""

    OPEN = "open"
    TIMED_OUT = "timed out"


OPEN: Final = WaitEnd.OPEN
"""Result of a look at a condition that is not over."""

_PARK: Final = object()
_CHANGED: Final = b"waits"
_WATCHER: Final = "#waits"
_LEAST_PAUSE: Final = 0.001

REQUIRED: Final[Any] = object()
"""Default of a wait for an answer that has none: a time-out raises."""

TIMED_OUT: Final = WaitEnd.TIMED_OUT
"""Result of a wait whose time has passed first."""


class Condition(ABC):
    """The condition that ends the wait of one call.

    Attributes:
        key: key of the call among the records.
        what: word for people, such as "time", "message", "answer", "children", "result".
        until: time at which the wait ends anyway, in milliseconds of Redis' clock; None for never.
    """

    __slots__ = ("key", "until", "what")

    def __init__(self, key: str, what: str, until: int | None) -> None:
        self.key = key
        self.what = what
        self.until = until

    @property
    @abstractmethod
    def parked(self) -> WakeCondition:
        """Kind and value by which scripts see the condition, as of the last look. See `settlement.WakeCondition`."""

    @property
    def also(self) -> Sequence[WakeCondition]:
        """Further conditions that wake the parked task, so that it looks again."""
        return ()

    @abstractmethod
    async def look(self) -> Any:
        """Return the value that ends the wait, or `OPEN`. Asks Redis, and writes nothing; it may be repeated."""

    def withdraw(self, value: Any) -> None:  # noqa: B027 - most values need nothing
        """Called if the call was cancelled, and so does not get a value that a look has found."""


class TimePassed(Condition):
    """A time of Redis' clock, before which nothing ends the wait."""

    __slots__ = ()

    def __init__(self, key: str, until: int) -> None:
        super().__init__(key, "time", until)

    @property
    def parked(self) -> WakeCondition:
        return TIME

    async def look(self) -> Any:
        return OPEN


async def wait_until(run: Run, condition: Condition, *, looked: int | None = None) -> Any:
    """Return the value of a condition that is over, `TIMED_OUT` when its time has passed; meanwhile the run may park.

    The call is within `run.calling()`, so that the run does not park before its result is recorded.

    looked: time of Redis in milliseconds at which the caller has looked, and found nothing; else this looks first.

    Raises what `look` raises, `RunStopped` where the handler's own task waits and the run parks, `CancelledError`,
    `LeaseLost`.
    """
    return await _board(run).wait(condition, looked)


WAIT: Final = "#wait"
"""First member of the JSON object that is saved for an open wait: its kind. The second one is `h`, see `match_call`."""

_SAVED_WAIT: Final = b'{"#wait":"'


class Closing:
    """The end of waits whose calls were cancelled: the entries that store it, and what follows once they are stored."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._then: list[Callable[[], Awaitable[None]]] = []

    def add(self, *entries: Entry, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Add entries. then: what follows. It may be left out if the process dies, so something else does it later."""
        self.entries += entries
        if then is not None:
            self._then.append(then)

    async def finish(self) -> None:
        """Do what follows the entries."""
        for then in self._then:
            await then()


Closer: TypeAlias = Callable[[Run, str, dict[str, Any], Closing], None]

_CLOSERS: Final[dict[str, Closer]] = {}


def set_closer(kind: str, closer: Closer) -> None:
    """Let a function close open waits of a kind: it gets the run, the key, the saved value, and what it adds to.

    A kind without one has only its saved value and an event.
    """
    _CLOSERS[kind] = closer


def save_wait(run: Run, key: str, kind: str, saved: Mapping[str, Any]) -> Entry:
    """Return the entry that stores an open wait of a call. saved: what a later run needs; `h` is the call's digest."""
    data = run.history.saved[key] = orjson.dumps({WAIT: kind, **saved})
    return Entry(Kind.SAVED, key, data)


async def match_wait(run: Run, name: str, digest: str, *, order: str | None = None) -> Match:
    """Return the key of a call that waits, and its record if there is one. Its saved wait is known after that.

    See `match_call`. In a branch, any of the open waits may be that of this call, unless the branch has a scope of its
    own: there it calls in the same order in each run.
    """
    history, caller = run.history, None
    if not run.is_own_task():
        caller = run.keys.caller()
        if history.pages is not None:
            await history.read_all()
    match = await match_call(run, name, digest, history.saved, order=order, caller=caller)
    if match[1] is None and match[2] is None:
        await history.read_unfinished(match[0])
    return match


def saved_wait(run: Run, key: str) -> dict[str, Any] | None:
    """Return what is saved of the open wait of a call, by this run or an earlier one; None if it has none."""
    saved = run.history.saved.get(key)
    return None if saved is None else orjson.loads(saved)


async def close_waits(run: Run, scopes: Iterable[str]) -> Closing:
    """Return the end of all open waits in scopes whose branches were cancelled."""
    closing = Closing()
    await run.history.read_all()
    prefixes = tuple(scopes)
    for key in sorted(key for key in run.history.saved if key.startswith(prefixes)):
        data = run.history.saved[key]
        if data.startswith(_SAVED_WAIT):
            found = orjson.loads(data)
            closer = _CLOSERS.get(found[WAIT], _close)
            closer(run, key, found, closing)
    return closing


def _close(run: Run, key: str, saved: dict[str, Any], closing: Closing) -> None:
    closing.add(*forget_steps([key], run.history), run.next_entry(Waited(closed=True)))


async def redis_time(run: Run) -> int:
    """Return the time of Redis in milliseconds; wait while Redis is unavailable."""
    return await _board(run).read_time()


class Race:
    """The branches of a call of `ctx.first`, of which one ends with a message or an answer that it takes.

    Two branches may find theirs at the same time. So they take them one after the other, and a branch takes nothing
    when another one has ended: what it has found stays.
    """

    def __init__(self) -> None:
        self.outer = BRANCH.get()
        """The branch that makes the call, if that is one of another race."""
        self.taking = asyncio.Lock()
        """Held while a branch stores that it takes something."""
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.took: set[str] = set()
        """Names of the branches that have taken something."""
        self.over = asyncio.Event()

    def winner(self) -> str:
        """Return the branch that has ended first; of several the first that has taken something, or the first one."""
        ended = [name for name, task in self.tasks.items() if task.done()]
        return next((name for name in ended if name in self.took), ended[0])

    @property
    def decided(self) -> bool:
        """Whether a branch has ended, and the others are not cancelled yet."""
        return not self.over.is_set() and any(task.done() for task in self.tasks.values())


BRANCH: Final[ContextVar[tuple[Race, str] | None]] = ContextVar("perdure_branch", default=None)
"""The branch of `ctx.first` that calls here: its race and its name."""


def _branches() -> Iterator[tuple[Race, str]]:
    """Return the branches that call here, the innermost first."""
    branch = BRANCH.get()
    while branch is not None:
        yield branch
        branch = branch[0].outer


def note_taken() -> None:
    """Note that the branch here has taken a message or an answer, in this run or an earlier one."""
    for race, name in _branches():
        race.took.add(name)


@asynccontextmanager
async def taking() -> AsyncIterator[None]:
    """Let the caller store in the block that it takes a message or an answer. The loser of a race is cancelled here."""
    async with AsyncExitStack() as stack:
        while True:
            decided = None
            for race, _ in _branches():
                await stack.enter_async_context(race.taking)
                if race.decided:
                    decided = race
                    break
            if decided is None:
                break
            await stack.aclose()
            await decided.over.wait()
        yield
        note_taken()


def look_again(run: Run, key: str) -> None:
    """Let the call with this key look again, if it waits: its condition has changed in this run."""
    _board(run).look_again(key)


def _board(run: Run) -> WaitBoard:
    return run.extras.of(WaitBoard, lambda: WaitBoard(run))


class SharedNotifications:
    """The task notifications that the runs of a worker share; an object of its extras, which do not close them."""

    def __init__(self, notifications: TaskNotifications) -> None:
        self.listen = notifications.listen


class _Waiter:
    """One call that waits in memory. own: in the handler's own asyncio task. stale: it has not looked since."""

    __slots__ = ("condition", "future", "own", "stale")

    def __init__(self, condition: Condition, *, own: bool) -> None:
        self.condition = condition
        self.own = own
        self.stale = True
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def withdraw(self) -> None:
        """Let the condition have back a value that the call does not get: it was cancelled."""
        ended = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        if ended and (value := self.future.result()) is not _PARK and value is not TIMED_OUT:
            self.condition.withdraw(value)

    def end(self, value: Any) -> bool:
        """Return a value to the call, unless it has ended."""
        if self.future.done():
            return False
        self.future.set_result(value)
        return True


class WaitBoard:
    """The waits of one run that are held in memory, and the decision to park."""

    park_after: ClassVar[float] = 1.0
    """Seconds without a call of the context after which a run with branches parks. Shorter waits stay in memory."""

    look_every: ClassVar[float] = 5.0
    """Seconds after which a wait in memory looks again without a notification, which may be lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiters: dict[str, _Waiter] = {}
        self._number = 0
        self._ahead = 0.0
        """Milliseconds by which the clock of Redis is ahead of the monotonic one."""
        self._activity: tuple[object, ...] = ()
        self._quiet_since = self._looked = RUNTIME.monotonic()
        self._news: asyncio.Queue[bytes] = asyncio.Queue()
        self._watcher: asyncio.Task[None] | None = None

    async def read_time(self) -> int:
        """Return the time of Redis in milliseconds."""
        run = self._run
        record = run.delivery.partition.record(run.id)
        read = partial(run.gateway.command, "TIME", node_of=record)
        now = milliseconds(await retry_while_unavailable(read, on_wait=self._on_wait))
        self._ahead = now - RUNTIME.monotonic() * 1000
        return now

    def _now(self) -> float:
        """Return the time of Redis in milliseconds, by the last one that was read."""
        return RUNTIME.monotonic() * 1000 + self._ahead

    def _on_wait(self, error: Exception) -> None:
        log_wait(f"the waits of task {self._run.id}", self._run.touch)(error)

    async def wait(self, condition: Condition, looked: int | None) -> Any:
        """See `wait_until`."""
        run = self._run
        await run.check_stopped()
        if looked is None:
            value = await self._look(condition)
            if value is not OPEN:
                return value
        else:  # it has written since, so that a time which the board has read itself is nearer
            self._ahead = max(self._ahead, looked - RUNTIME.monotonic() * 1000)
        calls, run.calls = run.calls, max(0, run.calls - 1)  # the call that waits is not in progress
        try:
            return await self._wait(condition)
        finally:
            run.calls += min(1, calls)

    async def _wait(self, condition: Condition) -> Any:
        """Wait in memory, or park the run at once where the handler makes all calls itself."""
        run = self._run
        own = run.is_own_task()
        if own and not run.branched and not self._waiters and run.may_park and self._is_long([condition]):
            await run.park(self._reason([condition]))
        self._number += 1
        name, waiter = f"#wait:{self._number}", _Waiter(condition, own=own)
        run.wait_began(name)
        self._waiters[name] = waiter
        self._wake_watcher()
        try:
            while (value := await waiter.future) is _PARK:
                waiter.future = asyncio.get_running_loop().create_future()
                if self._may_park():
                    await run.park(self._reason(self._conditions()))
            return value
        except BaseException:
            waiter.withdraw()
            raise
        finally:
            del self._waiters[name]
            run.wait_ended(name)
            run.touch()
            if not self._waiters and self._watcher is not None:
                self._watcher.cancel()
                self._end_watcher()

    def look_again(self, key: str) -> None:
        """See `look_again`."""
        for waiter in self._waiters.values():
            if waiter.condition.key == key:
                waiter.stale = True
                self._wake_watcher()

    async def _look(self, condition: Condition) -> Any:
        """Return the value of a condition, `TIMED_OUT` or `OPEN`. The time is read first: a value until then counts."""
        now = None if condition.until is None else await self.read_time()
        value = await retry_while_unavailable(condition.look, on_wait=self._on_wait)
        ended = value is OPEN and condition.until is not None and now is not None and now >= condition.until
        return TIMED_OUT if ended else value

    # parking

    def _conditions(self) -> list[Condition]:
        return [waiter.condition for waiter in self._waiters.values() if not waiter.future.done()]

    def _is_long(self, conditions: Sequence[Condition]) -> bool:
        """Return whether none of the waits ends by its time so soon that parking is not worth it."""
        ends = [condition.until for condition in conditions if condition.until is not None]
        return not ends or min(ends) - self._now() >= self.park_after * 1000

    def _may_park(self) -> bool:
        """Return whether the run has nothing to do but wait."""
        run, conditions = self._run, self._conditions()
        if not conditions or len(conditions) < len(self._waiters) or not run.may_park or not self._is_long(conditions):
            return False
        return RUNTIME.monotonic() - self._quiet_since >= self.park_after

    def _reason(self, conditions: Sequence[Condition]) -> ParkReason:
        ends = [condition.until for condition in conditions if condition.until is not None]
        delay = (min(ends) - self._now()) / 1000 if ends else MAX_SECONDS
        words = sorted({condition.what for condition in conditions})
        parked = dict.fromkeys(wake for condition in conditions for wake in (condition.parked, *condition.also))
        return ParkReason(max(0.0, min(delay, MAX_SECONDS)), " or ".join(words), tuple(parked))

    def _park(self) -> None:
        """Stop the run: the handler's own task, where it waits, stops itself."""
        self._check_asked()
        for waiter in self._waiters.values():
            if waiter.own:
                waiter.end(_PARK)
                return
        self._run.cancel(StopReason.PARKED, self._reason(self._conditions()))

    def _check_asked(self) -> None:
        """Warn if all branches wait, and none of them for what a branch of an earlier run has waited for."""
        run = self._run
        waits = {waiter.condition.key for waiter in self._waiters.values()}
        left = [
            key
            for key, data in run.history.saved.items()
            if key not in waits
            and data.startswith(_SAVED_WAIT)
            and not key.rpartition("/")[2].startswith(OPEN_CHILD)  # no call waits for it yet
            and not run.keys.is_given(key)
        ]
        if left:
            warn_once(
                f"task {run.envelope.task!r} waits again in a branch in place of {sorted(left)[0]!r}, which an earlier "
                "run had started: a branch finds its wait by the arguments of the call, so one that differs "
                "in each run starts again; compute the argument in a step, or give the branch a scope: "
                "with ctx.scope(...)"
            )

    # watching

    def _wake_watcher(self) -> None:
        """Let the watcher see a new wait; start it with the first one."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="perdure waits")
            self._run.wait_began(_WATCHER, self._watcher)
        if self._news.empty():
            self._news.put_nowait(_CHANGED)

    async def _watch(self) -> None:
        """Look at the waits when they may be over, and park the run when it does nothing else."""
        self._quiet_since, self._looked = RUNTIME.monotonic(), RUNTIME.monotonic()
        listening, news = False, {_CHANGED}
        try:
            async with AsyncExitStack() as stack:
                while self._waiters:
                    if not listening and any(condition.parked != TIME for condition in self._conditions()):
                        await self._listen(stack)
                        listening, news = True, {LOST}
                    await self._look_at(self._stale(news))
                    self._note_activity()
                    if self._may_park():
                        self._park()
                    news = await self._next_news()
        except Exception as error:  # noqa: BLE001 - each call that waits raises it
            for waiter in self._waiters.values():
                if not waiter.future.done():
                    waiter.future.set_exception(error)
        finally:
            if self._watcher is asyncio.current_task():
                self._end_watcher()

    def _end_watcher(self) -> None:
        """Forget the watcher: the next wait starts another one."""
        self._news, self._watcher = asyncio.Queue(), None
        self._run.wait_ended(_WATCHER)

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Subscribe to the record's channel; in unit tests, where nothing listens, looks are repeated only."""
        run = self._run
        shared = None if run.host.extras is None else run.host.extras.get(SharedNotifications)
        if shared is not None:
            channel = run.delivery.partition.record(run.id)
            enter = partial(_enter, stack, shared, channel)
            self._news = await retry_while_unavailable(enter, on_wait=self._on_wait)

    async def _next_news(self) -> set[bytes]:
        """Return the notifications of the next time that there is something to do."""
        found: set[bytes] = set()
        pause, began = self._pause(), RUNTIME.monotonic()
        with anyio.move_on_after(pause):
            found.add(await self._news.get())
        if RUNTIME.monotonic() - began > pause + self.park_after / 4:  # the event loop was blocked: no branch could run
            self._quiet_since = RUNTIME.monotonic()
        while not self._news.empty():
            found.add(self._news.get_nowait())
        return found

    def _pause(self) -> float:
        """Return the seconds until there is something to do without a notification."""
        now, conditions = RUNTIME.monotonic(), self._conditions()
        quiet = max(self._quiet_since + self.park_after - now, self.park_after / 4)
        ends = [(condition.until - self._now()) / 1000 for condition in conditions if condition.until is not None]
        return max(_LEAST_PAUSE, min(quiet, self._looked + self.look_every - now, *ends))

    def _stale(self, news: set[bytes]) -> list[_Waiter]:
        """Return the calls that look now: by their time, by a notification, or because all do now and then."""
        now = RUNTIME.monotonic()
        every = LOST in news or now - self._looked >= self.look_every
        if every:
            self._looked = now
        at = self._now()
        return [
            waiter
            for waiter in self._waiters.values()
            if not waiter.future.done()
            and (
                every
                or waiter.stale
                or waiter.condition.parked[0].encode() in news
                or (waiter.condition.until is not None and waiter.condition.until <= at)
            )
        ]

    async def _look_at(self, waiters: Sequence[_Waiter]) -> None:
        """Look at the conditions of these calls, and return the values of those that are over."""
        if not waiters:
            return
        timed = any(waiter.condition.until is not None for waiter in waiters)
        now = await self.read_time() if timed else None
        looking = [waiter for waiter in waiters if waiter.condition.parked != TIME]
        await asyncio.gather(*[self._look_for(waiter) for waiter in looking])
        for waiter in waiters:
            waiter.stale = False
            until = waiter.condition.until
            if until is not None and now is not None and now >= until:
                waiter.end(TIMED_OUT)

    async def _look_for(self, waiter: _Waiter) -> None:
        try:
            value = await retry_while_unavailable(waiter.condition.look, on_wait=self._on_wait)
        except Exception as error:  # noqa: BLE001 - the call raises it
            if not waiter.future.done():
                waiter.future.set_exception(error)
            return
        if value is not OPEN and not waiter.end(value):
            waiter.condition.withdraw(value)

    def _note_activity(self) -> None:
        """Note whether a call of the context has started or ended since the last look."""
        run = self._run
        activity = (run.active, run.last_entry, run.calls_ended, self._number)
        busy = bool(run.steps_in_flight or run.calls)
        if busy or activity != self._activity:
            self._quiet_since = RUNTIME.monotonic()
        if not busy:
            run.active = RUNTIME.monotonic() + self._pause()  # a run that waits is not idle
        self._activity = (run.active, *activity[1:])


async def _enter(stack: AsyncExitStack, shared: SharedNotifications, channel: str) -> asyncio.Queue[bytes]:
    return await stack.enter_async_context(shared.listen(channel))
