"""The capacity of one Redis node from the measured constants: the model of docs/explanation/scaling.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Capacity", "capacities"]

USED: Final = 0.7
"""Planned share of a node's core; the rest is for peaks, snapshots and failovers."""

GOAL: Final = 1_000_000
"""Tasks per second of the plan."""

PARTITIONS_PER_NODE: Final = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity for one kind of task. micros: Redis CPU of one task in microseconds. per_node: tasks per second.
    received: bytes per second to a node at that rate. nodes, partitions: needed for the goal.
    """

    steps: int
    micros: float
    per_node: float
    received: float
    nodes: int
    partitions: int


def capacities(figures: Iterable[Mapping[str, float]], steps: Iterable[int] = (0, 1, 10)) -> list[Capacity]:
    """Return capacities for tasks with these numbers of steps. figures: one mapping per crew; the highest count."""
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
