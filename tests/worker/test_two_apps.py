"""Two apps with a task of the same name on the same queue: each runs its own tasks only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, TaskHandle, Worker
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import TaskExists
from perdure.queues.catalog import Catalog, read_catalog
from perdure.queues.derived_tasks import read_task_input
from perdure.queues.errors import SessionError
from perdure.worker.agents.journal.forks import fork

from tests.support.command_line import Answer, call
from tests.support.workers import BOUND, history, letter, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration

QUICK = Retry(max_attempts=1000, base=0.02, factor=1.0)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the log from WARNING, each `LEVEL text`."""
    lines: list[str] = []
    logger.enable("perdure")
    handler = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{level} {message}")
    yield lines
    logger.remove(handler)
    logger.disable("perdure")


def make_app(name: str, settings: Settings, *, retry: Retry = QUICK, aliases: tuple[str, ...] = ()) -> App:
    app = App(name, settings=settings.model_copy(update={"unknown_task": retry}), aliases=aliases)

    @app.task(queue="default")
    async def send(ctx: Context, number: int = 0) -> str:
        return f"{name} {number}"

    @app.task(queue="default")
    async def wait(ctx: Context) -> str:
        await ctx.step("one", lambda: 1)
        message = await ctx.inbox(wait=3600)
        return f"{name} {message[0].content}"

    @app.agent(name="assistant", queue="default")
    class Assistant(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="answer", title="answer")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            return "done"

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return name

    return app


@pytest.fixture
async def alpha(settings: Settings) -> AsyncIterator[App]:
    async with make_app("alpha", settings) as app:
        yield app


@pytest.fixture
async def beta(settings: Settings) -> AsyncIterator[App]:
    async with make_app("beta", settings) as app:
        yield app


async def returned(handle: TaskHandle[Any]) -> int:
    return sum(event.type == "returned" for event in await history(handle))


async def test_each_app_runs_its_own_tasks(alpha: App, beta: App) -> None:
    async with running_worker(alpha), running_worker(beta):
        sent = [(app.name, number, app.tasks["send"]) for number in range(10) for app in (alpha, beta)]
        handles = [await task.enqueue(number) for _, number, task in sent]
        found = [await handle.result(timeout=BOUND) for handle in handles]
    assert found == [f"{name} {number}" for name, number, _ in sent]
    records = [await handle.record() for handle in handles]
    assert [record.app for record in records] == [name for name, _, _ in sent]
    assert {(record.attempts, record.crashes) for record in records} == {(1, 0)}


async def test_a_task_without_an_app_runs_on_any(alpha: App, beta: App) -> None:
    handle = await alpha.producer.enqueue("send", {"number": 3}, queue="default")
    await work_off(beta)
    assert await handle.result(timeout=BOUND) == "beta 3"
    assert (await handle.record()).app is None


async def test_a_producer_addresses_an_app(alpha: App, beta: App) -> None:
    one = await alpha.producer.enqueue("send", {"number": 1}, queue="default", app="beta")
    many = await alpha.producer.enqueue_many("send", [{"number": 2}], queue="default", app="beta")
    stream = alpha.producer.enqueue_stream("send", [{"number": 3}], queue="default", app="beta")
    handles = [one, *many, *[handle async for handle in stream]]
    async with running_worker(alpha), running_worker(beta):
        assert [await handle.result(timeout=BOUND) for handle in handles] == ["beta 1", "beta 2", "beta 3"]


