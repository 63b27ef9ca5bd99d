"""Large results of steps and tasks: stored in chunks, returned as small ones are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.queues.errors import LargeValueLost
from perdure.queues.security.encryption import MARK
from perdure.worker.agents.journal.forks import fork

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, letter, recorded_steps, redis_command, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)
LIMITS = {"payload_limit": 10_000, "large_limit": 3_000_000}


@dataclass
class Page:
    number: int
    text: str


@pytest.fixture(params=["plain", "encrypted"])
async def app(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[App]:
    settings = settings.model_copy(update=LIMITS)
    if request.param == "encrypted":
        settings = with_keys(settings, FIRST)
    async with App("large", settings=settings) as app:
        yield app


async def test_a_resumed_run_and_the_caller_get_large_results(app: App) -> None:
    calls: list[str] = []

    def page(number: int, size: int) -> Page:
        calls.append(f"page {number}")
        return Page(number, "é" * size)

    async def untyped(size: int) -> Any:
        calls.append("untyped")
        return {"rows": list(range(size))}

    @app.task(retry=AGAIN)
    async def report(ctx: Context) -> list[Page]:
        pages = [await ctx.step("page", page, number, 700_000) for number in range(2)]
        small = await ctx.step("page", page, 2, 3)
        rows = await ctx.step("rows", untyped, 100_000)
        assert rows == {"rows": list(range(100_000))}
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return [pages[0], small]

    handle = await report.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [Page(0, "é" * 700_000), Page(2, "ééé")]
    assert calls == ["page 0", "page 1", "page 2", "untyped"]
    stored = await recorded_steps(app, handle)
    assert {name.split(":")[0] for name in stored} == {"c", "d"}
    assert max(map(len, stored.values())) <= 512 * 1024
    chunks = [value for name, value in stored.items() if name.startswith("c:")]
    chunks.append(await redis_command(app, "HGET", handle.partition.record(handle.id), "result:0"))
    encrypted = app.producer.gateway.encryptor.active
    assert any("é".encode() * 10 in chunk for chunk in chunks) != encrypted
    assert (chunks[-1][:1] == MARK) == encrypted
    assert len(stored["d:page"]) < 400
    record = await handle.record()
    assert record.shown_result() == b"(1,400,053 bytes, stored in 3 chunks)"


async def test_bytes_are_returned_as_they_were(app: App) -> None:
    values = {"text": "ünï".encode(), "binary": bytes(range(256)), "large": bytes(range(256)) * 4000, "empty": b""}

    def make(name: str) -> bytes:
        return values[name]

    @app.task(retry=AGAIN)
    async def read(ctx: Context, name: str) -> bytes:
        found = await ctx.step("make", make, name)
        assert found == values[name]
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return found

    handles = {name: await read.enqueue(name) for name in values}
    await work_off(app)
    for name, handle in handles.items():
        assert await bounded(handle.result()) == values[name]
    large = await recorded_steps(app, handles["large"])
    assert sum(len(value) for name, value in large.items() if name.startswith("c:")) < len(values["large"]) + 100
    stranger = await app.producer.find(handles["large"].id)
    assert stranger is not None
    assert list(await bounded(stranger.result())) == ["base64"]


async def test_what_is_above_the_second_limit_is_refused_with_the_setting(app: App) -> None:
    @app.task
    async def step(ctx: Context) -> None:
        await ctx.step("make", lambda: "x" * 3_000_001)

    @app.task
    async def result(ctx: Context) -> str:
        return "x" * 3_000_001

    handles: list[TaskHandle[Any]] = [await step.enqueue(), await result.enqueue()]
    await work_off(app)
    first, second = [await letter(app, handle) for handle in handles]
    assert (first.reason, second.reason) == (Reason.NOT_RETRYABLE, Reason.UNSERIALISABLE_RESULT)
    assert first.message.startswith("size of the record of step 'make' is 3,0")
    assert "size of the result is 3,000,003 bytes" in second.message
    for found in (first, second):
        assert "over the limit of 3,000,000 bytes" in found.message
        assert "raise PERDURE_LARGE_LIMIT" in found.message
    assert await recorded_steps(app, handles[0]) == {}


async def test_recorded_steps_within_a_step_take_their_chunks_with_them(app: App) -> None:
    def part(number: int) -> str:
        return str(number) * 600_000

    @app.task
    async def outer(ctx: Context) -> None:
        async def whole() -> int:
            return sum([len(await ctx.step("part", part, number)) for number in range(3)])

        await ctx.options(nested="record").step("whole", whole)

    handle = await outer.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert list(await recorded_steps(app, handle)) == ["d:whole"]


async def test_a_fork_has_large_results_of_its_own(app: App) -> None:
    calls: list[int] = []

    def make(size: int) -> str:
        calls.append(size)
        return "x" * size

    @app.task
    async def job(ctx: Context) -> str:
        first = await ctx.step("make", make, 1_500_000)
        return first + await ctx.step("make", make, 20)

    handle = await job.enqueue()
    await work_off(app)
    forked = await fork(app.producer, handle.id)
    await redis_command(app, "DEL", handle.partition.steps(handle.id))
    await work_off(app)
    assert await bounded(forked.handle.result()) == "x" * 1_500_020
    assert calls == [1_500_000, 20]


async def test_a_lost_chunk_is_an_error_that_names_the_step(app: App) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        text = await ctx.step("make", lambda: "x" * 1_000_000)
        if ctx.attempt == 1:
            for name in await redis_command(app, "HKEYS", handle.partition.steps(ctx.task_id)):
                if name.endswith(b":1"):
                    await redis_command(app, "HDEL", handle.partition.steps(ctx.task_id), name)
            raise ConnectionError("cut off")
        return text

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.UNREADABLE
    assert found.message == (
        f"could not read the result of step 'make' of task {handle.id}: chunk 2 of 2 is missing; replay the task with "
        "--fresh, or enqueue it again"
    )


async def test_a_lost_chunk_of_a_result_is_an_error(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        return "x" * 1_000_000

    handle = await job.enqueue()
    await work_off(app)
    await redis_command(app, "HDEL", handle.partition.record(handle.id), "result:0")
    with pytest.raises(LargeValueLost, match=f"could not read the result of task {handle.id}: chunk 1 of 2 is missing"):
        await handle.result()
