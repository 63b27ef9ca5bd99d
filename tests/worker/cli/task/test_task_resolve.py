"""`perdure task resolve`: the exit of a dead letter with a step in doubt, as its operator finds it."""

from __future__ import annotations

import json
import shlex

import anyio
import pytest
from perdure import App, Context, Retry, Settings

from tests.support.command_line import call
from tests.support.workers import steal, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def task_id(settings: Settings, environment: None) -> str:
    """Id of a dead letter whose step `pay it` has acted and lost its run."""
    found: str = call("enqueue", "buy", "--queue", "test").ids[0]
    anyio.run(work, settings)
    anyio.run(work, settings)
    return found


async def work(settings: Settings) -> None:
    """Run a worker until nothing is left to run."""
    app = App("test", settings=settings)

    async def pay(order: str, ctx: Context) -> str:
        handle = await app.producer.find(ctx.task_id)
        assert handle is not None
        await steal(app, handle, expired=True)
        return "paid"

    @app.task(retry=Retry(max_attempts=1))
    async def buy(ctx: Context) -> str:
        return await ctx.options(risky=True, in_doubt="fail").step("pay it", pay, "order 7", ctx)

    async with app:
        await work_off(app)


def test_what_a_dead_letter_says_leads_to_its_end(settings: Settings, task_id: str) -> None:
    command = f"perdure task resolve {task_id} 'pay it' with --result JSON, --failed TEXT or --run-again"
    for shown in (("dlq", "show"), ("task", "show"), ("task", "why")):
        said = " ".join(call(*shown, task_id).out.split())
        assert command in said, shown
        assert f"then: perdure dlq replay {task_id}" in said
        assert f"idempotency key {task_id}:pay it" in said
        assert 'pay it("order 7"' in said
    assert command in " ".join(call("task", "handoff", task_id).out.split())
    arguments = shlex.split(command)[1:5]
    done = call(*arguments, "--result", '"receipt 17"', "--by", "ada", "--json")
    assert json.loads(done.out) == {"id": task_id, "step": "pay it", "decision": "result", "state": "dead"}
    assert f"it is a dead letter; to resume it: perdure dlq replay {task_id}" in done.err
    why = call("task", "why", task_id).out
    assert f"run: perdure dlq replay {task_id}; its steps in doubt are resolved" in why
    assert "resolved by ada: result" in why
    doubts = json.loads(call("dlq", "show", task_id, "--json").out)["doubts"]
    assert [(one["step"], one["decision"]) for one in doubts] == [("pay it", "result")]
    assert call("dlq", "replay", task_id).code == 0
    anyio.run(work, settings)
    assert json.loads(call("task", "result", task_id, "--json").out)["result"] == "receipt 17"
    assert "step_resolved in pay it: with result receipt 17 (by ada)" in call("task", "events", task_id).out


def test_wrong_decisions_are_refused(task_id: str) -> None:
    for options in ((), ("--run-again", "--failed", "no"), ("--result", "{"), ("--failed", "")):
        assert call("task", "resolve", task_id, "pay it", *options).code == 2, options
    other = call("task", "resolve", task_id, "mail", "--run-again")
    assert (other.code, "it is not in doubt; in doubt: 'pay it'" in other.err) == (1, True)
    assert call("task", "resolve", task_id, "pay it", "--failed", "the bank refused").ids == [task_id]
    assert "as failed: the bank refused" in call("task", "events", task_id).out.replace('"', "")


def test_a_result_that_does_not_fit_names_its_remedy(settings: Settings, task_id: str) -> None:
    assert call("task", "resolve", task_id, "pay it", "--result", "17").code == 0
    assert call("dlq", "replay", task_id).code == 0
    anyio.run(work, settings)
    why = " ".join(call("task", "why", task_id).out.split())
    assert f"(perdure task resolve {task_id} STEP with --result JSON, --failed TEXT or --run-again)" in why
    assert call("task", "resolve", task_id, "pay it", "--result", '"receipt 17"').code == 0
