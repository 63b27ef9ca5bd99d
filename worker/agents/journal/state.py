"""State of an agent, as a Pydantic model.

The state is data and is stored as JSON; users subclass `AgentState` and add fields. The reduction of the log
(`reducer.py`) works on the JSON, so it does not need the user's class.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, cast

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_serializer,
)
from pydantic_core import CoreSchema, core_schema

from ...durable.journal.chat import Message

KEPT: Final = 100
"""Number of latest decisions, discoveries, commitments and questions that the state keeps; the log has all of them."""


# pydantic inspects the signature of each factory. Python parses that of `list` out of its documentation, for which it
# compiles the patterns of its tokenizer at the start of each process.
def _no_items() -> list[Any]:
    return []


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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Write a status as the text that it is: reading `value` calls Python, for each step of each checkpoint."""
        return cast("CoreSchema", {**handler(source), "serialization": core_schema.simple_ser_schema("str")})


class PlanStep(BaseModel):
    """Step of a plan.

    Attributes:
        key: Name within the task and end of the idempotency key; without `/` and `#`.
        risky: Whether the step acts on the world, so that a checkpoint is written before it.
        arguments: For the agent's own use.
    """

    model_config = ConfigDict(extra="allow", validate_assignment=True, ser_json_inf_nan="strings")

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


class ReplacedStep(BaseModel):
    """Open step that another plan replaced. why: reason of that plan."""

    key: str
    title: str
    why: str = ""


class Decision(BaseModel):
    """Decision of the agent. n: number of its event."""

    n: int
    choice: str
    reasoning: str = ""
    alternatives: list[str] = Field(default_factory=_no_items)


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


class ChangedFile(BaseModel):
    """File of the workspace that changed. path: from the workspace. n: number of the event that saved it."""

    path: str
    n: int


class WaitingFor(BaseModel):
    """Thing that the task waits for.

    Attributes:
        what: Kind, such as "message".
        on: Sender that is expected.
        wait: Id by which it is answered: of a wait for an answer.
    """

    what: str = ""
    on: str = ""
    why: str = ""
    wait: str = ""


UtcTime = Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(UTC))]
"""A time with a zone, converted to UTC."""


class Commitment(BaseModel):
    """Thing that one party has promised another.

    Attributes:
        by: Name of the party that promised it; "me" is the agent.
        to: Name of the party that it was promised to; "me" is the agent.
        due: Time until which it is to be done; None if no time was agreed. A time without a zone is refused.
        wait: Id of the open wait whose answer it is; empty otherwise.
    """

    model_config = ConfigDict(validate_assignment=True)

    what: str
    by: str = "me"
    to: str = ""
    due: UtcTime | None = None
    done: bool = False
    wait: str = ""

    def is_due(self, now: datetime) -> bool:
        """Return whether it is open and its time has come."""
        return not self.done and self.due is not None and self.due <= now


class Question(BaseModel):
    """Open question. to: name of the party that can answer it; empty if that is not known."""

    model_config = ConfigDict(validate_assignment=True)

    text: str
    to: str = ""


class ArchivedSteps(BaseModel):
    """Closed steps that left the state together. first, last: keys of the first and the last one. steps: how many."""

    first: str
    last: str
    steps: int


class Archive(BaseModel):
    """Account of what left the state; its size does not grow with the number of steps.

    Attributes:
        steps: Closed steps that left the plan with their results; `ctx.recall_step` returns each by its key.
        messages: Messages that left the conversation without a summary; the log has them.
        ranges: The steps in the order in which they left.
        retired: The first of these steps, whose records are not kept any more.
        base: Number of the last event `log_base`; 0 while the log is complete.
    """

    steps: int = 0
    messages: int = 0
    ranges: list[ArchivedSteps] = Field(default_factory=_no_items)
    retired: int = 0
    base: int = 0


class AgentState(BaseModel):
    """State of an agent's work. Subclass it to add fields; those are the agent's inputs too.

    Attributes:
        plan: Open steps and the latest closed ones (`Agent.keep_steps`).
        replaced: Latest open steps that another plan replaced, and why.
        results: Results of the steps in the plan, by key; in `finish`, those of archived steps, too.
        decisions: Latest decisions; the log has earlier ones.
        discoveries: Latest discoveries; the log has earlier ones.
        commitments: What the agent promised and what it was promised. The agent adds, changes and removes them.
        questions: Open questions. The agent adds them, and removes those that were answered.
        messages: Conversation since its last compaction, its latest messages (`Agent.keep_messages`).
        files: Files of the workspace that changed last.
        context: Any other data to keep.
        archive: Account of the steps and messages that left the state.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")

    goal: str = ""
    plan: list[PlanStep] = Field(default_factory=_no_items)
    current: str | None = None
    replaced: list[ReplacedStep] = Field(default_factory=_no_items)
    results: dict[str, Any] = Field(default_factory=dict)
    decisions: list[Decision] = Field(default_factory=_no_items)
    discoveries: list[Discovery] = Field(default_factory=_no_items)
    commitments: list[Commitment] = Field(default_factory=_no_items)
    questions: list[Question] = Field(default_factory=_no_items)
    context: dict[str, Any] = Field(default_factory=dict)
    messages: list[Message] = Field(default_factory=_no_items)
    artifacts: list[Artifact] = Field(default_factory=_no_items)
    files: list[ChangedFile] = Field(default_factory=_no_items)
    waiting_for: WaitingFor | None = None
    archive: Archive = Field(default_factory=Archive)

    @field_serializer("commitments", "questions", mode="wrap")
    def _store_latest(self, found: list[Any], serialize: SerializerFunctionWrapHandler) -> Any:
        """Store at most `KEPT` items: the latest ones, and commitments that are done only if there is room."""
        if len(found) > KEPT:
            done = [one for one in found if getattr(one, "done", False)]
            surplus = {id(one) for one in done[: len(found) - KEPT]}
            found = [one for one in found if id(one) not in surplus][-KEPT:]
        return serialize(found)
