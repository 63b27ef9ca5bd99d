"""The list of tasks, with filters."""

from __future__ import annotations

from ....queues.records import State
from ...web.operations.tasks import TaskListInputs, TaskPageView, list_tasks
from ...web.problems import Problem
from ..page import Html, PageRequest, page


@page("/tasks", title="Tasks", nav="Tasks")
async def tasks(request: PageRequest) -> Html:
    """Show tasks, the newest first. A filter that is refused hides no form."""
    given, found, problem = request.inputs(TaskListInputs, limit=100), None, None
    try:
        found = await list_tasks(request.call, given)
    except Problem as refused:
        if refused.status not in (404, 422):
            raise
        problem = refused.detail
    states = [(str(state), str(state)) for state in State]
    return request.render(
        "tasks.html",
        200 if problem is None else 422,
        found=found,
        problem=problem,
        states=states,
        details=_details(found),
    )


def _details(found: TaskPageView | None) -> dict[str, str]:
    """Return by id what a row says of a task: its error, what it waits for, or its step."""
    details: dict[str, str] = {}
    for task in () if found is None else found.items:
        error = task.error if isinstance(task.error, dict) else {}
        text = ": ".join(str(error[name]) for name in ("error", "message") if error.get(name))
        failure = ": ".join(filter(None, (task.reason, text)))
        waits = f"waits for {task.waits}" if task.waits else ""
        details[task.id] = task.problem or failure or waits or task.step or ""
    return details
