"""From kills and the journal to what each kill hit and who went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .journal import Line
from .replicas import Kill

__all__ = ["Takeover", "takeovers"]


@dataclass(frozen=True, slots=True)
class Takeover:
    """One kill. begun: steps that had begun by then. step, subject: what the worker had in hand, empty if nothing.
    by: the worker that went on, after so many `seconds`; None where none has.
    """

    worker: int
    begun: int
    step: str
    subject: str
    by: int | None
    seconds: float | None

    def summary(self) -> dict[str, Any]:
        """The takeover as plain data, for programs."""
        return asdict(self)


def takeovers(lines: Sequence[Line], kills: Sequence[Kill]) -> list[Takeover]:
    """What became of each kill; the lines are those of one task."""
    return [_takeover(lines, kill) for kill in kills]


def _takeover(lines: Sequence[Line], kill: Kill) -> Takeover:
    own = [line for line in lines if line.pid == kill.pid]
    after = next((line for line in lines if line.at > kill.at and line.pid != kill.pid), None)
    return Takeover(
        worker=kill.pid,
        begun=len({line.step for line in lines if line.at <= kill.at}),
        step=own[-1].step if own else "",
        subject=own[-1].subject if own else "",
        by=after.pid if after else None,
        seconds=round(after.at - kill.at, 3) if after else None,
    )
