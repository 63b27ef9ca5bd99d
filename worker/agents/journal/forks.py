"""Forks: a new task that starts from a point in another task's log.

A fork has the state or the step records that the source had at that point. Arguments and state can be edited before it
starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from ....queues.derived_tasks import read_task_input, store_fork
from ....queues.envelope import check_own_id, check_size, new_task_id
from ....queues.errors import TaskNotFound
from ....queues.event_log import TaskEvent, read_last_events, walk_events
from ....queues.handle import TaskHandle
from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import SNAPSHOT, Partition, tenant_of, with_tenant
from ....queues.producer import Producer
from ....queues.security.secret_arguments import ANY
from ....queues.transport.large_results import recorded_results
from ....queues.waits import RECORDS, wait_id
from ...durable.journal.event import LOG_BASE, RECORDED
from ...durable.journal.function_plan import FunctionPlan
from ...durable.journal.handoff.document import RECEIVED, OpenPromise
from ...durable.journal.parsing import Unreadable, parse_event
from ...durable.journal.run_events import Forked, Planned
from ...durable.journal.step_record import PLANNED, UNSAVED, VERSION, StepRecord
from ...durable.promises import PROMISES, as_commitments, encode_promises, stored_promises
from ...errors import BadHistory, first_problem
from .agent_events import saved_link
from .archive import archived_field, archived_steps, retired_fields
from .history import PastState
from .json_patch import BadPatch, apply, diff
from .reducer import State, empty_state, reduce
from .snapshot import encode_snapshot
from .state import AgentState

Point = int | str | None
"""Number of an event, id of a log entry or key of a step; None for the end of the log."""

_ARTIFACTS: Final = "#artifact:"
"""Prefix of the checkpoint keys of artifact links."""

_WORKSPACE: Final = "#workspace"
"""Checkpoint key of the files of the workspace."""

_FINISH: Final = "#finish"

_REPLAN: Final = "#replan"
"""Checkpoint keys of an agent's result, and of the note that a replan is due."""

_OF_PROMISES: Final = frozenset({"forked", "promised", "promise_kept", "waiting", "waited", "answered"})
"""Types of events that change the open promises of a function."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Task that was started from a point of another one.

    Attributes:
        event: Number of the last event that the fork knows.
        agent: Name of the agent; None for a function.
        steps: Number of recorded steps that it starts with.
        within: Key of the step that was running at that point, which the fork restarts.
    """

    handle: TaskHandle[Any]
    event: int
    agent: str | None
    steps: int
    within: str | None


