"""Messages that handlers read and send: recorded once, and waited for without a worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Producer, Retry, State, TaskHandle
from perdure.queues import InboxFull, inbox
from perdure.queues.inbox import forward_messages
from perdure.worker.durable import messaging
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.runtime.stages import successor
from perdure.worker.settings import Settings

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import (
    bounded,
    history,
    pending,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def warnings_of() -> Iterator[list[str]]:
    """The warnings that workers log."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


AT_ONCE = Retry(max_attempts=3, base=0.0)


def contents(messages: Any) -> list[Any]:
    return [one.content for one in messages]


async def types(handle: TaskHandle[Any]) -> list[str]:
    """Return the event types, without the resumptions."""
    return [event.type for event in await history(handle) if event.type != "resumed"]


async def parked(handle: TaskHandle[Any]) -> None:
    async def waits() -> bool:
        return (await handle.record()).waits is not None

    await wait_until(waits, "the task waits")


async def test_a_resumed_run_reads_the_same_messages(settings: Settings) -> None:
    """An empty read is repeated too: whatever arrived since, the second run takes the path of the first."""
    app = App("mail", settings=settings)
    runs: list[list[list[Any]]] = []

    @app.task(retry=AT_ONCE)
    async def reads(ctx: Context) -> list[list[Any]]:
        runs.append([])
        runs[-1].append(contents(await ctx.inbox(limit=2)))
        runs[-1].append(contents(await ctx.inbox()))
        runs[-1].append(contents(await ctx.inbox()))
        if len(runs) == 1:
            await handle.send("since")
            raise ValueError("once more")
        runs[-1].append(contents(await ctx.inbox()))
        return runs[-1]

    async with app:
        handle = await reads.enqueue()
        sent = [(await handle.send(number, sender="ada")).number for number in range(3)]
        await work_off(app)
        assert await bounded(handle.result()) == [[0, 1], [2], [], ["since"]]
        assert runs == [[[0, 1], [2], []], [[0, 1], [2], [], ["since"]]]
        received = [event for event in await history(handle) if event.type == "received"]
        assert [one.data["number"] for one in received[:-1]] == sent
        assert received[0].data == {"number": sent[0], "sender": "ada", "content": 0}
        assert (await handle.record()).unused == 0


async def test_a_waiting_task_takes_no_slot_and_a_message_wakes_it(settings: Settings) -> None:
    app = App("mail", settings=settings)

    @app.task
    async def waits(ctx: Context) -> list[Any]:
        first = await ctx.inbox(wait=3600, why="the figures")
        second = await ctx.inbox(wait=math.inf, sender="ada")
        return contents(first + second)

    @app.task
    async def other(ctx: Context) -> str:
        return "done"

    async with app, running_worker(app, concurrency=1):
        handle = await waits.enqueue()
        await parked(handle)
        assert await pending(app) == []
        assert await bounded((await other.enqueue()).result()) == "done"
        first = await handle.send(1, sender="bob")
        assert first.state is State.WAITING
        await wait_until(lambda: _events(handle, "waiting", 2), "it waits again")
        await parked(handle)
        await handle.send("not hers", sender="bob")
        await wait_until(lambda: _unused_and_parked(handle), "it waits on")
        third = await handle.send(2, sender="ada")
        assert await bounded(handle.result()) == [1, 2]
        assert contents(await handle.pending_messages()) == ["not hers"]
        record = await handle.record()
        assert (record.attempts, record.crashes, record.error) == (1, 0, None)
        logged = [(event.type, event.data) for event in await history(handle) if event.type in ("waiting", "received")]
        assert logged == [
            ("waiting", {"what": "message", "why": "the figures"}),
            ("received", {"number": first.number, "sender": "bob", "content": 1}),
            ("waiting", {"what": "message", "on": "ada"}),
            ("received", {"number": third.number, "sender": "ada", "content": 2}),
        ]


async def _events(handle: TaskHandle[Any], kind: str, number: int) -> bool:
    return (await types(handle)).count(kind) == number


async def _unused_and_parked(handle: TaskHandle[Any]) -> bool:
    record = await handle.record()
    return record.unused == 1 and record.waits is not None


