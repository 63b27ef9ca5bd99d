"""What the tasks of elements are made of: the journal, steps that it knows, and the options of every task."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure import App

    from ..app import Journal

__all__ = ["TaskKit"]


@dataclass(frozen=True)
class TaskKit:
    """Parts of the tasks of an app.

    Attributes:
        stepped: Calls a step that logs its effect and its value: of a context, with a name, inputs and a pause.
        options: Retry policy and version.
    """

    app: App
    journal: Journal
    stepped: Callable[..., Coroutine[Any, Any, str]]
    options: dict[str, Any]
