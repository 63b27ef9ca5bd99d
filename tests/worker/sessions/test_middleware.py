"""Sessions with middleware: each message passes the enqueue hooks, and its turn has their headers."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, EnqueueCall, Middleware, PlanStep, Settings

from tests.support.workers import redis_command, work_off

pytestmark = pytest.mark.integration


class Tracing(Middleware):
    """Gives each task a trace; refuses the message 'refused'."""

    def __init__(self) -> None:
        self.calls: list[EnqueueCall] = []
        self.ids: list[str] = []

    async def enqueue(self, call: EnqueueCall, call_next: Any) -> str:
        if call.arguments["goal"] == "refused":
            raise ValueError("not this message")
        self.calls.append(call)
        call.headers |= {"trace": f"t{len(self.calls)}", "session": "another"}
        task_id: str = await call_next()
        self.ids.append(task_id)
        return task_id


class Echo(Agent[AgentState]):
    """Answers with the headers of its turn."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> dict[str, str]:
        return dict(ctx.headers)


async def test_a_message_passes_the_enqueue_hooks_also_if_its_task_is_stored_later(settings: Settings) -> None:
    tracing = Tracing()
    app = App("test", settings=settings, middleware=[tracing])
    app.agent(Echo)
    async with app:
        session = app.session(Echo, "ada")
        turns = [await session.send("one", message_id="m1"), await session.send("two")]
        with pytest.raises(ValueError, match="not this message"):
            await session.send("refused")
        partition = app.producer.namespace.partition("test")
        for key in (
            partition.record(turns[0].task_id),
            partition.ready,
        ):  # as if the sender had died before
            await redis_command(app, "DEL", key)
        assert (await session.send("one", message_id="m1")).task_id == turns[0].task_id
        await work_off(app)
        assert [await turn.result(5) for turn in turns] == [
            {"session": "ada", "trace": "t1"},
            {"session": "ada", "trace": "t2"},
        ]
        assert (await session.record()).sent == 2
    assert tracing.ids == [turns[0].task_id, turns[1].task_id, turns[0].task_id]
    assert [(call.task, call.queue, call.options) for call in tracing.calls[:2]] == [
        ("echo", "test", {"message_id": "m1"}),
        ("echo", "test", {}),
    ]
