"""Partitions of a queue: routes, resharding, the producer's router and the worker's assignment."""

from __future__ import annotations

from .assignment import PartitionAssignment
from .resharding import close_previous, load_route, load_routes, retire_generation, set_partitions
from .route import MOST_PARTITIONS, SINGLE, Generation, Route, spread
from .router import PartitionRouter

__all__ = [
    "MOST_PARTITIONS",
    "SINGLE",
    "Generation",
    "PartitionAssignment",
    "PartitionRouter",
    "Route",
    "close_previous",
    "load_route",
    "load_routes",
    "retire_generation",
    "set_partitions",
    "spread",
]
