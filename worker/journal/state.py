"""The state of an agent: what its log comes to.

It is data, and travels as JSON; users subclass `AgentState` with fields of their own. The log's own reduction
(`reducer.py`) works on the JSON, so that it needs no user's class.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .messages import Message

__all__ = ["AgentState", "Artifact", "Decision", "Discovery", "PlanStep", "StepStatus", "WaitingFor"]


class StepStatus(StrEnum):
    """Where a step of a plan stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class PlanStep(BaseModel):
    """One step of a plan. key: its name within the task, and the end of its idempotency key.

    risky: it acts on the world, so a checkpoint is taken before it.
    """

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    key: str
    title: str
    status: StepStatus = StepStatus.PENDING
    attempts: int = 0
    risky: bool = False
    arguments: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None


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
    """All that an agent knows of its work. Subclass it for what yours knows besides.

    results: what the plan's steps returned, by key. decisions, discoveries: the latest ones, all are in the log.
    messages: the conversation since it was compacted last. context: whatever else is to be kept.
    """

    model_config = ConfigDict(extra="forbid")

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
