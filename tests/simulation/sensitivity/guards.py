"""Guards of the scripts and of the worker, and what is known of them.

A guard is a condition: of a branch that refuses (it ends in `return`, `break`, `continue` or `raise`) or that protects
what it contains, of a loop that waits, or of a function that returns a condition. Or it is an act that the next
statement relies on: an `await` whose value nothing takes. These are no guards: a condition that only tells whether
there is a value, because the program would not pass the type check without it; one that only reads an option of the
call or the kind of a value; a block that only logs.

Without the guard, a branch that refuses is never taken, another one always, a loop does not wait, and a returned
condition holds. Each evaluation of the condition is counted in which this makes a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

__all__ = ["FUNCTION", "ROOT", "Finding", "Guard", "Kind", "numbered"]

ROOT: Final = Path(__file__).parents[3]

FUNCTION: Final = "_guard"
"""Name of the function that takes the place of a condition."""


@dataclass(frozen=True)
class Guard:
    """A guard of a script or a module.

    Attributes:
        part: Which operand of the line's `and`, from 0; which one counts from 0 also if there is only one.
        text: What is left out.
        scope: Function of a module in which it is; empty for scripts.
        number: Which one with this text in the function or script, from 1.
    """

    path: str
    line: int
    part: int
    text: str
    scope: str = ""
    number: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f"#{self.part}" if self.part else "")

    @property
    def place(self) -> str:
        """The file, and in a module the function; line numbers would change too often."""
        return self.path + (f", {self.scope}" if self.scope else "") + (f" ({self.number})" if self.number > 1 else "")


def numbered(guards: Iterable[Guard]) -> list[Guard]:
    """Return guards with their numbers."""
    seen = Counter[tuple[str, str, str]]()
    found = []
    for guard in guards:
        seen[guard.path, guard.scope, guard.text] += 1
        found.append(replace(guard, number=seen[guard.path, guard.scope, guard.text]))
    return found


class Kind(Enum):
    """Result of removing a guard."""

    FOUND = "found"
    RARE = "needed by few runs"
    EQUIVALENT = "equivalent"
    OUTSIDE = "outside the runs"


@dataclass(frozen=True)
class Finding:
    """Result of removing one guard, and its explanation.

    Attributes:
        place, text: Those of the guard.
        protects: What the guard checks.
        result: The check that fails without it, or the reason why none does.
        seed: A seed that finds it missing, if it is found.
    """

    place: str
    text: str
    protects: str
    kind: Kind
    result: str
    seed: int | None = None

    @property
    def outcome(self) -> str:
        """The last column of the table."""
        if self.kind is Kind.FOUND:
            return f"{self.seed}: {self.result}"
        return f"{self.kind.value}: {self.result}"
