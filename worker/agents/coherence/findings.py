"""Findings that hold, stored in the checkpoint so that each is reported once, and the verdict of the judge."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import Partition
from ....queues.transport.gateway import Gateway
from ...errors import TaskDefinitionError

Policy = Literal["off", "warn", "hand_off", "bury"]
"""Consequence of a finding. `warn` logs an event and a warning. `hand_off` also parks the task, with its handoff
document, until it receives a message. `bury` also makes it a dead letter with reason `incoherent`."""

_POLICIES: Final = ("off", "warn", "hand_off", "bury")


class Finding(NamedTuple):
    """A finding of a check. `detail` is for people, `about` identifies the finding for as long as it holds."""

    check: str
    detail: str
    about: str = ""


def check_name(check: Callable[..., Any]) -> str:
    """Return the name of a check of the application: that of its function."""
    return str(getattr(check, "__name__", type(check).__name__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """The checks of one agent or function, each with its policy.

    Attributes:
        progress: the agent made progress within `stuck_minutes`.
        repetition: no tool was called `repeats` times with the same arguments in the last `window` calls, and the
            assistant did not say the same so often.
        checks: checks of the application: functions of a `View` that return a `Finding`, a text, or None.
        custom: policy of their findings.
        judge: async function of a `View` that returns an objection as text, or None. It runs beside the agent after
            each `judge_every` tool calls and completed steps; its verdict is recorded, and holds until the next one.
        judged: policy of an objection.
    """

    progress: Policy = "warn"
    repetition: Policy = "warn"
    custom: Policy = "warn"
    judged: Policy = "warn"
    stuck_minutes: float = 30.0
    repeats: int = 5
    window: int = 20
    checks: tuple[Callable[[Any], Any], ...] = ()
    judge: Callable[[Any], Awaitable[str | None]] | None = None
    judge_every: int = 10

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "Policy" and value not in _POLICIES:
                raise ValueError(f"coherence: {one.name} must be one of {', '.join(_POLICIES)}, got {value!r}")
            if one.type in ("int", "float") and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"coherence: {one.name} must be more than 0, got {value!r}")
        if not 2 <= self.repeats <= self.window:
            raise ValueError(f"coherence: repeats must be from 2 to window ({self.window}), got {self.repeats}")
        names = [check_name(check) for check in self.checks]
        if taken := [name for name in names if name in _BUILT_IN or names.count(name) > 1]:
            raise ValueError(f"coherence: checks must have names of their own, got {taken[0]!r}")

    def policy(self, check: str) -> Policy:
        """Return the policy of a check."""
        name = _BUILT_IN.get(check, "custom")
        policy: Policy = getattr(self, name)
        return policy


_BUILT_IN: Final = {"progress": "progress", "repetition": "repetition", "judge": "judged"}
"""Field with the policy of each check of Perdure."""


def check_coherence(what: str, coherence: object) -> None:
    """Raise `TaskDefinitionError` if the coherence of a task or an agent is not a `Coherence`. what: its name."""
    if not isinstance(coherence, Coherence):
        raise TaskDefinitionError(
            f"{what}: coherence must be a Coherence, such as Coherence(repetition='bury'), got {coherence!r}"
        )


FINDINGS: Final = "#coherence"
"""Checkpoint field of the stored findings."""

VERDICT: Final = "#judge"
"""Checkpoint field of the last verdict of the judge."""

MAX_DISMISSED: Final = 100
"""Dismissed findings that are kept, the latest."""

VERSION: Final = 1
"""Latest version of the stored form that this code reads."""


def key_of(finding: Finding | StoredFinding) -> str:
    """Return the hash that equal findings of a task share."""
    return hashlib.blake2b(f"{finding.check}\0{finding.about}".encode(), digest_size=12).hexdigest()


class StoredFinding(BaseModel):
    """A finding that still holds.

    Attributes:
        policy: its consequence.
        n: the number of the event that reported it.
        known: whether a person has since let the task continue; the finding then has no further consequence.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    check: str
    detail: str
    about: str = ""
    policy: Policy = "warn"
    n: int = 0
    known: bool = False


class StoredFindings(BaseModel):
    """All findings that hold.

    Attributes:
        mail: the number of the last inbox message when the latest finding was made.
        dismissed: keys of findings that a person has dismissed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = VERSION
    mail: int = 0
    findings: tuple[StoredFinding, ...] = ()
    dismissed: tuple[str, ...] = ()

    @classmethod
    def decode(cls, data: bytes | None) -> StoredFindings:
        """Read what `encode` returned. Unreadable data counts as no findings: the checks find them again."""
        if data is None:
            return cls()
        try:
            found = cls.model_validate_json(data)
        except ValidationError:
            return cls()
        return found if found.v <= VERSION else cls()

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class StoredVerdict(BaseModel):
    """The last verdict of the judge. work: tool calls and steps until then. objection: empty if there was none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    work: int = 0
    objection: str = ""

    @classmethod
    def decode(cls, data: bytes | None) -> StoredVerdict:
        """Read a stored verdict. Unreadable data counts as none: the judge is asked again."""
        try:
            return cls() if data is None else cls.model_validate_json(data)
        except ValidationError:
            return cls()


async def stored_findings(gateway: Gateway, partition: Partition, task_id: str) -> tuple[StoredFinding, ...]:
    """Return the stored findings of a task's agent, empty if there are none. Raises `DecryptionError`."""
    saved = await checkpoint_fields(gateway, partition, task_id, FINDINGS)
    return StoredFindings.decode(saved.get(FINDINGS)).findings
