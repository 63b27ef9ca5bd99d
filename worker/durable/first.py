"""The first of several branches: `ctx.first` returns its value, and ends the others."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ..errors import StepDefinitionError, StepMismatch, StepOutsideTask
from .answers import close_wait
from .attempt_end import forget_undone
from .journal.step_record import StepRecord
from .run import Run
from .steps.codec import arguments_text, fingerprint
from .steps.current import CURRENT_STEP, Durability, check_call, check_name
from .steps.failures import drop_failures
from .steps.tool_calls import close_calls
from .waiting import BRANCH, Race, close_waits, match_wait, set_closer

T = TypeVar("T")

_FIRST: Final = "#first"

set_closer("answer", close_wait)  # also for waits that only an earlier run has opened


class First(NamedTuple, Generic[T]):
    """The branch of `ctx.first` that ended first: its name, and the value that it returned."""

    name: str
    value: T


async def first(run: Run, branches: Mapping[str, Awaitable[T]], durability: Durability) -> First[T]:
    """Return the branch that ends first. See `Context.first`.

    The name of that branch is recorded when the others have ended, in the act that closes their waits. A later run runs
    this branch only: its records give the same value. A run that is cut off before that runs all of them again.
    """
    left = dict(branches)
    try:
        with run.calling():
            call, winner = await _begin(run, branches)
        if winner is not None:
            run.keys.skip(call.scope_of(name) for name in branches if name != winner)
            task = call.start(winner, left.pop(winner))
            try:
                await asyncio.wait([task])
            finally:
                await _end([task])
            return await _outcome(run, call.key, winner, task)
        race = Race()
        tasks = race.tasks
        try:
            for name in branches:
                tasks[name] = call.start(name, left.pop(name), race)
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            with run.calling():
                async with race.taking:  # a branch that stores what it takes ends first
                    winner = race.winner()
                await _end([task for name, task in tasks.items() if name != winner])
                await call.record(winner, [name for name in branches if name != winner], durability)
        finally:
            race.over.set()
            await _end(list(tasks.values()))
        return await _outcome(run, call.key, winner, tasks[winner])
    finally:
        for awaitable in left.values():
            _drop(awaitable)


class _Call:
    """One call. Its branches have the scopes `first/NAME/`, those of the second call `first#2/NAME/`."""

    def __init__(self, run: Run, key: str, digest: str, shown: str) -> None:
        self.key = key
        self._run = run
        self._digest = digest
        self._shown = shown
        self._scope = key.rpartition("/")[2].removeprefix("#")

    def scope_of(self, name: str) -> str:
        """Return the prefix of the keys of a branch."""
        return f"{self._run.keys.scope}{self._scope}/{name}/"

    def start(self, name: str, branch: Awaitable[T], race: Race | None = None) -> asyncio.Task[T]:
        """Run a branch in its scope."""
        keys = self._run.keys
        token = keys.enter_scope(f"{self._scope}/{name}")
        among = BRANCH.set(BRANCH.get() if race is None else (race, name))
        try:
            task = asyncio.create_task(_await(branch))
        finally:
            BRANCH.reset(among)
            keys.leave_scope(token)
        keys.note_caller(self.scope_of(name), task)
        return task

    async def plan(self) -> None:
        """Store the call with the next write: its key, under which its branches record, is that of these names."""
        if self.key not in self._run.history.saved:
            plan = self._run.history.saved[self.key] = orjson.dumps({"h": self._digest})
            await self._run.recorder.put(Entry(Kind.SAVED, self.key, plan), wait=False)

    async def record(self, winner: str, losers: Sequence[str], durability: Durability) -> None:
        """Record the outcome, and close what the other branches have left open."""
        run, scopes = self._run, [self.scope_of(name) for name in losers]
        run.keys.skip(scopes)
        closing = await close_waits(run, scopes)
        for scope in scopes:
            closing.add(*drop_failures(run, scope))  # such as: a step was cut off
        closing.add(*close_calls(run, tuple(scopes)))
        record = StepRecord(orjson.dumps(winner), self._digest, self._shown).encode()
        entry = Entry(Kind.DONE_WITH_EVENT, self.key, record)
        stored, replicated = durability != "async", durability == "replicated"
        await run.recorder.put(entry, *closing.entries, wait=stored, replicated=replicated, progress=True)
        run.history.saved.pop(self.key, None)
        run.touch()
        if stored:
            run.progressed()
        await closing.finish()


async def _begin(run: Run, branches: Mapping[str, Awaitable[Any]]) -> tuple[_Call, str | None]:
    """Return a call and the branch that has ended first in an earlier run; None if the branches run now."""
    await _check(run, branches)
    digest, called = fingerprint((sorted(branches),), {})
    shown = arguments_text(called, run.redact)
    key, recorded, former = await match_wait(run, _FIRST, digest)
    if former is not None:
        raise StepMismatch(key, StepRecord.decode(former).arguments, shown, after_new=run.steps_recorded > 0)
    call = _Call(run, key, digest, shown)
    if recorded is not None:
        run.touch()
        return call, str(orjson.loads(recorded))
    if run.stopping:
        await run.boundary()
    await call.plan()
    return call, None


async def _outcome(run: Run, key: str, winner: str, task: asyncio.Task[T]) -> First[T]:
    """Return or raise the outcome. An attempt that ends with the error of a branch leaves the next one all branches."""
    if not task.cancelled() and (error := task.exception()) is not None:
        await forget_undone(run, [key], error)
    return First(winner, task.result())


async def _check(run: Run, branches: Mapping[str, Awaitable[Any]]) -> None:
    """Check a call. Raises `StepDefinitionError`, `StepOutsideTask`, `CancelledError`, `LeaseLost`."""
    if (step := CURRENT_STEP.get()) is not None:
        raise StepOutsideTask(
            f"ctx.first was called inside step {step.key!r}: a step is recorded as a whole; call it in the handler"
        )
    if not branches:
        raise StepDefinitionError("ctx.first must get at least one branch, such as ctx.first(late=ctx.sleep(60))")
    for name, awaitable in branches.items():
        check_name("name of a branch", name)
        if isinstance(awaitable, asyncio.Future):
            raise StepDefinitionError(
                f"branch {name!r} must be a coroutine, such as ctx.sleep(60), got {awaitable!r}, which runs already"
            )
        if not inspect.isawaitable(awaitable):
            raise StepDefinitionError(f"branch {name!r} must be awaitable, such as ctx.sleep(60), got {awaitable!r}")
    await check_call(run, _FIRST, own=True)


async def _await(branch: Awaitable[T]) -> T:
    return await branch


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the branches that run, and wait until they have ended; what they raise then is lost."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # asyncio reports an exception that is not retrieved


def _drop(branch: object) -> None:
    """Close a branch that is not run, and the coroutines that it got: Python reports those that are never awaited."""
    if inspect.iscoroutine(branch):
        frame = branch.cr_frame if inspect.getcoroutinestate(branch) == inspect.CORO_CREATED else None
        arguments = [] if frame is None else list(frame.f_locals.values())
        branch.close()
        for value in arguments:
            _drop(value)  # such as that of asyncio.wait_for
            if isinstance(value, dict):  # such as those of ctx.first
                for inner in value.values():
                    _drop(inner)
