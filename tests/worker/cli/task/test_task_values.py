"""`perdure task values` and `perdure task update`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings

from tests.support.command_line import call
from tests.support.workers import work_off


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks."""

    async def run() -> None:
        app = App("test", settings=settings)

        @app.task
        async def job(ctx: Context) -> Any:
            await ctx.values.set("status", ["runs"])
            return await ctx.values.get("speed")

        async with app:
            await work_off(app)

    return lambda: anyio.run(run)


def test_values_are_set_and_printed(work: Any) -> None:
    task_id = call("enqueue", "job", "--queue", "test").ids[0]
    assert call("task", "values", task_id).err == f"perdure: task {task_id} has no values\n"
    done = call("task", "update", task_id, "speed", '{"now": 2}', "--by", "ada")
    assert (done.code, done.ids, done.err) == (0, [task_id], f"perdure: set value 'speed' of task {task_id} as 'ada'\n")
    assert call("task", "update", task_id, "speed", "-", "--json", stdin=b"3").json == {
        "id": task_id,
        "name": "speed",
        "state": "queued",
    }
    work()
    assert call("task", "result", task_id).out == "3\n"
    found = call("task", "values", task_id, "--json").lines
    assert [(row["name"], row["value"]) for row in found] == [("speed", 3), ("status", ["runs"])]
    assert found[1]["by"] == "handler"
    shown = call("task", "values", task_id).out
    assert '["runs"]' in shown
    assert "handler" in shown


def test_an_update_that_cannot_be_stored_says_why(work: Any) -> None:
    task_id = call("enqueue", "job", "--queue", "test").ids[0]
    for args, problem, code in (
        (("speed", "{"), "JSON", 2),
        (("a speed", "1"), "name of a value must be", 2),
        (("speed", '"' + "x" * 70_000 + '"'), "over the limit of 65,536", 1),
    ):
        refused = call("task", "update", task_id, *args)
        assert (refused.code, refused.out) == (code, ""), refused.err
        assert problem in refused.err
    assert "no task missing" in call("task", "update", "missing", "speed", "1").err
    assert "no task missing" in call("task", "values", "missing").err
    work()
    assert "takes no more values: it is succeeded" in call("task", "update", task_id, "speed", "1").err
