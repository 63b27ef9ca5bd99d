"""Plan of one run, drawn from its seed: tasks, workers and faults. The interleaving is drawn apart from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

__all__ = ["FAULTS", "KINDS", "Fault", "Plan", "TaskPlan", "draw"]

SPAN: Final = 12.0
"""Virtual seconds in which tasks are enqueued and faults occur."""

KINDS: Final = ("chain", "chain", "hasty", "fan", "stumbles", "doomed", "dozes", "listens", "relay", "agent")
"""Kinds of tasks; see app.py."""

FAULTS: Final = {
    "kill": (0.1, 3.0),
    "freeze": (0.5, 9.0),
    "block": (0.5, 6.0),
    "stop": (0.1, 1.0),
    "cut": (0.0, 0.0),
    "late": (0.2, 6.0),
    "deaf": (0.0, 0.0),
    "hold": (0.3, 8.0),
    "restart": (0.1, 3.0),
    "lose tail": (0.1, 1.5),
    "step clock": (1.0, 600.0),
    "step clock back": (1.0, 40.0),
    "full": (0.5, 6.0),
    "flush scripts": (0.0, 0.0),
    "pause server": (0.2, 5.0),
    "newcomer": (0.0, 0.0),
    "cancel": (0.0, 0.0),
    "replay": (0.0, 0.0),
    "fork": (0.0, 0.0),
}
"""Kinds of faults, and the least and the most of their sizes: mostly seconds; see faults.py."""


@dataclass(frozen=True)
class Fault:
    """A fault. at: seconds after the start. target: which worker, connection or task, modulo their number."""

    at: float
    kind: str
    target: int
    size: float

    def __str__(self) -> str:
        size = f" {self.size:.2f} s" if self.size else ""
        return f"{self.at:6.2f} s  {self.kind}{size} (target {self.target})"


@dataclass(frozen=True)
class TaskPlan:
    """A task. at: seconds after the start at which it is enqueued. delay: seconds until it may run."""

    id: str
    kind: str
    at: float
    steps: int
    pause: float
    delay: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A run. lease: seconds. variant: number of another interleaving of the same plan."""

    seed: int
    workers: int
    lease: float
    tasks: tuple[TaskPlan, ...]
    faults: tuple[Fault, ...]
    variant: int = 0

    def without(self, *faults: Fault) -> Plan:
        """Return the same run with fewer faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))


def draw(seed: int) -> Plan:
    """Return the plan of a seed."""
    random = Random(f"plan {seed}")
    tasks = tuple(
        TaskPlan(
            id=f"t{number}",
            kind=random.choice(KINDS),
            at=random.uniform(0, SPAN * 0.6),
            steps=random.randint(1, 5),
            pause=random.choice((0.0, 0.01, 0.3, 1.0)),
            delay=random.choice((0.0, 0.0, 0.0, 2.0)),
        )
        for number in range(random.randint(3, 8))
    )
    faults = tuple(
        sorted((_fault(random) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6)))), key=lambda one: one.at)
    )
    return Plan(seed, random.randint(2, 3), random.choice((1.0, 3.0, 6.0)), tasks, faults)


def _fault(random: Random) -> Fault:
    kind = random.choice([*FAULTS])
    least, most = FAULTS[kind]
    return Fault(
        round(random.uniform(0.2, SPAN), 3), kind, random.randrange(100), round(random.uniform(least, most), 3)
    )
