"""The state of an agent: what its log comes to.

It is data, and travels as JSON; users subclass `AgentState` with fields of their own. The log's own reduction
(`reducer.py`) works on the JSON, so that it needs no user's class.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema, core_schema

from .chat import Message

__all__ = ["AgentState", "Artifact", "Decision", "Discovery", "Ephemeral", "PlanStep", "StepStatus", "WaitingFor"]


class Ephemeral:
    """Marks a field of a state that is never stored, and has its default again in every run: `Annotated[T, Ephemeral]`.

    For what cannot be stored (a client, a lock) or should not be (a password): it may be of any type, and is not
    validated. One that is an input of the agent has what was enqueued, in every run.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()


class StepStatus(StrEnum):
    """Where a step of a plan stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class PlanStep(BaseModel):
    """One step of a plan. key: its name within the task, and the end of its idempotency key: without `/` and `#`.

    risky: it acts on the world, so a checkpoint is taken before it. arguments: for the agent's own use.
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
        """How far the step has come: JSON data, saved beside the state once in a while as long as the step runs, there
        again when it is run again, and gone when it is done.
        """
        if self._progress is None:  # most steps have none
            self._progress = {}
        return self._progress


class Decision(BaseModel):
    """n: the number of its event."""

    n: int
    choice: str
    reasoning: str = ""
    alternatives: list[str] = Field(default_factory=list)


class Discovery(BaseModel):
    """n: the number of its event."""

    n: int
    fact: str
    source: str = ""


class Artifact(BaseModel):
    """hash: SHA-256 in hexadecimal. size: bytes."""

    name: str
    hash: str
    size: int
    media_type: str = "application/octet-stream"


class WaitingFor(BaseModel):
    """what: such as "message". on: whom."""

    what: str = ""
    on: str = ""
    why: str = ""


class AgentState(BaseModel):
    """All that an agent knows of its work. Subclass it for what yours knows besides; those are its inputs too.

    results: what the plan's steps returned, by key. decisions, discoveries: the latest ones, all are in the log.
    messages: the conversation since it was compacted last. context: whatever else is to be kept.
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