async def test_a_task_whose_app_has_no_worker_becomes_a_dead_letter(
    alpha: App, settings: Settings, log: list[str]
) -> None:
    task = alpha.tasks["send"]
    handles = [await task.enqueue(number) for number in range(3)]
    async with make_app("beta", settings, retry=Retry(max_attempts=3, base=0.02, factor=2.0, jitter=0.0)) as beta:
        await work_off(beta)
    for handle in handles:
        found = await letter(alpha, handle)
        assert (found.reason, found.app, found.attempts, found.crashes) == (Reason.WRONG_APP, "alpha", 0, 0)
        assert "task 'send' belongs to app 'alpha', and this worker runs app 'beta'" in found.message
        assert [event.type for event in await history(handle)] == ["returned", "returned", "buried"]
        explained = await handle.explain()
        assert (explained.app, explained.remedy) == (
            "alpha",
            f"start a worker of app 'alpha' on its queue, then run: perdure dlq replay {handle.id}",
        )
        assert await replay(alpha.producer.gateway, found, Replay())
    warnings = [line for line in log if line.startswith("WARNING")]
    assert len(warnings) == 1, "one warning per app and process"
    assert "left a task to workers of app 'alpha'" in warnings[0]
    await work_off(alpha)
    assert [await handle.result(timeout=BOUND) for handle in handles] == ["alpha 0", "alpha 1", "alpha 2"]


async def test_a_task_is_not_given_up_while_a_worker_of_its_app_lives(alpha: App, settings: Settings) -> None:
    busy, done = asyncio.Event(), asyncio.Event()

    @alpha.task(queue="default")
    async def hold(ctx: Context) -> None:
        busy.set()
        await done.wait()

    impatient = make_app("beta", settings, retry=Retry(max_attempts=2, base=0.02, factor=1e6, cap=3_600))
    async with running_worker(alpha, concurrency=1), running_worker(impatient):
        await hold.enqueue()
        await asyncio.wait_for(busy.wait(), BOUND)
        handle = await alpha.tasks["send"].enqueue(5)

        async def often() -> bool:
            return await returned(handle) > 3

        await wait_until(often, "the other app returns the task more often than it may")
        done.set()
        assert await handle.result(timeout=BOUND) == "alpha 5"


async def test_the_explanation_names_the_app_that_has_no_worker(alpha: App, beta: App) -> None:
    async with Worker(beta):
        handle = await alpha.tasks["send"].enqueue(1)
        explained = await handle.explain()
        assert (explained.cause, explained.sentence) == (
            "wrong_app",
            "it is queued, and queue 'default' has workers of app 'beta' only, and the task belongs to app 'alpha'",
        )
        assert explained.remedy == "start a worker of app 'alpha': perdure worker run APP --queues default"
        async with Worker(alpha):
            assert (await handle.explain()).cause == "ready"


@pytest.mark.parametrize("by_name", [True, False])
async def test_a_successor_keeps_the_app(alpha: App, beta: App, settings: Settings, by_name: bool) -> None:
    @alpha.task(queue="default")
    async def begin(ctx: Context) -> str:
        await ctx.continue_as("send" if by_name else alpha.tasks["send"], why="test", arguments={"number": 1})

    handle = await begin.enqueue()
    await work_off(alpha)
    following = await handle.successor()
    assert following is not None
    assert (await following.record()).app == "alpha"
    async with running_worker(alpha), running_worker(beta):
        assert await handle.result(timeout=BOUND) == "alpha 1"


async def test_a_successor_of_another_app_gets_that_app(alpha: App, beta: App) -> None:
    @alpha.task(queue="default")
    async def begin(ctx: Context, named: bool) -> str:
        await ctx.continue_as("only_beta" if named else beta.tasks["send"], why="test", arguments={"number": 1})

    @beta.task(queue="default")
    async def only_beta(ctx: Context, number: int) -> str:
        return f"only beta {number}"

    async with running_worker(alpha), running_worker(beta):
        assert await (await begin.enqueue(False)).result(timeout=BOUND) == "beta 1"
        assert await (await begin.enqueue(True)).result(timeout=BOUND) == "only beta 1"


async def test_a_fork_keeps_the_app(alpha: App, beta: App) -> None:
    ended = await alpha.tasks["send"].enqueue(1)
    await work_off(alpha)
    assert await ended.result(timeout=BOUND) == "alpha 1"
    stored = await read_task_input(alpha.producer.gateway, ended.partition, ended.id)
    assert stored.envelope.app == "alpha"  # the record of an ended task keeps the names only
    waiting = await alpha.tasks["wait"].enqueue()
    await work_off(alpha)
    forked = (await fork(alpha.producer, waiting.id)).handle
    assert (await forked.record()).app == "alpha"
    await forked.send("hello")
    async with running_worker(alpha), running_worker(beta):
        assert await forked.result(timeout=BOUND) == "alpha hello"


