"""Children: tasks that a handler spawns and awaits without a slot, and that do not outlive its attempt.

Each call has a plan, which is stored before the first child: the id of the children, from which their ids and the name
of their join follow. So a run that finds the plan adds the same children to the same join, which changes nothing where
they are there already. When the call has its results, they are recorded like those of a step.

A record of results outlives the attempt, as that of a step does. What has failed, and what is not joined yet, ends with
the attempt: the next one spawns new children, and those that the attempt has left open are cancelled, once its outcome
is stored. The janitor closes the joins of attempts whose worker died before it could (`queues/joins.py`).

A join that is missing says nothing about its children: a server that lost its last writes has lost the join. The run
ends there at no cost, and the next one adds the same children again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar

import orjson

from ...deadletter.policy import Reason
from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition
from ...queues.durations import Moment, seconds_until
from ...queues.envelope import TaskMessage, new_task_id
from ...queues.errors import DecryptionError, EntriesLost, TaskCancelled, TaskFailed, TaskNotFound
from ...queues.groups import DEFAULT_GROUP_LIMIT, Group, decode_group
from ...queues.handle import TaskHandle, cancel_task
from ...queues.joins import (
    ChildEnd,
    ChildOutcome,
    JoinPlace,
    JoinState,
    OnFailure,
    PlannedChild,
    add_children,
    child_places,
    close_join,
    ended_children,
    life_of,
    read_join,
    read_outcomes,
    watch_task,
)
from ...queues.keys import Namespace, Partition, with_tenant
from ...queues.transport.backoff import retry_while_unavailable
from ..errors import ChildFailed, InvalidArguments, SpawnRefused
from ..log import log_wait, logger
from .attempt_end import COMPLETED, GATHER, JOIN, OPEN_CHILD, RESULT, SPAWN, AttemptEnd, chunks_of
from .child_tasks import enqueuing_run
from .journal.event import Event
from .journal.run_events import ChildrenJoined, ChildrenSpawned, Waited
from .journal.step_record import StepRecord
from .run import Run, RunObserver
from .steps.codec import read_step_result, store_step_result
from .steps.current import CURRENT_STEP, check_call
from .steps.keys import forget_steps
from .steps.matching import digest_of
from .stop_reasons import StopReason
from .waiting import (
    OPEN,
    TIMED_OUT,
    Closing,
    Condition,
    match_wait,
    redis_time,
    save_wait,
    saved_wait,
    set_closer,
    wait_until,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Errors: TypeAlias = Literal["raise", "keep", "wait"]
"""Effect of a child that fails on the call that awaits it."""

CHILDREN: Final = "#children"
"""Checkpoint key that says that the task has spawned children: a worker must cancel it. See cancel.lua."""

DEFAULT_LIMIT: Final = DEFAULT_GROUP_LIMIT
"""Children of one call that are open at once."""

MAX_DEPTH: Final = 16
"""Parents that a child may have above it."""

MAX_CHILDREN: Final = 1_000_000
"""Children of one call."""

TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage")
"""Headers that children have from their parent, so that they belong to its trace (W3C Trace Context)."""


class SpawnedChildren(RunObserver):
    """The children of a run: the joins to close at its end, and what its calls need of each other.

    Attributes:
        groups: Names of the joins that this run or an earlier one of the attempt has opened.
        spawned: Names of their joins, and the keys that say that they are open, by the ids of the children that
            `ctx.spawn` has spawned.
    """

    __slots__ = ("_locks", "groups", "spawned")

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.spawned: dict[str, tuple[str, str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def joining(self, group: str) -> asyncio.Lock:
        """Return the lock of a join that several branches may await."""
        return self._locks.setdefault(group, asyncio.Lock())

    async def on_settled(self, run: Run, stop: StopReason, *, ended: bool) -> None:
        if ended:
            await close_all(run)

    @classmethod
    def of(cls, run: Run) -> SpawnedChildren:
        """Return that of a run, which is created at its first use."""
        found = run.observer(cls)
        if found is None:
            found = cls()
            run.observe(found)
        return found


class ChildrenLeft(Condition):
    """The end of a join, or of more children than the caller has seen."""

    __slots__ = ("_place", "_run", "_seen")

    def __init__(self, run: Run, key: str, place: JoinPlace, seen: int | None, until: int | None, what: str) -> None:
        super().__init__(key, what, until)
        self._run = run
        self._place = place
        self._seen = seen

    @property
    def parked(self) -> WakeCondition:
        group = self._place.group
        return ("join", group if self._seen is None else f"{group}:{self._seen}")

    async def look(self) -> Any:
        state = await read_join(self._run.gateway, self._place)
        if state is None or state.over or (self._seen is not None and state.ended > self._seen):
            return True
        return OPEN


class Spawnable(Protocol[P, T]):
    """A registered task or agent, or one with options."""

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[T]: ...

    def as_call(self) -> Any: ...


class GroupCall(Protocol):
    """A call that makes the messages of children."""

    @property
    def task(self) -> Any: ...

    @property
    def own_queue(self) -> str: ...

    def encode_child(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def child_message(self, child: Any, task_id: str) -> Any: ...

    def call_text(self, arguments: Iterable[bytes]) -> bytes: ...


class ChildCall(GroupCall, Protocol):
    """The call of a task with options, as `TaskCall` is."""

    def spawned(self, headers: Mapping[str, str], inherited: Mapping[str, Any]) -> ChildCall: ...

    def handle(self, task_id: str, partition: Partition) -> TaskHandle[Any]: ...


class _Plan(NamedTuple):
    """The plan of a call.

    total: number of its children, None until all of them are in the join. items: digest of their items.
    """

    id: str
    total: int | None = None
    items: str = ""

    @property
    def group(self) -> str:
        return group_of(self.id)

    def number_of(self, child: str) -> int:
        """Return the number of a child. Raises `DecryptionError` for an id that the plan does not have."""
        name, _, number = child.removeprefix(self.id).partition("-")
        known = int(number) if not name and number.isdigit() else 0
        if child != _numbered(self.id, known) or known >= (self.total or 0):
            raise DecryptionError(f"the outcome of task {child}", f"join {self.group} has no such child")
        return known

    def ids(self, count: int | None = None) -> Iterable[str]:
        total = self.total if count is None else count
        return (_numbered(self.id, number) for number in range(total or 0))


def group_of(planned: str) -> str:
    """Return the name of the join of a call from the id of its plan."""
    return digest_of(planned.encode())


def _numbered(base: str, number: int) -> str:
    return base if number == 0 else f"{base}-{number}"


# calls of the context


async def spawn(run: Run, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TaskHandle[Any]:
    """Spawn a child. See `Context.spawn`."""
    await check_call(run, SPAWN, own=True)
    call = _inheriting(run, child_call("spawn", task))
    child = call.encode_child(args, kwargs)
    digest = digest_of(call.call_text([child.data]))
    key, recorded, former = await match_wait(run, f"{SPAWN}:{call.task.name}", digest)
    if former is not None:
        recorded = StepRecord.decode(former).result
    if recorded is not None and await _is_of(run, recorded):
        run.touch()
        return _spawned(run, call, key, recorded)
    if run.stopping:
        await run.boundary()
    run.step_began(key)
    try:
        plan = await _planned(run, key, digest)
        await _add(run, call, plan, [child], OnFailure.KEEP, 0)
        place = _place(run, plan.group)
        found = (await _retried(run, partial(child_places, run.gateway, place, [plan.id]))).get(plan.id)
        at = found.partition if found is not None else _own(run).partition(call.own_queue)
        where = [at.namespace, at.queue, at.index]
        data = orjson.dumps({"id": plan.id, "at": where, "group": plan.group, "of": run.id})
        event = ChildrenSpawned(task=call.task.name, count=1, child=plan.id)
        record = StepRecord(data, digest, call.task.name)
        open_key = _open_key(key, plan.id)
        AttemptEnd.of(run).enqueued.setdefault(open_key, ())
        await _record(
            run, key, record, event, also=[save_wait(run, open_key, _CHILDREN, {"id": plan.id, "of": run.id})]
        )
        AttemptEnd.of(run).spawned[key] = record.encode()
    finally:
        run.step_ended(key)
    return _spawned(run, call, key, data)


async def _is_of(run: Run, recorded: bytes) -> bool:
    """Return whether a child is of this task, or was joined by the task of which this one is a copy."""
    stored = orjson.loads(recorded)
    return stored["of"] == run.id or await run.history.read_record(f"{JOIN}:{stored['id']}") is not None


def _open_key(key: str, child: str) -> str:
    """Return the key that says that a spawned child is not joined: in the scope of its call."""
    return f"{key.removesuffix(key.rpartition('/')[2])}{OPEN_CHILD}:{child}"


def _spawned(run: Run, call: ChildCall, key: str, data: bytes) -> TaskHandle[Any]:
    """Return the handle of a child that was spawned from its record."""
    stored = orjson.loads(data)
    namespace, queue, index = stored["at"]
    children = SpawnedChildren.of(run)
    children.groups.add(stored["group"])
    children.spawned[stored["id"]] = stored["group"], _open_key(key, stored["id"])
    return call.handle(stored["id"], Namespace(namespace).partition(queue, index))


async def join(run: Run, child: Any) -> Any:
    """Wait for a child. See `Context.join`."""
    await check_call(run, JOIN, own=True)
    if not isinstance(child, TaskHandle):
        raise SpawnRefused(f"join needs the handle that ctx.spawn has returned, got {child!r}")
    children = SpawnedChildren.of(run)
    if (spawned := children.spawned.get(child.id)) is None:
        raise SpawnRefused(
            f"could not join task {child.id}: this run has not spawned it; await handle.result() to wait for any task"
        )
    key, (group, open_key) = f"{JOIN}:{child.id}", spawned
    data = b""
    recorded = await run.history.read_record(key)
    if recorded is None:
        await wait_until(run, ChildrenLeft(run, key, _place(run, group), None, None, "children"))
        async with children.joining(group):  # the branch that records the result first closes the join
            recorded = await run.history.read_record(key)
            if recorded is None:
                data = await _record_join(run, key, child, group, open_key)
    if recorded is not None:
        run.touch()
        children.groups.discard(group)
        data = await read_step_result(run, key, StepRecord.decode(recorded).result)
    stored = orjson.loads(data)
    if isinstance(stored, dict):
        await _look_at_budgets(run, stored["why"])
    return _value(stored, child.decode)


async def _record_join(run: Run, key: str, child: TaskHandle[Any], group: str, open_key: str) -> bytes:
    """Record the end of a spawned child, and close its join."""
    place = _place(run, group)
    outcome: ChildOutcome | None = None
    if await _is_missing(run, place):
        outcome = await _watched_again(run, key, place, child)
    if outcome is None:
        [outcome] = await _outcomes(run, place, [child.id])
    dropped = forget_steps([open_key], run.history)
    data = await _record_outcomes(run, key, "", _stored(outcome, 0), child.id, [outcome], also=dropped)
    run.history.done[key] = StepRecord(data, "", child.id).encode()
    await _close(run, group)
    return data


async def _watched_again(run: Run, key: str, place: JoinPlace, child: TaskHandle[Any]) -> ChildOutcome | None:
    """Wait for a child whose join Redis has lost. Return its outcome if it has ended, else None: a join has it."""
    watch = partial(watch_task, run.gateway, run.delivery, place, child.partition, child.id, life=_life(run))
    try:
        if await _retried(run, watch) is not None:
            return await _ended_outcome(child)
    except TaskNotFound:
        return ChildOutcome(child.id, ChildEnd.LOST)
    await wait_until(run, ChildrenLeft(run, key, place, None, None, "children"))
    return None


async def gather(run: Run, task: Any, items: Any, limit: int | None, errors: Errors) -> list[Any]:
    """Spawn a child for each item, and return their results. See `Context.gather`."""
    call = _inheriting(run, child_call("gather", task))
    found = await _gathered(run, call, items, limit, errors)
    return [_value(outcome, call.task.decode, keep=errors == "keep") for outcome in found]


async def group_arguments(run: Run, data: bytes, arguments: Any) -> dict[str, Any]:
    """Return the arguments of the callback of a group: the results of the tasks of the group come first.

    Args:
        data: Arguments that the callback was enqueued with.
        arguments: `Arguments` of its task.

    Raises:
        InvalidArguments: They do not fit the handler.
        ChildFailed: A task of the group ended without a result.
    """
    try:
        group = decode_group(data)
    except ValueError as error:
        raise InvalidArguments(run.envelope.task, str(error), malformed=True) from None
    call = _GroupCall(run, group)
    found = await _gathered(run, call, range(len(group.items)), group.limit, group.errors)
    results = [orjson.Fragment(_value(outcome, bytes)) for outcome in found]
    decoded: dict[str, Any] = arguments.decode(orjson.dumps({arguments.name_of_first(): results, **group.arguments}))
    return decoded


class _Member(NamedTuple):
    """Arguments of a task of a group."""

    number: int
    data: bytes


class _GroupCall:
    """The call of the tasks of a group."""

    def __init__(self, run: Run, group: Group) -> None:
        self.task = SimpleNamespace(name=group.envelope["task"])
        self.own_queue = group.queue
        self._group = group
        self._headers, self._inherited = _inherited(run, self.task.name)

    def encode_child(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Member:
        return _Member(args[0], self._group.items[args[0]].data)

    async def child_message(self, child: _Member, task_id: str) -> TaskMessage:
        inherited = {name: value for name, value in self._inherited.items() if value is not None}
        if budgets := inherited.pop("budgets"):
            inherited["budgets"] = [use.encode() for use in budgets]
        return self._group.message(child.number, task_id, self._headers, inherited)

    def call_text(self, arguments: Iterable[bytes]) -> bytes:
        return b"\n".join(arguments)


async def _gathered(run: Run, call: GroupCall, items: Any, limit: int | None, errors: Errors) -> list[Any]:
    """Return the stored results of the children of a call. Raises `ChildFailed`."""
    group = await _open(run, GATHER, call, items, limit, errors)
    if group.results is None:
        await wait_until(run, ChildrenLeft(run, group.key, group.place, None, None, "children"))
        await _join_all(run, group, errors)
    run.touch()
    if isinstance(group.results, dict):
        await _look_at_budgets(run, group.results["why"])
        raise _failure(group.results)
    return group.results or []


async def as_completed(run: Run, task: Any, items: Any, limit: int | None, errors: Errors) -> AsyncGenerator[Any, None]:
    """Spawn a child for each item, and yield their results as they arrive. See `Context.as_completed`."""
    call = _inheriting(run, child_call("as_completed", task))
    group = await _open(run, COMPLETED, call, items, limit, errors)
    seen = 0
    while seen < group.total:
        read = partial(ended_children, run.gateway, group.place, seen)
        arrived: Sequence[str] = await _retried(run, read)
        if not arrived:
            await check_call(run, COMPLETED, own=True)
            await wait_until(run, ChildrenLeft(run, group.key, group.place, seen, None, "children"))
            arrived = await _retried(run, read)
            if not arrived:
                await _stop_without(run)
        for outcome in await _outcomes(run, group.place, arrived):
            seen += 1
            number = group.plan.number_of(outcome.child)
            if outcome.state is not ChildEnd.SUCCEEDED and errors != "keep":
                await _cancel_open(run, group.place)
                await _look_at_budgets(run, outcome.reason)
            run.touch()
            yield _value(_stored(outcome, number), call.task.decode, keep=errors == "keep")
            await check_call(run, COMPLETED, own=True)


def parked_result(handle: TaskHandle[Any], timeout: Moment | None) -> Coroutine[Any, Any, Any] | None:
    """Return the wait for the result of a task that parks the caller's run.

    None where it is awaited in memory: in a step, outside of handlers, while the run stops, or for another namespace.

    Raises:
        SpawnRefused: The task would wait for itself, or for its parent.
    """
    run = enqueuing_run()
    if run is None:
        return None
    if handle.id in (run.id, run.envelope.parent):
        which = "its own result" if handle.id == run.id else f"the result of its parent {handle.id}, which ends later"
        raise SpawnRefused(f"task {run.id} cannot await {which}")
    if CURRENT_STEP.get() is not None:
        return None
    if handle.partition.namespace != run.delivery.partition.namespace:
        return None
    return result_of(run, handle, None if timeout is None else seconds_until(timeout, "timeout"))


async def followed(call: Awaitable[Any]) -> Any:
    """Return what a call returns; if that is the handle of a task, the result of the task, outside of the call."""
    value = await call
    return await value.result() if isinstance(value, TaskHandle) else value


async def result_of(run: Run, handle: TaskHandle[Any], timeout: float | None) -> Any:
    """Return the result of any task of this deployment, awaited in a handler outside its steps: the run may park."""
    name = f"{RESULT}:{handle.id}"
    await check_call(run, RESULT, own=True)
    key, recorded, former = await match_wait(run, name, _ANY)
    if former is not None:
        recorded = StepRecord.decode(former).result
    if recorded is not None:
        run.touch()
        data = await read_step_result(run, key, recorded)
    else:
        data = await _await_result(run, key, handle, timeout)
    found = orjson.loads(data)
    if isinstance(found, dict) and "timeout" in found:
        raise TimeoutError(f"task {handle.id} did not end within {found['timeout']:g} s")
    if isinstance(found, dict):
        raise _task_error(found)
    return handle.decode(found.encode())


async def _await_result(run: Run, key: str, handle: TaskHandle[Any], timeout: float | None) -> bytes:
    """Wait for the end of a task, record it, and return what is stored of it."""
    if run.stopping:
        await run.boundary()
    saved = saved_wait(run, key)
    known: JoinState | None = None
    if saved is not None and saved.get("of") == run.id:
        known = await _retried(run, partial(read_join, run.gateway, _place(run, group_of(saved["id"]))))
    else:
        if (await _retried(run, handle.record)).state.terminal:
            return await _record_result(run, key, handle, await _ended_outcome(handle))
        endless = timeout is None or timeout > MAX_SECONDS
        until = None if endless else await redis_time(run) + round((timeout or 0.0) * 1000)
        saved = {"h": _ANY, "id": new_task_id(), "of": run.id, "until": until}
        await _save(run, key, saved)
    group = group_of(saved["id"])
    SpawnedChildren.of(run).groups.add(group)
    place = _place(run, group)
    watch = partial(watch_task, run.gateway, run.delivery, place, handle.partition, handle.id, life=_life(run))
    outcome: ChildOutcome | None
    # A join that is over has the result, which the task may not have any more.
    if (known is not None and known.over) or await _retried(run, watch) is None:
        waited = await wait_until(run, ChildrenLeft(run, key, place, None, saved["until"], "result"))
        if waited is not TIMED_OUT and await _is_missing(run, place):
            await _stop_without(run)
        outcome = None if waited is TIMED_OUT else (await _outcomes(run, place, [handle.id]))[0]
    else:
        outcome = await _ended_outcome(handle)
    data = await _record_result(run, key, handle, outcome, timeout)
    await _close(run, group)
    return data


async def _record_result(
    run: Run, key: str, handle: TaskHandle[Any], outcome: ChildOutcome | None, timeout: float | None = None
) -> bytes:
    """Record the end of an awaited task, None if the time-out came first."""
    stored = {"timeout": timeout} if outcome is None else _stored(outcome, 0)
    return await _record_outcomes(run, key, _ANY, stored, handle.id, [] if outcome is None else [outcome])


_ANY: Final = digest_of(b"")
"""Digest of a call that has nothing but its name."""


async def _ended_outcome(handle: TaskHandle[Any]) -> ChildOutcome:
    """Return the outcome of a task that has ended, from its record; of its successor, if it has one."""
    try:
        data = await handle.read_result()
    except TaskFailed as error:
        return ChildOutcome(handle.id, ChildEnd.DEAD, None, error.reason, error.error)
    except TaskCancelled:
        return ChildOutcome(handle.id, ChildEnd.CANCELLED)
    return ChildOutcome(handle.id, ChildEnd.SUCCEEDED, data)


# the children of one call


class _Group:
    """The children of one call, which are all in its join; or the results, if the call is recorded."""

    def __init__(self, key: str, digest: str, plan: _Plan, place: JoinPlace, results: Any = None) -> None:
        self.key = key
        self.digest = digest
        self.plan = plan
        self.place = place
        self.results: list[Any] | dict[str, Any] | None = results

    @property
    def total(self) -> int:
        return self.plan.total or 0


async def _open(run: Run, kind: str, call: GroupCall, items: Any, limit: int | None, errors: Errors) -> _Group:
    """Return the children of a call, which are spawned unless an earlier run has done so."""
    await check_call(run, kind, own=True)
    what = kind[1:] if kind == GATHER else "as_completed"
    on_failure, window = check_window(limit, errors)
    _check_items(what, items)
    if isinstance(items, set | frozenset):
        raise SpawnRefused(f"{what} needs items in an order that each run repeats, got a set: pass sorted(items)")
    children: list[Any] | None = None
    if isinstance(items, Sequence | AbstractSet):
        children = [call.encode_child(*arguments_of(item)) for item in items]
        _check_count(what, len(children))
        digest = digest_of(call.call_text(child.data for child in children))
    else:
        digest = digest_of(call.call_text([b"items of a generator"]))
    key, recorded, former = await match_wait(run, f"{kind}:{call.task.name}", digest)
    if former is not None:
        recorded = StepRecord.decode(former).result
    if recorded is not None:
        data = await read_step_result(run, key, recorded)
        return _Group(key, digest, _Plan(""), _place(run, ""), orjson.loads(data))
    if run.stopping:
        await run.boundary()
    plan = _plan_of(run, key)
    if plan is not None and plan.total and await _is_missing(run, _place(run, plan.group)):
        plan = plan._replace(total=None)
    if plan is None or plan.total is None:
        if children is None:
            children = [call.encode_child(*arguments_of(item)) async for item in each_item(what, items)]
        run.step_began(key)
        try:
            plan = await _planned(run, key, digest, digest_of(call.call_text(child.data for child in children)))
            if children:
                await _add(run, call, plan, children, on_failure, window)
            plan = plan._replace(total=len(children))
            event = run.next_entry(ChildrenSpawned(task=call.task.name, count=len(children), child=plan.id))
            saved = {"h": digest, "id": plan.id, "of": run.id, "n": len(children), "items": plan.items}
            await _save(run, key, saved, event)
        finally:
            run.step_ended(key)
    SpawnedChildren.of(run).groups.add(plan.group)
    return _Group(key, digest, plan, _place(run, plan.group))


async def _join_all(run: Run, group: _Group, errors: Errors) -> None:
    """Read and record the results of children that have ended, in the order of their items, and close the join."""
    run.step_began(group.key)
    try:
        state = await _retried(run, partial(read_join, run.gateway, group.place)) if group.total else None
        if group.total and state is None:
            await _stop_without(run)
        outcomes: list[ChildOutcome] = []
        if errors != "keep" and state is not None and state.failed is not None:
            outcomes = await _outcomes(run, group.place, [state.failed])
        elif group.total:
            outcomes = await _outcomes(run, group.place, group.plan.ids())
        failed = next((outcome for outcome in outcomes if outcome.state is not ChildEnd.SUCCEEDED), None)
        found: Any
        if failed is not None and errors != "keep":
            number = group.plan.number_of(failed.child)
            found = _stored(failed, number)
        else:
            found = [_stored(outcome, number) for number, outcome in enumerate(outcomes)]
        await _record_outcomes(run, group.key, group.digest, found, "", outcomes, count=group.total)
        await _close(run, group.plan.group)
        group.results = found
    finally:
        run.step_ended(group.key)


async def each_item(what: str, items: Any) -> AsyncGenerator[Any, None]:
    """Yield the items of a list or a generator. Raises `SpawnRefused` if it is neither, or has too many."""
    _check_items(what, items)
    count = 0
    if isinstance(items, AsyncIterable):
        async for item in items:
            count += 1
            _check_count(what, count)
            yield item
    else:
        for item in items:
            count += 1
            _check_count(what, count)
            yield item


def arguments_of(item: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of the child of an item: a tuple has them by position, a dict by name."""
    if type(item) is tuple:
        return item, {}
    if isinstance(item, Mapping):
        return (), item
    return (item,), {}


