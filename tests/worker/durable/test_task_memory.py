"""ctx.memory: each memory is stored once, however often its step runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskFailed
from perdure.memory import MemoryLink, NewMemory
from perdure.queues import Producer, generate_key
from perdure.queues.delivery.checkpoint import History
from perdure.worker.agents.journal.forks import fork
from perdure.worker.errors import StepOutsideTask
from perdure.worker.log import logger
from perdure.worker.memory import (
    FoundMemory,
    HybridStore,
    LazyMemoryStore,
    Memory,
    MemoryStoreUnavailable,
    SqliteBackend,
)
from perdure.worker.memory.task_memory import TaskMemory, cite_memories, cited_memories
from pydantic import Secret, SecretStr

from tests.support.processes import WorkerProcesses, push_token, worker_processes
from tests.support.workers import bounded, running_worker, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "memory.sqlite3"


@pytest.fixture
async def app(settings: Settings, place: Path) -> AsyncIterator[App]:
    settings = settings.model_copy(update={"memory": str(place)})
    async with App("memories", settings=settings) as app:
        yield app


async def stored_memories(place: Path) -> list[Memory]:
    async with HybridStore(SqliteBackend(place)) as store:
        return [one async for one in store.export()]


def is_there(place: Path) -> bool:
    return place.exists()


def break_open(place: Path) -> None:
    place.write_text("Dear diary " * 100)


def remove(place: Path) -> None:
    place.unlink()


def texts(memories: list[Memory]) -> list[str]:
    return [one.text for one in memories]


async def test_a_repeated_step_stores_no_memory_twice(app: App, place: Path) -> None:
    seen: list[list[str]] = []

    @app.task(retry=AGAIN)
    async def student(ctx: Context) -> None:
        async def learn() -> None:
            seen.append([(await ctx.memory.add(f"{word} in attempt {ctx.attempt}")).text for word in ("one", "two")])
            if ctx.attempt == 1:
                raise ConnectionError("cut off before the step was recorded")

        await ctx.step("learn", learn)

    handle = await student.enqueue()
    await work_off(app)
    await bounded(handle.result())
    first, second = await stored_memories(place)
    assert texts([first, second]) == ["one in attempt 1", "two in attempt 1"]
    assert seen == [texts([first, second])] * 2
    life = f"{handle.id}@{(await handle.record()).enqueued_at}"
    assert (first.key, second.key) == (f"{life}:learn", f"{life}:learn:2")
    assert first.owner == "student"
    assert first.accesses == 0


async def test_tries_of_one_step_use_the_same_keys(app: App, place: Path) -> None:
    tries: list[int] = []

    @app.task
    async def student(ctx: Context) -> None:
        async def learn() -> None:
            tries.append(1)
            await ctx.memory.add(f"in try {len(tries)}")
            if len(tries) < 3:
                raise ConnectionError

        await ctx.options(retry=Retry(max_attempts=3, base=0.0)).step("learn", learn)

    await student.enqueue()
    await work_off(app)
    assert len(tries) == 3
    assert texts(await stored_memories(place)) == ["in try 1"]


async def test_calls_outside_steps_are_steps_themselves(app: App, place: Path) -> None:
    seen: list[tuple[Memory, list[FoundMemory], int]] = []

    @app.task(retry=AGAIN)
    async def student(ctx: Context) -> None:
        memory = await ctx.memory.add("The sky is blue", tags=["colour"], importance=0.8)
        found = await ctx.memory.search("blue sky", tags={"colour"}, touch=True)
        touched = await ctx.memory.touch(memory)
        seen.append((memory, found, touched))
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        assert await ctx.memory.forget(memory) == 1

    handle = await student.enqueue()
    await work_off(app)
    await bounded(handle.result())
    first, second = seen
    assert first == second
    assert first[1][0].memory.text == "The sky is blue"
    assert first[2] == 1
    assert await stored_memories(place) == []


async def test_a_fork_has_the_memories_that_its_source_has_stored(app: App, place: Path) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def student(ctx: Context) -> None:
        await ctx.memory.add("The sky is blue")
        await ctx.ask("ada", "ok?")

    source = await student.enqueue()
    await work_off(app)
    copy = (await fork(app.producer, source.id)).handle
    await work_off(app)
    assert await copy.status() is State.WAITING
    assert [one.source for one in await stored_memories(place)] == [f"task:{source.id}"]


async def test_a_search_covers_own_memories_or_everyones(app: App, place: Path) -> None:
    async with HybridStore(SqliteBackend(place)) as store:
        [await store.add(NewMemory(text=f"red {one}"), owner=one) for one in ("student", "teacher")]

    @app.task
    async def student(ctx: Context) -> list[list[str]]:
        own = await ctx.memory.search("red")
        every = await ctx.memory.search("red", everyone=True, type=["fact", "other"])
        assert await ctx.memory.forget(*(one.memory for one in every)) == 1
        return [[one.memory.owner for one in own], sorted(one.memory.owner for one in every)]

    handle = await student.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [["student"], ["student", "teacher"]]
    assert [one.owner for one in await stored_memories(place)] == ["teacher"]


async def test_secrets_of_the_task_are_masked_in_memories(app: App, place: Path) -> None:
    @app.task
    async def student(ctx: Context, token: Annotated[Secret[str], "given"]) -> None:
        word = token.get_secret_value()
        await ctx.memory.add(f"It is {word}", metadata={"deep": [word]}, source=f"https://x/{word}")

    handle = await student.enqueue(Secret("open sesame"))
    await work_off(app)
    await bounded(handle.result())
    [memory] = await stored_memories(place)
    assert "sesame" not in memory.model_dump_json()


async def test_the_store_is_opened_on_first_use_and_closed_with_the_worker(app: App, place: Path) -> None:
    @app.task
    async def student(ctx: Context, uses: bool) -> bool:
        if uses:
            await ctx.memory.add("x")
        return is_there(place)

    async with running_worker(app) as worker:
        assert await bounded((await student.enqueue(False)).result()) is False
        assert await bounded((await student.enqueue(True)).result()) is True
        stores = worker._executor.extras.get(LazyMemoryStore)
        assert stores is not None
        store = await stores.get()
    with pytest.raises(RuntimeError, match="is not open"):
        await store.list()


async def test_memories_without_a_vector_are_warned_about(place: Path) -> None:
    async with HybridStore(SqliteBackend(place)) as store:
        await store.add(NewMemory(text="added without an embedder"))
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="WARNING")
    keeper = LazyMemoryStore(Settings(memory=str(place), embedder="perdure.memory:HashingEmbedder"))
    try:
        store = await keeper.get()
        assert [line for line in lines if "perdure memory reembed" in line]
        assert [count async for count in store.reembed()] == [1]
        assert not await store.lacks_vectors()
    finally:
        logger.remove(sink)
        await keeper.close()


async def test_an_unavailable_store_fails_the_attempt_only(app: App, place: Path) -> None:
    break_open(place)

    @app.task(retry=AGAIN)
    async def student(ctx: Context) -> str:
        if ctx.attempt == 2:
            remove(place)
        return (await ctx.memory.add("x")).text

    handle = await student.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "x"

    @app.task(retry=Retry(max_attempts=1))
    async def verbose(ctx: Context) -> None:
        await ctx.memory.add("x" * 40_000)

    failed = await verbose.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed, match="text: String should have at most 32768"):
        await bounded(failed.result())


async def test_memories_cannot_be_stored_outside_the_handler(app: App) -> None:
    kept: list[TaskMemory] = []

    @app.task
    async def student(ctx: Context) -> None:
        kept.append(ctx.memory)

    handle = await student.enqueue()
    await work_off(app)
    await bounded(handle.result())
    with pytest.raises(StepOutsideTask):
        await kept[0].add("x")
    with pytest.raises(MemoryStoreUnavailable, match="the worker has ended"):
        await kept[0].store()


class Finding(AgentState):
    pass


async def test_an_agents_findings_are_stored_once_before_its_outcome(app: App, place: Path) -> None:
    runs: list[int] = []

    @app.agent(name="scholar", retry=AGAIN)
    class Scholar(Agent[Finding]):
        async def plan(self, ctx: Context, state: Finding) -> list[PlanStep]:
            return [PlanStep(key="read", title="read")]

        async def act(self, ctx: Context, state: Finding, step: PlanStep) -> int:
            await ctx.memory.add("from within a step")
            return 1

        async def finish(self, ctx: Context, state: Finding) -> str:
            return "done"

        async def remember(self, ctx: Context, state: Finding) -> list[NewMemory | str]:
            runs.append(ctx.attempt)
            found: list[NewMemory | str] = [f"a text in attempt {ctx.attempt}"]
            if ctx.attempt == 1:
                return [*found, 7]  # type: ignore[list-item]  # the first is stored, then it fails
            return [*found, NewMemory(text=f"a lesson about {state.goal}", type="lesson", importance=1.0)]

    handle: Any = await Scholar.enqueue("the goal")  # type: ignore[attr-defined]
    await work_off(app)
    assert await bounded(handle.result()) == "done"
    assert runs == [1, 2]
    memories = await stored_memories(place)
    assert texts(memories) == ["from within a step", "a text in attempt 1", "a lesson about the goal"]
    assert {one.owner for one in memories} == {"scholar"}
    life = f"{handle.id}@{(await handle.record()).enqueued_at}"
    keys = [f"{life}:{key}" for key in ("read/memory.add", "remember", "remember:2")]
    assert [one.key for one in memories] == keys


class Explorer(Agent[Finding]):
    """Logs what it finds, and says nothing of what to remember. A goal may have several facts, or one to fail after."""

    async def plan(self, ctx: Context, state: Finding) -> list[PlanStep]:
        return [PlanStep(key="look", title="look")]

    async def act(self, ctx: Context, state: Finding, step: PlanStep) -> str:
        for fact in state.goal.split("; "):
            await ctx.discover(fact, source="https://example.com/page")
        return ""

    async def finish(self, ctx: Context, state: Finding) -> int:
        if ctx.attempt == 1 and "fails" in state.goal:
            raise ValueError("after its discoveries")
        return len(state.discoveries)


async def test_the_discoveries_of_an_agent_are_remembered_by_default(app: App, place: Path) -> None:
    explorer = app.agent(Explorer, name="explorer", retry=AGAIN)
    handle = await explorer.enqueue("water boils at 100 °C; it fails;  ; " + "x" * 40_000)
    await work_off(app)
    assert await bounded(handle.result()) == 4
    memories = await stored_memories(place)
    assert texts(memories) == ["water boils at 100 °C", "it fails", "x" * 32_768]
    assert {(one.owner, one.type, one.source, one.subject) for one in memories} == {
        ("explorer", "finding", "https://example.com/page", "")
    }
    assert [one.accesses for one in memories] == [0, 0, 0], "each was stored once"


async def test_an_agent_that_says_what_to_remember_remembers_nothing_else(app: App, place: Path) -> None:
    class Silent(Explorer):
        async def remember(self, ctx: Context, state: Finding) -> list[NewMemory | str]:
            return []

    handle = await app.agent(Silent, name="silent").enqueue("water is wet")
    await work_off(app)
    assert await bounded(handle.result()) == 1
    assert not is_there(place)


async def test_a_store_that_cannot_be_used_ends_no_task_that_remembers_by_default(app: App, place: Path) -> None:
    break_open(place)
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}", level="WARNING")
    handle = await app.agent(Explorer, name="explorer").enqueue("water is wet")
    await work_off(app)
    logger.remove(sink)
    assert await bounded(handle.result()) == 1
    (line,) = [line for line in lines if "its discoveries could not be remembered: " in line]
    assert "not a SQLite database" in line


async def test_the_discoveries_of_encrypted_tasks_are_not_remembered_in_clear(settings: Settings, place: Path) -> None:
    changed = settings.model_copy(update={"memory": str(place), "encryption_keys": SecretStr(generate_key())})
    async with App("test", settings=changed) as app:
        handle = await app.agent(Explorer, name="explorer").enqueue("water is wet")
        await work_off(app)
        assert await bounded(handle.result()) == 1
    assert not is_there(place)


async def test_the_discoveries_of_a_turn_are_about_its_session(app: App, place: Path) -> None:
    explorer = app.agent(Explorer, name="explorer")
    for session, text in (("user:42", "likes tea"), ("user:42", "likes jazz"), ("user:7", "likes coffee")):
        turn = await app.session(explorer, session).send(text)
        await work_off(app)
        await bounded(turn.result())
    memories = await stored_memories(place)
    assert [(one.subject, one.text, one.accesses) for one in memories] == [
        ("user:42", "likes tea", 0),
        ("user:42", "likes jazz", 0),
        ("user:7", "likes coffee", 0),
    ]


async def test_a_fresh_goal_stores_its_own_findings(app: App, place: Path) -> None:
    found: list[str] = []

    @app.agent(name="scholar", retry=AGAIN)
    class Scholar(Agent[Finding]):
        async def plan(self, ctx: Context, state: Finding) -> list[PlanStep]:
            found.append(f"news of day {len(found) + 1}")
            return [PlanStep(key="read", title="read")]

        async def act(self, ctx: Context, state: Finding, step: PlanStep) -> int:
            await ctx.memory.add(f"a note on the {found[-1]}")
            return 1

        async def finish(self, ctx: Context, state: Finding) -> str:
            return "done"

        async def remember(self, ctx: Context, state: Finding) -> list[str]:
            return [found[-1]]

    for _ in range(2):
        handle: Any = await Scholar.enqueue("the news", fresh=True)  # type: ignore[attr-defined]
        await work_off(app)
        assert await bounded(handle.result()) == "done"
    days = ["news of day 1", "news of day 2"]
    assert sorted(texts(await stored_memories(place))) == sorted([*days, *(f"a note on the {day}" for day in days)])


@pytest.fixture
def workers(settings: Settings, tmp_path: Path, place: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(settings, tmp_path, environment={"PERDURE_MEMORY": str(place)}) as workers:
        yield workers


@pytest.mark.processes
async def test_a_kill_between_memory_and_record_stores_nothing_twice(
    workers: WorkerProcesses, settings: Settings, place: Path
) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        first = await workers.start().ready()
        handle = await producer.enqueue("student", {"gate": "go"}, queue="replica")
        await workers.line("learned", f"{handle.id}:learn")
        first.kill()
        second = await workers.start().ready()
        await workers.line("learned", f"{handle.id}:learn", pid=second.pid)
        await push_token(producer, "go")
        found = await bounded(handle.result())
        second.stop()
        await second.ended()
    assert sorted(found) == [f"{n}: as process {first.pid} says it" for n in range(3)]
    memories = await stored_memories(place)
    assert sorted(texts(memories)) == sorted(found)
    assert [one.accesses for one in memories] == [0, 0, 0]


async def test_a_task_keeps_the_ids_of_the_latest_memories_that_it_cites() -> None:
    history, written = History(), list[str]()

    class Recorder:
        async def put(self, *entries: Any, wait: bool) -> None:
            written.extend(entry.step for entry in entries)

    run: Any = SimpleNamespace(history=history, recorder=Recorder())
    for number in range(3_000):
        await cite_memories(run, [f"m{number}", f"m{max(0, number - 9)}"])
    kept = cited_memories(history.saved)
    assert len(history.saved) == 16
    assert kept == [f"m{number}" for number in range(3_000 - len(kept), 3_000)]
    assert 960 <= len(kept) <= 1_024
    written.clear()
    await cite_memories(run, ["m2999", "m2998"])
    assert not written


async def test_a_task_names_what_a_memory_supersedes(app: App, place: Path) -> None:
    @app.task
    async def job(ctx: Context) -> list[str]:
        old = await ctx.memory.add("the limit is 10")
        await ctx.memory.add("the limit is 12", links=[MemoryLink("supersedes", old.id)])
        [found] = await ctx.memory.search("limit")
        return [found.memory.text, *(f"{other.relation} {other.text}" for other in found.related)]

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["the limit is 12", "supersedes the limit is 10"]
    assert {memory.text: [link.relation for link in memory.links] for memory in await stored_memories(place)} == {
        "the limit is 10": ["superseded_by"],
        "the limit is 12": ["supersedes"],
    }
