"""Tasks that another program takes out of the queue by mistake: workers put each of them back, and it succeeds once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings, State, TaskCancelled, TaskFailed, TaskHandle
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.keys import GROUP

from tests.support.workers import bounded, partition_of, redis_command, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app("lost"), pytest.mark.usefixtures("quick_cleaning")]

LAST_ID = "18446744073709551615-18446744073709551615"


@dataclass
class Story:
    """Finished runs by number, and what holds up runs."""

    runs: Counter[int] = field(default_factory=Counter)
    started: set[int] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def app(app: App, story: Story) -> App:
    @app.task
    async def count(ctx: Context, number: int, text: str = "") -> int:
        story.runs[number] += 1
        return number + len(text)

    @app.task
    async def held(ctx: Context, number: int) -> int:
        story.started.add(number)
        await story.gate.wait()
        story.runs[number] += 1
        return number

    @app.task
    async def parked(ctx: Context) -> str:
        return str((await ctx.inbox(wait=3600))[0].content)

    return app


MISTAKES: dict[str, list[tuple[str | int, ...]]] = {
    "XADD MAXLEN 0": [("XADD", "ready", "MAXLEN", 0, "*", "a", "b")],
    "XTRIM": [("XTRIM", "ready", "MAXLEN", 3)],
    "DEL of the stream": [("DEL", "ready")],
    "UNLINK of all": [("UNLINK", "ready", "due", "nudge", "seen")],
    "XGROUP DESTROY": [("XGROUP", "DESTROY", "ready", GROUP)],
    "XGROUP SETID": [("XGROUP", "CREATE", "ready", GROUP, "0"), ("XGROUP", "SETID", "ready", GROUP, "$")],
    "the last id": [("XADD", "ready", LAST_ID, "a", "b")],
    "a late id": [("XADD", "ready", "18446744073709551614-0", "a", "b")],
    "the last id, read": [
        ("XADD", "ready", LAST_ID, "a", "b"),
        ("XGROUP", "CREATE", "ready", GROUP, "0"),
        ("XREADGROUP", "GROUP", GROUP, "script", "COUNT", 1000, "STREAMS", "ready", ">"),
        ("XGROUP", "DELCONSUMER", "ready", GROUP, "script"),
    ],
    "the last id of nudges": [("XADD", "nudge", LAST_ID, "a", "b")],
    "XGROUP DELCONSUMER": [
        ("XGROUP", "CREATE", "ready", GROUP, "0"),
        ("XREADGROUP", "GROUP", GROUP, "script", "COUNT", 150, "STREAMS", "ready", ">"),
        ("XGROUP", "DELCONSUMER", "ready", GROUP, "script"),
    ],
}
"""Commands, with the names of keys of the partition."""


async def make(app: App, mistake: str) -> None:
    partition = partition_of(app)
    keys = ("ready", "due", "nudge", "seen")
    for command in MISTAKES[mistake]:
        await redis_command(app, *(getattr(partition, part) if part in keys else part for part in command))


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_queued_tasks_are_put_back_and_succeed_once(
    app: App, story: Story, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    lost = logging.getLogger("perdure.queues.delivery.lost_tasks")
    monkeypatch.setattr(lost, "handlers", [caplog.handler])  # whatever a worker of another test has set above it
    monkeypatch.setattr(lost, "propagate", False)
    caplog.set_level(logging.WARNING, lost.name)
    count = app.tasks["count"]
    texts = ["", "a" * 100, '\u00e9"\\' * 10, "b" * 2_000_000]
    handles = [await count.enqueue(number=number, text=texts[number % 3]) for number in range(198)]
    handles += [await count.options(key="k", tags=["x"]).enqueue(number=198), await count.enqueue(199, texts[3])]
    await make(app, mistake)
    async with running_worker(app), running_worker(app):
        for number, handle in enumerate(handles):
            text = "" if number == 198 else texts[3] if number == 199 else texts[number % 3]
            assert await bounded(handle.result()) == number + len(text)
        later = await count.enqueue(number=500)  # the queue takes tasks as before
        assert await bounded(later.result()) == 500

        async def reported() -> bool:
            return any(record.name == lost.name for record in caplog.records)

        if mistake != "XGROUP DESTROY":
            await wait_until(reported, "a worker has reported what it repaired")
    assert story.runs == Counter([*range(200), 500])
    assert await redis_command(app, "XLEN", partition_of(app).ready) == 0


@pytest.mark.parametrize("outcome", ["succeeds", "fails once", "fails", "parks"])
@pytest.mark.parametrize("command", ["XDEL", "XTRIM"])
async def test_a_run_whose_message_was_deleted_settles(
    settings: Settings, story: Story, monkeypatch: pytest.MonkeyPatch, command: str, outcome: str
) -> None:
    """Before its next heartbeat, which finds out that the lease is lost with the message: here in 100 s."""
    monkeypatch.setattr(LeaseHeartbeat, "renew_now", lambda _: None)
    monkeypatch.setattr(LeaseHeartbeat, "set_lease", lambda _, lease: None)
    async with App("lost", settings=settings.model_copy(update={"lease": 300.0})) as app:

        @app.task(retry=Retry(max_attempts=1 if outcome == "fails" else 2, base=0.0))
        async def held(ctx: Context, number: int) -> int:
            story.runs[number] += 1
            story.started.add(number)
            await story.gate.wait()
            if outcome in ("fails", "fails once") and story.runs[number] == 1:
                raise ValueError("no")
            return int(str((await ctx.inbox(wait=60))[0].content)) if outcome == "parks" else number

        partition = partition_of(app)
        async with running_worker(app):

            async def touched() -> bool:
                return bool(await redis_command(app, "EXISTS", partition.seen))

            await wait_until(touched, "the worker has restarted the leases")
            handle = await held.enqueue(number=1)
            await wait_until(_started(story, 1), "the run started")
            ready = partition.ready
            entry = (await redis_command(app, "XRANGE", ready, "-", "+"))[0][0]
            await redis_command(app, *(("XDEL", ready, entry) if command == "XDEL" else ("XTRIM", ready, "MAXLEN", 0)))
            story.gate.set()
            if outcome == "fails":
                with pytest.raises(TaskFailed):
                    await bounded(handle.result())
                (letter,) = [one async for one in list_letters(app.producer.gateway, [partition], Filter())]
                assert await replay(app.producer.gateway, letter, Replay())
            elif outcome == "parks":
                await wait_until(_is_waiting(handle), "the task waits")
                await handle.send("1")
            assert await bounded(handle.result()) == 1
    assert story.runs[1] == (1 if outcome == "succeeds" else 2)


@pytest.mark.app(lease=0.4)
async def test_a_run_whose_message_was_deleted_is_cancelled(app: App, story: Story) -> None:
    handle = await app.tasks["held"].enqueue(number=1)
    async with running_worker(app):
        await wait_until(_started(story, 1), "the run started")
        await redis_command(app, "XTRIM", partition_of(app).ready, "MAXLEN", 0)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
    assert story.runs[1] == 0


async def test_a_run_whose_message_was_acknowledged_runs_again(app: App, story: Story) -> None:
    handle = await app.tasks["held"].enqueue(number=1)
    ready = partition_of(app).ready
    async with running_worker(app):
        await wait_until(_started(story, 1), "the run started")
        entry = (await redis_command(app, "XRANGE", ready, "-", "+"))[0][0]
        await redis_command(app, "XACK", ready, GROUP, entry)

        async def put_back() -> bool:
            found = await redis_command(app, "XRANGE", ready, "-", "+")
            return bool(found) and found[0][0] != entry

        await wait_until(put_back, "the task has a new message")
        story.gate.set()
        assert await bounded(handle.result()) == 1


async def test_a_due_time_that_was_deleted_is_set_again(app: App, story: Story) -> None:
    due = partition_of(app).due
    soon = await app.tasks["count"].options(delay=1.0).enqueue(number=1)
    late = await app.tasks["count"].options(delay=3600.0).enqueue(number=2)
    score = await redis_command(app, "ZSCORE", due, late.id)
    await redis_command(app, "DEL", due)
    async with running_worker(app):
        waiting = await app.tasks["parked"].enqueue()
        assert await bounded(soon.result()) == 1
        await wait_until(_is_waiting(waiting), "the task waits")
        await redis_command(app, "DEL", due)

        async def both() -> bool:
            return bool(await redis_command(app, "ZCARD", due) == 2)

        await wait_until(both, "both tasks are in the due set")
        await waiting.send("hello")
        assert await bounded(waiting.result()) == "hello"
        assert float(await redis_command(app, "ZSCORE", due, late.id)) == float(score)
    assert story.runs == Counter([1])
    await late.cancel()


def _started(story: Story, number: int) -> Callable[[], Awaitable[bool]]:
    async def started() -> bool:
        return number in story.started

    return started


def _is_waiting(handle: TaskHandle[Any]) -> Callable[[], Awaitable[bool]]:
    async def waits() -> bool:
        return await handle.status() is State.WAITING

    return waits
