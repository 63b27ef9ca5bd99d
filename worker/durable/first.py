"""The first of several branches: `ctx.first` returns its value, and ends the others."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ..errors import StepDefinitionError, StepOutsideTask
from .attempt_end import forget_undone
from .journal.step_record import StepRecord
from .run import Run
from .steps.codec import arguments_text, fingerprint
from .steps.current import CURRENT_STEP, Durability, check_call, check_name
from .steps.failures import drop_failures
from .waiting import close_waits, match_wait

T = TypeVar("T")

_FIRST: Final = "#first"


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
        await _check(run, branches)
        digest, called = fingerprint((sorted(branches),), {})
        key, recorded, former = await match_wait(run, _FIRST, digest)
        winner = None if recorded is None else str(orjson.loads(recorded))
        if former is not None and (known := str(orjson.loads(StepRecord.decode(former).result))) in branches:
            winner = known
        # The scope of the second call of a scope is `first#2/NAME/`.
        scope = key.rpartition("/")[2].removeprefix("#")
        lost = [f"{run.keys.scope}{scope}/{name}/" for name in branches if name != winner]
        if winner is not None:
            run.keys.skip(lost)
            task = _start(run, f"{scope}/{winner}", left.pop(winner))
            try:
                await asyncio.wait([task])
            finally:
                await _end([task])
            return await _outcome(run, key, winner, task)
        if run.stopping:
            await run.boundary()
        if key not in run.history.saved:  # the records of the branches are under this key, whichever branch comes first
            plan = run.history.saved[key] = orjson.dumps({"h": digest})
            await run.recorder.put(Entry(Kind.SAVED, key, plan), wait=False)
        tasks = {name: _start(run, f"{scope}/{name}", left.pop(name)) for name in branches}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            winner = next(name for name, task in tasks.items() if task.done())
        finally:
            await _end(list(tasks.values()), but=None if winner is None else tasks[winner])
        lost.remove(f"{run.keys.scope}{scope}/{winner}/")
        run.keys.skip(lost)
        closing = await close_waits(run, lost)
        for branch in lost:
            closing.add(*drop_failures(run, branch))  # such as: a step was cut off
        record = StepRecord(orjson.dumps(winner), digest, arguments_text(called, run.redact)).encode()
        entry = Entry(Kind.DONE_WITH_EVENT, key, record)
        stored, replicated = durability != "async", durability == "replicated"
        await run.recorder.put(entry, *closing.entries, wait=stored, replicated=replicated)
        run.history.saved.pop(key, None)
        await closing.finish()
        return await _outcome(run, key, winner, tasks[winner])
    finally:
        for awaitable in left.values():
            _drop(awaitable)


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
        if not inspect.isawaitable(awaitable):
            raise StepDefinitionError(f"branch {name!r} must be awaitable, such as ctx.sleep(60), got {awaitable!r}")
    await check_call(run, _FIRST, own=True)


def _start(run: Run, scope: str, branch: Awaitable[T]) -> asyncio.Task[T]:
    """Run a branch in a scope of its own."""
    with run.keys.scoped(scope):
        return asyncio.create_task(_await(branch))


async def _await(branch: Awaitable[T]) -> T:
    return await branch


async def _end(tasks: list[asyncio.Task[Any]], *, but: asyncio.Task[Any] | None = None) -> None:
    """Cancel the branches that run, and wait until they have ended; what they raise then is lost."""
    others = [task for task in tasks if task is not but]
    for task in others:
        task.cancel()
    if running := [task for task in others if not task.done()]:
        await asyncio.wait(running)
    for task in others:
        if not task.cancelled():
            task.exception()  # it is retrieved, so that asyncio does not report it


def _drop(branch: Awaitable[Any]) -> None:
    """Drop a branch that is not run."""
    if inspect.iscoroutine(branch):
        branch.close()
    elif isinstance(branch, asyncio.Future):
        branch.cancel()
