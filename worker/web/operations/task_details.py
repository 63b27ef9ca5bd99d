"""Details of a task: its phases, steps and children; forks, decisions about doubts, and revealed secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, JsonValue
from pydantic_core import to_json

from ....queues.doubts import Decision, Resolution
from ....queues.doubts import resolve_step as store_decision
from ....queues.envelope import check_own_id, readable_envelope, shown_data
from ....queues.errors import DecryptionError, LargeValueLost
from ....queues.event_log import TaskEvent, read_last_events, walk_events
from ....queues.handle import TaskHandle
from ....queues.inspection.views import queue_partitions
from ....queues.keys import Partition
from ....queues.records import Record, State, read_tasks
from ....queues.security.encryption import step_chunks
from ....queues.security.secret_arguments import contains_mask, mask
from ....queues.transport.gateway import Gateway
from ....queues.transport.large_values import LargeValue, read_arguments, read_large
from ....queues.transport.pipelining import Command
from ....queues.wording import iso_time
from ...agents.journal import agent_events as _agent_events  # noqa: F401 - the log may have them
from ...agents.journal.forks import BadEdit, fork
from ...agents.journal.history import agent_name
from ...defined_secrets import mask_defined
from ...durable.journal.event import RECORDED
from ...durable.journal.failure_record import FailureRecord, is_failure
from ...durable.journal.step_record import StepRecord
from ...errors import BadHistory
from ...shown_events import event_sentence
from ...shown_task import read_shown_task
from ..operation import MAX_LIMIT, Call, ResultModel, operation
from ..problems import Problem
from ..task_phases import Phase, StepSpan, phases_of
from ..users import Role
from .tasks import ExplanationView, OneTask, TaskView

MAX_EVENTS: Final = 2_000
"""Events of a log, the newest, of which phases, steps and children are computed."""

MAX_CHILDREN: Final = 200
"""Tasks of a tree."""

_MAX_OF_CALL: Final = 50
"""Children of one call that a tree has."""

_MAX_DEPTH: Final = 5
"""Levels of a tree below its root."""

StepKey = Annotated[str, Field(min_length=1, max_length=1024, description="Key of the step.")]


class TaskDetails(ResultModel):
    """A task with its explanation, and what its checkpoint has for operators."""

    task: TaskView
    explanation: ExplanationView
    result: Any = Field(description="Result of a task that has succeeded; a text if it cannot be read, or is large.")
    parent: str | None = Field(description="Id of the task that spawned it.")
    agent: bool = Field(description="Whether it is an agent, and has a state.")
    masked: bool = Field(description="Whether secret arguments are masked.")
    plan: list[dict[str, Any]] | None = Field(description="Steps of the plan of a function.")
    budgets: list[dict[str, Any]] = Field(description="What was spent of the budgets of the task and of its parents.")
    artifacts: list[dict[str, Any]]
    promises: list[dict[str, Any]] = Field(description="Open promises.")
    findings: list[dict[str, Any]] = Field(description="Findings of coherence checks that hold.")
    notes: list[str] = Field(description="Why something is left out.")


@operation("GET", "/tasks/{task_id}/details", roles=[Role.VIEWER, Role.PRODUCER])
async def show_task_details(call: Call, given: OneTask) -> TaskDetails:
    """Return a task with the explanation of its state, its result, plan, budgets, artifacts and doubts."""
    handle = await call.find(given.task_id, given.queue)
    gateway, shown = call.producer.gateway, await read_shown_task(call.producer, handle)
    record, data = shown.record, shown.summary()
    return TaskDetails(
        task=TaskView.of(record),
        explanation=ExplanationView.of(shown.explained),
        result=data["result"],
        parent=await _parent(gateway, handle),
        agent=await agent_name(gateway, handle.partition, handle.id) is not None,
        masked=bool(record.secrets or record.masked) and contains_mask(record.shown_arguments() or b""),
        plan=data["plan"],
        budgets=data["budgets"],
        artifacts=data["artifacts"],
        promises=data["promises"],
        findings=data["incoherent"],
        notes=shown.notes,
    )


async def _parent(gateway: Gateway, handle: TaskHandle[Any]) -> str | None:
    stored = await gateway.command("HGET", handle.partition.record(handle.id), "env")
    envelope = None if stored is None else readable_envelope(stored)
    return None if envelope is None else envelope.parent


class PhaseView(ResultModel):
    """A phase: a time in which the task waited for a worker, was delayed or parked, or ran."""

    kind: Literal["queued", "delayed", "parked", "running", "lost", "dead"]
    start: str
    end: str | None = Field(description="None while it lasts.")
    exact: bool = Field(description="Whether its start is known; else it is the latest possible one.")
    what: str = Field(description="What it waits for, or how it ended.")


class StepSpanView(ResultModel):
    """Time of a step, or of one of its tries."""

    key: str
    start: str
    end: str | None
    outcome: Literal["running", "recorded", "failed", "cut off"]
    attempt: int
    exact: bool = Field(description="Whether its start is known; else it is the earliest possible one.")
    tool: str | None
    error: str


class MarkView(ResultModel):
    """An incident at one time, such as a failed attempt, a crash or a replay."""

    at: str
    kind: str
    text: str


class TaskPhasesView(ResultModel):
    """Phases, steps and incidents of a task, in the order of time."""

    start: str
    end: str
    phases: list[PhaseView]
    steps: list[StepSpanView]
    marks: list[MarkView]
    totals: dict[str, int] = Field(description="Milliseconds by kind of phase.")
    read: int = Field(description="Events that were read, the newest.")
    of: int = Field(description="Events of the log.")


@operation("GET", "/tasks/{task_id}/phases", roles=[Role.VIEWER, Role.PRODUCER])
async def show_task_phases(call: Call, given: OneTask) -> TaskPhasesView:
    """Return when a task waited for a worker, was parked and ran, and the time of each step.

    It is computed from the newest 2,000 events of its log.
    """
    handle = await call.find(given.task_id, given.queue)
    record, events, total = await handle.record(), *await _newest(call.producer.gateway, handle)
    start = events[0].at if len(events) < total else None
    found = phases_of(record, events, await call.now(), start=start)
    kinds = dict.fromkeys(phase.kind for phase in found.phases)
    return TaskPhasesView(
        start=_iso(found.start),
        end=_iso(found.end),
        phases=[PhaseView.model_validate(_times(phase)) for phase in found.phases],
        steps=[StepSpanView.model_validate(_times(step)) for step in found.steps],
        marks=[MarkView(at=_iso(mark.at), kind=mark.kind, text=mark.text) for mark in found.marks],
        totals={str(kind): found.total(kind) for kind in kinds},
        read=len(events),
        of=total,
    )


def _times(span: Phase | StepSpan) -> dict[str, Any]:
    return asdict(span) | {"start": iso_time(span.start), "end": iso_time(span.end)}


def _iso(at: int) -> str:
    return iso_time(at) or ""


async def _newest(gateway: Gateway, handle: TaskHandle[Any]) -> tuple[list[TaskEvent], int]:
    """Return the newest events, the oldest first, and the length of the log."""
    total = int(await gateway.command("XLEN", handle.partition.log(handle.id)))
    events = await read_last_events(gateway, handle.partition, handle.id, MAX_EVENTS)
    return events[::-1], max(total, len(events))


# events


class LogInputs(OneTask):
    """A page of the log of a task, from its end."""

    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most events of the page.")
    cursor: str | None = Field(
        None, pattern=r"^[0-9]{1,20}-[0-9]{1,20}$", description="Field `next` of the page before: the id of an event."
    )


class EventView(ResultModel):
    """An event of a task."""

    id: str
    at: str
    type: str
    step: str | None
    number: int | None
    text: str = Field(description="The event as a sentence, cut.")
    data: Any
    problem: str | None = Field(description="Why its data cannot be read.")


class EventPage(ResultModel):
    """A page of the log of a task, the newest event first."""

    items: list[EventView]
    next: str | None


@operation("GET", "/tasks/{task_id}/log", roles=[Role.VIEWER, Role.PRODUCER])
async def list_events(call: Call, given: LogInputs) -> EventPage:
    """Return events of a task, the newest first. `GET /tasks/{task_id}/events` follows them."""
    handle = await call.find(given.task_id, given.queue)
    at = (call.producer.gateway, handle.partition, handle.id)
    events = await read_last_events(*at, given.limit + 1, before=given.cursor)
    items = [
        EventView(
            id=event.id,
            at=_iso(event.at),
            type=event.type,
            step=event.step,
            number=event.number,
            text=event_sentence(event),
            data=event.data,
            problem=event.problem,
        )
        for event in events[: given.limit]
    ]
    return EventPage(items=items, next=items[-1].id if len(events) > given.limit else None)


# steps


class OneStep(OneTask):
    """A step of a task."""

    key: StepKey


class StepView(ResultModel):
    """The record of a step."""

    key: str
    state: Literal["recorded", "failed", "handled", "open", "cut off", "unreadable"]
    arguments: str = Field(description="Text of the arguments of its call.")
    result: Any = Field(description="JSON value.")
    size: int = Field(description="Bytes of the result.")
    error: str = Field(description="Text of its failure, or why it cannot be read.")


@operation("GET", "/tasks/{task_id}/step", roles=[Role.VIEWER, Role.PRODUCER])
async def show_step(call: Call, given: OneStep) -> StepView:
    """Return the recorded result of a step, and the arguments of its call."""
    handle = await call.find(given.task_id, given.queue)
    gateway, steps, name = call.producer.gateway, handle.partition.steps(handle.id), f"d:{given.key}"
    stored = await gateway.command("HGET", steps, name)
    if stored is None:
        raise Problem(404, "step-not-found", f"task {handle.id} must have a record of step {given.key!r}, it has none")
    cipher = gateway.encryptor.of(handle.partition, handle.id)
    try:
        data = cipher.decrypt(name, stored)
        if is_failure(data):
            failure = FailureRecord.decode(data)
            return StepView(
                key=given.key,
                state=failure.state.value,
                arguments=failure.arguments,
                result=None,
                size=0,
                error=failure.text,
            )
        record = StepRecord.decode(data)
        result = record.result
        if (large := LargeValue.decode(result)) is not None:
            what = f"the result of step {given.key!r} of task {handle.id}"
            decrypt = partial(cipher.decrypt, step_chunks(given.key))
            result = await read_large(gateway, steps, "c", given.key, large, decrypt, what)
    except (DecryptionError, LargeValueLost, LookupError, TypeError, ValueError) as error:
        return StepView(
            key=given.key, state="unreadable", arguments="", result=None, size=len(stored), error=str(error)
        )
    return StepView(
        key=given.key,
        state="recorded",
        arguments=str(record.arguments),
        result=shown_data(result),
        size=len(result),
        error="",
    )


# arguments


class ArgumentsView(ResultModel):
    """Arguments of a task, also large ones."""

    arguments: Any = Field(description="JSON value, or text if another program wrote something else.")
    masked: bool = Field(description="Whether secret values are masked.")
    size: int = Field(description="Bytes as JSON.")


@operation("GET", "/tasks/{task_id}/arguments", roles=[Role.VIEWER, Role.PRODUCER])
async def show_arguments(call: Call, given: OneTask) -> ArgumentsView:
    """Return the arguments of a task, also large ones. Secret values are masked."""
    record, data = await _arguments(call, given)
    shown = mask(data, (*record.secrets, *record.masked))
    return ArgumentsView(arguments=shown_data(shown), masked=shown != data and contains_mask(shown), size=len(shown))


@operation("POST", "/tasks/{task_id}/reveal", roles=[Role.ADMIN], changes=True)
async def reveal_arguments(call: Call, given: OneTask) -> ArgumentsView:
    """Return the arguments of a task with their secret values. The log names who has read them."""
    _, data = await _arguments(call, given)
    return ArgumentsView(arguments=shown_data(data), masked=False, size=len(data))


async def _arguments(call: Call, given: OneTask) -> tuple[Record, bytes]:
    """Return the record and the decrypted arguments. Raises `DecryptionError`, `LargeValueLost`."""
    handle = await call.find(given.task_id, given.queue)
    record = (await mask_defined(call.producer))(await handle.record())
    if record.args is None:
        return record, b"{}"
    at = (call.producer.gateway, handle.partition, handle.id)
    return record, await read_arguments(*at, record.task or "?", record.secrets, record.args)


# children


class TaskNode(ResultModel):
    """A task of a tree."""

    id: str
    how: Literal["root", "spawned", "successor"]
    task: str | None = None
    queue: str | None = None
    state: str | None = Field(default=None, description="None if there is no record of it any more.")
    enqueued_at: str | None = None
    finished_at: str | None = None
    error: str = ""
    children: list[TaskNode] = Field(default=[])
    left: int = Field(default=0, description="Further children, which are left out.")


class TaskTree(ResultModel):
    """A task with the tasks that it spawned and that continue it."""

    parent: str | None = Field(description="Id of the task that spawned it.")
    root: TaskNode
    read: int = Field(description="Tasks of the tree.")


@operation("GET", "/tasks/{task_id}/children", roles=[Role.VIEWER, Role.PRODUCER])
async def show_children(call: Call, given: OneTask) -> TaskTree:
    """Return the tree of the tasks that a task spawned, and the tasks that continue them.

    It has at most 200 tasks, and of each call the first 50.
    """
    handle = await call.find(given.task_id, given.queue)
    gateway = call.producer.gateway
    partitions = await queue_partitions(gateway, call.producer.namespace)
    tree = _Tree(gateway, partitions)
    root = await tree.read({handle.id: handle.partition}, {handle.id: "root"}, _MAX_DEPTH)
    return TaskTree(parent=await _parent(gateway, handle), root=root[0], read=tree.count)


@dataclass(slots=True)
class _Tree:
    """Reads a tree level by level, up to a number of tasks."""

    gateway: Gateway
    partitions: Sequence[Partition]
    count: int = 0

    async def read(
        self, places: Mapping[str, Partition], how: Mapping[str, Literal["root", "spawned", "successor"]], depth: int
    ) -> list[TaskNode]:
        """Return the nodes of tasks, in the order of `how`. places: partitions of those that have a record."""
        nodes: list[TaskNode] = []
        records = await self._records(places)
        for task_id, kind in how.items():
            self.count += 1
            record = records.get(task_id)
            if record is None:
                nodes.append(TaskNode(id=task_id, how=kind))
                continue
            children, left = await self._children(places[task_id], record, depth) if depth else ([], 0)
            nodes.append(_node(record, kind, children, left))
        return nodes

    async def _records(self, places: Mapping[str, Partition]) -> dict[str, Record]:
        found: dict[str, Record] = {}
        for partition in dict.fromkeys(places.values()):
            ids = [task_id for task_id, place in places.items() if place == partition]
            read = await read_tasks(self.gateway, partition, ids)
            found |= {record.id: record for record in read if record is not None}
        return found

    async def _children(self, partition: Partition, record: Record, depth: int) -> tuple[list[TaskNode], int]:
        """Return the nodes of the children of a task, and how many are left out."""
        how: dict[str, Literal["root", "spawned", "successor"]] = {}
        left = 0
        for event in reversed(await read_last_events(self.gateway, partition, record.id, MAX_EVENTS)):
            if event.type == "children_spawned" and isinstance(event.data, dict):
                first, count = event.data.get("child"), event.data.get("count", 1)
                if isinstance(first, str) and first and isinstance(count, int) and count > 0:
                    room = max(0, min(_MAX_OF_CALL, MAX_CHILDREN - self.count - len(how)))
                    ids = (first if number == 0 else f"{first}-{number}" for number in range(min(count, room)))
                    how |= dict.fromkeys(ids, "spawned")
                    left += count - min(count, room)
        if record.handed_to is not None:
            how[record.handed_to] = "successor"
        if not how:
            return [], left
        return await self.read(await self._find(list(how)), how, depth - 1), left

    async def _find(self, ids: Sequence[str]) -> dict[str, Partition]:
        """Return the partition of each task that has a record."""
        ask: list[tuple[str, Partition]] = [(task_id, place) for task_id in ids for place in self.partitions]
        commands: list[Command] = [("EXISTS", place.record(task_id)) for task_id, place in ask]
        found = await self.gateway.pipeline(commands)
        return {task_id: place for (task_id, place), exists in zip(ask, found, strict=True) if exists}


def _node(
    record: Record, how: Literal["root", "spawned", "successor"], children: list[TaskNode], left: int
) -> TaskNode:
    error = record.error or {}
    return TaskNode(
        id=record.id,
        how=how,
        task=record.task,
        queue=record.queue,
        state=str(record.state),
        enqueued_at=iso_time(record.enqueued_at),
        finished_at=iso_time(record.finished_at),
        error=record.problem or ": ".join(str(error[name]) for name in ("error", "message") if error.get(name)),
        children=children,
        left=left,
    )


# forks


class ForkTask(OneTask):
    """A point of a task, and the new task that starts from it."""

    at: int | str | None = Field(
        None,
        description="Event, by its number or the id of its entry in the log, or key of the step after which the new "
        "task starts. Default: the end of the log.",
    )
    before: StepKey | None = Field(None, description="Step before which it starts, in place of `at`.")
    edit: dict[str, JsonValue] = Field(
        {}, description="New values by name or path (`context.mood`): arguments of a function, state of an agent."
    )
    new_id: Annotated[str, AfterValidator(check_own_id)] | None = Field(
        None, description="Id of the new task. A second fork with this id returns the first one."
    )
    skip_unreadable: bool = Field(False, description="Skip events that are missing or cannot be read.")


class ForkView(ResultModel):
    """A task that was started from a point of another one."""

    id: str
    queue: str
    source: str
    event: int = Field(description="Number of the last event that it knows.")
    agent: str | None
    steps: int = Field(description="Recorded steps that it starts with.")
    within: str | None = Field(description="Step that was running at that point, and runs again.")


@operation("POST", "/tasks/{task_id}/fork", roles=[Role.OPERATOR], changes=True, status=201)
async def fork_task(call: Call, given: ForkTask) -> ForkView:
    """Start a new task from a point of another one.

    The new task has the same name, arguments and headers, and the steps that were recorded by then; an agent has the
    state of then. The other task does not change.
    """
    handle = await call.find(given.task_id, given.queue)
    if given.before is not None and given.at is not None:
        raise Problem(422, "invalid-input", "give either at or before")
    if given.edit and contains_mask(str(given.edit).encode("utf-8", "replace")):
        raise Problem(422, "invalid-input", "edit must not have masked values: leave secret arguments out to keep them")
    at = given.at if given.before is None else await _point_before(call.producer.gateway, handle, given.before)
    try:
        forked = await fork(
            call.producer,
            handle.id,
            queue=handle.partition.queue,
            at=at,
            edit=given.edit,
            new_id=given.new_id,
            lenient=given.skip_unreadable,
        )
    except BadEdit as error:
        raise Problem(422, "invalid-input", f"edit: {error}") from None
    except BadHistory as error:
        raise Problem(409, "bad-history", str(error)) from None
    return ForkView(
        id=forked.handle.id,
        queue=forked.handle.partition.queue,
        source=handle.id,
        event=forked.event,
        agent=forked.agent,
        steps=forked.steps,
        within=forked.within,
    )


async def _point_before(gateway: Gateway, handle: TaskHandle[Any], step: str) -> str | int:
    """Return the point before the first event of a step since the last fresh start: an entry of the log, or 0."""
    point: str | int | None = None
    last: str | int = 0
    async for event in walk_events(gateway, handle.partition, handle.id):
        if event.restarts:
            point = None
        elif point is None and event.step == step and event.type in ("step_started", "step_failed", *RECORDED):
            point = last
        last = event.id
    if point is None:
        raise Problem(404, "step-not-found", f"the log of task {handle.id} must have step {step!r}, it has none")
    return point


# doubts


class ResolveStep(OneTask):
    """A decision about a step in doubt: exactly one of `result`, `failed` and `run_again`."""

    step: StepKey
    result: JsonValue = Field(None, description="It happened: the step returns this value, which may be null.")
    failed: str | None = Field(None, min_length=1, description="It failed: the step raises an error with this text.")
    run_again: bool = Field(False, description="It did not happen: the step is called again.")
    replaces: Literal["none", "result", "failed", "run_again"] | None = Field(
        None,
        description="Decision that the caller has seen: if another one is stored, it is kept, and this one refused. "
        "Default: any is replaced.",
    )


class ResolvedView(ResultModel):
    """A decision about a step."""

    id: str
    step: str
    decision: Decision
    state: State = Field(description="State of the task. A dead letter reads the decision after a replay.")


@operation("POST", "/tasks/{task_id}/resolve", roles=[Role.APPROVER, Role.OPERATOR], changes=True)
async def resolve_step(call: Call, given: ResolveStep) -> ResolvedView:
    """Decide about a risky step that was cut off, and may have acted.

    The next run takes the decision in place of calling the step. A later decision replaces this one until a run has
    read it.
    """
    has_result = "result" in given.model_fields_set
    if has_result + (given.failed is not None) + given.run_again != 1:
        raise Problem(422, "invalid-input", "give exactly one of result, failed and run_again")
    handle = await call.find(given.task_id, given.queue)
    decision: Decision = "result" if has_result else "failed" if given.failed is not None else "run_again"
    text = to_json(given.result).decode() if has_result else given.failed or ""
    producer, found = call.producer, Resolution(decision, text, call.user.name)
    state = await store_decision(
        producer.gateway,
        handle.partition,
        handle.id,
        given.step,
        found,
        limit=producer.payload_limit,
        replaces=given.replaces,
    )
    return ResolvedView(id=handle.id, step=given.step, decision=decision, state=state)
