"""The page of a task: overview, steps, children and events, each a tab. Other modules add tabs and parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...web.operations.task_details import (
    LogInputs,
    OneStep,
    PhaseView,
    StepSpanView,
    TaskDetails,
    TaskNode,
    list_events,
    show_arguments,
    show_children,
    show_step,
    show_task_phases,
)
from ...web.operations.tasks import ResultInputs, list_messages
from ...web.operations.tasks import task_result as wait_for_result
from ..page import Html, PageRequest, page
from ..rendering import milliseconds
from ..task_tabs import PARTS, one_task, render_task, task_tab

_MAX_STEPS: Final = 200
"""Steps of the chart, the latest."""

MAX_SHOWN: Final = 2_000_000
"""Characters of a value on a page of its own."""

_NARROWEST: Final = 0.3
"""Percent of the width of a bar at least, so that a short step is seen."""


@task_tab("/tasks/{task_id}", "Task", order=0)
async def task(request: PageRequest, shown: TaskDetails) -> Html:
    """Show why a task is where it is, and what comes next; its arguments, result and error."""
    parts = []
    for template, read in PARTS:
        values = await read(request, shown)
        if values is not None:
            parts.append((template, values))
    messages = (await list_messages(request.call, one_task(request))).items
    return render_task(request, "task_overview.html", shown, parts=parts, messages=messages)


@dataclass(frozen=True, slots=True)
class ChartBar:
    """A bar of a chart. x, width: percent. label: what a screen reader says. kind: class of its colour."""

    x: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps times to percent of the width of a chart."""

    start: int
    end: int

    def bar(self, span: PhaseView | StepSpanView, kind: str, label: str) -> ChartBar:
        """Return the bar of a span."""
        first = self.percent(milliseconds(span.start))
        last = self.percent(self.end if span.end is None else milliseconds(span.end))
        width = max(_NARROWEST, last - first)
        return ChartBar(round(min(first, 100 - width), 3), round(width, 3), kind, label)

    def percent(self, at: int | None) -> float:
        """Return the place of a time, from 0 to 100."""
        length = max(1, self.end - self.start)
        return min(100.0, max(0.0, ((at or self.start) - self.start) / length * 100))


@task_tab("/tasks/{task_id}/steps", "Steps", order=10)
async def task_steps(request: PageRequest, shown: TaskDetails) -> Html:
    """Show when a task waited for a worker, was parked and ran, and its steps as a chart."""
    found = await show_task_phases(request.call, one_task(request))
    start, end = milliseconds(found.start) or 0, milliseconds(found.end) or 0
    scale = _Scale(start, end)
    steps = found.steps[-_MAX_STEPS:]
    return render_task(
        request,
        "task_steps.html",
        shown,
        found=found,
        total=(end - start) / 1000,
        phases=[(phase, scale.bar(phase, phase.kind, phase.kind), _took(phase, end)) for phase in found.phases],
        marks=[(mark, round(scale.percent(milliseconds(mark.at)), 3)) for mark in found.marks],
        steps=[
            (step, scale.bar(step, step.outcome.replace(" ", "-"), step.outcome), _took(step, end)) for step in steps
        ],
        left=len(found.steps) - len(steps),
    )


def _took(span: PhaseView | StepSpanView, end: int) -> float:
    """Return the seconds of a span. end: that of the chart, in milliseconds."""
    last = end if span.end is None else milliseconds(span.end) or 0
    return (last - (milliseconds(span.start) or 0)) / 1000


@task_tab("/tasks/{task_id}/children", "Children", order=20)
async def task_children(request: PageRequest, shown: TaskDetails) -> Html:
    """Show the tree of the tasks that a task spawned, and that continue it."""
    found = await show_children(request.call, one_task(request))
    return render_task(request, "task_children.html", shown, found=found, rows=_flat(found.root.children, 0))


def _flat(nodes: Sequence[TaskNode], depth: int) -> list[tuple[int, TaskNode]]:
    """Return the nodes of a tree with their depth, each before its children."""
    return [row for node in nodes for row in [(depth, node), *_flat(node.children, depth + 1)]]


@task_tab("/tasks/{task_id}/events", "Events", order=30)
async def task_events(request: PageRequest, shown: TaskDetails) -> Html:
    """Show the event log of a task, the newest first."""
    found = await list_events(request.call, request.inputs(LogInputs, **one_task(request).model_dump(), limit=100))
    return render_task(request, "task_events.html", shown, found=found)


@page("/tasks/{task_id}/step", title="Step", nav="Tasks", live=False)
async def task_step(request: PageRequest) -> Html:
    """Show the arguments and the whole result of a step."""
    given = one_task(request).model_dump()
    found = await show_step(request.call, OneStep(**given, key=request.query.get("key", [""])[-1]))
    return request.render("task_step.html", found=found, task_id=request.path["task_id"], most=MAX_SHOWN)


@page("/tasks/{task_id}/arguments", title="Arguments", nav="Tasks", live=False)
async def task_arguments(request: PageRequest) -> Html:
    """Show all arguments of a task, also large ones."""
    found: Any = await show_arguments(request.call, one_task(request))
    return request.render("task_arguments.html", found=found, task_id=request.path["task_id"], most=MAX_SHOWN)


@page("/tasks/{task_id}/result", title="Result", nav="Tasks", live=False)
async def task_result(request: PageRequest) -> Html:
    """Show the whole result of a task, also a large one; that of its last successor, if another task continues it."""
    found = await wait_for_result(request.call, ResultInputs(**one_task(request).model_dump()))
    return request.render("task_result.html", found=found, task_id=request.path["task_id"], most=MAX_SHOWN)
