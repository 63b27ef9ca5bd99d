"""`perdure task compact`, and what other commands say of a task that waits for it."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Settings, State
from perdure.queues import list_tasks

from tests.support.command_line import call
from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


class Noter(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=key, title=key) for key in ("small", "notes", "more")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        if step.key == "notes":
            state.context["notes"] = "x" * 15_000
        return "x" * (7000 if step.key == "more" else 10)

    async def finish(self, ctx: Context, state: AgentState) -> int:
        return len(state.results)


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs the tasks until none can run."""

    async def run(until: State) -> None:
        app = App("test", settings=settings.model_copy(update={"payload_limit": 20_000}))
        app.agent(Noter, name="noter")

        async def reached() -> bool:
            found = list_tasks(app.producer.gateway, app.producer.namespace, states=[until])
            return bool([one async for one in found])

        async with app, running_worker(app):
            await wait_until(reached, f"the task is {until}")

    return lambda until: anyio.run(run, until)


def test_a_full_agent_is_compacted_and_resumes(work: Any) -> None:
    task_id = call("enqueue", "noter", "--queue", "test", "--args", '{"goal": "note all"}').ids[0]
    refused = call("task", "compact", task_id)
    assert refused.code == 1
    assert "the task must be waiting, scheduled or dead, got queued" in refused.err
    work(State.WAITING)
    why = call("task", "why", task_id).out
    assert "waiting for a compaction" in why
    assert f"perdure task compact {task_id}; or raise PERDURE_PAYLOAD_LIMIT or PERDURE_LARGE_LIMIT first" in why
    assert "archive" not in call("task", "state", task_id).out  # it is empty
    unknown = call("task", "compact", task_id, "--drop-context", "note")
    assert (unknown.code, "the state has no context key 'note'" in unknown.err) == (2, True)
    done = call("task", "compact", task_id, "--keep-steps", "1", "--drop-context", "notes", "--json")
    found = json.loads(done.out)
    assert (found["steps"], found["woken"], found["fields"]["context"]) == (1, True, 2)
    assert found["after"] < 2000
    assert found["before"] > 15_000
    assert "the task is due now" in done.err
    assert "archive" in call("task", "state", task_id).out
    work(State.SUCCEEDED)
    assert call("task", "result", task_id).out.strip() == "3", "finish has the result of the archived step, too"
    archived = json.loads(call("task", "state", task_id, "--step", "small", "--json").out)
    assert (archived["archived"], archived["step"]["status"], archived["result"]) == (True, "done", "x" * 10)
    live = call("task", "state", task_id, "--step", "more").out
    assert "done" in live
    assert "xxx" in live
    unknown = call("task", "state", task_id, "--step", "less")
    assert (unknown.code, "has no step 'less'" in unknown.err) == (1, True)
    again = call("task", "compact", task_id)
    assert (again.code, "got succeeded" in again.err) == (1, True)
