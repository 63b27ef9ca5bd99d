"""Copies of sealed messages and answers, put back by a writer without the key: none is used twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from perdure import App, Context, Settings, State, TaskHandle

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, redis_command, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def app(settings: Settings) -> App:
    app = App("paid", settings=with_keys(settings, FIRST, required=True))

    @app.task
    async def pay(ctx: Context, read_later: bool = False) -> list[Any]:
        """Take one message of ada for each payment."""
        found: list[Any] = []
        for amount in (7, 700):
            sender = "ada" if amount == 7 or not read_later else "grace"
            found += [[amount, one.content, one.sender] for one in await ctx.inbox(wait=3600, limit=1, sender=sender)]
        return found

    return app


async def stored_messages(app: App, handle: TaskHandle[Any]) -> dict[int, bytes]:
    """Return the stored messages of an inbox by their numbers."""
    fields = await redis_command(app, "HGETALL", handle.partition.inbox(handle.id))
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    return {int(name[2:]): data for name, data in found.items() if name.startswith(b"m:")}


async def plant(app: App, handle: TaskHandle[Any], number: int, data: bytes, digest: str = "ab" * 12) -> None:
    """Put a message into the inbox as the scripts do, and wake the task."""
    at = handle.partition
    sent = int(await redis_command(app, "HINCRBY", at.inbox(handle.id), "sent", 1))
    fields = (f"m:{number}", data, f"n:{sent}", f"{number} {digest}", f"id:{digest}", number, "last", number)
    await redis_command(app, "HSET", at.inbox(handle.id), *fields)
    await redis_command(app, "ZADD", at.due, 1, handle.id)


async def paid_seven(app: App, handle: TaskHandle[Any]) -> tuple[int, bytes]:
    """Let the task use a "yes" of ada; return its number and what a writer without the key has seen of it."""
    await work_off(app)
    sent = await handle.send("yes", sender="ada")
    seen = (await stored_messages(app, handle))[sent.number]
    await work_off(app)
    assert await stored_messages(app, handle) == {}
    assert await handle.status() is State.WAITING
    return sent.number, seen


@pytest.mark.parametrize("place", ["a new number", "its own number", "its own number, last"])
async def test_a_copy_of_a_message_is_not_used_again(app: App, place: str) -> None:
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].enqueue()
        number, seen = await paid_seven(app, handle)
        new = number + 1 if place == "a new number" else number
        await plant(app, handle, new, seen)
        if place == "its own number, last":
            await handle.send("not hers", sender="grace")
        await work_off(app)
        assert await handle.status() is State.WAITING
        await handle.send("also 700", sender="ada")
        await work_off(app)
        assert await bounded(handle.result()) == [[7, "yes", "ada"], [700, "also 700", "ada"]]
        assert new in await stored_messages(app, handle)
        if place == "a new number":
            problems = [one.problem or "" for one in await handle.pending_messages()]
            assert "changed in Redis" in problems[0]


async def test_a_message_that_was_left_is_used_once_later(app: App) -> None:
    """A call that takes another sender's message leaves the one before it, which no copy replaces."""
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].enqueue(read_later=True)
        await work_off(app)
        left = await handle.send("for later", sender="grace")
        number, seen = (await handle.send("yes", sender="ada")).number, b""
        seen = (await stored_messages(app, handle))[number]
        assert number > left.number
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), "m:1", seen)
        await work_off(app)
        assert await bounded(handle.result()) == [[7, "yes", "ada"], [700, "for later", "grace"]]


async def test_concurrent_senders_get_numbers_of_their_own(app: App) -> None:
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].options(delay=3600).enqueue()
        sent = await asyncio.gather(*(handle.send(number, sender="ada") for number in range(50)))
        assert len({one.number for one in sent}) == 50
        assert sorted(one.content for one in await handle.pending_messages()) == list(range(50))
        assert all(one.problem is None for one in await handle.pending_messages())
