"""Tasks: status, result and cancellation."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..operation import Call, Inputs, QueueText, ResultModel, TaskIdText, operation
from ..users import Role


class OneTask(Inputs):
    """A task by its id."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")


class TaskView(ResultModel):
    """A task as its record has it."""

    id: str
    queue: str
    state: str
    record: dict[str, Any] = Field(description="All fields of the record; secret values are masked.")


@operation("GET", "/tasks/{task_id}", roles=[Role.VIEWER, Role.PRODUCER])
async def show_task(call: Call, given: OneTask) -> TaskView:
    """Return a task."""
    record = await (await call.find(given.task_id, given.queue)).record()
    return TaskView(id=record.id, queue=record.queue, state=str(record.state), record=record.summary())


@operation("POST", "/tasks/{task_id}/cancel", roles=[Role.OPERATOR, Role.PRODUCER], changes=True)
async def cancel_task(call: Call, given: OneTask) -> TaskView:
    """Cancel a task.

    A running task stops at its next step.
    """
    handle = await call.find(given.task_id, given.queue)
    await handle.cancel()
    return await show_task(call, given)