async def fork(
    producer: Producer,
    task_id: str,
    *,
    queue: str | None = None,
    at: Point = None,
    edit: Mapping[str, Any] | None = None,
    new_id: str | None = None,
    lenient: bool = False,
) -> Fork:
    """Enqueue a new task that continues from a point in another task's past. The source is not changed.

    The fork has the task name, arguments, headers and tenant of its source. An agent starts with the state at that
    point; a function starts with the steps that were recorded by then and runs the others.

    Args:
        queue: Queue of the source, if several have its id.
        at: Point in the source's log.
        edit: New values by name or path (`context.mood`). For an agent they go into its state, and into its arguments
            where those have the name; for a function into its arguments.
        new_id: Id of the fork; generated if omitted. A second call with the same id returns the same fork.
        lenient: Skip events that cannot be read.

    Raises:
        TaskNotFound, TaskExists, BadHistory, BadEdit, DecryptionError, PayloadTooLarge
    """
    own_id = None if new_id is None else check_own_id(new_id, tenant_of(task_id) or producer.namespace.tenant)
    handle = await producer.find(task_id, queue)
    if handle is None:
        raise TaskNotFound(task_id, f"any queue of namespace {producer.namespace.name!r} on {producer.address.shown}")
    gateway, partition, task_id = producer.gateway, handle.partition, handle.id
    new_id = with_tenant(tenant_of(task_id), own_id or new_task_id())
    origin = await read_task_input(gateway, partition, task_id)
    known = await _as_of(producer, partition, task_id, at, lenient=lenient)
    secret = {mark[0] if mark else ANY for mark in origin.envelope.secrets}
    state, arguments = edit_task(
        known.state, from_json(origin.arguments), edit or {}, agent=known.agent is not None, secret=secret
    )
    data = to_json(arguments) if edit else origin.arguments
    check_size("the task's arguments", len(data), max(producer.large_limit, producer.payload_limit), "large_limit")
    for mark in (await checkpoint_fields(gateway, partition, task_id, UNSAVED)).values():
        try:
            step = orjson.loads(mark)["step"]
        except (ValueError, LookupError, TypeError):
            raise BadHistory(task_id, f"the mark of unsaved files of task {task_id} is damaged") from None
        if known.whole or step in known.before:
            raise BadHistory(task_id, f"the files of step {step!r} of task {task_id} are not saved: use a step before")
    recorded = await recorded_results(gateway, partition, task_id)
    last = await read_last_events(gateway, partition, task_id, 1)
    if last and last[0].id != known.entry:  # the source runs: its newer records are not part of the state read
        known = replace(known, whole=False)
    done = {key: value for key, value in recorded.items() if known.has(key, value)}
    saved = _links(known, await checkpoint_fields(gateway, partition, task_id, _ARTIFACTS))
    if done:
        saved |= await checkpoint_fields(gateway, partition, task_id, VERSION)
    if known.same_files:
        saved |= await checkpoint_fields(gateway, partition, task_id, _WORKSPACE)
    elif known.files is not None:
        saved[_WORKSPACE] = orjson.dumps(known.files)
    other: dict[str, bytes] = {}
    if known.agent is not None:
        blobs: dict[str, bytes] = {}
        if known.whole:
            saved |= await checkpoint_fields(gateway, partition, task_id, _REPLAN)
        saved[SNAPSHOT] = encode_snapshot(state, 1, known.agent, blobs)
        saved |= blobs
        archived = await archived_steps(gateway, partition, task_id)
        other = {archived_field(key): value for key, value in archived.items() if key not in known.archived_later}
        other |= await retired_fields(gateway, partition, task_id)
    else:
        saved |= await _plan_and_promises(producer, partition, task_id, known)
    files = orjson.loads(saved[_WORKSPACE]) if _WORKSPACE in saved else None
    forked = Forked(source=task_id, at=known.number, changes=diff(empty_state(), state), workspace=files)
    place = await store_fork(
        gateway,
        producer.namespace,
        origin,
        new_id,
        at=f"{task_id} {known.entry}",
        arguments=data,
        event=forked.to_json(),
        fields=_named("d:", done) | _named("s:", saved) | other,
    )
    started = TaskHandle[Any](new_id, place, gateway, producer.notifications)
    steps = sum("#" not in key for key in done)
    return Fork(started, known.number, known.agent, steps, state.get("current"))


@dataclass(frozen=True, slots=True)
class _SourceAt:
    """Source task as of a point in its log.

    Attributes:
        whole: Whether the point is the end of the log.
        before: Keys of records that were written last before the point.
        after: Keys of records that were written last after it.
        read: Numbers of the inbox messages that had been read.
        answered: Ids of the waits that had ended.
        forked: See `Records`.
        archived_later: Keys of steps that left the state after the point.
        same_files: Whether no files of the workspace were saved after the point.
        files: Link of the files of the workspace at the point; None if there were none, or if the log lacks it.
        plan: Plan of a function at the point, if the log has one.
        promises: Its open promises at the point.
    """

    state: State
    number: int
    entry: str
    agent: str | None
    whole: bool
    before: frozenset[str]
    after: frozenset[str]
    read: frozenset[int]
    answered: frozenset[str]
    forked: bool
    archived_later: frozenset[str]
    same_files: bool
    files: dict[str, Any] | None
    plan: FunctionPlan | None
    promises: list[OpenPromise]

    def has(self, key: str, value: bytes) -> bool:
        """Return whether a step record existed at this point. An agent's result does not count: the fork continues."""
        if self.agent is not None and key == _FINISH:
            return False
        if self.whole or key in self.before:
            return True
        if self.forked and key not in self.after and self.number:
            return True
        name = key.rpartition("/")[2]
        if name.startswith(RECORDS):
            return wait_id(key) in self.answered
        if name.startswith("#inbox"):
            messages = orjson.loads(StepRecord.decode(value).result)
            return bool(messages) and all(one.get("number") in self.read for one in messages)
        return False


