"""Tokens of limits that runs hold: taken and kept while the run has its lease, released after its outcome is stored.

The token of an admitted task is that of its message, so each delivery of the message has the same one, and a run
without the lease never releases it. A token of `ctx.limit` belongs to one delivery. What is not released expires.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from pydantic_core import from_json

from ...queues.admission import Admission
from ...queues.envelope import LimitUse
from ...queues.errors import QueueError
from ...queues.keys import LimitKeys, Namespace, Partition
from ...queues.limits.control import note_breaker
from ...queues.limits.definition import Limit
from ...queues.limits.kept import KEPT, kept_text
from ...queues.limits.parked import parked_waiter, wake_for_limit
from ...queues.limits.store import (
    RENEW,
    TOKEN_LIFE,
    BreakerChange,
    LimitStore,
    Outcome,
    Released,
    ReleaseRequest,
    TakeAnswer,
    TakeRequest,
    renewal,
    token_member,
)
from ...queues.limits.task_limits import TaskLimits
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Argument
from ...queues.transport.scripts import Script
from ..log import log_wait, logger
from .run import Run, RunObserver
from .stop_reasons import LimitReason, StopReason

_TOKEN: Final = b"token"
"""Field of the message of an admitted task: the nonce of its token."""

_NONCE: Final = re.compile(rb"[A-Za-z0-9.-]{1,64}")

_MAX_REQUESTS: Final = 200
"""Tokens that one call of the script takes."""

_MAX_RELEASES: Final = 200
"""Tokens that one call of the script releases."""

_LAST_RELEASES: Final = 2.0
"""Seconds that a worker which stops waits until its last tokens are released; then they expire."""

_GOOD: Final = frozenset({StopReason.COMPLETED, StopReason.CONTINUED})
_BAD: Final = frozenset({StopReason.FAILED, StopReason.TIMED_OUT, StopReason.IDLE, StopReason.BURIED})


_SAME_MESSAGE: Final = frozenset({StopReason.RELEASED, StopReason.QUARANTINED})
"""Outcomes after which another run gets the message."""


class HeldToken:
    """A token, or the request for one.

    Attributes:
        actual: cost by the name of the limit, in place of what was reserved.
        admission: whether it is that of the task's message.
    """

    __slots__ = ("actual", "admission", "member", "taking", "uses")

    def __init__(self, member: str, uses: Sequence[LimitUse], *, admission: bool = False) -> None:
        self.member = member
        self.uses = uses
        self.admission = admission
        self.actual: dict[str, int] = {}
        self.taking: asyncio.Task[None] | None = None


class _Asked(NamedTuple):
    """A request that waits for its answer. on_wait: called while Redis is unavailable."""

    request: TakeRequest
    on_wait: Callable[[], None]
    answer: asyncio.Future[TakeAnswer]


class LimitCalls:
    """Calls of the limits that the runs of a worker share. Tokens released in one tick share a call."""

    def __init__(self, gateway: Gateway, namespace: Namespace, lease: Callable[[], float]) -> None:
        """lease: returns the seconds for which a token is held without a renewal."""
        self._gateway = gateway
        self._namespace = namespace
        self._lease = lease
        self._asked: list[_Asked] = []
        self._released: list[ReleaseRequest] = []
        self._releasing: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def keys(self) -> LimitKeys:
        """The keys of the limits."""
        return self._namespace.limits

    @property
    def busy(self) -> bool:
        """Whether tokens are being released, so that tasks which waited for them may be queued soon."""
        return self._releasing is not None or bool(self._calls)

    def _store(self) -> LimitStore:
        return LimitStore(self._gateway, self._namespace, self._lease())

    async def take(self, request: TakeRequest, on_wait: Callable[[], None]) -> TakeAnswer:
        """Take a token, or renew it if the member holds it. Requests of one tick share a call.

        on_wait: called while Redis is unavailable.
        """
        asked = _Asked(request, on_wait, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if len(self._asked) == 1:
            asyncio.get_running_loop().call_soon(self._take_asked)
        return await asked.answer

    def _take_asked(self) -> None:
        asked, self._asked = self._asked, []
        self._do(self._take_all(asked))

    async def _take_all(self, asked: Sequence[_Asked]) -> None:
        def touch() -> None:
            for one in asked:
                one.on_wait()

        async def take() -> None:
            left = [one for one in asked if not one.answer.done()]  # the others were cancelled
            for start in range(0, len(left), _MAX_REQUESTS):
                batch = left[start : start + _MAX_REQUESTS]
                taken = await self._store().take([one.request for one in batch])
                for change in taken.changes:
                    log_change(change)
                for one, answer in zip(batch, taken.answers, strict=True):
                    if not one.answer.done():
                        one.answer.set_result(answer)

        try:
            await retry_while_unavailable(take, on_wait=log_wait("tokens of limits", touch))
        except BaseException as error:
            for one in asked:
                if not one.answer.done():
                    one.answer.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise

    async def publish(self, limit: Limit, app: str, on_wait: Callable[[], None]) -> None:
        """Publish a definition of the app that Redis has lost. on_wait: called while Redis is unavailable."""
        publish = partial(self._store().publish, [limit], app, starts=False)
        await retry_while_unavailable(publish, on_wait=log_wait(f"limit {limit.name}", on_wait))

    def release(self, token: HeldToken, outcome: Outcome = "") -> None:
        """Release a token soon. outcome: for the breakers of its limits. Called in the event loop."""
        self._released.append(ReleaseRequest(token.member, token.uses, outcome, token.actual))
        if self._releasing is None:
            self._releasing = asyncio.create_task(self._release_all(), name="perdure limits")

    async def _release_all(self) -> None:
        try:
            while self._released:
                batch, self._released = self._released[:_MAX_RELEASES], self._released[_MAX_RELEASES:]
                release = partial(self._store().release, batch)
                released = await retry_while_unavailable(release, on_wait=log_wait("released tokens of limits"))
                for change in released.changes:
                    log_change(change)
                if released.changes:
                    await note_breaker(self._gateway, self._namespace, released.changes)
                if released.published:
                    self._do(self._admit_later(released))
                elif released.hints:
                    await self._admit(released)
        except QueueError as error:
            logger.warning("could not release tokens of limits: {}; they expire", error)
        finally:
            self._releasing = None

    async def _admit(self, released: Released) -> None:
        """Start what waited for the tokens. If it fails, each task that waits is looked at again at its time."""
        life = max(TOKEN_LIFE, self._lease())
        admission = Admission(self._gateway, self._namespace, life=life, on_change=log_change)
        await retry_while_unavailable(partial(admission.start_waiting, released))

    async def _admit_later(self, released: Released) -> None:
        """Start what waited, while further tokens are released: it takes a time if a process that waited has died."""
        try:
            await self._admit(released)
        except QueueError as error:
            logger.debug("could not offer a place of a limit again: {}; what waits looks again by itself", error)

    def ask_for_parked(self, partition: Partition, task_id: str, token: HeldToken) -> None:
        """Let a parked task wait for a token in the limits' lists, and wake it if there is room by now."""
        self._do(self._ask_for_parked(partition, task_id, token))

    async def _ask_for_parked(self, partition: Partition, task_id: str, token: HeldToken) -> None:
        waiter = parked_waiter(partition, task_id)
        try:
            taken = await self._store().take([TakeRequest(token.member, token.uses, charge=False, waiter=waiter)])
            if taken.answers[0].granted:
                self.release(token)
                await wake_for_limit(self._gateway, partition, task_id)
        except QueueError as error:
            logger.bind(id=task_id).debug("could not wait for a limit: {}; the task asks again by itself", error)

    def keep(self, token: HeldToken) -> None:
        """Renew the token of a parked task once more, for as long as it takes until its partition's worker does."""
        self._do(self._keep(token))

    async def _keep(self, token: HeldToken) -> None:
        life = max(TOKEN_LIFE, self._lease())
        try:
            await LimitStore(self._gateway, self._namespace, life).renew([(token.member, token.uses)])
        except QueueError as error:
            logger.debug("could not renew a token of a parked task: {}", error)

    def forget_soon(self, uses: Iterable[LimitUse], waiter: str) -> None:
        """Remove a waiter that does not wait any more, so that no token is offered to it."""
        self._do(self._forget_waiter(uses, waiter))

    def _do(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call, name="perdure limits")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _forget_waiter(self, uses: Iterable[LimitUse], waiter: str) -> None:
        keys = self._namespace.limits
        names = {key for use in uses for key in (keys.waiters(use.name), keys.waiters(use.name, use.key))}
        try:
            await self._gateway.pipeline([("ZREM", key, waiter) for key in sorted(names)])
        except QueueError as error:
            logger.debug("could not remove a waiter of limits: {}; it is dropped at its turn", error)

    async def close(self) -> None:
        """Release the last tokens."""
        calls = [*self._calls, *(() if self._releasing is None else (self._releasing,))]
        if calls:
            _, left = await asyncio.wait(calls, timeout=_LAST_RELEASES)
            for call in left:
                call.cancel()