async def test_a_session_keeps_the_app(alpha: App, beta: App) -> None:
    session = alpha.session(alpha.agents["assistant"], "user-42")
    async with running_worker(alpha), running_worker(beta):
        turns = [await session.send("hello") for _ in range(5)]
        assert [await turn.result(timeout=BOUND) for turn in turns] == ["alpha"] * 5
    record = await session.record()
    assert (record.app, record.summary()["app"]) == ("alpha", "alpha")
    with pytest.raises(SessionError, match="belongs to app 'alpha', not to 'beta'; nothing was stored"):
        await beta.session(beta.agents["assistant"], "user-42").send("hello")
    assert (await session.record()).sent == 5


async def test_an_id_of_another_app_is_refused(alpha: App, beta: App) -> None:
    await alpha.tasks["send"].options(task_id="order-7").enqueue(1)
    with pytest.raises(TaskExists, match="order-7 exists already as a task of app 'alpha', not 'beta'"):
        await beta.tasks["send"].options(task_id="order-7").enqueue(1)
    goal = await alpha.agents["assistant"].enqueue("tidy up")
    with pytest.raises(TaskExists, match=f"{goal.id} exists already as a task of app 'alpha', not 'beta'"):
        await beta.agents["assistant"].enqueue("tidy up")
    await work_off(alpha)
    with pytest.raises(TaskExists, match="of app 'alpha', not 'beta'"):  # also after it has ended
        await beta.tasks["send"].options(task_id="order-7").enqueue(1)
    for fresh in (False, True):
        with pytest.raises(TaskExists, match=f"{goal.id} exists already as a task of app 'alpha', not 'beta'"):
            await beta.agents["assistant"].enqueue("tidy up", fresh=fresh)
    assert (await (await alpha.agents["assistant"].enqueue("tidy up", fresh=True)).record()).app == "alpha"
    again = await alpha.producer.enqueue("send", {"number": 1}, queue="default", task_id="order-7")
    assert again.existed


async def test_a_renamed_app_runs_the_tasks_of_its_former_name(alpha: App, settings: Settings, log: list[str]) -> None:
    renamed = make_app("gamma", settings, aliases=("alpha",))
    handle = await alpha.tasks["send"].enqueue(1)
    session = alpha.session(alpha.agents["assistant"], "user-42")
    await session.send("hello")
    async with renamed, running_worker(alpha), running_worker(renamed):
        assert await handle.result(timeout=BOUND) in ("gamma 1", "alpha 1")
    async with renamed, running_worker(renamed):
        late = await alpha.tasks["send"].enqueue(2)
        turn = await renamed.session(renamed.agents["assistant"], "user-42").send("hello again")
        assert (await late.result(timeout=BOUND), await turn.result(timeout=BOUND)) == ("gamma 2", "gamma")
        assert (await late.explain()).cause == "succeeded"
    assert not log


async def test_a_worker_names_other_apps_on_its_queue_at_its_start(
    alpha: App, beta: App, settings: Settings, log: list[str]
) -> None:
    async with Worker(alpha, queues=["default", "quiet"]), Worker(alpha, queues=["default"]):
        assert not log
        async with Worker(beta, queues=["default", "other"]):
            pass
    (line,) = log
    assert line.startswith("WARNING other apps share queues with app 'beta' (queue 'default': app 'alpha')")
    assert "PERDURE_NAMESPACE" in line
    async with Worker(beta, queues=["default"]):
        pass
    assert len(log) == 1, "the worker of the other app has left"


