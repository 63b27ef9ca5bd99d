"""Arguments of the tools: their checks, and their JSON schemas for a model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...validation_errors import describe_problem
from ..context.providers import MALFORMED

_Offset = Annotated[int, Field(ge=0, le=2**40, description="Where to start, for the rest of a long result.")]
_Event = Annotated[str, Field(pattern=r"^(\d{1,15}(-\d{1,15})?)?$")]
_Section = Literal[
    "", "former", "failed", "open", "decisions", "discoveries", "promises", "questions", "artifacts", "files"
]
_Query = Annotated[str, Field(min_length=1, max_length=1_000)]


class ArgumentsRefused(ValueError):
    """The arguments of a model do not fit a tool; the text is for the model."""


class ToolArguments(BaseModel):
    """Base of the arguments; the docstring of a class is the description of its tool."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    tool: ClassVar[str]


class RecallStep(ToolArguments):
    """Return a step of your plan with its whole result, also one that no longer stands in the prompt."""

    tool = "recall_step"
    key: Annotated[str, Field(min_length=1, max_length=200, description="Key of the step, as in the plan.")]
    offset: _Offset = 0


class SearchHistory(ToolArguments):
    """Search the log of your task (steps, tool calls, decisions, messages) for words, the newest events first.

    It also returns one event in full, or a whole section of the brief.
    """

    tool = "search_history"
    query: Annotated[_Query, Field(description="Words that an event must have, all of them.")] = "*"
    before: Annotated[_Event, Field(description="Search only events before this event: its number or id.")] = ""
    event: Annotated[_Event, Field(description="Number or id of an event to return in full instead of searching.")] = ""
    section: Annotated[
        Literal[
            "", "former", "failed", "open", "decisions", "discoveries", "promises", "questions", "artifacts", "files"
        ],
        Field(description="Return all entries of this section of the brief, in full, instead of searching."),
    ] = ""
    offset: _Offset = 0


class SearchMemory(ToolArguments):
    """Search what you remember from earlier tasks."""

    tool = "search_memory"
    query: Annotated[_Query, Field(description="A question, or words.")]
    limit: Annotated[int, Field(ge=1, le=20, description="Most memories to return.")] = 5


class ReadArtifact(ToolArguments):
    """Read a text file that your task has saved."""

    tool = "read_artifact"
    name: Annotated[str, Field(min_length=1, max_length=1_000, description="Name or SHA-256 of the artifact.")]
    offset: _Offset = 0
    limit: Annotated[int, Field(ge=1, le=100_000, description="Most bytes to return.")] = 8_000


class ReadInbox(ToolArguments):
    """Read the unread messages that others sent to you. They count as read afterwards."""

    tool = "read_inbox"
    limit: Annotated[int, Field(ge=1, le=20, description="Most messages to return.")] = 10


TOOLS: Final[dict[str, type[ToolArguments]]] = {
    kind.tool: kind for kind in (RecallStep, SearchHistory, SearchMemory, ReadArtifact, ReadInbox)
}


def schema_of(kind: type[ToolArguments]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    found = kind.model_json_schema()
    properties = {
        name: {key: value for key, value in one.items() if key not in ("title", "pattern")}
        for name, one in found["properties"].items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": found.get("required", []),
        "additionalProperties": False,
    }


def check_arguments(kind: type[ToolArguments], arguments: dict[str, Any]) -> ToolArguments:
    """Return the checked arguments of a call. Raises `ArgumentsRefused`."""
    if MALFORMED in arguments:
        raise ArgumentsRefused("the arguments must be a JSON object")
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:3]
        known = ", ".join(kind.model_fields)
        raise ArgumentsRefused("; ".join(_problem(one, known) for one in problems)) from None


def _problem(problem: Any, known: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f"unknown argument; the arguments are {known}"
    return describe_problem(problem)
