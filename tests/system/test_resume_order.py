"""The order in which a run that was cut off takes up its work again, shown with a process that is really killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import App, Context, Producer
from perdure.worker.settings import Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.workers import bounded, running_worker

pytestmark = pytest.mark.integration

PROGRAM = PROGRAMS / "booting.py"


async def test_after_a_kill_come_the_handoff_the_messages_the_state_and_history_when_asked_for(
    settings: Settings, tmp_path: Path
) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        handle = await producer.enqueue("careful", {"goal": "to the inn"}, task_id="journey", queue="booting")
        with worker_processes(settings, tmp_path, PROGRAM) as workers:
            first = await workers.start().ready()
            await workers.line("stands")
            first.kill()
            await handle.send("turn back")
            await handle.send("or do not")
            await workers.start().ready()
            found = await bounded(handle.result())
    (handoff, why), (messages, arrived), (state, stands) = [(name, part) for name, part, _ in found["parts"]]
    assert (handoff, why) == ("handoff", ["crash", ["two"]])
    assert (messages, arrived) == ("messages", ["turn back", "or do not"])
    assert (state, stands) == ("state", ["two", ["one"], ["to the left"]])
    assert [asked for _, _, asked in found["parts"]] == [[], ["read_inbox"], []], "each is read in its turn"
    chores = {"EXISTS"}  # of the janitor, which may come meanwhile
    assert set(found["asked"]) - chores == {"read_log"}, "and the log only when it is asked for"
    assert found["history"][:2] == ["started", "planned"]
    assert "decided" in found["history"]
    assert found["read"] == 2, "looking uses nothing up"


async def test_a_first_run_has_nothing_to_take_up(settings: Settings) -> None:
    app = App("boot", settings=settings)

    @app.task
    async def looks(ctx: Context) -> list[list[str]]:
        before = [name async for name, _ in ctx.resume_info()]
        await ctx.step("one", lambda: 1)
        return [before, [name async for name, _ in ctx.resume_info()]]

    async with app, running_worker(app):
        assert await bounded((await looks.enqueue()).result()) == [[], []]