def _check_count(what: str, count: int) -> None:
    if count > MAX_CHILDREN:
        raise SpawnRefused(f"{what} can spawn at most {MAX_CHILDREN:,} children, got more items")


def check_window(limit: object, errors: object) -> tuple[OnFailure, int]:
    """Return what a failed child means, and how many children may be open at once; 0 for any. Raises `SpawnRefused`."""
    return _on_failure(errors), _window(limit)


def _check_items(what: str, items: object) -> None:
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable | AsyncIterable):
        raise SpawnRefused(f"{what} needs a list or a generator with an item for each child, got {items!r}")


def _on_failure(errors: object) -> OnFailure:
    if errors not in ("raise", "keep", "wait"):
        raise SpawnRefused(f"errors must be 'raise', 'keep' or 'wait', got {errors!r}")
    return OnFailure(str(errors))


def _window(limit: object) -> int:
    if limit is None:
        return 0
    if type(limit) is not int or limit < 1:
        raise SpawnRefused(f"limit must be a whole number of at least 1, or None for no limit, got {limit!r}")
    return min(limit, MAX_CHILDREN)


def child_call(what: str, task: Any) -> ChildCall:
    """Return the call of a child. Raises `SpawnRefused`."""
    if isinstance(task, str):
        raise SpawnRefused(f"{what} needs a registered task, got the name {task!r}: pass the task itself")
    as_call: Callable[[], ChildCall] | None = None if isinstance(task, type) else getattr(task, "as_call", None)
    if as_call is None:
        raise SpawnRefused(f"{what} needs a registered task, got {task!r}: decorate its function with @app.task")
    return as_call()


