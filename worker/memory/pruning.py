"""Pruning of memories, by an explicit policy only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...queues.errors import ConfigurationError
from .memory import Memory, strength

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Conditions under which a memory is removed; one of them suffices.

    Attributes:
        below: Its strength (see `memory.py`) is less than this.
        unused: Its last use is more than this many days ago.
        most: Its owner and type have this many stronger ones.
    """

    below: float | None = None
    unused: float | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.below is None and self.unused is None and self.most is None:
            raise ConfigurationError(
                "a pruning policy must set below (strength), unused (days) or most (number per owner and type)"
            )
        for name in ("below", "unused", "most"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{name} of a pruning policy must be 0 or more, got {value}")


@dataclass(frozen=True, slots=True)
class _Ranked:
    strength: float
    id: str
    accessed: float


class Pruning:
    """Plan of a prune over a stream of memories; keeps only what it needs of each."""

    def __init__(self, policy: Policy, now: float) -> None:
        self._policy = policy
        self._now = now
        self._removed: list[_Ranked] = []
        self._kept: dict[tuple[str, str], list[_Ranked]] = defaultdict(list)

    def add(self, memory: Memory) -> None:
        policy = self._policy
        ranked = _Ranked(strength(memory, self._now), memory.id, memory.accessed)
        weak = policy.below is not None and ranked.strength < policy.below
        if weak or (policy.unused is not None and self._now - memory.accessed > policy.unused * _DAY):
            self._removed.append(ranked)
        elif policy.most is not None:
            self._kept[memory.owner, memory.type].append(ranked)

    def plan(self) -> list[tuple[str, float]]:
        """Return the ids of the memories to remove, each with the time of its last use, the weakest first."""
        removed = list(self._removed)
        for kept in self._kept.values():
            kept.sort(key=lambda one: (one.strength, one.accessed, one.id), reverse=True)
            removed += kept[self._policy.most :]
        removed.sort(key=lambda one: one.strength)
        return [(one.id, one.accessed) for one in removed]
