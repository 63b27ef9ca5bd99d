"""Findings that hold, stored in the checkpoint so that each is reported once, and the verdict of the judge."""

from __future__ import annotations

import hashlib
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import Partition
from ....queues.transport.gateway import Gateway
from .settings import Finding, Policy

FINDINGS: Final = "#coherence"
"""Checkpoint field of the stored findings."""

VERDICT: Final = "#judge"
"""Checkpoint field of the last verdict of the judge."""

MOST_DISMISSED: Final = 100
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
