"""The reference pages of the Python API, made from signatures and docstrings.

`python -m tests.project.api_page` writes docs/reference/api.md and docs/reference/api-modules.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import perdure
import perdure.context
import perdure.memory
import perdure.otel
import perdure.queues
import perdure.testing
import perdure.web
from perdure.queues import Namespace, Partition
from perdure.worker.durable.steps.current import Step
from perdure.worker.task import Task

from tests.support.paths import ROOT

__all__ = ["PAGES", "undescribed"]

_WRITTEN: Final = "<!-- written by python -m tests.project.api_page from signatures and docstrings -->\n"

_TITLE: Final = """# Python API

Every class and function of the package `perdure`, with their public members. `perdure.context`, `perdure.memory`,
`perdure.otel`, `perdure.testing`, `perdure.web` and `perdure.queues` have [a page of their own](api-modules.md), as
have [errors](errors.md) and [settings](settings.md).

A method with a variant for synchronous code names it: `result_sync` blocks the calling thread. `SyncContext`, the
context of a [plain function](../how-to/sync-tasks.md), has the members of `Context` without `await`, and `app.sync()`
those of `Producer`.
"""

_MODULES_TITLE: Final = """# Python API: modules

Every class and function of the public modules beside [`perdure`](api.md). Errors have [a page of their own](errors.md).
"""

_MODULES: Final = (
    perdure.context,
    perdure.memory,
    perdure.otel,
    perdure.testing,
    perdure.web,
    perdure.queues,
)

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
    (
        "app.encryptor",
        "app.enqueue_chain",
        "event.model_post_init",
        "plan_step.model_post_init",
        "task.decode",
        "worker.check_quarantine",
    )
)
"""Public members that programs do not use, in addition to those of a producer that take encoded tasks."""

_KEYS: Final = (Namespace, Partition)
"""Makers of keys. Their members are named by the keys, which the page of the storage format describes."""

_UNDESCRIBED: Final = {"task_id": "The task's id.", "queue": "The task's queue."}

_HOW: Final = {
    Namespace: "Its other members are names of keys and channels: [keys in Redis](keys.md).",
    Partition: "Its other members are names of keys: [keys in Redis](keys.md).",
    perdure.testing.UnitContext: "What `make_context` returns, with the members of [Context](api.md#context).",
    Task: "What `@app.task` returns.",
    Step: "What `current_step()` returns in the function of a step.",
    perdure.TaskHandle: "What `enqueue` and `producer.find` return; `handle.id` is the task's id.",
    perdure.TurnHandle: "What `session.send` returns.",
}


def api_page() -> str:
    """Return the page of `perdure`."""
    parts = [_WRITTEN, _TITLE]
    for instance, kind in _CLASSES.items():
        parts += _class(kind, instance)
    parts.append("## Other classes\n")
    for kind in _other_classes(perdure):
        parts += _class(kind, level="###")
    parts += ["## Functions\n", _functions(perdure)]
    return "\n".join(parts)


def modules_page() -> str:
    """Return the page of the other public modules."""
    parts = [_WRITTEN, _MODULES_TITLE]
    for module in _MODULES:
        parts.append(f"## {module.__name__}\n\n{_text(module)}\n")
        for kind in _other_classes(module):
            parts += _class(kind, level="###")
        if functions := _functions(module):
            parts.append(functions)
    return "\n".join(parts)


PAGES: Final[dict[Path, Callable[[], str]]] = {
    ROOT / "docs" / "reference" / "api.md": api_page,
    ROOT / "docs" / "reference" / "api-modules.md": modules_page,
}


def undescribed() -> list[str]:
    """Return the rows that do not say what their member is: it has no docstring."""
    rows = [line for page in PAGES.values() for line in page().splitlines() if line.startswith("| `")]
    return [row for row in rows if row.endswith("` |  |")]


def _other_classes(module: ModuleType) -> list[type[Any]]:
    """Return the classes that a module exports, those with a section of their own and errors left out."""
    elsewhere = set(_CLASSES.values()) | {perdure.SyncContext}
    if module is not perdure:
        elsewhere |= {value for name in perdure.__all__ if inspect.isclass(value := getattr(perdure, name))}
    values = [getattr(module, name) for name in sorted(module.__all__)]
    return [
        value
        for value in values
        if inspect.isclass(value) and not issubclass(value, BaseException) and value not in elsewhere
    ]


def _class(kind: type[Any], instance: str | None = None, level: str = "##") -> Iterator[str]:
    """Yield the parts of the section of a class. instance: name of an instance. Default: that of the class."""
    yield f"{level} {kind.__name__}\n"
    if kind in _HOW:
        yield f"{_HOW[kind]}\n"
    if text := _without_examples(kind):
        yield f"```text\n{text}\n```\n"
    shown = instance or _instance(kind)
    if rows := [row for name, member in _own(kind) if (row := _row(kind, shown, name, member)) is not None]:
        yield "\n".join(["| member | what it is |", "|---|---|", *rows, ""])


def _instance(kind: type[Any]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _functions(module: ModuleType) -> str:
    named = {name: getattr(module, name) for name in sorted(module.__all__)}
    rows = [
        f"| `{_call(value)}{name}{_signature(value)}` | {_text(value)} |"
        for name, value in named.items()
        if inspect.isroutine(inspect.unwrap(value)) and (module is perdure or name not in perdure.__all__)
    ]
    return "\n".join(["| function | what it does |", "|---|---|", *rows, ""]) if rows else ""


def _own(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the public members that classes of the project define, except those that another section has."""
    elsewhere = set(_CLASSES.values()) - {kind}
    owners = [owner for owner in kind.__mro__ if owner.__module__.startswith("perdure") and owner not in elsewhere]
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set[str]()
    names = sorted({name for owner in owners for name in vars(owner) if not name.startswith("_")} - fields)
    for name in names:
        yield name, inspect.getattr_static(kind, name)


def _is_shown(member: Any) -> bool:
    return isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)


def _row(kind: type[Any], instance: str, name: str, member: Any) -> str | None:
    """Return the row of a member, None if the page leaves it out."""
    shown = f"{instance}.{name}"
    if (
        not _is_shown(member)
        or shown in _INTERNAL
        or "encoded task" in (text := _text(member) or _UNDESCRIBED.get(name, ""))
    ):
        return None
    if kind in _KEYS and not text:
        return None
    if name.endswith("_sync") and hasattr(kind, name.removesuffix("_sync")):
        return None
    if isinstance(member, property):
        return f"| `{shown}` | {text} |"
    if isinstance(member, (classmethod, staticmethod)):
        return f"| `{kind.__name__}.{name}{_signature(member.__func__)}` | {text} |"
    also = f" Synchronous: `{name}_sync`." if hasattr(kind, f"{name}_sync") else ""
    return f"| `{_call(member)}{shown}{_signature(member)}` | {text}{also} |"


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
        if name not in ("self", "cls", "unnamed", "unknown")
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


def _text(value: Any) -> str:
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph).replace("|", "\\|")


def _without_examples(kind: type[Any]) -> str:
    return "\n".join(line.rstrip() for line in (inspect.getdoc(kind) or "").splitlines())


if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), "utf-8")
