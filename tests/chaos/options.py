"""Options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .schedule import WEIGHTS

__all__ = ["NAMESPACE", "Options"]

NAMESPACE: Final = "chaos"


@dataclass(frozen=True)
class Options:
    """seconds: how long the monkey is at work. seed: what its schedule and the producers' tasks are drawn from.
    journal: the folder. workers: hosts, each with a worker or a supervisor. producers, rate: how many, and tasks per
    second of all of them. pause: seconds between two faults on average. lease, grace: the workers' settings, seconds.
    patience: seconds that all tasks have to end when the monkey rests. previous: the commit whose workers share the
    queue; empty for none. processes: those of a supervisor, which every other host has; 0 for plain workers only.
    faults: those that the monkey may choose from.
    """

    journal: Path
    seconds: float = 600.0
    seed: int = 1
    workers: int = 4
    producers: int = 2
    rate: float = 12.0
    pause: float = 1.5
    lease: float = 2.0
    grace: float = 2.0
    patience: float = 180.0
    previous: str | None = None
    processes: int = 2
    faults: Sequence[str] = tuple(WEIGHTS)
