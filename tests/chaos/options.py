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
    """Options of a run.

    Attributes:
        journal: Folder of the journal.
        seconds: Time during which faults are injected.
        seed: Seed of the schedule and of the tasks of each producer.
        workers: Hosts, each with a worker or a supervisor. processes: Workers of a supervisor, which every other host
            has; 0 for plain workers only.
        producers: Number of producers. rate: Tasks per second of all of them.
        pause: Mean seconds between two faults.
        lease, grace: Settings of the workers, in seconds.
        patience: Seconds for all tasks to end after the last fault.
        previous: Commit whose workers share the queue; None for the default, empty for none.
        faults: The possible faults.
        mix: Tasks that the producers enqueue: "all", "waits" for those that wait or have children, "streams" for
            those that emit, "limits" for those that hold tokens of limits, or "mixed" for all of the three. "all" and
            "mixed" have schedules as well.
        spared: Supervised hosts that no fault hits, beside the others.
        sample: Whether memory is sampled, and the parts of the run are compared.
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
    mix: str = "all"
    spared: int = 0
    sample: bool = False