def _inheriting(run: Run, call: ChildCall) -> ChildCall:
    """Return the call of a child with what it has from the run. Raises `SpawnRefused`."""
    namespace = call.task.app.producer.namespace.name
    if namespace != run.delivery.partition.namespace:
        raise SpawnRefused(
            f"could not spawn task {call.task.name!r}: it is of namespace {namespace!r}, and this task of "
            f"{run.delivery.partition.namespace!r}"
        )
    return call.spawned(*_inherited(run, call.task.name))


def _inherited(run: Run, task: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers and the fields of the envelope that children have from the run. Raises `SpawnRefused`."""
    own = run.envelope
    if own.depth >= MAX_DEPTH:
        raise SpawnRefused(
            f"could not spawn task {task!r}: task {run.id} has {own.depth} parents above it, which is the "
            "limit; check whether its tasks spawn each other"
        )
    headers: dict[str, str] = {name: own.headers[name] for name in TRACE_HEADERS if name in own.headers}
    budgets = own.budgets if run.spending is None else run.spending.uses
    # only the parent hands off, with its own arguments: it does so when a child of it was buried for its budget
    budgets = tuple(use._replace(then="bury", to=None) if use.then == "hand_off" else use for use in budgets)
    fields = {"parent": run.id, "depth": own.depth + 1, "budgets": budgets}
    return headers, fields


# plans, records and joins


def _plan_of(run: Run, key: str) -> _Plan | None:
    """Return the plan of a call; None without one, and for that of the task of which this one is a copy."""
    if (saved := run.history.saved.get(key)) is None:
        return None
    plan = orjson.loads(saved)
    return _Plan(plan["id"], plan.get("n"), plan.get("items", "")) if plan.get("of") == run.id else None


async def _planned(run: Run, key: str, digest: str, items: str = "") -> _Plan:
    """Return the plan of a call, which is stored.

    items: digest of the items of all children. If a run that was cut off has added children of other items, they are
    cancelled, and there is a new plan: a join has the children of one run's items.
    """
    former = _plan_of(run, key)
    if former is None or former.items != items:
        plan = _Plan(with_tenant(run.envelope.tenant, new_task_id()), items=items)
        await _save(run, key, {"h": digest, "id": plan.id, "of": run.id, "items": items})
        if former is not None:
            await _close(run, former.group)
    else:
        plan = former
    SpawnedChildren.of(run).groups.add(plan.group)
    return plan


async def _save(run: Run, key: str, value: dict[str, Any], *more: Entry) -> None:
    """Store the plan of a call."""
    first: list[Entry] = []
    if CHILDREN not in run.history.saved:
        run.history.saved[CHILDREN] = b"1"
        first.append(Entry(Kind.SAVED, CHILDREN, b"1"))
    AttemptEnd.of(run).enqueued.setdefault(key, ())
    await run.recorder.put(*first, save_wait(run, key, _CHILDREN, value), *more, wait=True)


_CHILDREN: Final = "children"
"""Kind of the saved plans."""


def _close_plan(run: Run, key: str, saved: dict[str, Any], closing: Closing) -> None:
    """Close the children of a call of a branch that was cancelled."""
    closing.add(*forget_steps([key], run.history))
    if saved.get("of") == run.id:
        closing.add(run.next_entry(Waited(closed=True)), then=partial(_close, run, group_of(saved["id"])))


set_closer(_CHILDREN, _close_plan)


async def _add(
    run: Run, call: GroupCall, plan: _Plan, children: Sequence[Any], on_failure: OnFailure, window: int
) -> None:
    """Add the children of a call to its join, and launch the first of them."""
    planned = [
        PlannedChild(call.own_queue, await call.child_message(child, _numbered(plan.id, number)))
        for number, child in enumerate(children)
    ]
    place = _place(run, plan.group)
    add = partial(add_children, run.gateway, run.delivery, place, planned)
    await _retried(run, partial(add, on_failure=on_failure, limit=window, life=_life(run)))


async def _record(run: Run, key: str, record: StepRecord, event: Event, *, also: Sequence[Entry] = ()) -> None:
    """Record a call with the event that it logs. also: further entries of the act."""
    encoded = record.encode()
    AttemptEnd.of(run).enqueued[key] = chunks_of(encoded)
    entry = Entry(Kind.DONE_WITH_EVENT, key, encoded)
    await run.recorder.put(entry, run.next_entry(event), *also, wait=True, progress=True)
    run.history.saved.pop(key, None)
    run.touch()
    run.step_recorded()


async def _record_outcomes(
    run: Run,
    key: str,
    digest: str,
    found: Any,
    shown: str,
    outcomes: Iterable[ChildOutcome],
    *,
    count: int = 1,
    also: Sequence[Entry] = (),
) -> bytes:
    """Record the results of children. Those of a call that did not fail outlive the attempt, as steps do."""
    data = orjson.dumps(found)
    stored = data
    if len(data) > run.payload_limit:
        stored = await store_step_result(run, key, data, None, len(data))
    failed = sum(outcome.state is not ChildEnd.SUCCEEDED for outcome in outcomes)
    event = ChildrenJoined(count=count, failed=failed, child=shown)
    await _record(run, key, StepRecord(stored, digest, shown), event, also=also)
    if not isinstance(found, dict):
        AttemptEnd.of(run).awaited[key] = True
    return data


async def _outcomes(run: Run, place: JoinPlace, children: Iterable[str]) -> list[ChildOutcome]:
    """Return the ends of children, in this order; one that is not there any more is lost."""
    wanted = list(children)

    async def read() -> dict[str, ChildOutcome]:
        return {outcome.child: outcome async for outcome in read_outcomes(run.gateway, place, wanted)}

    found = await _retried(run, read)
    return [found.get(child) or ChildOutcome(child, ChildEnd.LOST) for child in wanted]


async def _is_missing(run: Run, place: JoinPlace) -> bool:
    """Return whether there is no join, since Redis has lost it, or an operator has deleted it."""
    return await _retried(run, partial(read_join, run.gateway, place)) is None


async def _stop_without(run: Run) -> NoReturn:
    """Stop a run whose join is missing: the next run adds the children again, under the same ids."""
    run.cancel(StopReason.DATA_LOST, EntriesLost(run.id, "join", run.last_entry))
    await run.refuse()


async def _cancel_open(run: Run, place: JoinPlace) -> None:
    """Cancel the children of a join that have not ended."""
    open_children = [child.decode() for child in await _retried(run, partial(_members, run, place))]
    places = await _retried(run, partial(child_places, run.gateway, place, open_children))
    for found in places.values():
        cancel = partial(cancel_task, run.gateway, found.partition, found.task_id, retention=run.settings.result_ttl)
        with suppress(TaskNotFound):  # an operator has deleted it
            await _retried(run, cancel)


async def _members(run: Run, place: JoinPlace) -> Sequence[bytes]:
    found: Sequence[bytes] = await run.gateway.command("SMEMBERS", place.keys[1])
    return found


async def _close(run: Run, group: str) -> None:
    """Close the join of a call that is recorded."""
    await _retried(run, partial(close_join, run.gateway, _place(run, group), retention=_retention(run)))
    SpawnedChildren.of(run).groups.discard(group)


async def close_all(run: Run) -> None:
    """Close the joins of an attempt that has ended: open children are cancelled. What fails is left to the janitor."""
    children = run.observer(SpawnedChildren)
    groups = set() if children is None else set(children.groups)
    cipher = run.gateway.encryptor.of(run.delivery.partition, run.id)
    for key, value in run.history.saved.items():
        if _PLANS.search(key):
            plan = orjson.loads(value if value[:1] == b"{" else cipher.decrypt(f"s:{key}", value))
            if plan["of"] == run.id:
                groups.add(group_of(plan["id"]))
    retention = _retention(run)
    limit = asyncio.Semaphore(_CLOSED_AT_ONCE)

    async def close(group: str) -> None:
        async with limit:
            await close_join(run.gateway, _place(run, group), retention=retention)

    results = await asyncio.gather(*map(close, groups), return_exceptions=True)
    for error in results:
        if isinstance(error, Exception):
            bound = logger.bind(task=run.envelope.task, id=run.id)
            bound.warning("could not cancel the open children of the task: {}; a worker does so within a minute", error)
            break


_PLANS: Final = re.compile(rf"(?:^|/)(?:{SPAWN}|{GATHER}|{COMPLETED}|{RESULT}|{OPEN_CHILD}):")
"""Keys of saved plans."""

_CLOSED_AT_ONCE: Final = 16
"""Joins of one run that are closed at once."""


def _retention(run: Run) -> float:
    return run.settings.result_ttl


def _own(run: Run) -> Namespace:
    return Namespace(run.delivery.partition.namespace)


def _place(run: Run, group: str) -> JoinPlace:
    return JoinPlace(run.delivery.partition, run.id, group)


def _life(run: Run) -> str:
    return life_of(run.history.counters.attempts, run.history.replays)


async def _retried(run: Run, act: Callable[[], Any]) -> Any:
    return await retry_while_unavailable(act, on_wait=log_wait(f"the children of task {run.id}", run.touch))


# stored outcomes


def _stored(outcome: ChildOutcome, number: int) -> Any:
    """Return the stored form of an outcome: the text of a result, or an object that describes the failure."""
    if outcome.state is ChildEnd.SUCCEEDED:
        return (outcome.result or b"null").decode()
    error = dict(outcome.error)
    return {"id": outcome.child, "state": outcome.state.value, "why": outcome.reason, "error": error, "n": number}


def _value(stored: Any, decode: Callable[[bytes], Any], *, keep: bool = False) -> Any:
    """Return the result that is stored. Raises `ChildFailed`, or returns it if it is a value here."""
    if isinstance(stored, dict):
        error = _failure(stored)
        if keep:
            return error
        raise error
    return decode(stored.encode())


async def _look_at_budgets(run: Run, reason: str | None) -> None:
    """Do what follows for this task, before it sees the failure of a child that was buried for a budget they share."""
    if reason == Reason.BUDGET and run.spending is not None:
        await run.spending.before_step()


def _failure(stored: Mapping[str, Any]) -> ChildFailed:
    error = _task_error(stored)
    failed = ChildFailed(stored["id"], error, stored["n"])
    failed.__cause__ = error
    return failed


def _task_error(stored: Mapping[str, Any]) -> TaskFailed | TaskCancelled:
    child, state = stored["id"], stored["state"]
    if state == ChildEnd.DEAD:
        return TaskFailed(child, stored["why"] or "unknown", stored["error"])
    if state == ChildEnd.CANCELLED:
        return TaskCancelled(child)
    return TaskFailed(child, "lost", {"error": "TaskNotFound", "message": "its record was deleted, or has expired"})