async def _plan_and_promises(
    producer: Producer, partition: Partition, task_id: str, known: _SourceAt
) -> dict[str, bytes]:
    """Return the saved plan and the open promises of a function at a point."""
    if known.whole:
        saved = await checkpoint_fields(producer.gateway, partition, task_id, PLANNED)
        saved |= await checkpoint_fields(producer.gateway, partition, task_id, PROMISES)
    else:
        saved = {} if known.plan is None else {PLANNED: known.plan.encode()}
    if PROMISES not in saved and known.promises:
        saved[PROMISES] = encode_promises(known.promises)
    return saved


async def _as_of(producer: Producer, partition: Partition, task_id: str, at: Point, *, lenient: bool) -> _SourceAt:
    received = stored_promises(task_id, await checkpoint_fields(producer.gateway, partition, task_id, RECEIVED)) or []
    past, records = PastState(task_id, lenient), Records()
    cut = 0 if at == 0 else None
    position = files_saved = 0
    files: dict[str, Any] | None = None
    plan: FunctionPlan | None = None
    owing = empty_state() | {"commitments": as_commitments(received)}
    later: set[str] = set()
    async for event in walk_events(producer.gateway, partition, task_id):
        position += 1
        records.add(event, position)
        if event.type == "workspace_saved":  # in the act that recorded its step, after the event of that
            files_saved = records.written.get(event.step or "", position)
        if event.number is not None and isinstance(event.data, dict) and event.type in ("workspace_saved", "forked"):
            files = saved_link(event.type, event.data) if cut is None or files_saved <= cut else files
        if cut is not None and event.type == "archived" and isinstance(event.data, dict):
            later.update(event.data.get("steps", ()))
        if cut is None:
            planned = parse_event(event) if event.type == "planned" and event.number is not None else None
            plan = FunctionPlan.after(plan, planned) if isinstance(planned, Planned) else plan
            plan, owing = (None, empty_state()) if event.restarts else (plan, _owing(owing, event))
            past.apply(event)
            if _is_at(event, past, at):
                cut = position
    past.check()
    if cut is None and at is not None:
        raise BadHistory(task_id, f"the log of task {task_id} has no event, entry or step {at!r}")
    point = position if cut is None else cut
    return _SourceAt(
        past.state,
        past.number,
        past.entry,
        past.agent,
        point == position,
        frozenset(key for key, last in records.written.items() if last <= point),
        frozenset(key for key, last in records.written.items() if last > point),
        frozenset(number for number, when in records.messages.items() if when <= point),
        frozenset(wait for wait, when in records.waits.items() if when <= point),
        records.forked,
        frozenset(later),
        files_saved <= point,
        files,
        plan,
        [OpenPromise.model_validate(made) for made in owing["commitments"] if not made["done"]],
    )


def _owing(state: State, found: TaskEvent) -> State:
    """Return a state with the promises after an event. One that cannot be read or applied is reported elsewhere."""
    if found.number is None or found.type not in _OF_PROMISES or isinstance(event := parse_event(found), Unreadable):
        return state
    try:
        return reduce(state, event, found.number or 0)
    except BadPatch:
        return state


def _is_at(event: TaskEvent, past: PastState, at: Point) -> bool:
    if isinstance(at, int):
        return past.number == at
    return at is not None and (event.id == at or (event.step == at and event.type in RECORDED))


def _named(kind: str, found: Mapping[str, bytes]) -> dict[str, bytes]:
    return {kind + key: value for key, value in found.items()}


