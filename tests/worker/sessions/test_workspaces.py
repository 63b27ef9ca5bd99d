"""Sessions with files: each turn starts with those that the turns before it left, on whatever host it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings
from perdure.context import AgentTools, ToolCall
from perdure.worker.artifacts.links import orphans
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.workspace.task_workspace import workspace_hashes

from tests.support.workers import redis_command, work_off

pytestmark = pytest.mark.integration


class Editor(Agent[AgentState]):
    """Writes, lists or removes files, or fails after it has written one."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="edit", title="edit"), PlanStep(key="look", title="look")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        what, _, name = state.goal.partition(" ")
        if step.key == "look" and what == "fail":
            raise ValueError("after the file was saved")
        if what == "talk":  # a turn without files
            if step.key == "look":
                await ctx.artifacts.save("said.txt", state.goal.encode())
            return ""
        if what == "read":
            calls = [("read_artifact", {"name": "said.txt"}), ("recall_step", {"key": "former"})]
            asked = [ToolCall(id=str(n), name=name, arguments=given) for n, (name, given) in enumerate(calls)]
            return " ".join([(await AgentTools().call(ctx, state, one)).content for one in asked])
        folder = ctx.workspace.path
        if step.key == "edit" and what in ("write", "fail"):
            (folder / name).write_text(state.goal)
        elif step.key == "edit" and what == "remove":
            (folder / name).unlink()
        return " ".join(sorted(path.name for path in folder.iterdir()))

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["look"])


def app_on(host: str, settings: Settings, tmp_path: Path) -> App:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / host)}
    app = App("test", settings=settings.model_copy(update=places))
    app.agent(Editor, retry=Retry(max_attempts=1))
    return app


async def test_files_belong_to_the_session(settings: Settings, tmp_path: Path) -> None:
    async def say(text: str, host: str = "one") -> str:
        async with app_on(host, settings, tmp_path) as app:
            turn = await app.session(Editor, "ada").send(text, skip_failed=True)
            await work_off(app)
            return "failed" if text.startswith("fail") else str(await turn.result(5))

    assert await say("write a") == "a"
    assert await say("talk") == ""
    assert await say("write b", host="two") == "a b"
    assert await say("fail c") == "failed"  # the files, too, are those of the turn before it
    assert await say("look") == "a b"
    assert await say("remove a") == "b"
    async with app_on("two", settings, tmp_path) as app:
        gateway, namespace = app.producer.gateway, app.producer.namespace
        store = await artifact_store(gateway, app.settings)
        for key in await redis_command(app, "KEYS", "*:steps:turn-*"):  # the tasks of the turns expire
            await redis_command(app, "DEL", key)
        async for orphan in orphans(store, lambda: workspace_hashes(gateway, namespace, store), grace=-1.0):
            await store.remove(orphan.hash, -1.0)
    assert await say("look", host="three") == "b"
    read = await say("read")
    assert "talk" in read
    assert "steps of earlier turns are not kept" in read
    async with app_on("one", settings, tmp_path) as app:
        other = await app.session(Editor, "bob").send("look")
        await work_off(app)
        assert await other.result(5) == ""
        assert await app.session(Editor, "ada").forget()
        assert [one async for one in workspace_hashes(app.producer.gateway, app.producer.namespace, store)] == []
