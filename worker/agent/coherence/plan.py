"""Whether the plan and the results fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .settings import Coherence
from .view import View

__all__ = ["check_plan"]


def check_plan(view: View, coherence: Coherence) -> tuple[str, str] | None:
    wrong = list(_wrong(view.state))
    return ("; ".join(wrong), "; ".join(wrong)) if wrong else None


def _wrong(state: Mapping[str, Any]) -> Iterator[str]:
    plan, results, current = state.get("plan", ()), state.get("results", {}), state.get("current")
    status = {step["key"]: step["status"] for step in plan}
    for key, times in Counter(step["key"] for step in plan).items():
        if times > 1:
            yield f"{times} steps of the plan are called {key!r}"
    if missing := [key for key, one in status.items() if one == "done" and key not in results]:
        yield f"done without a result: {_listed(missing)}"
    if unknown := [key for key in results if key not in status]:
        yield f"a result of no step of the plan: {_listed(unknown)}"
    running = [key for key, one in status.items() if one == "running"]
    if len(running) > 1:
        yield f"{len(running)} steps are running at once: {_listed(running)}"
    if current is not None and current not in status:
        yield f"the current step {current!r} is not in the plan"
    elif current is not None and status[current] != "running":
        yield f"the current step {current!r} is {status[current]}"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:5]))
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"
