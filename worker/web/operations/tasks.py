"""Tasks: list, status, explanation, result, cancellation, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import anyio
from pydantic import Field
from pydantic_core import from_json

from ....queues.explanation.sentences import Explanation
from ....queues.handle import TaskHandle
from ....queues.inbox import InboxMessage, drop_message
from ....queues.inspection.timeline import count_tasks, page_tasks
from ....queues.records import Record, State
from ....queues.wording import iso_time
from ...defined_secrets import mask_defined
from ..filters import TaskFilterInputs, known_partitions
from ..operation import (
    Call,
    Inputs,
    QueueText,
    ResultModel,
    TaskIdText,
    header_input,
    operation,
)
from ..paging import PageInputs
from ..problems import Problem, refused_as
from ..users import Role

MAX_WAIT = 60.0
"""Seconds that one request waits for a result at most: proxies end longer ones."""


class OneTask(Inputs):
    """A task by its id."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")


class TaskView(ResultModel):
    """A task as its record has it. Times are ISO 8601, by Redis' clock; secret values are masked."""

    id: str
    queue: str
    partition: int
    lane: str = Field(description="Priority: high, normal, low or idle.")
    state: State
    task: str | None = Field(description="Name of the task; null if its record cannot be read.")
    app: str | None
    args: Any = Field(description="Arguments by name; a text if they cannot be read.")
    headers: dict[str, str]
    attempts: int
    crashes: int
    replays: int
    enqueued_at: str | None
    due_at: str | None
    finished_at: str | None
    ran_ms: int | None = Field(description="Milliseconds that its runs took.")
    worker: str | None
    started_at: str | None
    alive_at: str | None
    step: str | None = Field(description="Step that the run was in at its last heartbeat.")
    step_at: str | None
    reason: str | None = Field(description="Reason of the dead letter.")
    error: Any = Field(description="The last error: its class, message and traceback.")
    progress: Any = Field(None, description="The last progress that the handler reported.")
    waits: str | None = Field(None, description="What a parked task waits for.")
    handed_to: str | None = Field(None, description="Id of the task that continues it.")
    replaced_by: str | None = Field(None, description="Id of the task of its key that replaced it.")
    dropped: str | None = Field(None, description="Name of the limit that had no room for it.")
    key: str | None = None
    tenant: str | None = Field(None, description="Tenant that it belongs to.")
    tags: list[str] = Field(default=[])
    unused: int = Field(0, description="Messages that it has not read.")
    unused_answers: int = 0
    problem: str | None = Field(None, description="Why the record cannot be read.")

    @classmethod
    def of(cls, record: Record) -> TaskView:
        """Return the view of a record."""
        return cls(**record.summary())


class TaskListInputs(TaskFilterInputs, PageInputs):
    """Page of the tasks that match."""


class UnreadableTask(ResultModel):
    """A task that a filter could not look into."""

    id: str
    queue: str
    problem: str


class TaskPageView(ResultModel):
    """A page of tasks, the newest first."""

    items: list[TaskView]
    next: str | None = Field(description="Cursor of the next page; null at the end.")
    read: int = Field(description="Tasks that this page has read: with a filter, more than it shows.")
    of: int = Field(
        description="Tasks that there are, of the queue or of all; some may have expired. For a tenant: `read`."
    )
    unreadable: list[UnreadableTask] = Field(
        description="Tasks that are left out since the arguments, which the filter has conditions on, cannot be read."
    )


@operation("GET", "/tasks", roles=[Role.VIEWER, Role.PRODUCER])
async def list_tasks(call: Call, given: TaskListInputs) -> TaskPageView:
    """List tasks, the newest first.

    A page reads at most 5,000 tasks, so one with a filter that matches few may have no items and a `next`: `read` and
    `of` say how far it came. Tasks that are enqueued meanwhile do not move the pages. A producer gets the tasks that it
    has enqueued.
    """
    producer = call.producer
    wanted = await given.filter(call)
    await known_partitions(call, given.queue)
    with refused_as("cursor"):
        page = await page_tasks(
            producer.gateway,
            producer.namespace,
            wanted,
            queue=given.queue,
            limit=given.limit,
            cursor=given.cursor,
        )
    masked, tenanted = await mask_defined(producer), producer.namespace.tenant is not None
    return TaskPageView(
        items=[TaskView.of(masked(record)) for record in page.tasks],
        next=page.cursor,
        read=page.read,
        of=page.read if tenanted else await count_tasks(producer.gateway, producer.namespace, given.queue),
        unreadable=[
            UnreadableTask(id=record.id, queue=record.queue, problem=problem) for record, problem in page.unreadable
        ],
    )


