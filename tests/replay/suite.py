"""All handlers of the suite, from the modules that define them."""

from __future__ import annotations

from tests.replay import answers, budgets, children, ends, plans, streams, values, waits  # noqa: F401 - they add handlers
from tests.replay.handlers import HANDLERS

__all__ = ["HANDLERS"]
