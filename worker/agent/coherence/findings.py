"""What is known to be wrong with an agent, as its checkpoint keeps it: so that it is told of once, and can be shown."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ....queues import Gateway, Partition, checkpoint_fields
from .settings import Policy

__all__ = ["STANDING", "StoredFinding", "StoredFindings", "stored_findings"]

STANDING: Final = "#coherence"
"""The field of the checkpoint."""

VERSION: Final = 1


class StoredFinding(BaseModel):
    """A finding that still holds. n: the number of the event that told of it. policy: what followed. known: a person
    has come since, and let the task go on: it has no further consequence.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    check: str
    detail: str
    about: str = ""
    policy: Policy = "warn"
    n: int = 0
    known: bool = False


class StoredFindings(BaseModel):
    """All that hold. mail: the number of the last message in the task's inbox when the last one was found."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = VERSION
    mail: int = 0
    findings: tuple[StoredFinding, ...] = ()

    @classmethod
    def decode(cls, data: bytes | None) -> StoredFindings:
        """What was stored. It can be found anew, so what cannot be read is as good as nothing."""
        if data is None:
            return cls()
        try:
            found = cls.model_validate_json(data)
        except ValidationError:
            return cls()
        return found if found.v <= VERSION else cls()

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    def holds(self, check: str, about: str) -> StoredFinding | None:
        """The finding, where it is known."""
        return next((one for one in self.findings if (one.check, one.about) == (check, about)), None)


async def stored_findings(gateway: Gateway, partition: Partition, task_id: str) -> tuple[StoredFinding, ...]:
    """Return the stored findings of a task's agent, empty if there are none. Raises `DecryptionError`."""
    saved = await checkpoint_fields(gateway, partition, task_id, STANDING)
    return StoredFindings.decode(saved.get(STANDING)).findings
