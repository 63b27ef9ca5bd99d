"""Items that handlers emit into the streams of their task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import anyio
import anyio.from_thread
import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    PlanStep,
    ResumeWarning,
    Retry,
    Settings,
    State,
    SyncContext,
    TaskHandle,
    current_context,
    current_step,
)
from perdure.deadletter.replay import Replay, replay
from perdure.queues import generate_key
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.errors import PayloadTooLarge
from perdure.queues.stream_items import CUT_ALL, ITEM_BYTES
from perdure.testing import make_context
from perdure.worker.errors import StepDefinitionError, StepOutsideTask
from pydantic import SecretStr

from tests.support.emitted import entries_of, items_of, names_of, values_of
from tests.support.workers import (
    bounded,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    steal,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

AT_ONCE = Retry(max_attempts=3, base=0.0)


class Once:
    """What happens the first time only."""

    def __init__(self) -> None:
        self.left = 1

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left >= 0


async def lose_worker(ctx: Context | None = None) -> None:
    """Store what was emitted, and lose the lease as if the process had died: the next run continues."""
    ctx = current_context() if ctx is None else ctx
    run = ctx._run
    await run.flush()
    await steal(_APP[0], await _handle(ctx.task_id), expired=True)
    await asyncio.sleep(60)


async def work_on(app: App, handle: TaskHandle[Any]) -> None:
    """Work until the task has ended, however often its worker is lost."""
    for _ in range(6):
        await work_off(app)
        if await handle.status() in (State.SUCCEEDED, State.DEAD):
            return
    raise AssertionError("the task never ends")


_APP: list[App] = []


async def _handle(task_id: str) -> TaskHandle[Any]:
    handle = await _APP[0].producer.find(task_id)
    assert handle is not None
    return handle


@pytest.fixture(autouse=True)
def current_app(app: App) -> Iterator[None]:
    _APP[:] = [app]
    yield
    _APP.clear()


# where items come from


async def test_items_of_steps_tools_and_the_handler(app: App) -> None:
    async def ask(question: str) -> str:
        for word in question.split():
            await current_step().emit(word, to="tokens")
        return question

    async def search(query: str) -> int:
        await current_context().emit({"searching": query})
        return 1

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit("begin")
        await ctx.step("ask", ask, "how are you")
        await ctx.tool("search", search, "weather")
        await ctx.emit("end")

    running = await work.enqueue()
    await work_off(app)
    assert await running.status() is State.SUCCEEDED
    assert await values_of(app, running) == ["begin", {"searching": "weather"}, "end"]
    assert await values_of(app, running, "tokens") == ["how", "are", "you"]
    assert [item.number for item in await items_of(app, running)] == [1, 2, 3]
    assert [item.unit for item in await items_of(app, running)] == ["", "search", ""]
    assert await names_of(app, running) == ["output", "tokens"]


async def test_items_from_threads(app: App) -> None:
    def read() -> int:
        step = current_step()
        for number in range(3):
            anyio.from_thread.run(step.emit, number)
        return 3

    def plain() -> None:
        SyncContext.current().emit("in a step of a plain handler")

    @app.task
    async def asynchronous(ctx: Context) -> None:
        await ctx.step("read", read)

    @app.task
    def synchronous(ctx: SyncContext) -> None:
        ctx.emit("begin")
        ctx.step("plain", plain)
        with ctx.scope("page"):
            ctx.emit("page")

    one, other = await asynchronous.enqueue(), await synchronous.enqueue()
    await work_off(app)
    assert await values_of(app, one) == [0, 1, 2]
    assert await values_of(app, other) == ["begin", "in a step of a plain handler", "page"]
    assert [item.unit for item in await items_of(app, other)] == ["", "plain", "page/"]


async def test_a_channel_says_the_last_number(app: App) -> None:
    channel: asyncio.Queue[str] = asyncio.Queue()

    @app.task
    async def work(ctx: Context) -> None:
        for number in range(5):
            await ctx.emit(number)

    running = await work.enqueue()
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(app.settings.redis_url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(running.partition.stream(running.id, "output"))
        await work_off(app)
        async with asyncio.timeout(10):
            async for message in pubsub.listen():
                if message["type"] == "message":
                    channel.put_nowait(message["data"].decode())
                    if message["data"] == b"5":
                        break
    assert channel.qsize() <= 5


# a crash


async def test_a_step_that_is_cut_off_voids_its_items(app: App) -> None:
    dies = Once()

    async def ask() -> str:
        await current_step().emit("a", to="tokens")
        await current_step().emit("b", to="tokens")
        if dies:
            await lose_worker()
        await current_step().emit("c", to="tokens")
        return "abc"

    @app.task
    async def work(ctx: Context) -> str:
        await ctx.emit("begin")
        return await ctx.step("ask", ask)

    running = await work.enqueue()
    await work_on(app, running)
    assert await bounded(running.result()) == "abc"
    assert await values_of(app, running, "tokens") == ["a", "b", "c"]
    entries = await entries_of(app, running, "tokens")
    assert [(item.number, item.attempt, bool(item.cut)) for item in entries if not item.is_notice] == [
        (1, 1, False),
        (2, 1, False),
        (4, 1, True),
        (5, 2, False),
        (6, 2, False),
        (7, 2, False),
    ]
    assert await values_of(app, running) == ["begin"]
    assert not [name for name in await recorded_steps(app, running) if name == "e:ask"]


async def test_readers_get_a_notice_for_the_user_when_a_run_resumes(app: App) -> None:
    dies = Once()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit({"token": "a"}, to="tokens")
        if dies:
            await lose_worker(ctx)
        await ctx.emit({"token": "b"}, to="tokens")

    running = await work.enqueue()
    await work_on(app, running)
    _, notice, *_, end = items = [item async for item in running.stream("tokens", type=dict[str, str])]
    assert [item.kind for item in items] == ["item", "resumed", "item", "end"]
    (resumed,) = [event async for event in running.events(follow=False) if event.type == "resumed"]
    assert notice.value == resumed.data["text"]
    assert (notice.step, notice.problem, notice.summary()["value"]) == (None, None, notice.value)
    assert end.state == "succeeded"


async def test_readers_get_no_notice_of_a_wait_or_a_failed_attempt(app: App) -> None:
    @app.task(retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        await ctx.emit("a")
        await ctx.step("one", int)
        await ctx.sleep(0.5)
        if ctx.attempt == 1:
            raise ConnectionError("busy")

    running = await work.enqueue()
    async with running_worker(app):
        assert [item.kind async for item in running.stream()] == ["item", "end"]


async def test_a_handler_that_runs_again_continues_after_its_items(app: App) -> None:
    dies = Once()

    async def nothing() -> None:
        pass

    @app.task
    async def work(ctx: Context) -> None:
        for number in range(3):
            await ctx.emit(number)
        await ctx.step("nothing", nothing)
        with ctx.scope("pages"):
            await ctx.emit("page")
        if dies:
            await lose_worker(ctx)
        await ctx.emit("end")

    running = await work.enqueue()
    await work_on(app, running)
    assert [item.value for item in await items_of(app, running)] == [0, 1, 2, "page", "end"]
    assert [item.number for item in await items_of(app, running)] == [1, 2, 3, 4, 6]
    assert (await entries_of(app, running))[4].is_notice


async def test_branches_continue_each_their_own_scope(app: App) -> None:
    dies = Once()

    async def nothing() -> None:
        pass

    @app.task
    async def work(ctx: Context) -> None:
        async def branch(name: str) -> None:
            with ctx.scope(name):
                await ctx.emit(f"{name} 1")
                await ctx.step("nothing", nothing)
                await ctx.emit(f"{name} 2")

        await asyncio.gather(branch("a"), branch("b"))
        if dies:
            await lose_worker(ctx)
        await asyncio.gather(branch("c"), branch("d"))

    running = await work.enqueue()
    await work_on(app, running)
    assert sorted(await values_of(app, running)) == [f"{name} {number}" for name in "abcd" for number in (1, 2)]


async def test_a_handler_that_emits_something_else_warns(app: App) -> None:
    numbers = iter(range(10))

    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        number = next(numbers)
        await ctx.emit(number)
        if number == 0:
            await lose_worker(ctx)

    running = await work.enqueue()
    await work_on(app, running)
    dead = await letter(app, running)
    assert "stream 'output' is not what an earlier run has emitted" in dead.message
    assert dead.error.endswith(ResumeWarning.__name__)


async def test_a_large_checkpoint(app: App) -> None:
    dies = Once()

    async def nothing() -> None:
        pass

    async def ask() -> None:
        await current_step().emit("a")
        if dies:
            await lose_worker()
        await current_step().emit("b")

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit("begin")
        for _ in range(3 * PAGE):
            await ctx.options(durability="async").step("nothing", nothing)
        await ctx.step("ask", ask)
        await ctx.emit("end")

    running = await work.enqueue()
    await work_on(app, running)
    assert await values_of(app, running) == ["begin", "a", "b", "end"]


# failures


async def test_tries_of_a_step(app: App) -> None:
    tries: list[int] = []

    async def ask() -> None:
        tries.append(1)
        for number in range(len(tries)):
            await current_step().emit([len(tries), number])
        if len(tries) < 3:
            raise ConnectionError("busy")

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.options(retry=AT_ONCE).step("ask", ask)

    running = await work.enqueue()
    await work_off(app)
    assert await values_of(app, running) == [[3, 0], [3, 1], [3, 2]]
    assert [item.attempt for item in await items_of(app, running)] == [3, 3, 3]


async def test_the_next_attempt_of_a_task(app: App) -> None:
    fails = Once()

    async def first() -> None:
        await current_step().emit("first")

    async def second() -> None:
        await current_step().emit("second")
        if fails:
            raise ConnectionError("busy")

    @app.task(retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        await ctx.emit("begin")
        await ctx.step("first", first)
        await ctx.step("second", second)

    running = await work.enqueue()
    await work_off(app)
    assert await values_of(app, running) == ["begin", "first", "second"]
    assert len([item for item in await entries_of(app, running) if not item.is_notice]) == 5


async def test_items_of_a_failed_step_stay_if_the_handler_continues(app: App) -> None:
    dies = Once()

    async def ask() -> None:
        await current_step().emit("half")
        raise ConnectionError("busy")

    @app.task
    async def work(ctx: Context) -> None:
        try:
            await ctx.step("ask", ask)
        except ConnectionError:
            await ctx.emit("the service is busy")
        if dies:
            await lose_worker(ctx)

    running = await work.enqueue()
    await work_on(app, running)
    assert await values_of(app, running) == ["half", "the service is busy"]


async def test_forgotten_steps_void_their_items_and_those_of_the_handler(app: App) -> None:
    numbers = iter(range(10))

    async def look_up() -> str:
        await current_step().emit("looked up")
        return "order"

    async def charge() -> int:
        number = next(numbers)
        await current_step().emit(f"charge {number}", to="payments")
        return number

    @app.task(retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        await ctx.step("look up", look_up)
        number = await ctx.step("charge", charge)
        await ctx.emit(f"charged {number}")
        if number == 0:
            await ctx.forget("charge")
            raise ConnectionError("refused")

    running = await work.enqueue()
    await work_off(app)
    assert await values_of(app, running, "payments") == ["charge 1"]
    assert await values_of(app, running) == ["looked up", "charged 1"]
    assert not [name for name in await recorded_steps(app, running) if name == "e:#emitted"]


async def test_steps_within_a_step(app: App) -> None:
    dies = Once()

    async def inner(number: int) -> int:
        await current_step().emit(f"inner {number}")
        return number

    async def outer(ctx: Context) -> None:
        await current_step().emit("outer")
        await ctx.step("inner", inner, 1)
        if dies:
            await lose_worker(ctx)
        await ctx.step("inner", inner, 2)

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.options(nested="record").step("outer", outer, ctx)

    running = await work.enqueue()
    await work_on(app, running)
    assert sorted(await values_of(app, running)) == ["inner 1", "inner 2", "outer"]
    assert {item.unit for item in await items_of(app, running)} == {"outer", "outer/inner", "outer/inner#2"}


async def test_a_forgotten_step_voids_the_items_of_the_steps_within_it(app: App) -> None:
    numbers = iter(range(10))

    async def inner(number: int) -> None:
        await current_step().emit(f"inner {number}")

    async def outer(ctx: Context) -> int:
        number = next(numbers)
        await ctx.step("inner", inner, number)
        return number

    @app.task(retry=AT_ONCE)
    async def work(ctx: Context) -> None:
        if not await ctx.options(nested="record").step("outer", outer, ctx):
            await ctx.forget("outer")
            raise ConnectionError("refused")

    running = await work.enqueue()
    await work_off(app)
    assert await values_of(app, running) == ["inner 1"]


async def test_tries_of_a_plain_step_within_a_step(app: App) -> None:
    tries: list[str] = []

    async def part(name: str) -> None:
        tries.append(name)
        await current_step().emit(f"{name} {tries.count(name)}")
        if tries.count(name) == 1:
            raise ConnectionError("busy")
        await current_step().emit(f"{name} end")

    async def outer() -> None:
        ctx = current_context()
        await current_step().emit("outer")
        for name in ("a", "b"):
            await ctx.options(retry=AT_ONCE).step("part", part, name)
        if tries.count("b") == 2:
            await lose_worker()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.step("outer", outer)

    running = await work.enqueue()
    await work_on(app, running)
    assert await values_of(app, running) == ["outer", "a 3", "a end", "b 3", "b end"]
    assert [item.number for item in await entries_of(app, running)] == [*range(1, 19)]
    assert not [name for name in await recorded_steps(app, running) if name.startswith("e:outer")]


# keys


async def test_an_item_with_a_key_is_stored_once(app: App) -> None:
    tries: list[int] = []

    async def ask() -> None:
        tries.append(1)
        await current_step().emit("plain")
        await current_step().emit(f"keyed {len(tries)}", key="page 1")
        if len(tries) == 1:
            raise ConnectionError("busy")
        await current_step().emit("keyed again", key="page 1")
        await current_step().emit("other", key="page 2")

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.options(retry=AT_ONCE).step("ask", ask)
        await ctx.emit("late", key="page 1")

    running = await work.enqueue()
    await work_on(app, running)
    assert await values_of(app, running) == ["keyed 1", "plain", "other"]
    assert await redis_command(app, "ZCARD", running.partition.stream_keys(running.id, "output")) == 2


# agents


class Answers(AgentState):
    pass


class Talking(Agent[Answers]):
    """Emits in each of its methods, and is cut off once in each."""

    dies: ClassVar[dict[str, Once]] = {"plan": Once(), "act": Once(), "finish": Once()}

    async def _say(self, ctx: Context, method: str) -> None:
        await ctx.emit(f"{method} 1")
        if self.dies[method]:
            await lose_worker(ctx)
        await ctx.emit(f"{method} 2")

    async def plan(self, ctx: Context, state: Answers) -> list[PlanStep]:
        await self._say(ctx, "plan")
        return [PlanStep(key="ask", title="Ask")]

    async def act(self, ctx: Context, state: Answers, step: PlanStep) -> str:
        async def fetch() -> str:
            await current_step().emit("fetched")
            return "x"

        await ctx.step("fetch", fetch)
        await self._say(ctx, "act")
        return "answer"

    async def finish(self, ctx: Context, state: Answers) -> str:
        await self._say(ctx, "finish")
        return "done"


async def test_methods_of_an_agent(app: App) -> None:
    talking = app.agent(name="talking", retry=AT_ONCE)(Talking)
    running = await talking.enqueue("talk")
    await work_on(app, running)
    assert await running.status() is State.SUCCEEDED
    assert sorted(await values_of(app, running)) == sorted(
        ["fetched", *(f"{method} {number}" for method in ("plan", "act", "finish") for number in (1, 2))]
    )
    assert [item.unit for item in await items_of(app, running)] == [
        *("#plan", "#plan"),
        *("ask/fetch", "ask", "ask"),
        *("#finish", "#finish"),
    ]
    assert not [name for name in await recorded_steps(app, running) if name.startswith("e:")]


# what follows the end


async def test_streams_live_as_long_as_the_record(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context, fails: bool) -> None:
        await ctx.emit("a", key="a")
        if fails:
            raise ConnectionError("busy")

    done, dead = await work.enqueue(False), await work.enqueue(True)
    await work_off(app)
    for handle in (done, dead):
        names = (handle.partition.stream(handle.id, "output"), handle.partition.stream_keys(handle.id, "output"))
        record = await redis_command(app, "PTTL", handle.partition.record(handle.id))
        for name in names:
            assert 0 <= record - await redis_command(app, "PTTL", name) < 1000
    await replay(app.producer.gateway, await letter(app, dead), Replay())
    assert await redis_command(app, "PTTL", dead.partition.stream(dead.id, "output")) == -1
    await work_off(app)
    assert await values_of(app, dead) == ["a"]


async def test_a_fresh_replay_voids_all_items(app: App) -> None:
    fails = Once()

    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        await ctx.emit("begin")
        await ctx.emit("kept", key="a")
        if fails:
            raise ConnectionError("busy")

    running = await work.enqueue()
    await work_off(app)
    await replay(app.producer.gateway, await letter(app, running), Replay(fresh=True))
    await work_off(app)
    assert await values_of(app, running) == ["kept", "begin"]
    assert [(item.number, item.cut) for item in await entries_of(app, running)] == [
        (1, b""),
        (2, b""),
        (3, CUT_ALL),
        (4, b""),
        (5, b""),
    ]
    assert (await entries_of(app, running))[3].is_notice


# limits


async def test_a_stream_keeps_the_last_items(app: App) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        for _ in range(1000):
            await ctx.emit("x" * 60_000)

    running = await work.enqueue()
    await work_off(app)
    entries = await entries_of(app, running)
    assert entries[-1].number == 1000
    assert 100 <= len(entries) <= 400


WRONG: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
    ("no JSON", object(), {}, StepDefinitionError, "an item of stream 'output' must be JSON data, got <object"),
    ("large", "x" * ITEM_BYTES, {}, PayloadTooLarge, "an item of stream 'output' is 65,538 bytes, over the limit"),
    ("name", 1, {"to": "a b"}, StepDefinitionError, "name of a stream must be 1 to 64 letters"),
    ("no name", 1, {"to": 3}, StepDefinitionError, "name of a stream must be 1 to 64 letters"),
    ("key", 1, {"key": ""}, StepDefinitionError, "key must be a text of 1 to 1000 characters, got ''"),
    ("no key", 1, {"key": 7}, StepDefinitionError, "key must be a text of 1 to 1000 characters, got 7"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: str(case[0]))
async def test_what_cannot_be_emitted(case: tuple[str, Any, dict[str, Any], type[Exception], str]) -> None:
    _, item, options, error, text = case
    ctx = make_context()
    with pytest.raises(error, match=text):
        await ctx.emit(item, **options)
    assert ctx.emitted == []


async def test_what_a_step_leaves_running_emits_no_more_after_its_record(app: App) -> None:
    recorded, refused = asyncio.Event(), list[str]()
    left: list[asyncio.Task[None]] = []

    async def go_on() -> None:
        await current_step().emit("within")
        await recorded.wait()
        with pytest.raises(StepOutsideTask) as caught:
            await current_step().emit("after")
        refused.append(str(caught.value))

    async def ask() -> None:
        left.append(asyncio.create_task(go_on()))
        await asyncio.sleep(0)

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.step("ask", ask)
        recorded.set()
        await bounded(left[0])

    running = await work.enqueue()
    await work_off(app)
    assert await values_of(app, running) == ["within"]
    assert refused == [
        "ctx.emit was called by what step 'ask' had started, after the step was recorded: a step must await what emits"
    ]
    fields = await redis_command(app, "HKEYS", running.partition.steps(running.id))
    assert fields == [b"d:ask"]


async def test_a_task_has_at_most_16_streams() -> None:
    ctx = make_context()
    for number in range(16):
        await ctx.emit(number, to=f"stream-{number}")
    with pytest.raises(StepDefinitionError, match="at most 16 streams, got 'another'"):
        await ctx.emit(1, to="another")
    await ctx.emit(1, to="stream-3")
    assert len(ctx.emitted) == 17


async def test_items_are_refused_after_the_end() -> None:
    ctx = make_context()
    ctx._run.closed = True
    with pytest.raises(StepOutsideTask, match=r"^ctx\.emit was called outside a running task"):
        await ctx.emit(1)


# encryption


@pytest.fixture
async def sealed(settings: Settings) -> AsyncIterator[App]:
    changed = {"encryption_keys": SecretStr(generate_key()), "encryption_required": True}
    async with App("sealed", settings=settings.model_copy(update=changed)) as app:
        _APP[:] = [app]
        yield app


async def test_items_are_encrypted(sealed: App) -> None:
    dies = Once()

    async def ask() -> None:
        await current_step().emit("secret 1")
        if dies:
            await lose_worker()
        await current_step().emit("secret 2")

    @sealed.task
    async def work(ctx: Context) -> None:
        await ctx.emit("secret begin")
        await ctx.step("ask", ask)
        await ctx.emit("secret keyed", key="a")

    running = await work.enqueue()
    await work_on(sealed, running)
    assert await values_of(sealed, running) == ["secret begin", "secret 1", "secret 2", "secret keyed"]
    raw = await redis_command(sealed, "XRANGE", running.partition.stream(running.id, "output"), "-", "+")
    assert b"secret" not in repr(raw).encode()


# other programs


async def test_entries_of_another_program(app: App) -> None:
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit("a")
        await ctx._run.flush()
        begun.set()
        await go.wait()
        await ctx.emit("b")

    running = await work.enqueue()
    working = asyncio.create_task(work_off(app))
    await bounded(begun.wait())
    stream = running.partition.stream(running.id, "output")
    await redis_command(app, "XADD", stream, "18446744073709551615-18446744073709551615", "x", "y")
    go.set()
    await bounded(working)
    assert await running.status() is State.SUCCEEDED
    assert await values_of(app, running) == ["b"]


async def test_a_stream_whose_last_entries_were_deleted(app: App) -> None:
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit("a")
        await ctx._run.flush()
        begun.set()
        await go.wait()
        await ctx.emit("b")

    running = await work.enqueue()
    working = asyncio.create_task(work_off(app))
    await bounded(begun.wait())
    await redis_command(app, "XTRIM", running.partition.stream(running.id, "output"), "MAXLEN", 0)
    go.set()
    await bounded(working)
    assert [(item.number, item.value) for item in await items_of(app, running)] == [(2, "b")]


async def test_a_queue_of_the_name_record(app: App) -> None:
    """Scripts find the streams by the key of the record, whatever the names of namespace and queue."""

    @app.task(queue="record")
    async def work(ctx: Context) -> None:
        await ctx.emit("a")

    running = await work.enqueue()
    await work_off(app, queues=["record"])
    assert await redis_command(app, "PTTL", running.partition.stream(running.id, "output")) > 0


async def test_a_cancelled_task_keeps_its_items(app: App) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        await ctx.emit("a")
        await ctx.sleep(3600)

    running = await work.enqueue()
    await work_off(app)
    await wait_until(lambda: _is_waiting(running), "the task waits")
    await running.cancel()
    assert await values_of(app, running) == ["a"]
    assert await redis_command(app, "PTTL", running.partition.stream(running.id, "output")) > 0


async def _is_waiting(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.WAITING
