"""Priorities and idle tasks with real workers: which task starts next, and that none waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, Unique
from perdure.queues import find_task, list_queues, set_partitions
from perdure.queues.keys import GROUP, RELEASED
from perdure.queues.lanes import LANES
from perdure.queues.partitions.resharding import load_route
from perdure.worker.errors import InvalidArguments, TaskDefinitionError

from tests.support.command_line import call
from tests.support.processes import worker_processes
from tests.support.workers import BOUND, bounded, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("lanes")]


@pytest.fixture
def starts() -> list[str]:
    """Names in the order of the starts."""
    return []


def job_of(app: App, starts: list[str]) -> Any:
    @app.task
    async def job(ctx: Context, name: str) -> None:
        starts.append(name)

    return job


async def fill(job: Any, **counts: int) -> None:
    """Enqueue tasks of several priorities: the lower ones first."""
    for lane in ("idle", "low", "normal", "high"):
        options: dict[str, Any] = {"idle": True} if lane == "idle" else {"priority": lane}
        if count := counts.get(lane):
            await job.options(**options).enqueue_many([{"name": lane}] * count)


# order


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("concurrency", [1, 3, 16])
async def test_of_eight_starts_in_a_row_at_least_one_goes_to_a_lower_priority(
    app: App, starts: list[str], partitions: int, concurrency: int
) -> None:
    """The highest priority has all others, however many tasks of lower ones were there before."""
    job = job_of(app, starts)
    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, partitions)
    await fill(job, low=300, normal=300, high=70)
    await work_off(app, concurrency=concurrency)
    assert len(starts) == 670
    mixed = starts[: len(starts) - starts[::-1].index("high")]
    for first in range(len(mixed) - 7):
        assert set(mixed[first : first + 8]) != {"high"}
    assert 70 <= len(mixed) <= 70 + 2 * 10 + concurrency
    rest = starts[len(mixed) :]
    until_low = rest[: len(rest) - rest[::-1].index("normal")]
    for first in range(len(until_low) - 7):
        assert "low" in until_low[first : first + 8]
    assert until_low.count("low") <= len(until_low) / 8 + concurrency


async def test_a_priority_comes_first_over_a_long_backlog(app: App, starts: list[str]) -> None:
    """One of 10,000 tasks runs when the urgent ones come: they are the next ones, but for the turns of the others."""
    job, gate, begun = job_of(app, starts), asyncio.Event(), asyncio.Event()

    @app.task(priority="high")
    async def first(ctx: Context) -> None:
        begun.set()
        await gate.wait()

    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, 4)
    await job.enqueue_many([{"name": "normal"}] * 10_000)
    await first.enqueue()
    async with running_worker(app, concurrency=1):
        await bounded(begun.wait())
        before = len(starts)
        handles = await job.options(priority="high").enqueue_many([{"name": "high"}] * 20)
        gate.set()
        for handle in handles:
            await handle.result(timeout=BOUND)
        assert starts[before:].count("high") == 20
        assert starts[before : before + 24].count("high") >= 20


async def test_a_queue_without_priorities_has_one_lane(app: App, starts: list[str]) -> None:
    job = job_of(app, starts)
    await job.options(priority="normal").enqueue("a")
    await job.options(idle=False).enqueue("b")
    await work_off(app)
    route = await load_route(app.producer.gateway, app.producer.namespace, app.name)
    assert route is not None
    assert route.encode() == b"1"
    assert starts == ["a", "b"]


# idle tasks


async def test_idle_tasks_start_if_nothing_else_waits_and_half_of_the_slots_are_free(
    app: App, starts: list[str]
) -> None:
    job, gate = job_of(app, starts), asyncio.Event()
    running: set[str] = set()

    @app.task
    async def hold(ctx: Context) -> None:
        running.add(ctx.task_id)
        await gate.wait()

    held = await hold.enqueue_many([{}] * 5)
    async with running_worker(app, concurrency=8):

        async def all_run() -> bool:
            return len(running) == 5

        await wait_until(all_run, "five slots are busy")
        idle = await job.options(idle=True).enqueue_many([{"name": "idle"}] * 3)
        normal = await job.enqueue_many([{"name": "normal"}] * 20)
        for handle in normal:
            await handle.result(timeout=BOUND)
        assert "idle" not in starts
        gate.set()
        for handle in [*held, *idle]:
            await handle.result(timeout=BOUND)
    assert starts == ["normal"] * 20 + ["idle"] * 3


@pytest.mark.parametrize(("concurrency", "at_once"), [(1, 1), (2, 2), (5, 3), (8, 5)])
async def test_idle_tasks_leave_half_of_the_slots_to_others(app: App, concurrency: int, at_once: int) -> None:
    """Each one that starts finds at least half of the slots free."""
    gate, running, most = asyncio.Event(), [0], [0]

    @app.task(idle=True)
    async def background(ctx: Context) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await gate.wait()
        running[0] -= 1

    @app.task
    async def urgent(ctx: Context) -> None: ...

    handles = await background.enqueue_many([{}] * 12)
    async with running_worker(app, concurrency=concurrency):

        async def full() -> bool:
            return running[0] == at_once

        await wait_until(full, "idle tasks run")
        if at_once < concurrency:
            await (await urgent.enqueue()).result(timeout=BOUND)
        assert most[0] == at_once
        gate.set()
        for handle in handles:
            await handle.result(timeout=BOUND)
    assert most[0] <= at_once


async def test_large_idle_tasks_leave_slots_to_others(app: App) -> None:
    """Of 16 slots, three tasks that take four each may be idle ones: each has found at least 8 free."""
    gate, running = asyncio.Event(), [0]

    @app.task(idle=True, slots=4)
    async def background(ctx: Context) -> None:
        running[0] += 1
        await gate.wait()

    @app.task
    async def urgent(ctx: Context) -> None: ...

    handles = await background.enqueue_many([{}] * 8)
    async with running_worker(app, concurrency=16):

        async def full() -> bool:
            return running[0] == 3

        await wait_until(full, "idle tasks run")
        for _ in range(3):
            await (await urgent.enqueue()).result(timeout=BOUND)
        assert running[0] == 3
        gate.set()
        for handle in handles:
            await handle.result(timeout=BOUND)


async def test_idle_tasks_do_not_starve_beside_a_steady_flow(app: App, starts: list[str]) -> None:
    """A worker of which a few slots are always busy, and which is never without a new task."""
    job = job_of(app, starts)
    ended = asyncio.Event()

    @app.task
    async def again(ctx: Context) -> None:
        await asyncio.sleep(0.001)
        if not ended.is_set():
            await again.enqueue()

    await again.enqueue_many([{}] * 3)
    async with running_worker(app, concurrency=8):
        handles = await job.options(idle=True).enqueue_many([{"name": "idle"}] * 20)
        try:
            for handle in handles:
                await handle.result(timeout=BOUND)
        finally:
            ended.set()


async def test_a_released_idle_task_is_claimed_on_spare_slots_only(app: App, starts: list[str]) -> None:
    job, gate, begun = job_of(app, starts), asyncio.Event(), asyncio.Event()

    @app.task
    async def hold(ctx: Context) -> None:
        begun.set()
        await gate.wait()

    handle = await job.options(idle=True).enqueue("idle")
    ready = handle.partition.ready
    await redis_command(app, "XGROUP", "CREATE", ready, GROUP, "0")
    await redis_command(app, "XREADGROUP", "GROUP", GROUP, RELEASED, "STREAMS", ready, ">")
    held = await hold.enqueue()
    async with running_worker(app, concurrency=1):
        await bounded(begun.wait())
        normal = await job.enqueue("normal")
        gate.set()
        for one in (held, normal, handle):
            await one.result(timeout=BOUND)
    assert starts[-1] == "idle"


# what a lane keeps


async def test_retries_delays_and_replays_stay_in_their_lane(app: App) -> None:
    @app.task(priority="high", retry=Retry(max_attempts=2, base=0.01))
    async def broken(ctx: Context) -> None:
        raise ValueError("no")

    delayed = await broken.options(delay=0.05).enqueue()
    await asyncio.sleep(0.06)
    await work_off(app)
    record = await delayed.record()
    assert (record.state, record.attempts) == ("dead", 2)
    assert delayed.partition.lane == "high"
    assert await find_task(app.producer.gateway, app.producer.namespace, delayed.id) == delayed.partition


async def test_children_and_groups_go_to_the_lane_of_their_own_task(app: App) -> None:
    @app.task(idle=True)
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task(priority="high")
    async def parent(ctx: Context) -> list[int]:
        spawned = await ctx.spawn(child, 7)
        assert spawned.partition.lane == "idle"
        return [await ctx.join(spawned), *await ctx.gather(child, [{"number": 1}, {"number": 2}])]

    @app.task(priority="low")
    async def collect(ctx: Context, results: list[int]) -> int:
        return sum(results)

    handle = await parent.enqueue()
    group = await child.enqueue_group([{"number": 3}, {"number": 4}], then=collect)
    assert (handle.partition.lane, group.partition.lane) == ("high", "low")
    async with running_worker(app, concurrency=4):
        assert await handle.result(timeout=BOUND) == [7, 1, 2]
        assert await group.result(timeout=BOUND) == 7
    (stats,) = await list_queues(app.producer.gateway, app.producer.namespace, app.name)
    assert {partition.index // 1_000_000 for partition in stats.partitions if partition.index} == {1, 2, 3}


async def test_a_continued_task_keeps_its_priority_and_another_one_has_its_own(app: App) -> None:
    @app.task(priority="low")
    async def other(ctx: Context, part: int) -> int:
        return part

    @app.task
    async def long(ctx: Context, part: int) -> int:
        if part < 2:
            await ctx.continue_as(other if part else long, arguments={"part": part + 1})
        return part

    handle = await long.options(priority="high").enqueue(0)
    await work_off(app)
    found = [
        await find_task(app.producer.gateway, app.producer.namespace, f"{handle.id}{end}") for end in ("", ".h1", ".h2")
    ]
    assert [None if one is None else one.lane for one in found] == ["high", "high", "low"]


@pytest.mark.usefixtures("environment")
async def test_forks_and_imported_tasks_keep_the_priority_of_the_original(app: App, tmp_path: Path) -> None:
    broken = [True]

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> int:
        number = await ctx.step("one", lambda: 1)
        if broken:
            raise ValueError("no")
        return number

    handle = await job.options(priority="high").enqueue()
    await work_off(app)

    def commands() -> list[str]:
        forked = call("task", "fork", handle.id).ids
        assert call("task", "export", handle.id, "--output", str(tmp_path / "task")).code == 0
        return [*forked, *call("task", "import", str(tmp_path / "task"), "--id", "copy").ids]

    copies = await asyncio.to_thread(commands)
    assert len(copies) == 2
    broken.clear()
    for task_id in copies:
        copy = await app.producer.find(task_id)
        assert copy is not None
        assert copy.partition.lane == "high"
        await work_off(app)
        assert await copy.result(timeout=BOUND) == 1


async def test_turns_of_a_session_have_the_priority_of_the_agent(app: App) -> None:
    class Echo(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="say", title="say")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            return state.goal

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return state.goal

    echo = app.agent(Echo, priority="low")
    session = app.session(echo, "ada")
    turns = [await session.send(text) for text in ("one", "two", "three")]  # the later ones are stored by workers
    goal = await echo.enqueue("four")
    assert goal.partition.lane == "low"
    await work_off(app)
    for turn in turns:
        partition = await find_task(app.producer.gateway, app.producer.namespace, turn.task_id)
        assert partition is not None
        assert partition.lane == "low"


async def test_a_unique_key_is_one_task_whatever_its_priority(app: App) -> None:
    @app.task(unique=Unique("while_queued", by="order"))
    async def ship(ctx: Context, order: int) -> None: ...

    first = await ship.options(priority="low").enqueue(1)
    again = await ship.options(priority="high").enqueue(1)
    assert (again.id, again.existed, again.partition) == (first.id, True, first.partition)
    last = await ship.options(priority="high", unique=Unique("while_queued", by="order", keep="last")).enqueue(1)
    assert last.partition.lane == "high"
    assert (await first.record()).state == "cancelled"
    await work_off(app)
    assert (await last.record()).state == "succeeded"


async def test_limited_tasks_of_all_priorities_are_admitted(app: App) -> None:
    running, most = [0], [0]
    api = app.limit("api", total=2)

    @app.task(limits=[api])
    async def calls(ctx: Context) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.005)
        running[0] -= 1

    async with running_worker(app, concurrency=8):
        handles = []
        lanes: list[dict[str, Any]] = [{"priority": "low"}, {"priority": "high"}, {"idle": True}, {}]
        for options in lanes:
            handles += await calls.options(**options).enqueue_many([{}] * 4)
        for handle in handles:
            await handle.result(timeout=BOUND)
    assert most[0] <= 2


async def test_ordered_tasks_stay_in_the_lane_of_their_priority(app: App) -> None:
    session = app.limit("session", running=1, by="name", ordered=True)
    starts: list[tuple[str, int]] = []

    @app.task(limits=[session])
    async def turn(ctx: Context, name: str, number: int) -> None:
        starts.append((name, number))

    for priority in ("high", "low", "normal"):
        for number in range(3):
            task_id = f"{priority}-{number}"
            handle = await turn.options(priority=priority, task_id=task_id).enqueue(priority, number)
            assert handle.partition.lane == priority
            many = turn.options(priority=priority, task_id=[task_id])
            [again] = await many.enqueue_many([{"name": priority, "number": number}])
            assert (again.existed, again.partition) == (True, handle.partition)
    async with running_worker(app):

        async def all_started() -> bool:
            return len(starts) == 9

        await wait_until(all_started, "all turns run")
    for priority in ("high", "low", "normal"):
        assert [number for name, number in starts if name == priority] == [0, 1, 2]


@pytest.mark.processes
async def test_killed_workers_lose_no_task_of_any_priority(app: App, settings: Settings, tmp_path: Path) -> None:
    """Each worker is killed while it runs tasks of several lanes; the last one finishes them."""
    with worker_processes(settings, tmp_path) as workers:
        producer = app.producer
        lanes: list[dict[str, Any]] = [{"priority": "low"}, {"priority": "high"}, {"idle": True}, {}]
        handles = []
        for options in lanes:
            arguments = [{"value": number, "steps": 3, "pause": 0.02} for number in range(8)]
            handles += await producer.enqueue_many("pipeline", arguments, queue="replica", **options)
        for _ in range(3):
            process = await workers.start(concurrency=4, lease=1.0).ready()

            async def works(pid: int = process.pid) -> bool:
                return len(workers.lines("end", pid=pid)) >= 6

            await wait_until(works, "the worker runs steps")
            process.kill()
        await workers.start(concurrency=4, lease=1.0).ready()
        for handle in handles:
            await handle.result(timeout=BOUND)


async def test_a_reshard_changes_all_lanes_and_keeps_their_order(app: App) -> None:
    starts: dict[str, list[int]] = {}

    @app.task
    async def numbered(ctx: Context, lane: str, number: int) -> None:
        starts.setdefault(lane, []).append(number)

    for number, count in enumerate((1, 3, 2)):
        await set_partitions(app.producer.gateway, app.producer.namespace, app.name, count)
        for lane in ("high", "normal", "low"):
            call = numbered.options(priority=lane, key="a")
            await call.enqueue_many([{"lane": lane, "number": 3 * number + each} for each in range(3)])
    await work_off(app, concurrency=1)
    assert starts == {lane: list(range(9)) for lane in ("high", "normal", "low")}
    route = await load_route(app.producer.gateway, app.producer.namespace, app.name)
    assert route is not None
    assert [generation.count for generation in route.latest] == [2, 2, 2]


@pytest.mark.parametrize("first", LANES)
async def test_an_id_is_one_task_whatever_its_priority(app: App, starts: list[str], first: str) -> None:
    job = job_of(app, starts)
    for lane in (first, *LANES):
        options: dict[str, Any] = {"idle": True} if lane == "idle" else {"priority": lane}
        handle = await job.options(task_id="only", **options).enqueue("one")
        many = await job.options(task_id=["only"], **options).enqueue_many([{"name": "one"}])
        assert handle.partition.lane == many[0].partition.lane == first
    await work_off(app)
    assert starts == ["one"]


# a lane that some do not know yet


async def test_a_worker_serves_a_new_lane_at_once(app: App, starts: list[str]) -> None:
    """The nudge of the producer reaches one worker, whose next look at the route would come after some seconds."""
    job = job_of(app, starts)
    async with running_worker(app):
        lanes: list[dict[str, Any]] = [{"priority": "high"}, {"priority": "low"}, {"idle": True}]
        for number, options in enumerate(lanes):
            handle = await job.options(**options).enqueue(str(number))
            await handle.result(timeout=1.5)


async def test_each_worker_knows_a_new_lane_after_its_next_look_at_the_route(app: App, starts: list[str]) -> None:
    """One worker gets the nudge. The other one, which is alone afterwards, has read the route within 2.5 s."""
    job = job_of(app, starts)
    async with running_worker(app) as first, running_worker(app) as second:
        handle = await job.options(priority="high").enqueue("a")
        await handle.result(timeout=BOUND)

        async def both_read() -> bool:
            found = await redis_command(app, "XINFO", "CONSUMERS", handle.partition.ready, GROUP)
            names = {dict(zip(one[::2], one[1::2], strict=True))[b"name"].decode() for one in found}
            return {first.id, second.id} <= names

        async with asyncio.timeout(BOUND):
            await wait_until(both_read, "both workers read the lane")


# bad input


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"priority": "urgent"}, "priority must be 'high', 'normal' or 'low', got 'urgent'"),
        ({"priority": 1}, "priority must be 'high', 'normal' or 'low', got 1"),
        ({"priority": "idle"}, "priority must be 'high', 'normal' or 'low', got 'idle'"),
        ({"priority": ["high"]}, r"priority must be 'high', 'normal' or 'low', got \['high'\]"),
        ({"idle": 1}, "idle must be True or False, got 1"),
        ({"idle": True, "priority": "low"}, "idle=True has no priority: an idle task starts after all others"),
    ],
)
async def test_a_wrong_priority_is_one_sentence_and_nothing_is_stored(
    app: App, starts: list[str], options: dict[str, Any], problem: str
) -> None:
    job = job_of(app, starts)
    with pytest.raises(InvalidArguments, match=problem):
        job.options(**options)
    with pytest.raises(TaskDefinitionError, match=problem):
        app.task(name="other", **options)(job.handler)
    with pytest.raises(ValueError, match=problem):
        await app.producer.enqueue("job", {"name": "a"}, queue=app.name, **options)
    with pytest.raises(ValueError, match=problem):
        await app.producer.enqueue_many("job", [{"name": "a"}], queue=app.name, **options)
    assert not await redis_command(app, "EXISTS", app.producer.namespace.queues)