async def test_the_catalog_keeps_the_apps_apart(alpha: App, beta: App) -> None:
    async with running_worker(alpha), running_worker(beta):

        async def both() -> Catalog | None:
            catalog = await read_catalog(alpha.producer.gateway, alpha.producer.namespace)
            return catalog if len(catalog.named("send")) == 2 else None

        await wait_until(both, "both apps are in the catalog")
    catalog = await both()
    assert catalog is not None
    assert [(task.app, task.queue) for task in catalog.named("send")] == [("alpha", "default"), ("beta", "default")]
    assert catalog.find("send", app="beta").app == "beta"


class TestCommands:
    """The command line addresses the task of one app."""

    @pytest.fixture(autouse=True)
    async def catalog(self, alpha: App, beta: App, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PERDURE_REDIS_URL", settings.redis_url)
        monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)
        async with running_worker(alpha), running_worker(beta):

            async def published() -> bool:
                catalog = await read_catalog(alpha.producer.gateway, alpha.producer.namespace)
                return len(catalog.named("send")) == 2

            await wait_until(published, "both apps are in the catalog")

    @staticmethod
    async def run(*arguments: str, stdin: bytes = b"") -> Answer:
        return await anyio.to_thread.run_sync(lambda: call(*arguments, stdin=stdin))

    async def test_a_name_of_several_apps_needs_an_app(self, alpha: App, beta: App) -> None:
        for more in ((), ("--queue", "default")):
            refused = await self.run("enqueue", "send", *more)
            assert refused.code == 2
            assert "task 'send' is in several apps: name one of the apps: app 'alpha'" in refused.err
        answer = await self.run("enqueue", "send", "--app", "beta", "--args", '{"number": 4}')
        assert answer.code == 0
        line = json.dumps({"task": "send", "args": {"number": 5}, "app": "alpha"}).encode()
        (other,) = (await self.run("enqueue", "--file", "-", stdin=line)).ids
        async with running_worker(alpha), running_worker(beta):
            results = [await self.run("task", "result", task_id) for task_id in (answer.ids[0], other)]
        assert [result.json for result in results] == ["beta 4", "alpha 5"]
        unknown = await self.run("enqueue", "send", "--app", "gamma")
        assert unknown.code == 2
        assert "app 'gamma' has published no task 'send'; apps that have one: 'alpha', 'beta'" in unknown.err

    async def test_lists_show_and_filter_by_app(self, alpha: App, beta: App) -> None:
        handles = {app.name: await app.tasks["send"].enqueue(1) for app in (alpha, beta)}
        listed = (await self.run("task", "list", "--json")).json
        assert {one["id"]: one["app"] for one in listed} == {one.id: name for name, one in handles.items()}
        only = (await self.run("task", "list", "--app", "beta", "--json")).json
        assert [one["id"] for one in only] == [handles["beta"].id]
        assert (await self.run("task", "show", handles["alpha"].id, "--json")).json["app"] == "alpha"
        assert (await self.run("task", "why", handles["alpha"].id, "--json")).json["app"] == "alpha"

    async def test_versions_of_one_app(self, alpha: App, beta: App) -> None:
        handle = await alpha.tasks["wait"].enqueue()
        await work_off(alpha)
        (found,) = (await self.run("task", "versions", "wait", "--app", "alpha", "--json")).json
        assert [use["live"] for use in found["versions"]] == [1]
        assert (await self.run("task", "versions", "wait", "--app", "beta")).code == 1
        await handle.cancel()

    async def test_an_import_keeps_the_app(self, alpha: App, beta: App, tmp_path: Path) -> None:
        handle = await alpha.tasks["wait"].enqueue()
        await work_off(alpha)
        file = str(tmp_path / "task.jsonl")
        assert (await self.run("task", "export", handle.id, "-o", file)).code == 0
        (task_id,) = (await self.run("task", "import", file, "--id", "moved")).ids
        moved = await alpha.producer.find(task_id)
        assert moved is not None
        assert (await moved.record()).app == "alpha"
        await moved.send("here")
        async with running_worker(alpha), running_worker(beta):
            assert await moved.result(timeout=BOUND) == "alpha here"
