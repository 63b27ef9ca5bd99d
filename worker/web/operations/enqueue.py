"""Enqueue by catalog: tasks that workers have published, checked by the schemas of their arguments.

The header `enqueued-by` of a task has the name of the user. A producer reads and cancels tasks of its own name only.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, SecretStr

from ....queues.defaults import MAX_SECONDS
from ....queues.envelope import MAX_KEY_LENGTH, MAX_TAG_LENGTH, MAX_TAGS, TASK_ID_PATTERN
from ....queues.errors import PerdureError, QueueFull, TaskExists, TaskNotFound
from ....queues.handle import TaskHandle
from ....queues.keys import NAME_PATTERN
from ....queues.lanes import Priority
from ....queues.producer import PreparedTask
from ....queues.security.secret_arguments import DEEPEST
from ..operation import ENQUEUED_BY, Call, Inputs, ResultModel, TaskNameText, header_input, operation
from ..problems import Problem, ProblemError, ProblemView, problem_of, refused_as
from ..users import Role

MAX_BATCH: Final = 1000
"""Tasks of one request."""

_MAX_HEADERS: Final = 64
_MAX_HEADER: Final = 4096

_RESERVED_HEADERS: Final = frozenset({ENQUEUED_BY, "session"})
"""Headers that have a meaning for Perdure itself."""

_TAKEN_LATER: Final = re.compile(r"^key-[0-9a-f]{40}|-[0-9]{8}T[0-9]{6}Z")
"""Ids of idempotency keys (`_id_of_key`), and of the tasks of schedules (`task_id_of`)."""

_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Duration = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
_HeaderName = Annotated[str, Field(min_length=1, max_length=128)]
_HeaderValue = Annotated[str, Field(max_length=_MAX_HEADER)]
_Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_LENGTH)]
_Cost = Annotated[int, Field(ge=0, le=2**53)]
_Path = Annotated[str, Field(min_length=1, max_length=1024)]

_IdempotencyKey = Annotated[str, Field(min_length=1, max_length=256)]


class TaskInputs(Inputs):
    """A task to enqueue."""

    task: TaskNameText
    args: dict[str, Any] = Field({}, description="Arguments by name; the schema in the catalog says which.")
    app: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="App whose workers run the task, if several have one of this name.",
    )
    task_id: Annotated[str, Field(pattern=TASK_ID_PATTERN)] | None = Field(
        None,
        description="Id of the task. A task that is stored under it already, with the same name and arguments, is left "
        "as it is.",
    )
    tenant: str | None = Field(
        None,
        pattern=NAME_PATTERN,
        description="Tenant that the task belongs to, a part of its id. Default: that of the user.",
    )
    key: str | None = Field(
        None,
        max_length=MAX_KEY_LENGTH,
        description="Ordering key: tasks of one key start in the order in which they were enqueued.",
    )
    delay: _Seconds = Field(0, description="Seconds until the task may run.")
    expires: _Duration | None = Field(
        None, description="Seconds by which a worker must have started the task, or it becomes a dead letter."
    )
    timeout: _Duration | None = Field(None, description="Seconds that one attempt may take.")
    max_attempts: int | None = Field(None, ge=1, le=1_000_000, description="Attempts before it becomes a dead letter.")
    result_ttl: _Duration | None = Field(None, description="Seconds for which the outcome is kept.")
    headers: dict[_HeaderName, _HeaderValue] = Field(
        {}, max_length=_MAX_HEADERS, description="Texts that travel with the task, such as those of tracing."
    )
    tags: list[_Tag] = Field([], max_length=MAX_TAGS, description="Words by which lists find the task.")
    priority: Priority | None = Field(None, description="Priority in the queue. Default: that of the catalog.")
    idle: bool | None = Field(None, description="Whether the task runs on spare slots only. Default: as the catalog.")
    costs: dict[str, _Cost] = Field({}, max_length=16, description="What the task costs, by names of its limits.")
    secrets: list[_Path] = Field(
        [], max_length=64, description="Arguments that are never shown; `a.b` for a member. They must be texts."
    )


class EnqueueInputs(TaskInputs):
    """A task to enqueue, with an idempotency key."""

    idempotency_key: _IdempotencyKey | None = header_input(
        "Idempotency-Key",
        None,
        "A request that is repeated with the same key stores one task, as long as the outcome of the task is kept.",
    )


class EnqueuedTask(ResultModel):
    """A task that is stored."""

    id: str
    queue: str
    existed: bool = Field(description="Whether it was stored before, under this id or its unique key.")


@operation("POST", "/tasks", roles=[Role.PRODUCER], status=201)
async def enqueue_task(call: Call, given: EnqueueInputs) -> EnqueuedTask:
    """Enqueue a task.

    Workers publish which tasks there are, their queues and the schemas of their arguments (`GET /catalog`). When the
    response arrives, Redis has stored the task. A request that may have failed on the way can be repeated with the same
    `Idempotency-Key`, or the same `task_id`: one task is stored, and both responses have its id.

    A full queue is refused with 429, and Redis out of reach with 503; `Retry-After` says when to try again.
    """
    if given.idempotency_key is not None and given.task_id is not None:
        raise Problem(
            422, "invalid-input", "Idempotency-Key and task_id must not be given together: each names the task"
        )
    own_id = _chosen_id(call, given)
    if given.idempotency_key is not None:
        own_id = _id_of_key(call.user.name, given.idempotency_key)
    prepared = await _prepare(call, given, own_id)
    try:
        with refused_as("delay"):
            handle: TaskHandle[Any] = await call.producer.send_one(
                prepared.message,
                queue=prepared.queue,
                delay=given.delay,
                unique=prepared.unique,
                limit=prepared.limit,
            )
    except TaskExists as error:
        raise await _taken(call, error, error.task_id) from None
    if handle.existed and handle.id == prepared.message.id:
        await _check_own(call, handle)
    return EnqueuedTask(id=handle.id, queue=prepared.queue, existed=handle.existed)


def _chosen_id(call: Call, given: TaskInputs) -> str | None:
    """Return the id that the user has chosen for a task. Raises `Problem`.

    A producer must not take an id before the task that has it: of a planned time of a schedule, which would not run
    then, or of an idempotency key of another user.
    """
    task_id = given.task_id
    if task_id is not None and not call.user.sees_all and _TAKEN_LATER.search(task_id):
        raise Problem(
            422,
            "invalid-input",
            f"task_id must not look like the id of a scheduled task or of an idempotency key, got {task_id!r}",
        )
    return task_id


def _id_of_key(user: str, key: str) -> str:
    """Return the id of the task of an idempotency key. Users have keys of their own."""
    digest = hashlib.blake2b(f"{len(user)}:{user}{key}".encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    return f"key-{digest}"


async def _prepare(call: Call, given: TaskInputs, own_id: str | None) -> PreparedTask:
    """Check a task by the catalog and encode it. Raises `Problem`, `CatalogError`, `PayloadTooLarge`."""
    if taken := sorted(_RESERVED_HEADERS & {name.lower() for name in given.headers}):
        raise Problem(422, "invalid-input", f"headers must not have {taken[0]!r}, which the server sets")
    with refused_as("task"):
        prepared = await call.producer.prepare(
            given.task,
            _with_secrets(given.args, given.secrets),
            app=given.app,
            key=given.key,
            task_id=own_id,
            tenant=given.tenant,
            headers={**given.headers, ENQUEUED_BY: call.user.name},
            timeout=given.timeout,
            max_attempts=given.max_attempts,
            result_ttl=given.result_ttl,
            expires=given.expires,
            tags=given.tags,
            costs=given.costs or None,
            priority=given.priority,
            idle=given.idle,
        )
        prepared.message.check(call.producer.payload_limit, call.producer.large_limit)
        if prepared.unique is not None:
            prepared.unique.digest(prepared.queue, prepared.message)
            prepared.unique.check_delay(given.delay)
    if prepared.limit is not None and prepared.limit.wait:  # a request does not wait for room: its caller tries again
        prepared = prepared._replace(limit=replace(prepared.limit, wait=0.0))
    return prepared


def _with_secrets(args: Mapping[str, Any], secrets: Sequence[str]) -> dict[str, Any]:
    """Return arguments in which those that are secret are marked. Raises `Problem`."""
    found = dict(args)
    for path in secrets:
        *parents, name = path.split(".")
        place: Any = found
        for parent in parents[:DEEPEST]:
            inner = place.get(parent) if isinstance(place, dict) else None
            if not isinstance(inner, dict):
                place = None
                break
            place[parent] = place = dict(inner)
        value = place.get(name) if isinstance(place, dict) else None
        if len(parents) >= DEEPEST or not isinstance(value, str | SecretStr):
            raise Problem(422, "invalid-input", f"secrets: {path!r} must be the name of an argument that is a text")
        place[name] = value if isinstance(value, SecretStr) else SecretStr(value)
    return found


async def _taken(call: Call, error: TaskExists, task_id: str) -> Problem:
    """Return the problem of an id that another task has; it describes that task if the user may read it."""
    try:
        await call.find(task_id)
    except (Problem, TaskNotFound):
        return _foreign_id(task_id)
    return problem_of(error)


def _foreign_id(task_id: str) -> Problem:
    return Problem(409, "task-exists", f"id {task_id!r} must be free, but another task has it: choose another one")


async def _check_own(call: Call, handle: TaskHandle[Any]) -> None:
    """Refuse the id of a task that the user may not read."""
    if not call.user.sees_all:
        try:
            record = await handle.record()
        except TaskNotFound:  # it has expired since
            return
        if record.headers.get(ENQUEUED_BY) != call.user.name:
            raise Problem(
                409, "task-exists", f"id {handle.id!r} must be free, but another task has it: choose another one"
            )


class BatchInputs(Inputs):
    """Tasks to enqueue."""

    tasks: list[TaskInputs] = Field(min_length=1, max_length=MAX_BATCH)
    idempotency_key: _IdempotencyKey | None = header_input(
        "Idempotency-Key",
        None,
        "A request that is repeated with the same key and the same tasks stores each task once.",
    )


class BatchItem(ResultModel):
    """Outcome of one task of a batch, at its place."""

    id: str | None = Field(description="Id of the task; null if it is not stored.")
    queue: str
    existed: bool = False
    problem: ProblemView | None = Field(default=None, description="Why it is not stored.")


class BatchResult(ResultModel):
    """Outcome of a batch, in the order of its tasks."""

    items: list[BatchItem]
    stored: int = Field(description="Tasks that are stored now, those that existed included.")
    refused: int = Field(description="Tasks that are not stored; each has its problem.")


@operation("POST", "/tasks/batch", roles=[Role.PRODUCER])
async def enqueue_batch(call: Call, given: BatchInputs) -> BatchResult:
    """Enqueue up to 1,000 tasks.

    All are checked before the first is stored: if one is not valid, the batch is refused with the number of the task.
    A batch is no transaction. A task that finds its queue full, or its id taken, has a `problem` in the result, and the
    others are stored. With an `Idempotency-Key`, a batch that was cut off is repeated as it is.
    """
    prepared = [await _prepare_item(call, place, task, given.idempotency_key) for place, task in enumerate(given.tasks)]
    own_ids = [task.message.id for task in prepared if task.message.own_id]
    if len(set(own_ids)) < len(own_ids):
        twice = next(task_id for task_id in own_ids if own_ids.count(task_id) > 1)
        raise Problem(422, "invalid-input", f"tasks: id {twice!r} must occur once")
    items: list[BatchItem | None] = [None] * len(prepared)
    for places in _together(prepared, [task.delay for task in given.tasks]):
        outcome = await _send_group(call, [prepared[place] for place in places], given.tasks[places[0]].delay)
        for place, item in zip(places, outcome, strict=True):
            items[place] = item
    found = [item for item in items if item is not None]
    refused = sum(item.problem is not None for item in found)
    return BatchResult(items=found, stored=len(found) - refused, refused=refused)


async def _prepare_item(call: Call, place: int, task: TaskInputs, key: str | None) -> PreparedTask:
    try:
        own_id = _chosen_id(call, task)
        if own_id is None and key is not None:
            own_id = f"{_id_of_key(call.user.name, key)}-{place}"
        return await _prepare(call, task, own_id)
    except (Problem, PerdureError) as error:
        problem = problem_of(error) if isinstance(error, PerdureError) else error
        where = f"tasks.{place}"
        fields = [ProblemError(where=where, message=problem.detail)]
        raise Problem(
            problem.status,
            problem.kind,
            f"{where}: {problem.detail}; no task was stored",
            source=problem.source,
            fields=fields,
            headers=problem.headers,
        ) from error


T = TypeVar("T")


def _together(prepared: Sequence[PreparedTask], delays: Sequence[float]) -> list[list[int]]:
    """Return the places of tasks that one call can send: of one queue, delay, rule for unique tasks, and limit."""
    groups: list[tuple[tuple[Any, ...], list[int]]] = []
    for place, (task, delay) in enumerate(zip(prepared, delays, strict=True)):
        shared = (task.queue, delay, task.unique, task.limit)
        group = next((places for known, places in groups if known == shared), None)
        if group is None:
            group = []
            groups.append((shared, group))
        group.append(place)
    return [places for _, places in groups]


async def _send_group(call: Call, tasks: Sequence[PreparedTask], delay: float) -> list[BatchItem]:
    """Store tasks that go together; return the outcome of each, in order."""
    if tasks[0].unique is not None:  # the tasks that are stored may have other ids
        return list(await asyncio.gather(*(_send_unique(call, task, delay) for task in tasks)))
    stored: dict[str, TaskHandle[Any]] = {}
    problems: dict[str, ProblemView] = {}
    left = list(tasks)
    while left:
        try:
            handles: AsyncGenerator[TaskHandle[Any]] = call.producer.send_stream(
                [task.message for task in left], queue=tasks[0].queue, delay=delay, limit=tasks[0].limit
            )
            async with aclosing(handles):
                async for handle in handles:
                    stored[handle.id] = handle
        except QueueFull as error:
            view = problem_of(error).view()
            problems |= {task.message.id: view for task in left if task.message.id not in stored}
        except TaskExists as error:  # the tasks of later scripts are not stored yet
            for task_id in error.task_ids:
                problems[task_id] = (await _taken(call, TaskExists(task_id, "as another task"), task_id)).view()
        left = [task for task in left if task.message.id not in stored and task.message.id not in problems]
    return [await _item(call, task, stored.get(task.message.id), problems.get(task.message.id)) for task in tasks]


async def _send_unique(call: Call, task: PreparedTask, delay: float) -> BatchItem:
    try:
        handle: TaskHandle[Any] = await call.producer.send_one(
            task.message, queue=task.queue, delay=delay, unique=task.unique, limit=task.limit
        )
    except QueueFull as error:
        return await _item(call, task, None, problem_of(error).view())
    except TaskExists as error:
        return await _item(call, task, None, (await _taken(call, error, error.task_id)).view())
    return await _item(call, task, handle, None)


async def _item(
    call: Call, task: PreparedTask, handle: TaskHandle[Any] | None, problem: ProblemView | None
) -> BatchItem:
    if problem is None and handle is not None and handle.existed and handle.id == task.message.id:
        try:
            await _check_own(call, handle)
        except Problem as refused:
            problem = refused.view()
    if handle is None or problem is not None:
        return BatchItem(id=None, queue=task.queue, problem=problem)
    return BatchItem(id=handle.id, queue=task.queue, existed=handle.existed)
