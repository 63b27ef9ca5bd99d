"""Memory stores for tests: on both databases, with a clock that the test sets and embedders without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.worker.memory import HybridStore, Memory, NewMemory, new_memory

__all__ = ["DAY", "Angles", "Clock", "Numbers", "Stores", "remember"]

DAY = 86_400.0


@dataclass
class Clock:
    """Clock that the test sets, in seconds since 1970."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Angles:
    """Embedder of two dimensions with a given angle, in degrees, for each text. All other texts have 180 degrees."""

    angles: dict[str, float] = field(default_factory=dict)
    name: str = "angles"
    dimension: int = 2
    floor: float = 0.0
    asked: list[list[str]] = field(default_factory=list)

    def embed(self, texts: list[str]) -> list[list[float]]:
        self.asked.append(texts)
        return [self._one(self.angles.get(text, 180.0)) for text in texts]

    def _one(self, degrees: float) -> list[float]:
        rest = [0.0] * (self.dimension - 2)
        return [7 * math.cos(math.radians(degrees)), 7 * math.sin(math.radians(degrees)), *rest]


@dataclass
class Numbers:
    """An embedder to which texts mean the same that begin with the same number, and others nothing of each other."""

    name: str = "numbers"
    dimension: int = 100
    floor: float = 0.0
    asked: list[str] = field(default_factory=list)

    def embed(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        return [[float(text.partition(" ")[0] == str(place)) for place in range(self.dimension)] for text in texts]


@dataclass
class Stores:
    """Makes stores on one database, not yet open."""

    backend: Callable[[], Any]
    clock: Clock = field(default_factory=Clock)

    def __call__(self, embedder: Any = None) -> HybridStore:
        return HybridStore(self.backend(), embedder, clock=self.clock)


async def remember(store: HybridStore, *texts: str, owner: str = "", **fields: Any) -> Sequence[Memory]:
    memories: list[NewMemory] = [new_memory(text, **fields) for text in texts]
    return [await store.add(memory, owner=owner) for memory in memories]