@operation("GET", "/tasks/{task_id}", roles=[Role.VIEWER, Role.PRODUCER])
async def show_task(call: Call, given: OneTask) -> TaskView:
    """Return a task.

    An id whose record has expired is answered with 410, as long as it is known that there was a task; one that is not
    known with 404.
    """
    record = await (await call.find(given.task_id, given.queue)).record()
    return TaskView.of((await mask_defined(call.producer))(record))


class DoubtView(ResultModel):
    """A risky step that was cut off, and may have acted."""

    step: str
    arguments: Any
    idempotency_key: str
    decision: str | None
    by: str | None


class ExplanationView(ResultModel):
    """Why a task is in its state, and what happens next."""

    id: str
    task: str | None
    app: str | None
    queue: str
    state: State
    cause: str = Field(description="Word for programs, such as `no_worker`.")
    sentence: str = Field(description="The explanation.")
    remedy: str | None = Field(description="What an operator can do; null if nothing is to be done.")
    now: str | None
    since: str | None = Field(description="Start of the state.")
    until: str | None = Field(description="Time of the next event, as far as it is known.")
    worker: str | None
    heard_at: str | None
    step: str | None
    step_at: str | None
    steps: int = Field(description="Recorded steps.")
    failed_step: str | None
    attempts: int
    max_attempts: int | None
    crashes: int
    max_crashes: int | None
    waits_for: str | None
    waits_on: str | None
    why: str | None
    successor: str | None
    doubts: list[DoubtView]

    @classmethod
    def of(cls, explained: Explanation) -> ExplanationView:
        """Return the view of an explanation."""
        return cls(**explained.summary())


@operation("GET", "/tasks/{task_id}/why", roles=[Role.VIEWER, Role.PRODUCER])
async def explain_task(call: Call, given: OneTask) -> ExplanationView:
    """Explain why a task is in its state, and what happens next."""
    return ExplanationView.of(await (await call.find(given.task_id, given.queue)).explain())


class ResultInputs(OneTask):
    """A task, and how long to wait for its result."""

    wait: float = Field(
        0, ge=0, le=MAX_WAIT, description="Seconds to wait for the end of the task. Default: one look at it."
    )


class TaskResult(ResultModel):
    """The result of a task, or its state if it has not ended."""

    id: str = Field(description="Id of the task; of its last successor, if another task continues it.")
    state: State
    ended: bool = Field(description="Whether it has ended; if not, ask again.")
    result: Any = Field(default=None, description="What the handler returned.")


@operation("GET", "/tasks/{task_id}/result", roles=[Role.VIEWER, Role.PRODUCER])
async def task_result(call: Call, given: ResultInputs) -> TaskResult:
    """Return the result of a task, and wait for it for up to 60 seconds.

    If another task continues it, the result is that one's. A task that has not ended in time is answered with 200,
    `ended` false and its state: ask again. A dead letter and a cancelled task are problems with the status 409 and the
    source `task`, and the member `task` has the error of the handler.
    """
    handle = await call.find(given.task_id, given.queue)
    data: bytes | None = None
    last = await _last(handle)
    record = await last.record()
    if record.state.terminal:
        data = await last.read_result(0)
    elif given.wait:
        with anyio.move_on_after(given.wait):
            data = await last.read_result()
        last = await _last(last)
        record = await last.record()
    if data is None:
        return TaskResult(id=last.id, state=record.state, ended=False)
    try:
        result = from_json(data)
    except ValueError as error:
        raise Problem(
            500, "unreadable-result", f"could not read the result of task {last.id}: {error}", source="redis"
        ) from None
    return TaskResult(id=last.id, state=State.SUCCEEDED, ended=True, result=result)


