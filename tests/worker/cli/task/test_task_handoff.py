"""`perdure task handoff`."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, Settings, Worker
from perdure.queues.wording import iso_time

from tests.support.command_line import call

pytestmark = pytest.mark.integration


async def fails(ctx: Context) -> None:
    await ctx.decide("begin with src", reasoning="it is small")
    for number in range(30):
        await ctx.discover(f"fact {number} " + "of some length " * 20)
    await ctx.step("list", len, "x")
    raise ValueError("no good")


async def hands_on(ctx: Context) -> str:
    if ctx.resumption is None:
        await ctx.decide("leave it to the next")
        await ctx.continue_as("hands_on", message="mind the gap")
    return "done by the next"


@pytest.fixture(autouse=True)
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks."""

    async def run() -> None:
        app = App("test", settings=settings)
        app.task(retry=Retry(max_attempts=1))(fails)
        app.task(hands_on)
        async with Worker(app) as worker:
            await worker.run(burst=True)

    return lambda: anyio.run(run)


def enqueue(task: str) -> str:
    return call("enqueue", task, "--queue", "test").ids[0]


def test_the_handoff_is_markdown_within_the_budget_or_json(work: Any) -> None:
    task_id = enqueue("fails")
    work()
    text = call("task", "handoff", task_id).out
    assert text.startswith(f"# Handoff of fails {task_id}")
    assert "Buried as a dead letter" in text
    assert "- begin with src: it is small" in text
    assert len(text) <= 6000
    assert "fact 29" in text
    assert "Left out for length:" in text
    assert len(call("task", "handoff", task_id, "--budget", "200").out) <= 800
    found = call("task", "handoff", task_id, "--json").json
    assert (found["v"], found["session"], found["why"], found["last_completed"]) == (1, task_id, "burial", "list")


def test_a_task_that_has_not_run_has_a_handoff_and_a_missing_task_fails() -> None:
    task_id = enqueue("fails")
    assert "Report on request" in call("task", "handoff", task_id).out
    unknown = call("task", "handoff", "nothing")
    assert (unknown.code, unknown.out) == (1, "")
    assert "no task nothing" in unknown.err
    assert call("task", "cancel", task_id).code == 0


def test_the_handoff_of_an_ended_task_has_its_end_time(work: Any) -> None:
    task_id = enqueue("hands_on")
    work()
    found = call("task", "handoff", f"{task_id}.h1", "--json").json
    assert found["why"] == "finished"
    assert iso_time(found["at"]) == call("task", "show", f"{task_id}.h1", "--json").json["finished_at"]


def test_a_continued_task_names_its_successor_and_prints_its_result(work: Any) -> None:
    task_id = enqueue("hands_on")
    work()
    following = f"{task_id}.h1"
    assert re.search(rf"handed to +{following}", call("task", "show", task_id).out)
    assert call("task", "show", task_id, "--json").json["handed_to"] == following
    assert call("task", "result", task_id).out == '"done by the next"\n'
    assert call("task", "result", task_id, "--json").json["id"] == following
    assert f"Continued as task {following}" in call("task", "handoff", task_id).out
    assert "- mind the gap" in call("task", "handoff", following, "--received").out
    assert call("task", "handoff", task_id, "--received").code == 1
