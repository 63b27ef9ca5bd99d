"""Messages that another program wrote into an inbox: they stay there, answer nothing, and end no task."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from loguru import logger
from perdure import Agent, AgentState, App, Context, PlanStep, Producer, Retry, Settings, TaskHandle
from perdure.queues import InboxFull, event_log, inbox
from perdure.queues.delivery import checkpoint
from perdure.queues.errors import NoKey
from perdure.queues.event_log import read_events, read_last_events
from perdure.queues.security.encryption import Encryptor, TaskCipher, message_field
from perdure.queues.security.keyring import generate_key

from tests.support.workers import bounded, letter, redis_command, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration

KEY, OTHER = generate_key(), generate_key()
GOOD: dict[str, Any] = {"id": "evil", "sender": "ada", "content": "yes"}

DATA = {
    "not encrypted": orjson.dumps(GOOD),
    "not JSON": b"\xff\xfe{",
    "cut off": b'{"id": "evil", "sender": "ada"',
    "empty": b"",
    "a list": b"[1]",
    "no content": b'{"id": "evil", "sender": "ada"}',
    "a number as its sender": orjson.dumps(GOOD | {"sender": 7}),
    "no id": orjson.dumps(GOOD | {"id": ""}),
    "unknown fields": orjson.dumps(GOOD | {"approved": True}),
    "an unknown kind": orjson.dumps(GOOD | {"kind": "order"}),
    "too deep": b'{"id": "evil", "sender": "ada", "content": %b1%b}' % (b"[" * 900, b"]" * 900),
    "a cut cipher": b"\xc1\x01" + b"x" * 60,
    "large": orjson.dumps(GOOD | {"content": "y" * 300_000}),
}
"""Bytes of messages that a worker without keys cannot read, but the first: that one needs required encryption."""


class Listener(Agent[AgentState]):
    """Waits in its first step until a message has entered the conversation."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=f"s{number}", title="work") for number in range(3)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return step.key

    async def finish(self, ctx: Context, state: AgentState) -> list[str]:
        return [message.content.splitlines()[-2] for message in state.messages if message.name == "inbox"]


def make_app(settings: Settings, **changes: Any) -> App:
    app = App("mail", settings=settings.model_copy(update={"payload_limit": 200_000} | changes))

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> list[str]:
        (answer,) = await ctx.inbox(sender="ada", why="may I pay?", wait=3600, limit=1)
        return [answer.content, *(message.content for message in await ctx.inbox())]

    @app.task
    async def collect(ctx: Context) -> int:
        return len(await ctx.inbox(limit=2)) + len(await ctx.inbox())

    app.agent(Listener, name="listener")
    return app


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with make_app(settings) as app:
        yield app


@pytest.fixture
async def sealed(settings: Settings) -> AsyncIterator[App]:
    """An app that requires encryption."""
    encryption = {"encryption_keys": KEY, "encryption_required": True}
    async with make_app(Settings(**settings.model_dump(exclude_unset=True) | encryption)) as app:
        yield app


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


async def parked(handle: TaskHandle[Any]) -> None:
    async def waits() -> bool:
        record = await handle.record()
        return record.waits is not None and record.state == "waiting"

    await wait_until(waits, "the task waits")


async def plant(app: App, handle: TaskHandle[Any], stored: bytes, *, wakes: bool = True) -> int:
    """Store bytes as the next message of an inbox, as a raw client does, and wake the task. Return its number."""
    key = handle.partition.inbox(handle.id)
    sent, last = (int(value or 0) for value in await redis_command(app, "HMGET", key, "sent", "last"))
    seconds, fraction = await redis_command(app, "TIME")
    number = max(last + 1, int(seconds) * 1000 + int(fraction) // 1000)
    listed = (f"n:{sent + 1}", f"{number} evil{number}", f"id:evil{number}", number, "sent", sent + 1, "last", number)
    await redis_command(app, "HSET", key, f"m:{number}", stored, *listed)
    if wakes:
        await wake(app, handle)
    return number


async def wake(app: App, handle: TaskHandle[Any]) -> None:
    """Make the task due."""
    await redis_command(app, "ZADD", handle.partition.due, 1, handle.id)
    await redis_command(app, "XADD", handle.partition.nudge, "*", "why", "due")


async def read_again(app: App, handle: TaskHandle[Any]) -> None:
    """Wait until a worker has run the woken task and parked it again."""

    async def later() -> bool:
        return float(await redis_command(app, "ZSCORE", handle.partition.due, handle.id) or 0) > 1

    await wait_until(later, "the task waits again")


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in [*DATA.items()][1:]])
async def test_a_message_that_cannot_be_read_answers_nothing(app: App, log: list[str], data: bytes) -> None:
    async with running_worker(app):
        handle = await app.tasks["pay"].enqueue()
        await parked(handle)
        number = await plant(app, handle, b"1 " + data)
        await read_again(app, handle)
        (found,) = await handle.pending_messages()
        assert found.number == number
        if len(data) < 200_000:  # another reader may take a larger one
            assert found.problem is not None
            explained = (await handle.explain()).sentence
            assert f"message {number}" in explained
            assert "cannot be read" in explained
        await handle.send("good", sender="ada")
        assert await bounded(handle.result()) == ["good"]
    (line,) = [line for line in log if f"the inbox of task {handle.id}" in line]
    assert f"message {number}" in line
    assert f"task {handle.id}" in line
    assert await redis_command(app, "HEXISTS", handle.partition.inbox(handle.id), f"m:{number}")


