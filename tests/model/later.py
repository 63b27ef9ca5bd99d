"""Values that Redis chooses and a model cannot predict: ids of entries, and times of its clock.

Such a value is taken from what is seen after the act, if it lies within the act, and must stay the same from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Id", "Later", "Moment", "Stamped", "Value", "text_of"]

SLACK = 50
"""Milliseconds by which two readings of Redis' clock, in two commands of one script, may differ."""

LOOSE = 2_000
"""The same for a time that Redis reports as a distance from now, while the machine does other things."""


@dataclass(eq=False)
class Later(ABC):
    """A value that is known once it has been seen."""

    known: bytes | None = None

    def fits(self, seen: bytes, low: int, high: int) -> bool:
        """Return whether this can be the value, for an act that took place between two times in milliseconds."""
        if self.known is None and self.possible(seen, low - SLACK, high + SLACK):
            self.known = seen
        return self.known == seen

    @abstractmethod
    def possible(self, seen: bytes, low: int, high: int) -> bool:
        """Return whether an act between those times can have this value."""


@dataclass(eq=False)
class Id(Later):
    """The id of a stream's entry."""

    def possible(self, seen: bytes, low: int, high: int) -> bool:
        return low <= int(seen.partition(b"-")[0]) <= high

    @property
    def order(self) -> tuple[int, int]:
        """Return the position of the entry in its stream."""
        assert self.known is not None
        milliseconds, _, number = self.known.partition(b"-")
        return int(milliseconds), int(number)


@dataclass(eq=False)
class Moment(Later):
    """The time of an act, plus an offset in milliseconds."""

    plus: int = 0
    loose: bool = False
    """Redis reports it as a distance from now, so each reading differs a little."""

    def fits(self, seen: bytes, low: int, high: int) -> bool:
        if self.loose and self.known is not None:
            return abs(int(float(seen)) - self.ms) <= LOOSE
        slack = LOOSE if self.loose else 0
        return super().fits(seen, low - slack, high + slack)

    def possible(self, seen: bytes, low: int, high: int) -> bool:
        return low + self.plus <= int(float(seen)) <= high + self.plus

    @property
    def ms(self) -> int:
        assert self.known is not None
        return int(float(self.known))


@dataclass(eq=False)
class Stamped(Later):
    """The time of an act in milliseconds, a space, and a text."""

    text: bytes = b""

    def possible(self, seen: bytes, low: int, high: int) -> bool:
        at, _, text = seen.partition(b" ")
        return low <= int(at) <= high and text == self.text


Value = bytes | Later


def text_of(value: Value) -> bytes:
    """Return the value as Redis holds it. It must have been seen."""
    if isinstance(value, bytes):
        return value
    assert value.known is not None
    return value.known
