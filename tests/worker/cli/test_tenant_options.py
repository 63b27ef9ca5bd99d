"""`--tenant` and PERDURE_TENANT: commands of one tenant, and those that are about all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings

from tests.support.command_line import call
from tests.support.workers import work_off

pytestmark = pytest.mark.integration


class Echo(Agent[AgentState]):
    """Answers with what it was sent."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"{ctx.tenant}: {state.goal}"


def make_app(settings: Settings) -> App:
    app = App("test", settings=settings)
    app.agent(Echo)

    @app.task(retry=Retry(max_attempts=1))
    async def order(ctx: Context, number: int) -> str:
        if number < 0:
            raise ValueError("no such number")
        return f"{ctx.tenant} {number}"

    return app


@pytest.fixture
def work(settings: Settings, environment: None) -> Callable[[], None]:
    """Function that runs all queued tasks."""

    async def run() -> None:
        async with make_app(settings) as app:
            await work_off(app)

    anyio.run(run)  # publishes the catalog
    return lambda: anyio.run(run)


ACME, OTHER = ("--tenant", "acme"), ("--tenant", "other")


def test_tasks_of_tenants_with_the_same_ids(
    work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = tmp_path / "tasks.jsonl"
    lines.write_text('{"task": "order", "args": {"number": 3}}\n{"task": "order", "args": {"number": 4}}\n')
    for tenant in (ACME, OTHER):
        for number, task_id in ((1, "order-1"), (-1, "order-2")):
            enqueued = call("enqueue", "order", "--args", f'{{"number": {number}}}', "--id", task_id, *tenant)
            assert enqueued.out == f"{tenant[1]}~{task_id}\n"
    sent = call("enqueue", "--file", str(lines), "--batch", "b", *ACME)
    assert sent.out == "acme~b-1\nacme~b-2\n"
    work()
    listed = json.loads(call("task", "list", "--json", *ACME).out)
    ids = {"acme~order-1", "acme~order-2", "acme~b-1", "acme~b-2"}
    assert {row["id"] for row in listed} == ids and {row["tenant"] for row in listed} == {"acme"}
    assert len(json.loads(call("task", "list", "--json").out)) == 6
    assert call("task", "result", "order-1", *ACME).out == '"acme 1"\n'
    assert call("task", "result", "acme~order-1").out == '"acme 1"\n'
    for arguments in (
        ("task", "show", "other~order-1"),
        ("task", "cancel", "other~order-1"),
        ("task", "events", "other~b"),
    ):
        refused = call(*arguments, *ACME)
        assert (refused.code, refused.out) == (1, ""), arguments
        assert "could not find" in refused.err or "no task" in refused.err, refused.err

    assert [row["id"] for row in json.loads(call("dlq", "list", "--json", *ACME).out)] == ["acme~order-2"]
    assert "other~order-2" not in call("dlq", "export", *ACME).out
    monkeypatch.setenv("PERDURE_TENANT", "acme")
    assert call("dlq", "show", "order-2").code == 0
    assert call("dlq", "replay", "order-2").out == "acme~order-2\n"
    work()
    assert call("dlq", "purge", "--all", "--yes").out == "acme~order-2\n"
    cancelled = call("task", "cancel", "--all", "--yes", "--dry-run", "--json")
    assert json.loads(cancelled.out)["count"] == 0
    monkeypatch.delenv("PERDURE_TENANT")
    assert [row["id"] for row in json.loads(call("dlq", "list", "--json").out)] == ["other~order-2"]


def test_sessions_of_tenants_with_the_same_id(work: Callable[[], None]) -> None:
    for tenant in (ACME, OTHER):
        assert call("session", "send", "echo", "ada", "hello", "--no-wait", *tenant).code == 0
    work()
    [row] = json.loads(call("session", "list", "--json", *ACME).out)
    assert (row["id"], row["tenant"], row["turns"]) == ("acme~ada", "acme", 1)
    assert "acme: hello" in call("session", "show", "echo", "ada", *ACME).out
    stolen = call("session", "show", "echo", "other~ada", *ACME)
    assert stolen.code == 2 and "must be of tenant 'acme'" in stolen.err
    assert call("session", "forget", "echo", "ada", "--yes", *ACME).code == 0
    [row] = json.loads(call("session", "list", "--json").out)
    assert row["id"] == "other~ada"


def test_memories_of_tenants(environment: None, tmp_path: Path) -> None:
    store = ("--memory", str(tmp_path / "memory.db"))
    texts = {"acme": "the parcel of acme is late", "other": "the parcel of other is early"}
    ids = {
        name: call("memory", "add", text, "--owner", "bot", "--key", "k1", "--tenant", name, *store).out.strip()
        for name, text in texts.items()
    }
    assert ids["acme"] != ids["other"], "the keys are those of the tenants"
    [row] = json.loads(call("memory", "list", "--json", *ACME, *store).out)
    assert (row["id"], row["owner"]) == (ids["acme"], "acme~bot")
    found = call("memory", "search", "parcel", "--json", "--owner", "bot", *ACME, *store).out
    assert texts["acme"] in found and texts["other"] not in found
    refused = call("memory", "forget", ids["other"], *ACME, *store)
    assert refused.code == 1 and "nothing was deleted" in refused.err
    lines = tmp_path / "memories.jsonl"
    lines.write_text('{"text": "a fact", "owner": "other~bot"}\n')
    assert "owner must be one of tenant 'acme'" in call("memory", "add", "--file", str(lines), *ACME, *store).err
    assert call("memory", "forget", "--all", "--owner", "bot", *ACME, *store).out.strip() == ids["acme"]
    assert ids["other"] in call("memory", "export", *store).out


def test_a_command_about_all_tenants_is_refused_to_one(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("queue", "list").code == 0
    assert call("queue", "list", *ACME).code == 2
    monkeypatch.setenv("PERDURE_TENANT", "acme")
    for arguments in (("queue", "list"), ("worker", "list"), ("limit", "list"), ("job", "list"), ("config", "show")):
        refused = call(*arguments)
        assert refused.code == 2, arguments
        assert "about all tenants, and PERDURE_TENANT is 'acme'" in refused.err
    monkeypatch.setenv("PERDURE_TENANT", "a b")
    assert "PERDURE_TENANT: tenant must be 1 to 64 letters" in call("task", "list").err
