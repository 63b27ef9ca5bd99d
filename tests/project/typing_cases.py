"""Types of tasks and steps as a type checker sees them. Checked by mypy, never run; an unused ignore is an error."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, assert_type

from perdure import AlreadyDone, App, Context, Retry, State, SyncContext, TaskHandle

app = App("typing")


@app.task
async def plain(ctx: Context, root: str, depth: int = 1) -> list[str]:
    return [root] * depth


@app.task(queue="slow", retry=Retry(max_attempts=2))
async def optioned(ctx: Context, when: datetime) -> datetime:
    return when


@app.task
def blocking(ctx: SyncContext, root: str, depth: int = 1) -> list[str]:
    return [root] * depth


@app.task(timeout=60)
def blocking_optioned(ctx: SyncContext, when: datetime) -> datetime:
    return when


async def fetch(url: str, *, tries: int = 1) -> bytes:
    return url.encode() * tries


def count(text: str) -> int:
    return len(text)


async def tasks() -> None:
    handle = await plain.enqueue("src", depth=2)
    assert_type(handle, TaskHandle[list[str]])
    assert_type(await handle.result(timeout=1), list[str])
    assert_type(await optioned.enqueue(datetime.now(UTC)), TaskHandle[datetime])
    assert_type(await plain.options(delay=1).enqueue("src"), TaskHandle[list[str]])
    assert_type(await plain.enqueue_many([{"root": "src"}]), list[TaskHandle[list[str]]])
    with app.sync() as producer:
        assert_type(plain.enqueue_sync("src", depth=2), TaskHandle[list[str]])
        assert_type(plain.enqueue_sync("src").result_sync(timeout=1), list[str])
        assert_type(optioned.options(delay=1).enqueue_sync(datetime.now(UTC)).status_sync(), State)
        assert_type(plain.enqueue_many_sync([{"root": "src"}]), list[TaskHandle[list[str]]])
        assert_type(producer.enqueue("plain", {"root": "src"}), TaskHandle[Any])
        assert_type(producer.find("id"), TaskHandle[Any] | None)
    assert_type(handle.resolve_step_sync("pay", run_again=True), State)
    assert_type(plain.options(delay=1).enqueue_many_sync([{"root": "src"}]), list[TaskHandle[list[str]]])
    handle.correct_sync({"city": "Oslo"}, why="moved")  # type: ignore[call-arg]
    plain.enqueue_sync(1)  # type: ignore[arg-type]
    plain.options(delay=1).enqueue_sync(depth=1)  # type: ignore[call-arg]
    await plain.enqueue(1)  # type: ignore[arg-type]
    await plain.enqueue()  # type: ignore[call-arg]
    await plain.enqueue("src", wide=1)  # type: ignore[call-arg]
    await plain.options(delay=1).enqueue(depth=1)  # type: ignore[call-arg]
    await optioned.enqueue("yesterday")  # type: ignore[arg-type]


async def steps(ctx: Context) -> None:
    assert_type(await ctx.step("fetch", fetch, "url", tries=2), bytes)
    assert_type(await ctx.step("count", count, "text"), int)
    assert_type(await ctx.options(timeout=1).step("fetch", fetch, "url"), bytes)
    assert_type(await ctx.options(retry=Retry()).step("count", count, "text"), int)
    assert_type(await ctx.options(risky=True, verify=lambda url: AlreadyDone(b"")).step("act", fetch, "url"), bytes)
    assert_type(await ctx.step("later", lambda: 1), int)
    await ctx.options(durability="never").step("fetch", fetch, "url")  # type: ignore[arg-type]
    await ctx.step("fetch", fetch)  # type: ignore[call-overload]
    await ctx.step("fetch", fetch, 1)  # type: ignore[call-overload]
    await ctx.step("fetch", fetch, "url", timeout=1)  # type: ignore[call-arg]
    await ctx.options(timeout=1).step("count", count, "text", depth=1)  # type: ignore[call-arg, arg-type]
    assert_type(await ctx.tool("fetch", fetch, "url", tries=2), bytes)
    assert_type(await ctx.options(reasoning="to know").tool("count", count, "text"), int)
    await ctx.tool("count", count, b"text")  # type: ignore[call-overload]
    await ctx.options(call="c1").tool("count", count, "text", reasoning="to know")  # type: ignore[call-arg, arg-type]
    call: Any = await plain(ctx, "src")
    assert_type(await plain(ctx, "src"), list[str])
    await plain(ctx, call, "deep")  # type: ignore[arg-type]


async def sync_tasks() -> None:
    assert_type(await blocking.enqueue("src", depth=2), TaskHandle[list[str]])
    assert_type(await blocking_optioned.enqueue(datetime.now(UTC)), TaskHandle[datetime])
    assert_type(blocking.enqueue_sync("src").result_sync(), list[str])
    await blocking.enqueue(1)  # type: ignore[arg-type]
    await blocking_optioned.enqueue()  # type: ignore[call-arg]


def sync_steps(ctx: SyncContext) -> None:
    assert_type(ctx.step("fetch", fetch, "url", tries=2), bytes)
    assert_type(ctx.options(timeout=1).step("count", count, "text"), int)
    assert_type(ctx.tool("count", count, "text"), int)
    assert_type([message.content for message in ctx.inbox(wait=60)], list[Any])
    assert_type(ctx.memory.forget("id"), int)
    ctx.decide("left", reasoning="shorter")
    ctx.decide()  # type: ignore[call-arg]
    ctx.decide("left", why="shorter")  # type: ignore[call-arg]
    ctx.options(tries=1)  # type: ignore[arg-type]
    ctx.step("count", count, b"text")  # type: ignore[call-overload]