async def test_a_wait_ends_at_its_first_deadline(settings: Settings) -> None:
    app = App("mail", settings=settings)

    @app.task
    async def waits(ctx: Context, seconds: float) -> list[Any]:
        found = await ctx.inbox(wait=seconds, sender="ada")
        return [contents(found), contents(await ctx.inbox(wait=0))]

    async with app:
        short, long, given_up = await waits.enqueue(0.01), await waits.enqueue(3600), await waits.enqueue(3600)
        async with running_worker(app):
            assert await bounded(short.result()) == [[], []]
            await parked(long)
            record = await redis_command(app, "HGET", long.partition.steps(long.id), "s:#inbox")
            passed = orjson.dumps(orjson.loads(record) | {"until": 1})
            await redis_command(app, "HSET", long.partition.steps(long.id), "s:#inbox", passed)
            await long.send("wakes it, and is not what it waits for", sender="bob")
            assert await bounded(long.result()) == [[], ["wakes it, and is not what it waits for"]]
            await parked(given_up)
        assert await given_up.cancel() is State.CANCELLED
        assert (await given_up.record()).waits is None
        assert await types(short) == ["waiting", "waited"]
        assert await types(long) == ["waiting", "waited", "received"]


async def test_a_burst_ends_while_tasks_wait(settings: Settings) -> None:
    app = App("mail", settings=settings)

    @app.task
    async def waits(ctx: Context) -> list[Any]:
        return contents(await ctx.inbox(wait=3600))

    async with app:
        handle = await waits.enqueue()
        await work_off(app)
        await handle.send("now")
        await work_off(app)
        assert await handle.status() in (State.SUCCEEDED, State.WAITING)
        async with running_worker(app):
            assert await bounded(handle.result()) == ["now"]


async def test_tasks_send_messages_to_each_other(settings: Settings) -> None:
    app = App("mail", settings=settings)

    @app.task
    async def asks(ctx: Context, other: str) -> int:
        total = 0
        for number in range(3):
            await ctx.send(other, number)
            (answer,) = await ctx.inbox(wait=3600)
            assert answer.sender == other
            total += answer.content
        await ctx.send(other, None)
        return total

    @app.task(queue="else")
    async def answers(ctx: Context) -> int:
        count = 0
        while True:
            for message in await ctx.inbox(wait=3600):
                if message.content is None:
                    return count
                await ctx.send(message.sender, message.content * 10)
                count += 1

    async with app:
        answering = await answers.enqueue()
        asking = await asks.enqueue(answering.id)
        async with running_worker(app, concurrency=1):
            assert await bounded(asking.result()) == 30
            assert await bounded(answering.result()) == 3
        sent = [event.data for event in await history(asking) if event.type == "message_sent"]
        read = [event.data for event in await history(answering) if event.type == "received"]
        assert [(one["to"], one["number"]) for one in sent] == [(answering.id, one["number"]) for one in read]