def log_change(change: BreakerChange) -> None:
    """Log that a breaker opened or closed."""
    bound = logger.bind(limit=change.limit)
    if change.state == "open":
        until = datetime.fromtimestamp(change.until / 1000, UTC)
        counts = f"{change.failed} of {change.calls} calls have failed"
        bound.warning("limit {} opened: {}; nothing starts until {:%H:%M:%S} UTC", change.limit, counts, until)
    elif change.state == "half-open":
        bound.info("limit {} is half open: one call is its probe", change.limit)
    else:
        bound.info("limit {} closed: its probe was successful", change.limit)


def limit_calls(run: Run) -> LimitCalls | None:
    """Return the calls that the runs of the worker share; None in unit tests, without a worker."""
    extras = run.host.extras
    if extras is None:
        return None
    namespace = Namespace(run.delivery.partition.namespace)
    return extras.of(LimitCalls, lambda: LimitCalls(run.gateway, namespace, run.host.lease))


class RunTokens:
    """The tokens that a run holds. The heartbeat renews them after its lease."""

    def __init__(self, run: Run, calls: LimitCalls) -> None:
        self.calls = calls
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, HeldToken] = {}
        self._numbers = 0

    @classmethod
    def of(cls, run: Run, calls: LimitCalls) -> RunTokens:
        """Return those of a run, which are created at their first use."""
        if not isinstance(run.tokens, RunTokens):
            run.tokens = cls(run, calls)
        return run.tokens

    def new_member(self) -> str:
        """Return the name of a further token of this delivery."""
        self._numbers += 1
        entry, count = self._run.delivery.entry.decode(), self._run.delivery.count
        return token_member(self._run.delivery.partition, self._run.id, f"{entry}.{count}/{self._numbers}")

    async def take(self, token: HeldToken, *, charge: bool, waiter: str = "", labels: Sequence[str] = ()) -> TakeAnswer:
        """Take a token, and keep it until it is released. If this is cancelled, the token is released."""
        request = TakeRequest(token.member, token.uses, charge, waiter, labels)
        try:
            answer = await self.calls.take(request, self._run.touch)
        except BaseException:  # it may have been given: the token of a message is released with the outcome
            if not token.admission:
                self.calls.release(token)
            raise
        if answer.granted:
            self._held[token.member] = token
        return answer

    def hold(self, token: HeldToken) -> None:
        """Keep a token that is held already until it is released."""
        self._held[token.member] = token

    def holds(self, token: HeldToken) -> bool:
        """Return whether a token is held, as far as is known."""
        return self._held.get(token.member) is token

    def release(self, token: HeldToken, outcome: Outcome = "") -> None:
        """Release a token soon."""
        self._held.pop(token.member, None)
        if token.uses:
            self.calls.release(token, outcome)

    def add_cost(self, limit: str, cost: int) -> None:
        """Add to what the task costs at a limit of its own, in place of what was reserved."""
        for token in self._held.values():
            if token.admission:
                token.actual[limit] = token.actual.get(limit, 0) + cost

    def close(self) -> None:
        """Release what calls of the handler have left; the token of the message is released with the outcome only."""
        held, self._held = self._held, {}
        for token in held.values():
            if not token.admission:
                self.calls.release(token)

    # for the heartbeat, in its thread

    def held(self) -> Sequence[tuple[str, Sequence[LimitUse]]]:
        """Return the tokens that are to be renewed."""
        return [(token.member, token.uses) for token in tuple(self._held.values())]

    def renewal(
        self, tokens: Sequence[tuple[str, Sequence[LimitUse]]], life: float
    ) -> tuple[Script, list[str], list[Argument]]:
        """Return script, keys and arguments that renew tokens. See `queues.delivery.leases.LimitTokens`."""
        keys, args = renewal(Namespace(self._run.delivery.partition.namespace), tokens, life)
        return RENEW, keys, args

    def on_gone(self, member: str) -> None:
        """Handle that a token has expired, or was taken away."""
        self._loop.call_soon_threadsafe(self._gone, member)

    def _gone(self, member: str) -> None:
        token = self._held.get(member)
        if token is not None and token.taking is None and not self._run.stopped:
            token.taking = asyncio.create_task(self._take_again(token), name="perdure limits")

    async def _take_again(self, token: HeldToken) -> None:
        """Take a token again that is gone; stop the run if its limits have no room. It was charged before."""
        run = self._run
        try:
            answer = await self.calls.take(TakeRequest(token.member, token.uses, charge=False), run.touch)
        except QueueError as error:
            logger.bind(id=run.id).warning("could not take a token of a limit again: {}", error)
            return
        finally:
            token.taking = None
        if not self.holds(token):  # released or closed meanwhile
            if answer.granted and not token.admission:
                self.calls.release(token)
            return
        bound = logger.bind(task=run.envelope.task, id=run.id)
        if answer.granted:
            if not answer.held:
                bound.info("a token of limit {} had expired, and was taken again", token.uses[answer.use].name)
            return
        name = token.uses[answer.use].name
        bound.warning("the token of limit {} is gone, and others have its place: the run stops", name)
        run.cancel(StopReason.LIMIT_LOST, LimitReason(name, answer.retry, of_task=token.admission))


