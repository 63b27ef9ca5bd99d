"""Children that a handler spawns and awaits without a slot."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    ChildFailed,
    Context,
    PerdureError,
    PlanStep,
    Retry,
    Settings,
    Snooze,
    SpawnRefused,
    SyncContext,
    TaskFailed,
    TaskHandle,
)
from perdure.deadletter.replay import Replay, replay
from perdure.queues.joins import add_children
from perdure.queues.records import State
from perdure.worker.agents.journal.forks import fork
from perdure.worker.durable import joining
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.task import Task

from tests.support.workers import bounded, letter, running_worker, steal, wait_until, work_off

pytestmark = [pytest.mark.integration]

ONCE = Retry(max_attempts=1)
AT_ONCE = Retry(max_attempts=3, base=0.0)


async def test_a_parent_and_its_children_need_one_slot_only(app: App) -> None:
    runs = Counter[str]()

    @app.task
    async def grandchild(ctx: Context, number: int) -> int:
        return number * 10

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return sum(await ctx.gather(grandchild, [number, number + 1]))

    @app.task
    async def parent(ctx: Context) -> list[int]:
        runs["parent"] += 1
        return await ctx.gather(child, range(3))

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == [10, 30, 50]
        assert runs["parent"] == 2


async def test_spawn_and_join(app: App) -> None:
    ran = Counter[str]()

    @app.task
    async def child(ctx: Context, name: str, times: int = 1) -> str:
        ran[name] += 1
        return name * times

    @app.task
    async def parent(ctx: Context) -> list[str]:
        first = await ctx.spawn(child, "a")
        second = await ctx.spawn(child.options(tags=["second"]), "b", times=2)
        return [await ctx.join(second), await ctx.join(first), await ctx.join(first)]

    async with app, running_worker(app, concurrency=1):
        running = await parent.enqueue()
        assert await bounded(running.result()) == ["bb", "a", "a"]
        assert ran == {"a": 1, "b": 1}
        events = [event.type async for event in running.events()]
        assert events.count("children_spawned") == 2
        assert events.count("children_joined") == 2


async def test_the_window_advances_without_the_parent(app: App) -> None:
    running = 0
    largest = 0
    runs = 0

    @app.task
    async def child(ctx: Context, number: int) -> int:
        nonlocal running, largest
        running += 1
        largest = max(largest, running)
        await asyncio.sleep(0.01)
        running -= 1
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        nonlocal runs
        runs += 1
        return await ctx.gather(child, range(20), limit=3)

    async with app, running_worker(app, concurrency=16):
        assert await bounded((await parent.enqueue()).result()) == list(range(20))
        assert largest <= 3
        assert runs == 2


@pytest.mark.parametrize("how", ["list", "generator", "async generator", "tuples", "dicts", "none"])
async def test_items(app: App, how: str) -> None:
    read = Counter[str]()

    @app.task
    async def child(ctx: Context, number: int, add: int = 0) -> int:
        return number + add

    def generate() -> Iterator[int]:
        read["items"] += 1
        yield from (1, 2, 3)

    async def stream() -> AsyncIterator[int]:
        for number in generate():
            yield number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        items: dict[str, Any] = {
            "list": [1, 2, 3],
            "generator": generate(),
            "async generator": stream(),
            "tuples": [(0, 1), (1, 1), (2, 1)],
            "dicts": [{"number": 0, "add": 1}, {"number": 2}, {"number": 3}],
            "none": iter(()),
        }
        return await ctx.gather(child, items[how])

    async with app, running_worker(app, concurrency=1):
        expected = [] if how == "none" else [1, 2, 3]
        assert await bounded((await parent.enqueue()).result()) == expected
        assert read["items"] == ("generator" in how)


async def test_as_completed(app: App) -> None:
    seen: list[list[int]] = []
    ended = asyncio.Event()

    @app.task
    async def child(ctx: Context, number: int) -> int:
        if number == 0:
            await ended.wait()
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        seen.append([])
        async for number in ctx.as_completed(child, range(3)):
            seen[-1].append(number)
            if len(seen[-1]) == 2:
                ended.set()
        return seen[-1]

    async with app, running_worker(app, concurrency=3):
        result = await bounded((await parent.enqueue()).result())
        assert sorted(result[:2]) == [1, 2]
        assert result[2] == 0
        assert all(result[: len(numbers)] == numbers for numbers in seen)


@pytest.mark.parametrize("call", ["gather", "as_completed", "join"])
async def test_a_child_that_fails(app: App, call: str) -> None:
    started, ids = asyncio.Event(), list[str]()

    @app.task(retry=ONCE)
    async def child(ctx: Context, number: int) -> int:
        if number == 1:
            await started.wait()
            raise LookupError("no such page")
        ids.append(ctx.task_id)
        started.set()
        await asyncio.sleep(600)
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> str:
        try:
            if call == "gather":
                await ctx.gather(child, range(2))
            elif call == "as_completed":
                _ = [number async for number in ctx.as_completed(child, range(2))]
            else:
                await ctx.spawn(child, 0)
                await ctx.join(await ctx.spawn(child, 1))
        except ChildFailed as error:
            assert isinstance(error.error, TaskFailed)
            return f"{error.number} {error.error.error['message']}"
        return ""

    async with app, running_worker(app, concurrency=3):
        running = await parent.enqueue()
        assert await bounded(running.result()) == f"{0 if call == 'join' else 1} no such page"
        left = await app.producer.find(ids[0])
        assert left is not None

        async def is_cancelled() -> bool:
            return await left.status() is State.CANCELLED

        await wait_until(is_cancelled, "the other child is cancelled")


async def test_errors_keep(app: App) -> None:
    @app.task(retry=ONCE)
    async def child(ctx: Context, number: int) -> int:
        if number % 2:
            raise LookupError(f"no page {number}")
        return number

    @app.task
    async def parent(ctx: Context) -> list[str]:
        found = await ctx.gather(child, range(4), errors="keep")
        arrived = [result async for result in ctx.as_completed(child, range(4), errors="keep")]
        assert sorted(map(str, arrived), key=len)[:2] in (["0", "2"], ["2", "0"])
        return [f"{one.number}" if isinstance(one, ChildFailed) else f"={one}" for one in found]

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == ["=0", "1", "=2", "3"]


async def test_errors_wait_for_the_replay_of_a_dead_child(app: App) -> None:
    broken, ids = [True], list[str]()

    @app.task(retry=ONCE)
    async def child(ctx: Context, number: int) -> int:
        if number == 1 and broken:
            ids.append(ctx.task_id)
            raise LookupError("no such page")
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        return await ctx.gather(child, range(3), errors="wait")

    async with app, running_worker(app, concurrency=1):
        running = await parent.enqueue()

        async def is_dead() -> bool:
            found = await app.producer.find(ids[0]) if ids else None
            return found is not None and await found.status() is State.DEAD

        await wait_until(is_dead, "the child is a dead letter")
        broken.clear()
        dead = await app.producer.find(ids[0])
        assert dead is not None
        assert await replay(app.producer.gateway, await letter(app, dead), Replay())
        assert await bounded(running.result()) == [0, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("once more"), Snooze(0.0)], ids=["failure", "snooze"])
async def test_another_attempt_spawns_new_children_for_those_that_are_not_joined(app: App, error: Exception) -> None:
    ids: list[str] = []
    ran = Counter[int]()

    @app.task
    async def child(ctx: Context, number: int) -> int:
        ran[number] += 1
        return number

    @app.task(retry=AT_ONCE)
    async def parent(ctx: Context) -> int:
        total = sum(await ctx.gather(child, [1, 2]))
        total += await ctx.join(await ctx.spawn(child, 3))
        ids.append((await ctx.spawn(child, 4)).id)
        if len(ids) < 3:
            raise error
        return total

    async with app:
        running = await parent.enqueue()
        await work_off(app)
        assert await bounded(running.result()) == 6
        assert len(set(ids)) == 3
        assert [ran[number] for number in (1, 2, 3)] == [1, 1, 1]


async def test_a_retry_after_child_failed_spawns_new_children(app: App) -> None:
    ran = Counter[int]()

    @app.task(retry=ONCE)
    async def child(ctx: Context, number: int) -> int:
        ran[number] += 1
        if number == 1 and ran[1] == 1:
            raise LookupError("no such page")
        return number

    @app.task(retry=AT_ONCE)
    async def parent(ctx: Context) -> list[int]:
        return await ctx.gather(child, [0, 1])

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == [0, 1]
        assert ran == {0: 2, 1: 2}


async def test_the_children_of_a_cancelled_parent_are_cancelled(app: App) -> None:
    ids: list[str] = []
    loose: list[str] = []

    @app.task
    async def child(ctx: Context, number: int) -> None:
        ids.append(ctx.task_id)
        await asyncio.sleep(600)

    @app.task
    async def parent(ctx: Context) -> None:
        loose.append((await child.options(delay=600).enqueue(9)).id)
        await ctx.gather(child, range(5), limit=2)

    async with app, running_worker(app, concurrency=2):
        running = await parent.enqueue()

        async def is_parked() -> bool:
            return len(ids) == 2 and await running.status() is State.WAITING

        await wait_until(is_parked, "the parent waits")
        why = await running.explain()
        assert why.sentence.startswith("it has been waiting for 5 children, of which 0 have ended since ")
        assert why.remedy in {f"see why it has not ended: perdure task why {task_id}" for task_id in ids}
        await running.cancel()

        async def are_cancelled() -> bool:
            handles = [await app.producer.find(task_id) for task_id in ids]
            states = [await handle.status() for handle in handles if handle is not None]
            return states == [State.CANCELLED] * 2 and await running.status() is State.CANCELLED

        await wait_until(are_cancelled, "the children are cancelled")
        assert len(ids) == 2
        other = await app.producer.find(loose[0])
        assert other is not None
        assert await other.status() is State.SCHEDULED


async def test_children_in_branches(app: App) -> None:
    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task
    async def parent(ctx: Context) -> list[list[int]]:
        async def branch(number: int) -> list[int]:
            with ctx.scope(f"branch-{number}"):
                return [number, *await ctx.gather(child, [number, number + 1])]

        return await asyncio.gather(*map(branch, range(3)))

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == [[0, 0, 1], [1, 1, 2], [2, 2, 3]]


async def test_a_plain_handler(app: App) -> None:
    @app.task
    def child(ctx: SyncContext, number: int) -> int:
        return number

    @app.task
    def parent(ctx: SyncContext) -> list[int]:
        one = ctx.join(ctx.spawn(child, 7))
        return [one, *ctx.gather(child, [1, 2]), *sorted(ctx.as_completed(child, [3, 4]))]

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == [7, 1, 2, 3, 4]


async def test_a_result_that_is_awaited_in_a_handler_parks_it(app: App) -> None:
    runs = Counter[str]()

    @app.task(retry=ONCE)
    async def other(ctx: Context, fails: bool) -> str:
        if fails:
            raise LookupError("no such page")
        return "done"

    @app.task
    async def parent(ctx: Context) -> list[str]:
        runs["parent"] += 1
        found = [await (await other.enqueue(False)).result()]
        try:
            await (await other.enqueue(True)).result()
        except TaskFailed as error:
            found.append(error.reason)
        later = await other.options(delay=600).enqueue(False)
        try:
            await later.result(timeout=0.05)
        except TimeoutError:
            found.append("timeout")
        return found

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == ["done", "attempts_exhausted", "timeout"]
        assert runs["parent"] >= 3


async def test_children_have_the_trace_of_their_parent(app: App) -> None:
    seen: list[dict[str, str]] = []

    @app.task
    async def child(ctx: Context) -> None:
        seen.append(dict(ctx.headers))

    @app.task
    async def parent(ctx: Context) -> None:
        await ctx.join(await ctx.spawn(child))

    async with app, running_worker(app):
        headers = {"traceparent": "00-1-1-01", "own": "x"}
        await bounded((await parent.options(headers=headers).enqueue()).result())
        assert seen == [{"traceparent": "00-1-1-01"}]


async def test_the_depth_of_children_is_limited(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_DEPTH", 2)

    @app.task(retry=AT_ONCE)
    async def child(ctx: Context, depth: int) -> int:
        try:
            return await ctx.join(await ctx.spawn(child, depth + 1))
        except SpawnRefused as error:
            assert "has 2 parents above it, which is the limit" in str(error)
            return depth

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await child.enqueue(0)).result()) == 2


async def test_bad_input(app: App) -> None:
    problems: list[str] = []

    @app.task
    async def child(ctx: Context, number: int) -> None: ...

    async def plain(ctx: Context) -> None: ...

    @app.task
    async def parent(ctx: Context) -> None:
        other = await child.enqueue(1)
        wrong: Any = ctx
        calls: list[Any] = [
            lambda: wrong.spawn(plain),
            lambda: wrong.spawn("child", 1),
            lambda: wrong.spawn(child),
            lambda: wrong.spawn(child.options(delay=3), 1),
            lambda: wrong.join("x"),
            lambda: wrong.join(other),
            lambda: wrong.gather(child, [1], limit=0),
            lambda: wrong.gather(child, [1], limit=2.5),
            lambda: wrong.gather(child, [1], errors="ignore"),
            lambda: wrong.gather(child, 3),
            lambda: wrong.gather(child, {1, 2}),
            lambda: wrong.gather(child, [1, "x"]),
            lambda: wrong.gather(child, (number for number in (1, "x"))),
        ]
        for call in calls:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - what it raises is the test
                problems.append(str(error))

    async with app, running_worker(app, concurrency=1):
        running = await parent.enqueue()
        await bounded(running.result())
        starts = (
            "spawn needs a registered task, got <function",
            "spawn needs a registered task, got the name 'child': pass the task itself",
            "task 'child': missing a required argument: 'number'",
            "could not spawn task 'child': a child cannot have the option delay",
            "join needs the handle that ctx.spawn has returned, got 'x'",
            "could not join task ",
            "limit must be a whole number of at least 1, or None for no limit, got 0",
            "limit must be a whole number of at least 1, or None for no limit, got 2.5",
            "errors must be 'raise', 'keep' or 'wait', got 'ignore'",
            "gather needs a list or a generator with an item for each child, got 3",
            "gather needs items in an order that each run repeats, got a set: pass sorted(items)",
            "task 'child': number: ",
            "task 'child': number: ",
        )
        assert len(problems) == len(starts), problems
        for problem, start in zip(problems, starts, strict=True):
            assert problem.startswith(start), problem
            assert "\n" not in problem
        assert "children_spawned" not in [event.type async for event in running.events()]


@pytest.mark.parametrize("call", ["spawn", "gather", "as_completed", "result"])
async def test_the_children_of_a_branch_that_lost_are_cancelled(app: App, call: str) -> None:
    ids: list[str] = []
    began = asyncio.Event()

    @app.task
    async def child(ctx: Context, number: int) -> int:
        ids.append(ctx.task_id)
        began.set()
        await asyncio.sleep(600)
        return number

    @app.task
    async def parent(ctx: Context) -> str:
        async def children() -> Any:
            if call == "spawn":
                return await ctx.join(await ctx.spawn(child, 1))
            if call == "gather":
                return await ctx.gather(child, [1])
            if call == "result":
                return await (await child.enqueue(1)).result()
            return [number async for number in ctx.as_completed(child, [1])]

        async def other() -> None:
            await ctx.step("wait", began.wait)

        found = await ctx.first(children=children(), other=other())
        left = await app.producer.gateway.command("ZCARD", running.partition.joins)
        return f"{found.name} {left}"

    async with app, running_worker(app, concurrency=3):
        running = await parent.enqueue()
        assert await bounded(running.result()) == "other 0"
        left = await app.producer.find(ids[0])
        assert left is not None

        async def is_over() -> bool:
            return await left.status() is (State.RUNNING if call == "result" else State.CANCELLED)

        await wait_until(is_over, "the children are cancelled")
        await left.cancel()
        await wait_until(lambda: is_cancelled(left), "the end of the last task")


async def is_cancelled(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.CANCELLED


async def test_a_tool_may_return_the_handle_of_a_task(app: App) -> None:
    runs = Counter[str]()

    @app.task
    async def search(ctx: Context, word: str) -> str:
        runs["search"] += 1
        return word.upper()

    async def start(word: str) -> TaskHandle[str]:
        return await search.enqueue(word)

    @app.task
    async def parent(ctx: Context) -> str:
        runs["parent"] += 1
        return await ctx.tool("search", start, "lease")

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == "LEASE"
        assert runs == {"search": 1, "parent": 2}


async def test_a_step_of_an_agent_may_return_the_handle_of_a_task(app: App) -> None:
    runs = Counter[str]()

    @app.task
    async def search(ctx: Context, word: str) -> str:
        runs["search"] += 1
        return word.upper()

    class Researcher(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="first", title="search"), PlanStep(key="second", title="search again")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            return await search.enqueue(step.key)

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return dict(state.results)

    async with app, running_worker(app, concurrency=1):
        running = await app.agent(Researcher).enqueue("find it")
        assert await bounded(running.result()) == {"first": "FIRST", "second": "SECOND"}
        assert runs == {"search": 2}


async def test_a_child_keeps_the_version_of_the_code_that_spawned_it(app: App, settings: Settings) -> None:
    versions: list[int] = []

    def define(app: App, version: int) -> Task[[], None]:
        @app.task(queue="children", version=version)
        async def child(ctx: Context) -> None:
            versions.append(ctx.version)

        @app.task
        async def parent(ctx: Context) -> None:
            await ctx.gather(child, [()])

        return parent

    parent = define(app, 2)
    async with app, App("test", settings=settings) as older, App("test", settings=settings) as newer:
        define(older, 1)
        define(newer, 3)
        running = await parent.enqueue()
        await work_off(app, queues=["test"])
        await work_off(older, queues=["children"])
        assert versions == [], "older workers leave the child to newer ones"
        async with running_worker(newer, queues=["children"]), running_worker(app, queues=["test"]):
            await bounded(running.result())
        assert versions == [2]


async def test_a_group_calls_back_with_its_results(app: App) -> None:
    ran = Counter[int]()

    @app.task
    async def page(ctx: Context, number: int) -> dict[str, int]:
        ran[number] += 1
        return {"page": number}

    @app.task
    async def report(ctx: Context, pages: list[dict[str, int]], title: str) -> str:
        again = await ctx.step("count", len, pages)
        return f"{title} {again} {pages[-1]['page']} {ctx.tags}"

    async with app, running_worker(app, concurrency=1):
        running = await page.options(tags=["x"]).enqueue_group(range(5), then=report, limit=2, title="all")
        assert await bounded(running.result()) == "all 5 4 ()"
        assert ran == Counter(range(5))
        named = await app.producer.enqueue_group(
            "page", [{"number": 7}], then="report", arguments={"title": "named"}, queue="test", then_queue="test"
        )
        assert await bounded(named.result()) == "named 1 7 ()"
        empty = await page.enqueue_group([], then=report.options(tags=["b"]), title="none")
        with pytest.raises(TaskFailed):
            await bounded(empty.result())


async def test_a_group_that_fails_or_is_wrong(app: App) -> None:
    @app.task(retry=ONCE)
    async def page(ctx: Context, number: int) -> int:
        raise LookupError("no such page")

    @app.task(retry=ONCE)
    async def report(ctx: Context, pages: list[int]) -> int:
        return len(pages)

    @app.task
    async def nothing(ctx: Context) -> None: ...

    async with app, running_worker(app, concurrency=1):
        running = await page.enqueue_group([1, 2], then=report)
        with pytest.raises(TaskFailed, match=r"ChildFailed: child task .* no such page"):
            await bounded(running.result())
        wrong: Any = page
        for items, options, problem in (
            ([1], {"then": report, "limit": 0}, "limit must be a whole number of at least 1, got 0"),
            ([1], {"then": report, "errors": "keep"}, "errors must be 'raise' or 'wait', got 'keep'"),
            ([1], {"then": nothing}, "must have an argument for the results of a group"),
            ([1], {"then": report, "title": 1}, "unexpected keyword argument 'title'"),
            (["x"], {"then": report}, "task 'page': number: "),
            ([1], {"then": "report"}, "enqueue_group needs a registered task"),
        ):
            with pytest.raises((PerdureError, ValueError), match=problem):
                await wrong.enqueue_group(items, **options)


async def test_a_fork_spawns_children_of_its_own(app: App) -> None:
    may_end = asyncio.Event()
    ids: dict[int, set[str]] = {1: set(), 2: set()}

    @app.task
    async def child(ctx: Context, number: int) -> int:
        ids[number].add(ctx.task_id)
        await may_end.wait()
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[int]:
        spawned = await ctx.spawn(child, 1)
        return [*await ctx.gather(child, [2]), await ctx.join(spawned)]

    async with app, running_worker(app, concurrency=4):
        running = await parent.enqueue()

        async def is_parked() -> bool:
            return all(ids.values()) and await running.status() is State.WAITING

        await wait_until(is_parked, "the parent waits")
        copy = (await fork(app.producer, running.id)).handle
        await wait_until(_is_waiting(copy), "the fork waits")
        may_end.set()
        assert await bounded(running.result()) == await bounded(copy.result()) == [2, 1]
        assert [len(found) for found in ids.values()] == [2, 2]


def _is_waiting(handle: TaskHandle[Any]) -> Callable[[], Awaitable[bool]]:
    async def is_waiting() -> bool:
        return await handle.status() is State.WAITING

    return is_waiting


async def test_a_branch_that_joins_late_gets_the_result(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()
    reads = 0
    read, close = joining._outcomes, joining._close

    async def read_late(run: Any, place: Any, children: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 2:  # this branch has seen that the join is over; the other one closes it meanwhile
            await closed.wait()
        return await read(run, place, children)

    async def note_close(run: Any, group: str) -> None:
        await close(run, group)
        closed.set()

    monkeypatch.setattr(joining, "_outcomes", read_late)
    monkeypatch.setattr(joining, "_close", note_close)

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[int]:
        handle = await ctx.spawn(child, 7)
        return [*await asyncio.gather(ctx.join(handle), ctx.join(handle))]

    async with app, running_worker(app, concurrency=2):
        assert await bounded((await parent.enqueue()).result()) == [7, 7]


@pytest.mark.parametrize("whose", ["its own", "its parent's"])
async def test_a_task_cannot_wait_for_what_waits_for_it(app: App, whose: str) -> None:
    @app.task(retry=ONCE)
    async def child(ctx: Context, awaited: str | None) -> None:
        handle = await app.producer.find(awaited or ctx.task_id)
        assert handle is not None
        await handle.result()

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> None:
        await ctx.gather(child, [None if whose == "its own" else ctx.task_id])

    async with app, running_worker(app, concurrency=2):
        expected = "cannot await its own result" if whose == "its own" else "cannot await the result of its parent"
        with pytest.raises(TaskFailed, match=expected):
            await bounded((await parent.enqueue()).result())


async def test_a_parent_gets_the_result_of_a_task_whose_record_has_expired(app: App) -> None:
    @app.task(queue="others")
    async def other(ctx: Context) -> str:
        return "done"

    async def find(task_id: str) -> TaskHandle[str]:
        found = await app.producer.find(task_id)
        assert found is not None
        return found

    @app.task(retry=ONCE)
    async def parent(ctx: Context, task_id: str) -> str:
        return await (await ctx.step("find", find, task_id)).result(timeout=600)

    @app.task(retry=ONCE)
    async def itself(ctx: Context) -> None:
        handle = await app.producer.find(ctx.task_id)
        assert handle is not None
        await handle.result(timeout=math.inf)

    async with app:
        awaited = await other.enqueue()
        running = await parent.enqueue(awaited.id)
        await work_off(app, queues=["test"])
        assert await running.status() is State.WAITING
        await work_off(app, queues=["others"])
        await app.producer.gateway.command("DEL", awaited.partition.record(awaited.id))
        alone = await itself.enqueue()
        await work_off(app, queues=["test"])
        assert await bounded(running.result()) == "done"
        with pytest.raises(TaskFailed, match="cannot await its own result"):
            await bounded(alone.result())


async def test_the_children_of_a_call_have_the_items_of_one_run(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies when it has added the first of the items; the generator yields others in the next run."""
    ran = Counter[str]()
    runs = 0
    add = add_children

    async def add_some(gateway: Any, delivery: Any, place: Any, children: Any, **options: Any) -> Any:
        if runs == 1:
            await add(gateway, delivery, place, children[:2], **options)
            handle = await app.producer.find(place.task_id)
            assert handle is not None
            await steal(app, handle, expired=True)
        return await add(gateway, delivery, place, children, **options)

    monkeypatch.setattr(joining, "add_children", add_some)

    @app.task
    async def child(ctx: Context, item: str) -> str:
        ran[item] += 1
        return item

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[str]:
        nonlocal runs
        runs += 1
        items = "abc" if runs == 1 else "cab"
        return await ctx.gather(child, iter([*items]))

    async with app, running_worker(app, concurrency=1):
        assert await bounded((await parent.enqueue()).result()) == ["c", "a", "b"]
        assert set(ran) == {"a", "b", "c"}