def _links(known: _SourceAt, saved: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the artifact links as they were at this point."""
    artifacts = {one["name"]: one for one in known.state["artifacts"]}
    return {
        key: orjson.dumps(orjson.loads(data) | artifacts[name])
        for key, data in saved.items()
        if (name := key.removeprefix(_ARTIFACTS)) in artifacts
    }


_RECORD_NAMES: Final = {"message_sent": "send", "planned": "plan", "waited": "inbox"}
"""Name of the record by event type, if it differs from the type."""


class Records:
    """Index of the log: position of the last event of each step record and of each message read.

    An event of a type outside `RECORDED` belongs to the record that has its name and its ordinal within the scope.

    Attributes:
        written: Position of the last event of each step record, by key.
        messages: Position of the event that read each message, by number in the inbox.
        waits: Position of the event with which each wait for an answer ended, by its id.
        forked: Whether the task is a fork itself, which started with records that its log does not mention.
    """

    def __init__(self) -> None:
        self.written: dict[str, int] = {}
        self.messages: dict[int, int] = {}
        self.waits: dict[str, int] = {}
        self.forked = False
        self._times: Counter[str] = Counter()

    def add(self, event: TaskEvent, position: int) -> None:
        data = event.data if isinstance(event.data, dict) else {}
        if event.type == "replayed" and data.get("fresh"):
            self.written.clear()
            self._times.clear()
            self.waits.clear()
            self.forked = False
        elif event.type in ("forked", LOG_BASE):
            self.forked = True
        elif event.type in RECORDED and event.step is not None:
            self.written[event.step] = position
        elif event.type == "received" and isinstance(data.get("number"), int):
            self.messages[data["number"]] = position
        elif event.type in ("answered", "waited") and data.get("wait"):
            self.waits[str(data["wait"])] = position
        elif event.number is not None:
            key = self._key(event, data)
            self._times[key] += 1
            self.written[key if self._times[key] == 1 else f"{key}#{self._times[key]}"] = position

    def _key(self, event: TaskEvent, data: Mapping[str, Any]) -> str:
        name = _RECORD_NAMES.get(event.type, event.type)
        if event.type == "artifact_saved":
            name += f":{data.get('name')}"
        return f"{event.step}/#{name}" if event.step is not None else f"#{name}"


class BadEdit(ValueError):
    """An edit of the state or the arguments that cannot be applied."""


def edit_task(
    state: State, arguments: dict[str, Any], edit: Mapping[str, Any], *, agent: bool, secret: Collection[str]
) -> tuple[State, dict[str, Any]]:
    """Return the state and the arguments with new values.

    Args:
        edit: Values by name or path (`context.mood`).
        agent: Whether the task is an agent; the edit of a function changes its arguments only.
        secret: Names of arguments that are not in the state; `*` for all of them.

    Raises `BadEdit`.
    """
    for path, value in edit.items():
        name = path.partition(".")[0]
        if agent and name not in state and name not in arguments:
            raise BadEdit(
                f"cannot edit {name!r}: the state has no such field; its fields are {', '.join(sorted(state))}"
            )
        if agent and not (name in arguments and (name in secret or ANY in secret)):
            state = _set_value(state, path, value)
        if name in arguments or not agent:
            arguments = _set_value(arguments, path, value)
    if agent and edit:
        try:
            AgentState.model_validate({name: state[name] for name in AgentState.model_fields if name in state})
        except ValidationError as error:
            raise BadEdit(f"the edited state is invalid: {first_problem(error)}") from None
    return state, arguments


def _set_value(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    names = path.split(".")
    place: Any = document
    for name in names[:-1]:
        try:
            place = place[int(name) if isinstance(place, list) else name]
        except (LookupError, TypeError, ValueError):
            raise BadEdit(f"cannot edit {path!r}: {name!r} does not exist") from None
    there = isinstance(place, list) and names[-1].isdigit()
    pointer = "/" + "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)
    try:
        changed: dict[str, Any] = apply(
            document, [{"op": "replace" if there else "add", "path": pointer, "value": value}]
        )
    except BadPatch:
        raise BadEdit(f"cannot edit {path!r}: it does not exist") from None
    return changed
