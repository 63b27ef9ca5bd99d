"""Tools of an MCP server: one for each task of the catalog, with its description and its schemas."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....queues.catalog import CatalogTask
from ....queues.errors import ConfigurationError
from ....queues.regular_files import read_regular
from ...errors import first_problem
from .tool_results import has_own_content

TaskSupport = Literal["optional", "required", "forbidden"]

_MAX_NAME: Final = 128
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters of the name of a task that the name of a tool must not have."""

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object"}

_MAX_FILE: Final = 1 << 20
"""Bytes of a file of options at most."""


class ToolOptions(BaseModel):
    """Options of a task that is served as a tool.

    Attributes:
        task: Whether a call becomes an MCP task, for clients that know them: "optional" if it does not end soon,
            "required" always, and clients that know no tasks are refused, "forbidden" never.
        wait: Seconds that a call waits for the result, or for a question, before it becomes an MCP task.
        questions: Whether a question that the task asks within `wait` is put to the client in the call itself ("call"),
            or by the MCP task ("task").
        title: Name for people.
        read_only, destructive: Hints for clients; None leaves them out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: TaskSupport = "optional"
    wait: float = Field(default=0.25, ge=0, le=3600, allow_inf_nan=False)
    questions: Literal["task", "call"] = "task"
    title: str | None = Field(default=None, max_length=256)
    read_only: bool | None = None
    destructive: bool | None = None


@dataclass(frozen=True)
class ToolSelection:
    """Tasks that are served, and how.

    Attributes:
        only: Patterns of names of tasks, such as `report-*`; empty for all.
        options: Options by the name of the task.
    """

    only: Sequence[str] = ()
    options: Mapping[str, ToolOptions] = field(default_factory=dict)

    def serves(self, task: CatalogTask) -> bool:
        """Return whether a task is served."""
        return not self.only or any(fnmatchcase(task.name, pattern) for pattern in self.only)

    def of(self, task: str) -> ToolOptions:
        """Return the options of a task."""
        return self.options.get(task, _DEFAULTS)


_DEFAULTS: Final = ToolOptions()


def read_selection(path: Path | None, only: Sequence[str] = ()) -> ToolSelection:
    """Return the selection of a TOML file, which has one table `[NAME]` of options for each task.

    Args:
        path: The file; None for none. Its tasks are the ones that are served, unless `only` names others.

    Raises:
        ConfigurationError: The file cannot be read, or has something else.
    """
    if path is None:
        return ToolSelection(tuple(only))
    try:
        tables = tomllib.loads(read_regular(path, _MAX_FILE).decode())
        options = {name: ToolOptions.model_validate(table) for name, table in tables.items()}
    except OSError as error:
        raise ConfigurationError(f"could not read the tools of {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise ConfigurationError(f"tools of {path}: {first_problem(error)}") from None
    except ValueError as error:
        raise ConfigurationError(f"file {path} must be TOML with a table for each tool: {error}") from None
    return ToolSelection(tuple(only) or tuple(options), options)


@dataclass(frozen=True, slots=True)
class TaskTool:
    """A task as a tool. name: that of the tool."""

    name: str
    task: CatalogTask
    options: ToolOptions

    @property
    def output(self) -> Mapping[str, Any] | None:
        """JSON schema of its structured result; None without one."""
        schema = self.task.result
        return schema if schema is not None and schema.get("type") == "object" and not has_own_content(schema) else None

    def summary(self) -> dict[str, Any]:
        """Return the tool as `tools/list` has it."""
        shown: dict[str, Any] = {"name": self.name, "inputSchema": _object_schema(self.task.arguments)}
        if self.task.description:
            shown["description"] = self.task.description
        if self.options.title is not None:
            shown["title"] = self.options.title
        if self.output is not None:
            shown["outputSchema"] = dict(self.output)
        hints = {"readOnlyHint": self.options.read_only, "destructiveHint": self.options.destructive}
        if given := {name: value for name, value in hints.items() if value is not None}:
            shown["annotations"] = given
        return shown


def _object_schema(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**_NO_ARGUMENTS, **(arguments or {})}


def make_tools(tasks: Sequence[CatalogTask], selection: ToolSelection) -> dict[str, TaskTool]:
    """Return the tools of tasks by name, in order of their names.

    Characters that the name of a tool must not have become `_`. If tasks would have one name, that of their app stands
    before it; tasks that have one name even then are left out but for the first.
    """
    served = [task for task in tasks if selection.serves(task)]
    plain = [tool_name(task.name) for task in served]
    tools: dict[str, TaskTool] = {}
    for task, name in zip(served, plain, strict=True):
        own = name if plain.count(name) == 1 else tool_name(f"{task.app}.{task.name}")
        tools.setdefault(own, TaskTool(own, task, selection.of(task.name)))
    return {name: replace(tool, name=name) for name, tool in sorted(tools.items())}


def tool_name(name: str) -> str:
    """Return the name of a task as that of a tool."""
    return _FOREIGN.sub("_", name)[:_MAX_NAME]