async def test_a_message_of_a_sender_without_the_key_is_refused_at_the_call(settings: Settings, sealed: App) -> None:
    async with running_worker(sealed), Producer(settings.redis_url, namespace=settings.namespace) as without_key:
        handle = await sealed.tasks["pay"].enqueue()
        await parked(handle)
        with pytest.raises(NoKey, match=f"message to task {handle.id}: .* is encrypted, and this process has no key"):
            await without_key.send_message(handle.id, "yes", sender="ada")
        assert await handle.pending_messages() == []
        await handle.send("yes", sender="ada")
        assert await bounded(handle.result()) == ["yes"]


async def test_a_queued_task_refuses_a_plain_message_as_well(settings: Settings, sealed: App) -> None:
    handle = await sealed.tasks["pay"].enqueue()
    async with Producer(settings.redis_url, namespace=settings.namespace) as without_key:
        with pytest.raises(NoKey, match="PERDURE_ENCRYPTION_KEY_FILE"):
            await without_key.send_message(handle.id, "yes", sender="ada")
    await sealed.producer.send_message(handle.id, "yes")


async def test_a_task_without_a_key_cannot_send_to_one_with_encrypted_data(settings: Settings, sealed: App) -> None:
    handle = await sealed.tasks["pay"].enqueue()
    async with App("plain", settings=settings) as plain:

        @plain.task(retry=Retry(max_attempts=1))
        async def tell(ctx: Context, to: str) -> str:
            with pytest.raises(NoKey):
                await ctx.send(to, "yes")
            return "refused"

        told = await tell.enqueue(handle.id)
        await work_off(plain)
        assert await bounded(told.result()) == "refused"


@pytest.mark.parametrize("how", ["plain", "other key", "other task"])
async def test_a_forged_message_of_an_encrypted_task_names_its_sender(sealed: App, log: list[str], how: str) -> None:
    async with running_worker(sealed):
        handle = await sealed.tasks["pay"].enqueue()
        await parked(handle)
        data = orjson.dumps(GOOD)
        ciphers: dict[str, TaskCipher] = {
            "plain": Encryptor().of(handle.partition, handle.id),
            "other key": Encryptor([base64.b64decode(OTHER)]).of(handle.partition, handle.id),
            "other task": sealed.producer.gateway.encryptor.of(handle.partition, "another"),
        }
        number = await plant(sealed, handle, b"1 ", wakes=False)
        forged = b"1 " + ciphers[how].encrypt(message_field(number), data)
        await redis_command(sealed, "HSET", handle.partition.inbox(handle.id), f"m:{number}", forged)
        await wake(sealed, handle)
        await read_again(sealed, handle)
        (found,) = await handle.pending_messages()
        assert found.problem is not None
        assert found.problem.startswith("could not decrypt")
        assert found.sender == ("ada" if how == "plain" else "")
        await handle.send("good", sender="ada")
        assert await bounded(handle.result()) == ["good"]
    (line,) = [line for line in log if f"the inbox of task {handle.id}" in line]
    assert f"message {number}{' from ' + repr('ada') if how == 'plain' else ''} in the inbox" in line


async def test_an_agent_reads_the_good_messages_beside_broken_ones(app: App, log: list[str]) -> None:
    handle = await app.tasks["listener"].enqueue("listen")
    bad = [await plant(app, handle, b"1 " + data, wakes=False) for data in [*DATA.values()][1:]]
    await handle.send("whole", sender="ada")
    async with running_worker(app):
        (text,) = await bounded(handle.result())
    assert text == "whole"
    reported = [line for line in log if handle.id in line and "could not be read" in line]
    assert [any(str(number) in line for line in reported) for number in bad] == [True] * len(bad)
    assert len(reported) == len(bad), "each is reported once"


COUNTS = ["sent", "used", "last", "bytes"]
VALUES = [b"\xff", b"", b"-1", b"inf", b"nan", b"999999999999999999999", b"99999999999999", b"x" * 1_000_000]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value[:20]))
@pytest.mark.parametrize("name", COUNTS)
async def test_a_foreign_count_stops_neither_the_task_nor_the_server(app: App, name: str, value: bytes) -> None:
    async with running_worker(app):
        handle = await app.tasks["pay"].enqueue()
        await parked(handle)
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), name, value)
        await handle.send("good", sender="ada")
        assert await bounded(handle.result()) == ["good"]
        assert (await handle.record()).state == "succeeded"