def add_limits(run: Run, limits: TaskLimits, encoder: ArgumentEncoder, arguments: Mapping[str, Any]) -> None:
    """Give a task the limits of its definition that its message has not: it was stored without them.

    Raises `InvalidLimitUse`.
    """
    given: Mapping[str, Any] = {}
    if limits.keyed:
        if run.envelope.group:
            return  # its arguments follow from the results of the group
        given = from_json(encoder.encode_call((), arguments)[0])
    uses = tuple(use for use, _ in limits.uses(given, {path[0] for path in run.envelope.secrets if path}))
    run.envelope = run.envelope.model_copy(update={"limits": uses})


class ArgumentEncoder(Protocol):
    """Encoder of the arguments of a task as JSON."""

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, Any]: ...


class AdmissionToken(RunObserver):
    """The token of a limited task's message: taken before the handler starts, released after the accepted outcome."""

    __slots__ = ("_calls", "_token", "confirmed")

    def __init__(self, run: Run, calls: LimitCalls) -> None:
        nonce = run.delivery.fields.get(_TOKEN, b"")
        known = _NONCE.fullmatch(nonce) is not None
        member = token_member(run.delivery.partition, run.id, (nonce if known else run.delivery.entry).decode())
        self._calls = calls
        self._token = HeldToken(member, run.envelope.limits, admission=True)
        self.confirmed = False

    @classmethod
    def of(cls, run: Run) -> AdmissionToken | None:
        """Observe a run of a limited task; None in unit tests, without a worker."""
        calls = limit_calls(run)
        if calls is None or not run.envelope.limits:
            return None
        observer = cls(run, calls)
        run.observe(observer)
        return observer

    @property
    def kept(self) -> str:
        """Text that names the token if the task keeps it while it is parked, else empty."""
        return kept_text(self._token.member.rpartition("/")[2], self._token.uses) if self.confirmed else ""

    async def confirm(self, run: Run) -> LimitReason | None:
        """Take the token that the message was admitted with, or one that it was not; return what has no room.

        The token of a message that is new, and delivered for the first time, lives, so no call is needed: its mover
        had taken it at most 10 s before it added the message (admit_limited.lua refuses an older look), which was
        at most 5 s ago, and it lives for 30 s or a lease, the longer, by a clock that never goes faster. The
        heartbeat renews it within a third of a lease, and notices if it is gone, such as after a failover. A token
        that was kept while its task was parked may be gone.
        """
        delivery, token = run.delivery, self._token
        charge = _TOKEN not in delivery.fields
        first = delivery.count == 1 and not delivery.claimed and not delivery.repeated
        first = first and not any(KEPT in use.flags for use in token.uses)
        if not charge and first and run.host.is_new(delivery.partition, delivery.entry):
            RunTokens.of(run, self._calls).hold(token)
            self.confirmed = True
            return None
        answer = await RunTokens.of(run, self._calls).take(token, charge=charge)
        if answer.granted:
            self.confirmed = True
            return None
        # A token that is released before the task is in its waiting list wakes nothing, so look at once.
        retry = 0.0 if answer.reason in ("running", "total") else answer.retry
        return LimitReason(token.uses[answer.use].name, retry, of_task=True)

    async def on_settled(self, run: Run, stop: StopReason, *, ended: bool) -> None:
        """Release the token, unless the next run has the same one: of a message that stays, or of a parked task."""
        detail, token = run.stop_detail, self._token
        if stop in _SAME_MESSAGE or (isinstance(detail, LimitReason) and not detail.of_task):
            return
        if stop is StopReason.PARKED:
            if kept := [use for use in token.uses if KEPT in use.flags]:
                self._calls.keep(HeldToken(token.member, kept))
            token.uses = [use for use in token.uses if KEPT not in use.flags]
        outcome: Outcome = ""
        if self.confirmed and stop in _GOOD:
            outcome = "ok"
        elif self.confirmed and stop in _BAD:
            outcome = "error"
        if isinstance(run.tokens, RunTokens):
            run.tokens.release(token, outcome)
        elif token.uses:
            self._calls.release(token, outcome)
