"""Tabs and parts of the page of a task, which further modules of pages add.

A tab is a page of its own under `/tasks/{task_id}`, whose template extends `task.html` and fills its block `tab`:

    @task_tab("/tasks/{task_id}/plan", "Plan", order=50, when=lambda shown: shown.agent)
    async def task_plan(request: PageRequest, shown: TaskDetails) -> Html:
        found = await show_plan(request.call, one_task(request))
        return render_task(request, "task_plan.html", shown, found=found)

A part is a template that the first tab includes, with the values that its function returns; None leaves it out:

    @task_part("task_questions.html")
    async def open_questions(request: PageRequest, shown: TaskDetails) -> Mapping[str, Any] | None: ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..web.operations.task_details import TaskDetails, show_task_details
from ..web.operations.tasks import OneTask
from .page import Html, PageRequest, page

ShowTab: TypeAlias = Callable[[PageRequest, TaskDetails], Awaitable[Html]]
ReadPart: TypeAlias = Callable[[PageRequest, TaskDetails], Awaitable[Mapping[str, Any] | None]]


@dataclass(frozen=True, slots=True)
class TaskTab:
    """A tab of the page of a task.

    Attributes:
        name: Name of its page.
        order: Position among the tabs.
        when: Returns whether a task has it.
    """

    name: str
    title: str
    order: int
    when: Callable[[TaskDetails], bool]


TABS: list[TaskTab] = []
PARTS: list[tuple[str, ReadPart]] = []


def task_tab(
    path: str, title: str, *, order: int, when: Callable[[TaskDetails], bool] = lambda _: True
) -> Callable[[ShowTab], ShowTab]:
    """Make a tab of an async function. See the module."""

    def make(show: ShowTab) -> ShowTab:
        async def run(request: PageRequest) -> Html:
            return await show(request, await show_task_details(request.call, one_task(request)))

        run.__name__ = show.__name__
        page(path, title=title, nav="Tasks")(run)
        TABS.append(TaskTab(show.__name__, title, order, when))
        return show

    return make


def task_part(template: str) -> Callable[[ReadPart], ReadPart]:
    """Make a part of the first tab of an async function. See the module."""

    def make(read: ReadPart) -> ReadPart:
        PARTS.append((template, read))
        return read

    return make


def one_task(request: PageRequest) -> OneTask:
    """Return the task that the path names, and its queue if the query has one."""
    return OneTask(task_id=request.path["task_id"], queue=request.query.get("queue", [None])[-1])


def render_task(request: PageRequest, template: str, shown: TaskDetails, /, **values: Any) -> Html:
    """Return a tab of the page of a task."""
    task_id = request.path["task_id"]
    query = {"queue": request.query.get("queue", [None])[-1]}
    tabs = [
        (tab.title, request.url(tab.name, query, task_id=task_id), tab.name == request.page.name)
        for tab in sorted(TABS, key=lambda tab: tab.order)
        if tab.when(shown)
    ]
    return request.render(
        template, shown=shown, task=shown.task, explanation=shown.explanation, tab_links=tabs, **values
    )
