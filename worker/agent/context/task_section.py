"""The task section of a prompt: required lines, and optional lines within a token budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...journal import AgentState, PlanStep, StepStatus
from .tokens import TokenCounter

__all__ = ["TaskText", "task_text"]


@dataclass(slots=True)
class _Section:
    """Lines under a heading. `name` is set if lines may be left out; the last ones are kept."""

    heading: str
    lines: Sequence[str]
    name: str | None = None
    kept: list[str] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([self.heading, *self.kept])


@dataclass(frozen=True, slots=True)
class TaskText:
    """The text of the section, which may be empty, the left-out lines by kind, and the tokens of all lines."""

    text: str
    left_out: dict[str, int]
    wanted: int


def task_text(
    state: AgentState, counter: TokenCounter, budget: int, *, resumption: str = "", in_flight: Sequence[str] = ()
) -> TaskText:
    """Return the task section within a budget of tokens.

    Goal, open steps, what the task waits for and what is in flight are always included. The rest of the budget goes to
    the resumption, decisions, discoveries, artifacts and closed steps, in this order; the latest of each are kept.
    """
    required = [
        _Section("## Goal", [state.goal] if state.goal else []),
        _Section("## Open steps", [_open_step(step, state.current) for step in state.plan if _is_open(step)]),
        _Section("## Waiting for", _waiting(state)),
        _Section("## In flight", _listed(in_flight)),
    ]
    optional = [
        _Section("## After the interruption", resumption.strip().splitlines(), "resumption"),
        _Section("## Decisions", _listed(_decisions(state)), "decisions"),
        _Section("## Discoveries", _listed(_discoveries(state)), "discoveries"),
        _Section("## Artifacts", [f"- {one.name} ({one.size} bytes)" for one in state.artifacts], "artifacts"),
        _Section("## Closed steps", [_closed_step(step) for step in state.plan if not _is_open(step)], "steps"),
    ]
    for section in required:
        section.kept = list(section.lines)
    room = budget - sum(counter.count(section.text()) for section in required if section.kept)
    wanted = budget - room
    for section in optional:
        cost = sum(counter.count(line + "\n") for line in section.lines) + counter.count(section.heading)
        wanted += cost if section.lines else 0
        room -= _fill(section, room, counter)
    shown = [section.text() for section in (*required, *optional) if section.kept]
    left_out = {section.name: len(section.lines) - len(section.kept) for section in optional if section.name}
    return TaskText("\n\n".join(shown), {name: count for name, count in left_out.items() if count}, wanted)


def _fill(section: _Section, room: int, counter: TokenCounter) -> int:
    """Fill the section up to `room` tokens, with the first lines of a text or the last items of a list."""
    room -= (spent := counter.count(section.heading + "\n"))
    prose = section.name == "resumption"
    for line in section.lines if prose else reversed(section.lines):
        cost = counter.count(line + "\n")
        if cost > room:
            break
        room -= cost
        spent += cost
        section.kept.append(line)
    if not prose:
        section.kept.reverse()
    return spent if section.kept else 0


def _is_open(step: PlanStep) -> bool:
    return step.status in (StepStatus.PENDING, StepStatus.RUNNING)


def _open_step(step: PlanStep, current: str | None) -> str:
    notes = [step.status.value] if step.key != current else ["now"]
    notes += [f"attempt {step.attempts}"] if step.attempts > 1 else []
    notes += [f"last error: {step.error}"] if step.error else []
    return f"- {step.key}: {step.title} ({', '.join(notes)})"


def _closed_step(step: PlanStep) -> str:
    return f"- {step.key}: {step.title} ({step.status.value}{f': {step.error}' if step.error else ''})"


def _waiting(state: AgentState) -> list[str]:
    waiting = state.waiting_for
    if waiting is None:
        return []
    on = f" from {waiting.on}" if waiting.on else ""
    why = f", because {waiting.why}" if waiting.why else ""
    return [f"- {waiting.what or 'something'}{on}{why}"]


def _decisions(state: AgentState) -> Iterable[str]:
    for one in state.decisions:
        reasoning = f": {one.reasoning}" if one.reasoning else ""
        instead = f" (instead of: {', '.join(one.alternatives)})" if one.alternatives else ""
        yield f"{one.choice}{reasoning}{instead}"


def _discoveries(state: AgentState) -> Iterable[str]:
    for one in state.discoveries:
        yield f"{one.fact} [{one.source}]" if one.source else one.fact


def _listed(items: Iterable[str]) -> list[str]:
    return [f"- {' '.join(item.split())}" for item in items]
