"""The checks, by name. Each is a function from what there is to what is wrong with it, if anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from .goal import check_goal
from .plan import check_plan
from .progress import check_context, check_progress, check_waiting
from .repetition import check_repetition
from .settings import Coherence
from .view import View

__all__ = ["CHECKS", "Finding", "find"]


class Finding(NamedTuple):
    """What a check found. detail: for a person. about: what stays the same while the same thing is wrong."""

    check: str
    detail: str
    about: str = ""


CHECKS: Final[dict[str, Callable[[View, Coherence], tuple[str, str] | None]]] = {
    "goal": check_goal,
    "plan": check_plan,
    "progress": check_progress,
    "repetition": check_repetition,
    "context": check_context,
    "waiting": check_waiting,
}
"""A check gives what is wrong, and what tells that apart from anything else that it may find."""


def find(view: View, coherence: Coherence) -> list[Finding]:
    """What is wrong, by all checks that are not off."""
    found = []
    for name, check in CHECKS.items():
        if coherence.policy(name) != "off" and (wrong := check(view, coherence)) is not None:
            found.append(Finding(name, *wrong))
    return found