async def _last(handle: TaskHandle[Any]) -> TaskHandle[Any]:
    """Return the task that continues a task, and that no other one continues."""
    while (following := await handle.successor()) is not None:
        handle = following
    return handle


@operation("POST", "/tasks/{task_id}/cancel", roles=[Role.OPERATOR, Role.PRODUCER], changes=True)
async def cancel_task(call: Call, given: OneTask) -> TaskView:
    """Cancel a task.

    A task that no worker runs is cancelled at once. A running one stops at its next step: its state is still `running`
    in the response. A repeated request has no further effect.
    """
    handle = await call.find(given.task_id, given.queue)
    state = await handle.cancel()
    if state.terminal and state is not State.CANCELLED:
        raise Problem(409, "task-ended", f"could not cancel task {handle.id}: it is {state}")
    return await show_task(call, given)


class MessageInputs(OneTask):
    """A message to a task."""

    content: Any = Field(description="JSON data.")
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)] | None = header_input(
        "Idempotency-Key", None, "Id of the message: a request that is repeated with the same key stores one."
    )


class MessageReceipt(ResultModel):
    """Receipt of a message."""

    task_id: str = Field(description="Task that has it: the last one that continues the task.")
    number: int = Field(description="Number of the message in its inbox.")
    state: State
    waits_on: str | None = Field(description="Sender that the task waits for, if it is another one.")


@operation("POST", "/tasks/{task_id}/messages", roles=[Role.OPERATOR, Role.PRODUCER], changes=True, status=201)
async def send_message(call: Call, given: MessageInputs) -> MessageReceipt:
    """Send a message to a task, which reads it with `ctx.inbox()`.

    Its sender is the user. A task that waits for a message wakes up.
    """
    handle = await call.find(given.task_id, given.queue)
    with refused_as("content"):
        sent = await handle.send(given.content, sender=call.user.name, message_id=given.idempotency_key)
    return MessageReceipt(task_id=sent.task_id, number=sent.number, state=sent.state, waits_on=sent.waits_on)


class PendingMessage(ResultModel):
    """A message that a task has not read yet."""

    number: int
    id: str
    sender: str
    content: Any
    at: str | None
    kind: Literal["", "correction"] | str = Field(description="Empty for a message that the handler reads.")
    problem: str | None = Field(description="Why it cannot be read; null if it can.")

    @classmethod
    def of(cls, message: InboxMessage) -> PendingMessage:
        """Return the view of a message."""
        return cls(
            number=message.number,
            id=message.id,
            sender=message.sender,
            content=message.content,
            at=iso_time(message.at or None),
            kind=message.kind,
            problem=message.problem,
        )


class InboxView(ResultModel):
    """The messages that a task has not read yet, the oldest first."""

    items: Sequence[PendingMessage]


@operation("GET", "/tasks/{task_id}/messages", roles=[Role.VIEWER, Role.PRODUCER])
async def list_messages(call: Call, given: OneTask) -> InboxView:
    """List the messages that a task has not read yet."""
    handle = await call.find(given.task_id, given.queue)
    return InboxView(items=[PendingMessage.of(message) for message in await handle.pending_messages()])


class OneMessage(OneTask):
    """A message in the inbox of a task."""

    number: int = Field(ge=1, le=2**53, description="Number of the message.")


@operation("DELETE", "/tasks/{task_id}/messages/{number}", roles=[Role.OPERATOR], changes=True, status=204)
async def remove_message(call: Call, given: OneMessage) -> None:
    """Remove a message from the inbox of a task, which has not read it."""
    handle = await call.find(given.task_id, given.queue)
    if not await drop_message(call.producer.gateway, handle.partition, handle.id, given.number):
        raise Problem(
            404,
            "message-not-found",
            f"there is no message {given.number} in the inbox of task {handle.id}: it was read, removed, or never sent",
        )