async def test_what_no_sender_wrote_is_ignored_and_reported(app: App, log: list[str]) -> None:
    """No fields of a raw writer are loaded: many, large, without a list, with gaps in the numbers."""
    async with running_worker(app):
        handle = await app.tasks["pay"].enqueue()
        await parked(handle)
        key = handle.partition.inbox(handle.id)
        for number in range(150):
            await redis_command(app, "HSET", key, f"m:{number}", b"x" * 1_048_576)
        for start in range(0, 100_000, 10_000):
            fields = [part for number in range(start, start + 10_000) for part in (f"f{number}", "1")]
            await redis_command(app, "HSET", key, *fields)
        await redis_command(app, "ZADD", handle.partition.due, 1, handle.id)
        await redis_command(app, "XADD", handle.partition.nudge, "*", "why", "due")
        await read_again(app, handle)
        (found,) = await handle.pending_messages()
        assert found.problem is not None
        assert "100,150 fields that no sender wrote" in found.problem
        assert "100,150 fields" in (await handle.explain()).sentence
        await handle.send("good", sender="ada")
        assert await bounded(handle.result()) == ["good"]
    (line,) = [line for line in log if f"the inbox of task {handle.id}" in line]
    assert "100,150 fields" in line


async def test_listed_messages_over_the_budget_are_not_loaded(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_BYTES", 500_000)
    handle = await app.tasks["pay"].enqueue()
    for _ in range(20):
        await plant(app, handle, b"1 " + orjson.dumps(GOOD | {"content": "x" * 90_000}), wakes=False)
    found = await handle.pending_messages()
    assert len(found) == 20
    assert 0 < sum(message.problem is None for message in found) <= 6
    assert all("bytes" in message.problem for message in found if message.problem is not None)


async def test_an_inbox_holds_so_many_bytes_and_takes_more_after_a_read(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "INBOX_BYTES", 300_000)
    handle = await app.tasks["collect"].enqueue()
    for _ in range(2):
        await handle.send("x" * 100_000, sender="ada")
    with pytest.raises(InboxFull, match=r"2 messages with 200,\d+ bytes are unread, and it holds .* 300,000 bytes"):
        await handle.send("x" * 100_000, sender="ada")
    await handle.send("small", sender="ada")
    await work_off(app)
    assert await bounded(handle.result()) == 3


@pytest.mark.parametrize("field", ["recent", "excused", "handed_from", "crash"])
async def test_a_field_of_the_record_that_is_too_large_is_the_problem_of_its_task(
    app: App, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(checkpoint, "_RECORD_BYTES", 100_000)
    async with running_worker(app):
        handle = await app.tasks["pay"].enqueue()
        await parked(handle)
        await redis_command(app, "HSET", handle.partition.record(handle.id), field, b"9" * 1_000_000)
        await handle.send("yes", sender="ada")
        found = await letter(app, handle)
        assert f"{field} has 1,000,000 bytes" in (found.message or "")
        assert await bounded((await app.tasks["collect"].enqueue()).result()) == 0


async def test_a_field_of_the_checkpoint_that_is_too_large_is_the_problem_of_its_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PAGE_BYTES", 100_000)
    async with running_worker(app):
        handle = await app.tasks["pay"].enqueue()
        await parked(handle)
        await redis_command(app, "HSET", handle.partition.steps(handle.id), "d:x", b"9" * 1_000_000)
        await handle.send("yes", sender="ada")
        found = await letter(app, handle)
        assert "its field b'd:x' has 1,000,000 bytes" in (found.message or "")
        assert await bounded((await app.tasks["collect"].enqueue()).result()) == 0


async def test_an_event_that_is_too_large_is_not_read(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "LOG_BYTES", 100_000)
    handle = await app.tasks["collect"].enqueue()
    log = handle.partition.log(handle.id)
    await redis_command(app, "XADD", log, "*", "type", "decided", "n", "7", "data", b"9" * 1_000_000)
    for number in range(20):
        await redis_command(app, "XADD", log, "*", "type", "note", "data", orjson.dumps("x" * 30_000 + str(number)))
    first, *others = await read_events(app.producer.gateway, handle.partition, handle.id)
    assert (first.type, first.number, first.data) == ("decided", 7, None)
    assert first.problem is not None
    assert "it has 1,000,0" in first.problem
    assert [event.problem for event in others] == [None] * 20
    assert [event.id for event in await read_last_events(app.producer.gateway, handle.partition, handle.id, 21)] == [
        event.id for event in reversed([first, *others])
    ]
    await work_off(app)
    assert await bounded(handle.result()) == 0
