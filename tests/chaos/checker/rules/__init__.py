"""Rules of the checker: the guarantees of Perdure as checks of a history. Each module has one subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ..history import History, Violation
from .answers import check_answers
from .cancelling import check_cancelled
from .children import check_children
from .endings import check_lost, check_once, check_outcomes
from .gaps import check_gaps
from .letters import check_letters
from .limits import check_limits
from .messages import check_messages
from .order import check_order
from .processes import check_processes
from .recorded import check_recorded
from .repeats import check_charges, check_repeats
from .saved import check_saved
from .schedules import check_schedules
from .sessions import check_sessions
from .settings import check_settings
from .spending import check_spending
from .states import check_states
from .streams import check_streams

__all__ = ["RULES"]

RULES: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    check_lost,
    check_once,
    check_outcomes,
    check_recorded,
    check_gaps,
    check_saved,
    check_repeats,
    check_charges,
    check_letters,
    check_cancelled,
    check_states,
    check_order,
    check_processes,
    check_settings,
    check_sessions,
    check_messages,
    check_answers,
    check_children,
    check_streams,
    check_limits,
    check_schedules,
    check_spending,
)
"""All rules, in the order of the report."""
