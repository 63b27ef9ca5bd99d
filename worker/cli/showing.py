"""What a task has besides its record, as `perdure task show` shows it. What cannot be read hides nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ...queues import CannotOpen, Gateway, Partition
from ..agent.coherence import StandingFinding, standing_findings
from ..artifacts import Link, task_links
from ..errors import ArtifactError
from .artifact import size_text
from .output import tell

__all__ = ["describe_finding", "finding_text", "link_text", "shown_findings", "shown_links"]


async def shown_links(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[Link]:
    """What it has saved; none, and a line that says why, where that cannot be read."""
    try:
        return await task_links(gateway, partition, task_id)
    except (ArtifactError, CannotOpen) as error:
        tell(str(error))
        return ()


async def shown_findings(gateway: Gateway, partition: Partition, task_id: str) -> Sequence[StandingFinding]:
    """What its agent is known to have wrong; none, and a line that says why, where that cannot be read."""
    try:
        return await standing_findings(gateway, partition, task_id)
    except CannotOpen as error:
        tell(str(error))
        return ()


def link_text(links: Sequence[Link]) -> str | None:
    """A line for each, if there is any."""
    return "\n".join(f"{link.name}  {size_text(link.size)}  {link.hash}" for link in links) or None


def finding_text(findings: Sequence[StandingFinding]) -> str | None:
    """A line for each, if there is any."""
    return "\n".join(f"{one.check}: {one.detail} ({one.policy}, event {one.n})" for one in findings) or None


def describe_finding(finding: StandingFinding) -> dict[str, object]:
    """A finding as plain data, for programs."""
    return {"check": finding.check, "detail": finding.detail, "policy": finding.policy, "event": finding.n}
