"""Uses of limits by a handler and by its steps: `ctx.limit`.

In the handler, a use that has to wait parks the task. In a step it waits in memory: a step cannot park. So a use of
the handler is taken again by each run of it, but not for steps that are recorded: a resumed run takes the token at the
first step in the block that it calls, and pays only if none of the block's steps is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from contextvars import Token as ContextToken
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import anyio
import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition
from ...queues.envelope import LimitUse
from ...queues.keys import check_name
from ...queues.limits.definition import Limit, check_cost, given_values, key_digest, label_text
from ...queues.limits.parked import parked_waiter
from ...queues.limits.store import MEMORY, TakeAnswer
from ...queues.pubsub import LOST
from ...queues.runtime import RUNTIME
from ...queues.transport.backoff import retry_while_unavailable
from ..errors import Reschedule, StepDefinitionError
from ..log import log_wait
from .journal.run_events import Waited, WaitStarted
from .limit_tokens import HeldToken, RunTokens, limit_calls
from .run import Run, RunObserver
from .steps.codec import fingerprint
from .steps.current import CURRENT_STEP, StepCall, check_call, check_place
from .steps.keys import forget_steps
from .stop_reasons import ParkReason, StopReason
from .waiting import OPEN, Condition, SharedNotifications, WaitBoard, match_wait, redis_time, save_wait, wait_until

if TYPE_CHECKING:
    from .limit_tokens import LimitCalls

_LIMIT: Final = "#limit"

_SAVED_WAIT: Final = b'{"#wait":"'

_BY_RELEASE: Final = ("running", "total")
"""Reasons for which a limit has no room that the release of a token ends."""

_LOOK: Final = 5.0
"""Seconds after which a step that waits for a limit shows that it is not idle."""

_BEGUN: Final = "in"
"""Member of the saved value of a block in which a step has been called; `h` is the digest of the call."""


class Use:
    """A use of a limit: what `async with ctx.limit(...) as use` gives.

    Attributes:
        limit: name of the limit.
        cost: what the use costs. It is reserved before; set it to the actual cost, which replaces it at the end.
    """

    __slots__ = ("cost", "limit")

    def __init__(self, limit: str, cost: int) -> None:
        self.limit = limit
        self.cost = cost


class LimitBlock:
    """A block of code that uses a limit: `async with ctx.limit("openai", cost=1200) as use: ...`."""

    def __init__(self, run: Run, limit: str | Limit, cost: int | None, key: Any) -> None:
        """Raises `InvalidLimitUse`, `StepDefinitionError`, `ValueError`."""
        self._run = run
        name = limit.name if isinstance(limit, Limit) else check_name("the name of a limit", limit)
        known = limit if isinstance(limit, Limit) else run.host.limits.get(name)
        if cost is not None and known is not None:
            check_cost(name, cost, known.rates[1])
        self._reserved = 1 if cost is None else cost
        own = next((use for use in run.envelope.limits if use.name == name), None)
        values = None if key is None else given_values(name, key)
        if values is None and own is None and known is not None and known.by is not None:
            raise StepDefinitionError(
                f"key must be given for limit {name!r}, which has keys: ctx.limit({name!r}, key=...)"
            )
        self._key = own.key if values is None and own is not None else key_digest(name, values)
        self._label = "" if values is None else label_text(values)
        self._of_task = own is not None and own.key == self._key
        self._uses = (LimitUse(name, self._key, self._reserved),)
        self._calls = limit_calls(run)
        self._place = ""
        self._lazy = self._begun = False
        self._token: HeldToken | None = None
        self._entered: ContextToken[tuple[LimitBlock, ...]] | None = None
        self._ended = False
        self._replayed = 0
        self._taking = asyncio.Lock()
        self.use = Use(name, self._reserved)

    async def __aenter__(self) -> Use:
        run, name = self._run, self.use.limit
        check_place(run, _LIMIT, own=True, within=True)
        await run.check_stopped()
        if self._entered is not None:
            raise StepDefinitionError(f"a block of limit {name!r} can be entered once: call ctx.limit({name!r}) again")
        outer = _OPEN.get()
        if any(block.use.limit == name and block._key == self._key and not block._ended for block in outer):
            raise StepDefinitionError(
                f"limit {name!r} is used here already, with the same key: a block within a block would wait for itself"
            )
        if self._calls is None or self._of_task:
            pass  # the task has the token of its own limit
        elif CURRENT_STEP.get() is not None:
            await self._take_in_step(self._calls)
        else:
            await self._enter_in_handler(self._calls)
        self._entered = _OPEN.set((*outer, self))
        return self.use

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None) -> None:
        """End the block: release the token. error: with which the code has ended."""
        self._ended = True
        if self._entered is not None:
            try:
                _OPEN.reset(self._entered)
            except ValueError:  # left in another asyncio task than the one that entered
                _OPEN.set(tuple(block for block in _OPEN.get() if block is not self))
        run, cost = self._run, self.use.cost
        if type(cost) is not int or cost < 0:
            raise StepDefinitionError(f"the cost of a use must be a whole number, 0 or more, got {cost!r}")
        if self._calls is not None and self._of_task and isinstance(run.tokens, RunTokens):
            run.tokens.add_cost(self.use.limit, cost)
        token, self._token = self._token, None
        if token is None or not isinstance(run.tokens, RunTokens):
            return
        if cost != self._reserved:
            token.actual[self.use.limit] = cost
        failed = isinstance(error, Exception) and not isinstance(error, Reschedule)
        run.tokens.release(token, "error" if failed else "ok" if error is None else "")

    # in a step

    async def _take_in_step(self, calls: LimitCalls) -> None:
        """Take the token; wait in memory. The time-out or the cancellation of the step ends the wait."""
        tokens = RunTokens.of(self._run, calls)
        token = HeldToken(tokens.new_member(), self._uses)
        answer = await self._ask(tokens, token, charge=True, waiter="")
        if answer.granted:
            self._token = token
            return
        waiter = f"{MEMORY}/{token.member}"
        async with AsyncExitStack() as stack:
            news = await self._listen(stack, calls.keys.waiters(self.use.limit))
            try:
                while not (answer := await self._ask(tokens, token, charge=True, waiter=waiter)).granted:
                    await self._next_turn(news, waiter, self._pause(answer))
            except BaseException:
                calls.forget_soon(self._uses, waiter)
                raise
        self._token = token

    async def _ask(self, tokens: RunTokens, token: HeldToken, *, charge: bool, waiter: str) -> TakeAnswer:
        labels = (self._label,) if self._label else ()
        answer = await tokens.take(token, charge=charge, waiter=waiter, labels=labels)
        own = self._run.host.limits.get(self.use.limit)
        if answer.reason == "unknown" and own is not None:  # Redis has lost what this worker had published
            app = self._run.envelope.app or self._run.delivery.partition.queue
            await tokens.calls.publish(own, app, self._run.touch)
            answer = await tokens.take(token, charge=charge, waiter=waiter, labels=labels)
        if answer.reason == "unknown":
            raise StepDefinitionError(
                f"limit {self.use.limit!r} is not defined: no app with app.limit({self.use.limit!r}, ...) has a worker"
            )
        return answer

    def _pause(self, answer: TakeAnswer) -> float:
        """Return the seconds until this asks again. What waits keeps the clock moving by which dead tokens expire."""
        if answer.reason not in _BY_RELEASE:
            return answer.retry
        return min(answer.retry, max(WaitBoard.park_after, self._run.host.lease() / 2))

    async def _listen(self, stack: AsyncExitStack, channel: str) -> asyncio.Queue[bytes]:
        """Subscribe to the channel of the limit's waiters."""
        run = self._run
        shared = None if run.host.extras is None else run.host.extras.get(SharedNotifications)
        if shared is None:
            return asyncio.Queue()
        enter: Callable[[], Awaitable[asyncio.Queue[bytes]]] = partial(_enter, stack, shared, channel)
        return await retry_while_unavailable(enter, on_wait=log_wait(f"limits of task {run.id}", run.touch))

    async def _next_turn(self, news: asyncio.Queue[bytes], waiter: str, retry: float) -> None:
        """Return when it is this waiter's turn, or when it is time to ask again."""
        until = RUNTIME.monotonic() + retry
        while (left := until - RUNTIME.monotonic()) > 0:
            self._run.touch()
            with anyio.move_on_after(min(left, _LOOK)):
                if await news.get() in (LOST, waiter.encode()):
                    return

    # in the handler

    async def _enter_in_handler(self, calls: LimitCalls) -> None:
        run, name = self._run, f"{_LIMIT}:{self.use.limit}"
        with run.calling():
            await check_call(run, name, own=True)
            self._digest, _ = fingerprint((self.use.limit, self._key), {})
            self._place = (await match_wait(run, name, self._digest))[0]
            if run.stopping:
                await run.boundary()
            _take_before_steps(run)
            saved = run.history.saved.get(self._place)
            self._lazy = saved is not None and _BEGUN in orjson.loads(saved)
            if not self._lazy:
                await self._take_in_handler(calls, charge=True)

    async def before_step(self, *, recorded: bool) -> None:
        """Take the token before a step in the block is called, if it is not held yet."""
        if self._ended or self._calls is None or not self._place:
            return
        if recorded:
            self._replayed += 1
            return
        if self._token is None:
            async with self._taking:  # of several concurrent steps, the first one takes it
                if self._token is None:
                    with self._run.calling():
                        await self._take_in_handler(self._calls, charge=self._replayed == 0)
        if not self._begun and not self._lazy:
            run, self._begun = self._run, True
            data = run.history.saved[self._place] = orjson.dumps({"h": self._digest, _BEGUN: 1})
            await run.recorder.put(Entry(Kind.SAVED, self._place, data), wait=False)

    async def _take_in_handler(self, calls: LimitCalls, *, charge: bool) -> None:
        """Take the token; where it has no room, the task is parked."""
        run, tokens = self._run, RunTokens.of(self._run, calls)
        partition = run.delivery.partition
        token = HeldToken(tokens.new_member(), self._uses)
        waiter = parked_waiter(partition, run.id)
        asking = _ParkedForLimit.of(run, calls)
        try:
            while not (answer := await self._ask(tokens, token, charge=charge, waiter=waiter)).granted:
                if answer.reason in _BY_RELEASE:
                    asking.wait_for(token)
                await self._wait(self._pause(answer))
                asking.end(token)
        finally:
            if not run.stopped:
                asking.end(token)
        self._token = token
        saved = run.history.saved.get(self._place)
        if saved is not None and saved.startswith(_SAVED_WAIT):
            dropped = forget_steps([self._place], run.history)
            await run.recorder.put(*dropped, run.next_entry(Waited()), wait=False)

    async def _wait(self, retry: float) -> None:
        """Wait until the limit may have room; meanwhile the run may park."""
        run, what = self._run, f"limit {self.use.limit}"
        now = await redis_time(run)
        until = now + round(retry * 1000)
        if self._place not in run.history.saved and retry >= WaitBoard.park_after:
            started = run.next_entry(WaitStarted(what=what, until=until))
            await run.recorder.put(save_wait(run, self._place, "limit", {"h": self._digest}), started, wait=False)
        await wait_until(run, LimitHasRoom(self._place, self.use.limit, until), looked=now)


