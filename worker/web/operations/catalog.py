"""The catalog: tasks that workers have published, with the schemas of their arguments and results."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ....queues.catalog import CatalogTask
from ..operation import Call, Inputs, QueueText, ResultModel, TaskNameText, operation
from ..users import Role


class CatalogInputs(Inputs):
    """Filters of the catalog."""

    task: TaskNameText | None = Field(None, description="Only tasks of this name.")
    app: str | None = Field(None, description="Only tasks of this app.")
    queue: QueueText | None = Field(None, description="Only tasks of this queue.")


class PublishedTask(ResultModel):
    """A task as its workers describe it."""

    task: str
    app: str
    queue: str
    version: int = Field(description="Version of the task's code.")
    description: str = Field(description="Docstring of the handler.")
    arguments: dict[str, Any] | None = Field(description="JSON schema of the arguments; null if it is not known.")
    result: dict[str, Any] | None = Field(description="JSON schema of the result; null if it is not known.")
    max_attempts: int | None
    max_crashes: int | None
    limits: list[str] = Field(description="Names of the limits that the task needs to run.")
    priority: str
    problem: str | None = Field(description="Why its schemas cannot be used; null if they can.")

    @classmethod
    def of(cls, task: CatalogTask) -> PublishedTask:
        """Return the view of a task. A schema that cannot be used is left out, with its problem."""
        return cls(
            task=task.name,
            app=task.app,
            queue=task.queue,
            version=task.task_version,
            description=task.description,
            arguments=dict(task.arguments) if isinstance(task.arguments, dict) else None,
            result=dict(task.result) if isinstance(task.result, dict) else None,
            max_attempts=task.max_attempts,
            max_crashes=task.max_crashes,
            limits=task.limit_names,
            priority=task.lane,
            problem=task.problem,
        )


class CatalogView(ResultModel):
    """The tasks that workers have published."""

    items: list[PublishedTask]
    problems: dict[str, str] = Field(description="What another program wrote in place of an entry, by its name.")


@operation("GET", "/catalog", roles=[Role.VIEWER, Role.PRODUCER])
async def list_catalog(call: Call, given: CatalogInputs) -> CatalogView:
    """List the tasks that can be enqueued.

    Workers publish their tasks when they start, with JSON schemas of the arguments.
    """
    catalog = await call.producer.catalog()
    return CatalogView(
        items=[
            PublishedTask.of(task)
            for task in catalog.tasks
            if given.task in (None, task.name) and given.app in (None, task.app) and given.queue in (None, task.queue)
        ],
        problems=catalog.problems if call.user.sees_all else {},
    )
