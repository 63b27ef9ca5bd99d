"""Whether anything gets done: within its time, within its context, and with the messages that have come."""

from __future__ import annotations

from .settings import Coherence
from .view import View

__all__ = ["check_context", "check_progress", "check_waiting"]


def check_progress(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.idle <= coherence.stuck_minutes * 60:
        return None
    where = f" in step {view.state['current']!r}" if view.state.get("current") else ""
    return f"nothing got done{where} for more than {coherence.stuck_minutes:g} minutes", ""


def check_context(view: View, coherence: Coherence) -> tuple[str, str] | None:
    if view.tokens <= coherence.context_tokens:
        return None
    return f"its messages have {view.tokens:,} tokens, and {coherence.context_tokens:,} is its budget", ""


def check_waiting(view: View, coherence: Coherence) -> tuple[str, str] | None:
    awaited = view.state.get("waiting_for")
    if not awaited or not view.ignored:
        return None
    whom = f" from {awaited['on']!r}" if awaited.get("on") else ""
    what = awaited.get("what") or "something"
    steps = f"{view.ignored} step{'s' if view.ignored > 1 else ''}"
    return f"it waits for {what}{whom} while a message is in its inbox, unread for {steps}", ""