class LimitHasRoom(Condition):
    """Room in a limit, as far as it is known: the caller tries to take a token then."""

    __slots__ = ("_limit", "_looks")

    def __init__(self, key: str, limit: str, until: int) -> None:
        super().__init__(key, f"limit {limit}", until)
        self._limit = limit
        self._looks = 0

    @property
    def parked(self) -> WakeCondition:
        return ("limit", self._limit)

    async def look(self) -> Any:
        """Return `OPEN` the first time, right after the caller has asked; later, that the caller may ask again."""
        self._looks += 1
        return OPEN if self._looks == 1 else True


class _ParkedForLimit(RunObserver):
    """The tokens for which a run parks: once it is parked, it waits for them in the limits' own lists.

    A token that was released after the run had asked, and before it was parked, wakes nothing.
    """

    __slots__ = ("_calls", "_waiting")

    def __init__(self, calls: LimitCalls) -> None:
        self._calls = calls
        self._waiting: dict[str, HeldToken] = {}

    @classmethod
    def of(cls, run: Run, calls: LimitCalls) -> _ParkedForLimit:
        """Return that of a run, which is created at its first use."""
        found = run.observer(cls)
        if found is None:
            found = cls(calls)
            run.observe(found)
        return found

    def wait_for(self, token: HeldToken) -> None:
        self._waiting[token.member] = token

    def end(self, token: HeldToken) -> None:
        self._waiting.pop(token.member, None)

    async def on_settled(self, run: Run, stop: StopReason, *, ended: bool) -> None:
        if stop is StopReason.PARKED and isinstance(run.stop_detail, ParkReason):
            for token in self._waiting.values():
                self._calls.ask_for_parked(run.delivery.partition, run.id, token)


_OPEN: Final[ContextVar[tuple[LimitBlock, ...]]] = ContextVar("perdure_limits", default=())
"""The blocks around the caller, the innermost last."""


def _take_before_steps(run: Run) -> None:
    """Let the steps of a run take the tokens of the blocks around them, from now on."""
    inner = run.around_step
    if not isinstance(inner, _StepsInBlocks):
        run.around_step = _StepsInBlocks(run, inner)


class _StepsInBlocks:
    """A hook around the steps of a run: takes the tokens of the blocks around a step that is not recorded."""

    def __init__(self, run: Run, inner: Callable[..., Awaitable[Any]] | None) -> None:
        self._run = run
        self._inner = inner

    async def __call__(self, call: StepCall, perform: Callable[[], Awaitable[Any]]) -> Any:
        blocks = _OPEN.get()
        if blocks and CURRENT_STEP.get() is None:
            for block in blocks:
                await block.before_step(recorded=call.recorded)
        return await (perform() if self._inner is None else self._inner(call, perform))


async def _enter(stack: AsyncExitStack, shared: SharedNotifications, channel: str) -> asyncio.Queue[bytes]:
    return await stack.enter_async_context(shared.listen(channel))
