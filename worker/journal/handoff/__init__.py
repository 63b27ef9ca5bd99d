"""Handoff documents: what a run leaves when it stops."""

from __future__ import annotations

from .budget import HANDOFF_TOKENS, Counter, clipped, estimated_tokens, fitted, fitted_text
from .document import HANDOFF, RECEIVED, AwaitedAnswer, Handoff, Why
from .draft import build_handoff, handoff_of, state_after

__all__ = [
    "HANDOFF",
    "HANDOFF_TOKENS",
    "RECEIVED",
    "AwaitedAnswer",
    "Counter",
    "Handoff",
    "Why",
    "build_handoff",
    "clipped",
    "estimated_tokens",
    "fitted",
    "fitted_text",
    "handoff_of",
    "state_after",
]