@pytest.mark.parametrize("how", ["gather", "as_completed", "join"])
async def test_children_are_not_lost_with_their_join(app: App, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A server that loses its last writes may lose the join, but not the children, which are in other slots."""
    ran = Counter[int]()
    add, lost = add_children, asyncio.Event()

    async def add_and_lose(gateway: Any, delivery: Any, place: Any, children: Any, **options: Any) -> Any:
        added = await add(gateway, delivery, place, children, **options)
        if not lost.is_set():
            lost.set()
            await gateway.command("DEL", *place.keys)
        return added

    monkeypatch.setattr(joining, "add_children", add_and_lose)

    @app.task
    async def child(ctx: Context, number: int) -> int:
        ran[number] += 1
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[int]:
        if how == "gather":
            return await ctx.gather(child, [1, 2, 3], limit=2)
        if how == "as_completed":
            return sorted([found async for found in ctx.as_completed(child, [1, 2, 3], limit=2)])
        return [await ctx.join(await ctx.spawn(child, number)) for number in (1, 2, 3)]

    async with app, running_worker(app, concurrency=2):
        assert await bounded((await parent.enqueue()).result()) == [1, 2, 3]
    assert ran == {1: 1, 2: 1, 3: 1}


async def test_a_child_that_is_not_joined_is_no_wait_of_a_branch(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitBoard, "park_after", 0.05)

    @app.task
    async def child(ctx: Context, number: int) -> int:
        await ctx.sleep(number * 0.2)
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[int]:
        later = await ctx.spawn(child, 4)
        both = await asyncio.gather(ctx.gather(child, [2]), ctx.gather(child, [3]))
        return [*both[0], *both[1], await ctx.join(later)]

    async with app, running_worker(app, concurrency=4):
        assert await bounded((await parent.enqueue()).result()) == [2, 3, 4]


async def test_a_child_that_the_plan_does_not_have_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that can write to Redis has changed the list of the children that have ended."""

    async def other_ended(*args: Any, **options: Any) -> list[str]:
        return ["other"]

    monkeypatch.setattr(joining, "ended_children", other_ended)

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task(retry=ONCE)
    async def parent(ctx: Context) -> list[int]:
        return [found async for found in ctx.as_completed(child, [1])]

    async with app, running_worker(app, concurrency=2):
        with pytest.raises(TaskFailed, match=r"could not decrypt the outcome of task other: join .* has no such child"):
            await bounded((await parent.enqueue()).result())
