"""Findings that hold, stored in the checkpoint so that each is reported once."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ....queues import Gateway, Partition, checkpoint_fields
from .settings import Policy

__all__ = ["FINDINGS", "StoredFinding", "StoredFindings", "stored_findings"]

FINDINGS: Final = "#coherence"
"""Checkpoint field of the stored findings."""

VERSION: Final = 1
"""Latest version of the stored form that this code reads."""


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
    """All findings that hold. `mail` is the number of the last inbox message when the latest finding was made."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = VERSION
    mail: int = 0
    findings: tuple[StoredFinding, ...] = ()

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


async def stored_findings(gateway: Gateway, partition: Partition, task_id: str) -> tuple[StoredFinding, ...]:
    """Return the stored findings of a task's agent, empty if there are none. Raises `DecryptionError`."""
    saved = await checkpoint_fields(gateway, partition, task_id, FINDINGS)
    return StoredFindings.decode(saved.get(FINDINGS)).findings
