"""What one Redis node carries, by the measured constants: the model of docs/explanation/scaling.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Capacity", "capacities"]

USED: Final = 0.7
"""Part of a node's one core that is planned for; the rest is for peaks, snapshots and a failover."""

GOAL: Final = 1_000_000
"""Tasks per second of the plan."""

PARTITIONS_PER_NODE: Final = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """micros: Redis CPU of one task in all, in microseconds. per_node: tasks per second. received: bytes per second to
    a node at that rate. nodes: that the goal takes. partitions: that spread it over them.
    """

    steps: int
    micros: float
    per_node: float
    received: float
    nodes: int
    partitions: int


def capacities(figures: Iterable[Mapping[str, float]], steps: Iterable[int] = (0, 1, 10)) -> list[Capacity]:
    """For tasks of so many durable steps. figures: of each crew; of each constant the highest one counts."""
    crews = list(figures)

    def highest(key: str) -> float:
        return max(crew[key] for crew in crews)

    found = []
    for count in steps:
        micros = highest("enqueue_micros") + highest("task_micros") + count * highest("step_micros")
        per_node = USED * 1e6 / micros
        nodes = math.ceil(GOAL / per_node)
        received = per_node * (highest("task_received") + count * highest("step_received"))
        found.append(Capacity(count, micros, per_node, received, nodes, nodes * PARTITIONS_PER_NODE))
    return found
