"""Whether the agent does the same thing again and again."""

from __future__ import annotations

from collections import Counter

from .settings import Coherence
from .view import View

__all__ = ["check_repetition"]


def check_repetition(view: View, coherence: Coherence) -> tuple[str, str] | None:
    calls = view.calls[-coherence.window :]
    if not calls:
        return None
    call, times = Counter(calls).most_common(1)[0]
    if times < coherence.repeats:
        return None
    told = f"{call.tool}({call.arguments})"
    return f"{told} was called {times} times among the last {len(calls)} calls", f"{told} {call.digest}".rstrip()
