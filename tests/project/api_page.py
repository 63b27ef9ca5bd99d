"""The reference page of the Python API, made from signatures and docstrings.

`python -m tests.project.api_page` writes docs/reference/api.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import perdure
from perdure.worker.durable.steps.current import Step
from perdure.worker.task import Task

from tests.support.paths import ROOT

__all__ = ["PAGE", "api_page"]

PAGE: Final = ROOT / "docs" / "reference" / "api.md"

_TITLE: Final = """# Python API

The classes that programs use, with their public members. `python -m tests.project.api_page` writes this page from
signatures and docstrings. Calls with the suffix `_sync` block the calling thread, and are not listed. `SyncContext`
has the members of `Context` without `await`, and `app.sync()` those of `Producer`. Errors have
[a page of their own](errors.md), settings [another](settings.md).
"""

_CLASSES: Final[dict[str, type[Any]]] = {
    "app": perdure.App,
    "task": Task,
    "ctx": perdure.Context,
    "step": Step,
    "handle": perdure.TaskHandle,
    "producer": perdure.Producer,
    "worker": perdure.Worker,
    "retry": perdure.Retry,
    "agent": perdure.Agent,
    "state": perdure.AgentState,
    "plan_step": perdure.PlanStep,
    "session": perdure.Session,
    "turn": perdure.TurnHandle,
    "builder": perdure.ContextBuilder,
    "middleware": perdure.Middleware,
}
"""Classes in the order of the page, by the name of an instance."""

_INTERNAL: Final = frozenset(
    ("app.encryptor", "app.enqueue_chain", "plan_step.model_post_init", "task.decode", "worker.check_quarantine")
)
"""Public members that programs do not use, in addition to those of a producer that take encoded tasks."""

_UNDESCRIBED: Final = {"ctx.task_id": "The task's id.", "ctx.queue": "The task's queue."}

_HOW: Final = {
    Task: "What `@app.task` returns.",
    Step: "What `current_step()` returns in the function of a step.",
    perdure.TaskHandle: "What `enqueue` and `producer.find` return; `handle.id` is the task's id.",
    perdure.TurnHandle: "What `session.send` returns.",
}


def api_page() -> str:
    """Return the page."""
    parts = [_TITLE]
    for instance, kind in _CLASSES.items():
        parts.append(f"## {kind.__name__}\n")
        if kind in _HOW:
            parts.append(f"{_HOW[kind]}\n")
        parts.append(f"```text\n{_without_examples(kind)}\n```\n")
        if rows := list(_members(kind, instance)):
            parts.append("\n".join(["| member | what it is |", "|---|---|", *rows, ""]))
    parts.append("## Functions\n")
    functions = {name: getattr(perdure, name) for name in sorted(perdure.__all__)}
    rows = [
        f"| `{name}{_signature(value)}` | {_first_paragraph(value)} |"
        for name, value in functions.items()
        if inspect.isfunction(value)
    ]
    parts.append("\n".join(["| function | what it does |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _members(kind: type[Any], instance: str) -> Iterator[str]:
    """Yield a row for each public member that a class of the project defines."""
    owners = [owner for owner in kind.__mro__ if owner.__module__.startswith("perdure")]
    names = sorted({name for owner in owners for name in vars(owner) if not name.startswith("_")})
    for name in names:
        shown = f"{instance}.{name}"
        member = inspect.getattr_static(kind, name)
        text = _first_paragraph(member)
        if shown in _INTERNAL or name.endswith("_sync") or "encoded task" in text:
            continue
        if isinstance(member, property):
            yield f"| `{shown}` | {text or _UNDESCRIBED[shown]} |"
        elif inspect.isfunction(member):
            yield f"| `{_call(member)}{shown}{_signature(member)}` | {text} |"


def _call(function: Any) -> str:
    """Return what stands before a call."""
    returned = str(inspect.signature(function).return_annotation)
    if inspect.iscoroutinefunction(function) or returned.startswith("Coroutine"):
        return "await "
    return "async for item in " if returned.startswith("AsyncIterator") else ""


def _signature(function: Any) -> str:
    """Return the parameters with their defaults, without types."""
    parameters = [
        value.replace(annotation=inspect.Parameter.empty, default=_default(value.default))
        for name, value in inspect.signature(function).parameters.items()
        if name not in ("self", "unnamed", "unknown")
    ]
    text = str(inspect.Signature(parameters))
    return text.replace("(/, ", "(").replace("|", "\\|")


class _Shown:
    """A default as it is shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty or isinstance(value, (str, int, float, bool, tuple, type(None))):
        return value
    return _Shown("...")


def _first_paragraph(value: Any) -> str:
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph).replace("|", "\\|")


def _without_examples(kind: type[Any]) -> str:
    return "\n".join(line.rstrip() for line in (inspect.getdoc(kind) or "").splitlines())


if __name__ == "__main__":
    PAGE.write_text(api_page(), "utf-8")
