"""Which memories may go: by a policy that somebody states, never by default."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..errors import ConfigurationError
from .memory import Memory, strength

__all__ = ["Policy", "Pruning"]

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """A memory goes that meets any of these.

    below: its strength (see `decay.py`) is less. unused: days since it was last used. most: of each owner and type
    only so many stay, the strongest.
    """

    below: float | None = None
    unused: float | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.below is None and self.unused is None and self.most is None:
            raise ConfigurationError(
                "a policy of pruning says what goes: below a strength, unused for days, or over a number"
            )
        for name in ("below", "unused", "most"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{name} of a policy of pruning is 0 or more, not {value}")


@dataclass(frozen=True, slots=True)
class _Standing:
    strength: float
    id: str
    accessed: float


class Pruning:
    """Looks at memories one by one, and then says which go: it keeps of each what it needs, not the memory."""

    def __init__(self, policy: Policy, now: float) -> None:
        self._policy = policy
        self._now = now
        self._gone: list[_Standing] = []
        self._kept: dict[tuple[str, str], list[_Standing]] = defaultdict(list)

    def look(self, memory: Memory) -> None:
        policy = self._policy
        standing = _Standing(strength(memory, self._now), memory.id, memory.accessed)
        weak = policy.below is not None and standing.strength < policy.below
        if weak or (policy.unused is not None and self._now - memory.accessed > policy.unused * _DAY):
            self._gone.append(standing)
        elif policy.most is not None:
            self._kept[memory.owner, memory.type].append(standing)

    def verdict(self) -> list[tuple[str, float]]:
        """Those that go, each with the time of its last use, the weakest first."""
        gone = list(self._gone)
        for kept in self._kept.values():
            kept.sort(key=lambda one: (one.strength, one.accessed, one.id), reverse=True)
            gone += kept[self._policy.most :]
        gone.sort(key=lambda one: one.strength)
        return [(one.id, one.accessed) for one in gone]
