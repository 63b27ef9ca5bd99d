"""State of an agent, as a Pydantic model.

The state is data and is stored as JSON; users subclass `AgentState` and add fields. The reduction of the log
(`reducer.py`) works on the JSON, so it does not need the user's class.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema, core_schema

from .chat import Message

__all__ = ["AgentState", "Artifact", "Decision", "Discovery", "Ephemeral", "PlanStep", "StepStatus", "WaitingFor"]


class Ephemeral:
    """Marker of a state field that is never stored: `Annotated[T, Ephemeral]`. Every run starts with its default.

    Use it for objects that cannot be stored (a client, a lock) or should not be (a password). The field may have any
    type and is not validated. If it is an input of the agent, every run has the value that was enqueued.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()


class StepStatus(StrEnum):
    """Status of a step of a plan."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class PlanStep(BaseModel):
    """Step of a plan.

    Attributes:
        key: Name within the task and end of the idempotency key; without `/` and `#`.
        risky: Whether the step acts on the world, so that a checkpoint is written before it.
        arguments: For the agent's own use.
    """

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    key: str
    title: str
    status: StepStatus = StepStatus.PENDING
    attempts: int = 0
    risky: bool = False
    arguments: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    _progress: dict[str, Any] | None = PrivateAttr(default=None)

    @property
    def progress(self) -> dict[str, Any]:
        """Progress of the step as JSON data.

        It is saved beside the state at intervals while the step runs, restored when it runs again, and dropped when it
        is done.
        """
        if self._progress is None:  # most steps have none
            self._progress = {}
        return self._progress


class Decision(BaseModel):
    """Decision of the agent. n: number of its event."""

    n: int
    choice: str
    reasoning: str = ""
    alternatives: list[str] = Field(default_factory=list)


class Discovery(BaseModel):
    """Fact that the agent found. n: number of its event."""

    n: int
    fact: str
    source: str = ""


class Artifact(BaseModel):
    """Saved artifact. hash: SHA-256 in hexadecimal. size: bytes."""

    name: str
    hash: str
    size: int
    media_type: str = "application/octet-stream"


class WaitingFor(BaseModel):
    """Thing that the task waits for. what: kind, such as "message". on: sender that is expected."""

    what: str = ""
    on: str = ""
    why: str = ""


class AgentState(BaseModel):
    """State of an agent's work. Subclass it to add fields; those are the agent's inputs too.

    Attributes:
        results: Results of the plan's steps, by key.
        decisions: Latest decisions; the log has all of them.
        discoveries: Latest discoveries; the log has all of them.
        messages: Conversation since its last compaction.
        context: Any other data to keep.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")

    goal: str = ""
    plan: list[PlanStep] = Field(default_factory=list)
    current: str | None = None
    results: dict[str, Any] = Field(default_factory=dict)
    decisions: list[Decision] = Field(default_factory=list)
    discoveries: list[Discovery] = Field(default_factory=list)
    context: dict[str, Any] = Field(default_factory=dict)
    messages: list[Message] = Field(default_factory=list)
    artifacts: list[Artifact] = Field(default_factory=list)
    waiting_for: WaitingFor | None = None
