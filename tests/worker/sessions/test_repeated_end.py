"""Sessions: the end of a turn that is repeated by a later run of its task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings
from perdure.context import Commitment
from perdure.queues.sessions.turns import due_sessions
from perdure.queues.sessions.turns import end_turn as session_end

from tests.support.workers import work_off

pytestmark = pytest.mark.integration


class Caller(Agent[AgentState]):
    """Has a commitment that fell due before the turn."""

    wake_when_due = True

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="promise", title="promise")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        due = datetime.now(UTC) - timedelta(hours=1)
        state.commitments.append(Commitment(what="call back", to="ada", due=due))

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "done"


async def test_a_commitment_that_fell_due_before_the_turn_starts_no_turn(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run that recorded the result ended before it stored the end of the turn."""
    ends: list[Any] = []

    async def end_turn(*args: Any, **options: Any) -> bool:
        ends.append(args)
        if len(ends) == 1:
            raise RuntimeError("the run ends here")
        return await session_end(*args)

    monkeypatch.setattr("perdure.worker.agents.session_turn.end_turn", end_turn)
    app = App("test", settings=settings)
    app.agent(Caller, retry=Retry(max_attempts=2, base=0.0))
    async with app:
        session = app.session(Caller, "a")
        turn = await session.send("promise")
        await work_off(app)
        assert await turn.result(5) == "done"
        assert len(ends) == 2
        assert (await session.record()).status == "idle"
        assert await due_sessions(app.producer.gateway, app.producer.namespace) == []
