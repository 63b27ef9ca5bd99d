"""Whether the agent still works for what it was asked for."""

from __future__ import annotations

from .settings import Coherence
from .view import View

__all__ = ["check_goal"]

_SHOWN = 80


def check_goal(view: View, coherence: Coherence) -> tuple[str, str] | None:
    held = view.state.get("goal", "")
    if held == view.goal:
        return None
    return f"its goal is {_short(held)}, and {_short(view.goal)} was enqueued", str(held)


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