async def test_a_message_is_sent_once_if_the_sender_fails_before_the_record(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("mail", settings=settings)
    put, failed = CheckpointWriter.put, list[str]()

    async def put_later(self: CheckpointWriter, *entries: Any, **options: Any) -> None:
        if any(entry.step == "#send" for entry in entries) and not failed:
            failed.append("once")
            raise RuntimeError("before it was recorded")
        await put(self, *entries, **options)

    monkeypatch.setattr(CheckpointWriter, "put", put_later)

    @app.task(retry=AT_ONCE)
    async def sends(ctx: Context, to: str) -> list[int]:
        return [(await ctx.send(to, "first")).number, (await ctx.send(to, "second")).number]

    @app.task
    async def never(ctx: Context) -> None: ...

    async with app:
        to = await never.options(delay=3600).enqueue()
        handle = await sends.enqueue(to.id)
        await work_off(app)
        found = await to.pending_messages()
        assert await bounded(handle.result()) == [one.number for one in found]
        assert [(one.sender, one.content) for one in found] == [(handle.id, "first"), (handle.id, "second")]
        assert found[0].id.startswith(f"{handle.id}:#send:")
        assert failed


async def test_concurrent_reads_return_different_messages(settings: Settings) -> None:
    app = App("mail", settings=settings)

    @app.task
    async def reads(ctx: Context) -> list[Any]:
        found = await asyncio.gather(ctx.inbox(), ctx.inbox(), ctx.inbox(limit=1))
        return sorted(content for one in found for content in contents(one))

    async with app:
        handle = await reads.enqueue()
        for number in range(40):
            await handle.send(number)
        async with running_worker(app):
            assert await bounded(handle.result()) == [*range(40)]


async def test_a_wait_parks_the_task_when_its_branches_are_done(settings: Settings) -> None:
    """A branch that waits, and a step in another one: the task is parked when that is recorded."""
    app = App("mail", settings=settings)
    started, released, ran = asyncio.Event(), asyncio.Event(), list[str]()

    async def slow() -> str:
        ran.append("slow")
        started.set()
        await released.wait()
        return "slow"

    @app.task
    async def beside(ctx: Context) -> list[Any]:
        step = asyncio.create_task(ctx.step("slow", slow))
        if not ran:
            await started.wait()
        found = await asyncio.create_task(ctx.inbox(wait=3600))
        return [await step, contents(found)]

    async with app, running_worker(app):
        handle = await beside.enqueue()
        await wait_until(lambda: _events(handle, "waiting", 1), "it waits in memory")
        for _ in range(20):
            assert (await handle.record()).waits is None
        released.set()
        await parked(handle)
        await handle.send("now")
        assert await bounded(handle.result()) == ["slow", ["now"]]
        assert ran == ["slow"]


async def test_a_read_returns_at_most_what_fits_into_a_record(settings: Settings) -> None:
    app = App("mail", settings=settings.model_copy(update={"payload_limit": 10_000}))

    @app.task
    async def reads(ctx: Context) -> list[int]:
        return [len(await ctx.inbox()) for _ in range(4)]

    async with app:
        handle = await reads.enqueue()
        for _ in range(5):
            await handle.send("x" * 4000)
        await work_off(app)
        assert await bounded(handle.result()) == [2, 2, 1, 0]
        handle = await reads.options(max_attempts=1).enqueue()
        await handle.send("x" * (10_000 - 256 - len('{"id":"12","sender":"","content":""}')), message_id="12")
        async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
            large = await producer.send_message(handle.id, "x" * 10_000)
            near = await producer.send_message(handle.id, "x" * 9_950)
        await work_off(app)
        assert await bounded(handle.result()) == [1, 0, 0, 0]
        assert [one.number for one in await handle.pending_messages()] == [large.number, near.number]


async def test_a_broken_message_is_named_and_can_be_dropped(settings: Settings, warnings_of: list[str]) -> None:
    app = App("mail", settings=settings)

    @app.task(retry=Retry(max_attempts=1))
    async def reads(ctx: Context) -> list[Any]:
        return contents(await ctx.inbox(limit=1)) + contents(await ctx.inbox())

    async with app:
        handle = await reads.enqueue()
        _, second, _ = [(await handle.send(number)).number for number in (1, 2, 3)]
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), f"m:{second}", "1 ?")
        await work_off(app)
        assert await handle.result() == [1, 3]
        (line,) = [line for line in warnings_of if "could not be read" in line]
        assert f"message {second} in the inbox of task {handle.id} could not be read: could not decode" in line
        assert f"perdure task inbox {handle.id} --drop {second}" in line
        assert [one.number for one in await handle.pending_messages()] == [second]


async def test_a_send_to_a_full_inbox_is_retried_later(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 1)
    app = App("mail", settings=settings)

    @app.task
    async def sends(ctx: Context, to: str) -> None:
        await ctx.send(to, "one")
        try:
            await ctx.send(to, "two")
        except InboxFull as full:
            await ctx.step("send", str, str(full))
            raise

    @app.task
    async def never(ctx: Context) -> None: ...

    async with app, running_worker(app):
        to = await never.options(delay=3600).enqueue()
        handle = await sends.enqueue(to.id)
        await wait_until(lambda: _events(handle, "attempt_failed", 1), "the inbox is full")
        error = (await handle.record()).error
        assert error is not None
        assert error["error"].endswith("InboxFull")


async def test_messages_and_waits_are_encrypted(settings: Settings) -> None:
    app = App("mail", settings=with_keys(settings, FIRST))

    @app.task
    async def reads(ctx: Context) -> list[Any]:
        (first,) = await ctx.inbox(wait=3600, limit=1, why="private")
        return [first.content, (await ctx.inbox())[0].content]

    async with app:
        handle = await reads.enqueue()
        async with running_worker(app):
            await parked(handle)
            await handle.send("private")
            await handle.send("private too")
            stored = await redis_command(app, "HVALS", handle.partition.record(handle.id))
            assert not any(b"private" in value for value in stored)
            assert await bounded(handle.result()) == ["private", "private too"]
        for key in ("record", "steps"):
            values = await redis_command(app, "HVALS", getattr(handle.partition, key)(handle.id))
            assert not any(b"private" in value for value in values)


