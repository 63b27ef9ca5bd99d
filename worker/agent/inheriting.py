"""What an agent begins with that goes on where another task has handed on."""

from __future__ import annotations

from ..journal import AgentState, Decision, Discovery, Handoff

__all__ = ["inherit"]


def inherit(state: AgentState, received: Handoff) -> None:
    """Take over what the other has decided and found out. The numbers of its events are those of another log."""
    decisions = [
        Decision(n=0, choice=one.choice, reasoning=one.reasoning, alternatives=list(one.alternatives))
        for one in received.decisions
    ]
    discoveries = [Discovery(n=0, fact=one.fact, source=one.source) for one in received.discoveries]
    state.decisions = [*decisions, *state.decisions]
    state.discoveries = [*discoveries, *state.discoveries]