async def test_unread_messages_move_to_the_successor(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread messages, and those that arrive during and after the continuation."""
    app = App("mail", settings=settings)
    forward = forward_messages

    meanwhile = iter(["before they are routed", "afterwards"])

    async def forward_and_send(*args: Any, **options: Any) -> Any:
        left = await forward(*args, **options)
        await handle.send(next(meanwhile))
        return left

    monkeypatch.setattr(successor, "forward_messages", forward_and_send)

    @app.task(queue="else")
    async def second(ctx: Context) -> list[Any]:
        found: list[Any] = []
        while "late" not in found:
            found += contents(await ctx.inbox(wait=3600))
        return found

    @app.task
    async def first(ctx: Context) -> list[Any]:
        assert contents(await ctx.inbox(limit=1)) == ["read"]
        await ctx.continue_as(second, arguments={})

    async with app:
        handle = await first.enqueue()
        for content in ("read", "unread", "unread too"):
            await handle.send(content, sender="ada")
        async with running_worker(app):
            await wait_until(lambda: _has_successor(handle), "the successor runs")
            assert (await handle.send("late")).task_id == f"{handle.id}.h1"
            moved = ["unread", "unread too", "before they are routed", "afterwards", "late"]
            assert await bounded(handle.result()) == moved
            assert await handle.pending_messages() == []


async def _has_successor(handle: TaskHandle[Any]) -> bool:
    return (await handle.record()).state is State.SUCCEEDED


async def test_the_state_of_a_waiting_agent_says_what_it_waits_for(settings: Settings) -> None:
    """The message is addressed by the goal; the agent wakes in the step that waited, and its state no longer waits."""
    app = App("mail", settings=settings)
    seen: list[Any] = []

    class Writer(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="review", title="Have it reviewed"), PlanStep(key="print", title="Print it")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            if step.key == "print":
                return "printed"
            seen.append(await ctx.step("ask", lambda: len(seen)))
            (review,) = await ctx.inbox(wait=3600, sender="reviewer", why="the review")
            seen.append(state.waiting_for)
            return review.content

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return [state.results["review"], state.results["print"]]

    writer = app.agent(Writer)
    async with app, running_worker(app):
        handle = await writer.enqueue("a novel")
        assert handle.id == writer.task_id("a novel")
        await parked(handle)
        waiting = next(event for event in await history(handle) if event.type == "waiting")
        assert waiting.data == {"what": "message", "on": "reviewer", "why": "the review"}
        await app.producer.send_message(writer.task_id("a novel"), "too long", sender="reviewer")
        assert await bounded(handle.result()) == ["too long", "printed"]
        assert seen == [0, 0, None]
        assert not [name for name in await recorded_steps(app, handle) if "#inbox" in name], "dropped with its step"


async def test_a_message_that_a_cancelled_wait_has_found_is_read_by_the_next_call(settings: Settings) -> None:
    """The wait is cut off in the moment in which its message was found."""
    app = App("mail", settings=settings)

    @app.task
    async def reads(ctx: Context) -> list[Any]:
        async def busy() -> None:
            await ended.wait()

        ended = asyncio.Event()
        step = asyncio.create_task(ctx.step("busy", busy))
        waiting = asyncio.create_task(ctx.inbox(wait=3600))
        found = withdrawn(waiting, ended)
        await found.wait()
        ended.set()
        await step
        return contents(await ctx.inbox())

    def withdrawn(waiting: asyncio.Task[Any], ended: asyncio.Event) -> asyncio.Event:
        found = asyncio.Event()
        look = messaging._NewMessage.look

        async def cut_off(condition: Any) -> Any:
            value = await look(condition)
            if isinstance(value, list):
                waiting.cancel()
                found.set()
            return value

        monkeypatch.setattr(messaging._NewMessage, "look", cut_off)
        return found

    with pytest.MonkeyPatch.context() as monkeypatch:
        async with app, running_worker(app):
            handle = await reads.enqueue()
            await wait_until(lambda: _events(handle, "waiting", 1), "the branch waits")
            await handle.send("now")
            assert await bounded(handle.result()) == ["now"]


@pytest.mark.parametrize("writes", [False, True])
async def test_a_function_that_ends_with_unread_messages_says_so(
    app: App, warnings_of: list[str], writes: bool
) -> None:
    @app.task
    async def deaf(ctx: Context) -> None:
        if writes:
            await ctx.inbox(limit=1)

    handle = await deaf.enqueue()
    for text in ("one", "two", "three"):
        await handle.send(text, sender="ada")
    await work_off(app)
    await bounded(handle.result())
    left = 2 if writes else 3
    assert [event.data for event in await history(handle) if event.type == "left_unread"] == [{"count": left}]
    assert [line for line in warnings_of if "unread" in line] == [
        f"task {handle.id} has ended and left {left} messages unread: perdure task inbox {handle.id}\n"
    ]
