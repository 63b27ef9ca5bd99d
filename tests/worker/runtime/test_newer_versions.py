"""Tasks of a newer version wait for newer workers; a checkpoint that no version can read is buried at once."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure import App, Context, Retry, State, TaskCancelled, TaskHandle
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import UnreadableEnvelope
from perdure.queues.delivery import checkpoint, due_set
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.envelope import FORMAT_VERSION, Envelope
from perdure.queues.keys import DATA_FORMAT
from perdure.worker.runtime.stages import task_lookup

from tests.support.workers import (
    bounded,
    history,
    letter,
    partition_of,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
)

pytestmark = pytest.mark.integration

NEXT = DATA_FORMAT + 1


@pytest.fixture
def ran(app: App) -> list[str]:
    """Define a task of one step whose first attempt fails; return the list to which each run of the step adds."""
    ran: list[str] = []

    def one() -> str:
        ran.append("one")
        return "done"

    @app.task(retry=Retry(max_attempts=2, base=60.0, jitter=0.0))
    async def stepped(ctx: Context) -> str:
        found = await ctx.step("one", one)
        if ctx.attempt == 1:
            raise ValueError("once")
        return found

    return ran


async def after_one_step(app: App) -> TaskHandle[Any]:
    """Return a task that has recorded a step and waits for its next attempt, which comes as soon as a worker runs."""
    handle: TaskHandle[Any] = await app.tasks["stepped"].enqueue()
    async with running_worker(app):
        await wait_until(lambda: has_state(handle, State.SCHEDULED), "its first attempt has failed")
    await make_due(app, handle)
    return handle


async def has_state(handle: TaskHandle[Any], state: State) -> bool:
    return await handle.status() is state


async def make_due(app: App, handle: TaskHandle[Any]) -> None:
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)


async def waits_for_a_version(handle: TaskHandle[Any]) -> bool:
    record = await handle.record()
    return record.waits == f"version {NEXT}"


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process read the next data format, too."""
    for module in (checkpoint, due_set, task_lookup):
        monkeypatch.setattr(module, "DATA_FORMAT", NEXT)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("z:future", "1", "its field b'z:future' is of no known kind"),
        ("d:\udcff", "1", "is of no known kind"),
    ],
)
async def test_a_checkpoint_that_no_version_can_read_is_buried_at_once(
    app: App, ran: list[str], field: str, value: str, problem: str
) -> None:
    handle = await after_one_step(app)
    await redis_command(app, "HSET", handle.partition.steps(handle.id), field.encode("utf-8", "surrogateescape"), value)
    async with running_worker(app):
        found = await bounded(letter(app, handle))
        assert (found.reason, found.attempts, found.raw) == (Reason.UNREADABLE, 1, {})
        assert problem in found.message
        assert "replay the dead letter with --fresh" in found.message
        assert b"d:one" in await redis_command(app, "HKEYS", handle.partition.steps(handle.id))
        assert "crashed" not in [event.type for event in await history(handle)]
        assert await replay(app.producer.gateway, found, Replay(fresh=True))
        await wait_until(lambda: has_state(handle, State.SCHEDULED), "it ran again from its first step")
        assert ran == ["one", "one"]


async def test_an_unknown_kind_is_found_in_a_large_checkpoint(app: App, ran: list[str]) -> None:
    """A handler whose steps are not recorded reads a large checkpoint page by page to its end."""

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def reads_all(ctx: Context) -> None:
        await ctx.step("one", int, 1)
        if ctx.attempt == 1:
            raise ValueError("once")
        for name in "abcdefghijkl":
            await ctx.step(name, int, 1)

    handle: TaskHandle[None] = await reads_all.enqueue()
    many = [part for number in range(3 * PAGE) for part in (f"d:old{number}", "{}\n1")]
    await redis_command(app, "HSET", handle.partition.steps(handle.id), *many)
    await redis_command(app, "HSET", handle.partition.steps(handle.id), "z:future", "1")
    async with running_worker(app):
        found = await bounded(letter(app, handle))
    assert found.reason is Reason.UNREADABLE
    assert "its field b'z:future' is of no known kind" in found.message


async def test_a_damaged_counter_is_buried_at_once(app: App, ran: list[str]) -> None:
    handle = await after_one_step(app)
    await redis_command(app, "HSET", handle.partition.record(handle.id), "excused", "many")
    async with running_worker(app):
        found = await bounded(letter(app, handle))
    assert found.reason is Reason.UNREADABLE
    assert "excused must be a number, got 'many'" in found.message


async def test_a_checkpoint_of_a_newer_version_waits_for_a_newer_worker(
    app: App, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await after_one_step(app)
    await redis_command(app, "HSET", handle.partition.record(handle.id), "format", NEXT)
    await redis_command(app, "HSET", handle.partition.steps(handle.id), "z:future", "1")
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
    record = await handle.record()
    assert (record.state, record.attempts, record.crashes) == (State.WAITING, 1, 0)
    assert record.due_at is not None
    since = int(await redis_command(app, "HGET", handle.partition.record(handle.id), "newer_since"))
    assert record.due_at == since + round(app.settings.version_wait * 1000)
    assert 0 < await redis_command(app, "PTTL", handle.partition.versions) <= app.settings.version_wait * 1000
    await redis_command(app, "HDEL", handle.partition.steps(handle.id), "z:future")  # the newer version can read it
    upgrade(monkeypatch)
    async with running_worker(app):
        assert await bounded(handle.result()) == "done"
    assert ran == ["one"], "it has resumed at its recorded step"
    assert await redis_command(app, "EXISTS", handle.partition.versions) == 0


async def test_an_older_worker_that_gets_it_again_does_not_extend_the_wait(app: App, ran: list[str]) -> None:
    handle = await after_one_step(app)
    record = handle.partition.record(handle.id)
    await redis_command(app, "HSET", record, "format", NEXT)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
        first = await redis_command(app, "HGET", record, "newer_since")
        last = (await handle.record()).due_at
        settled = await redis_command(app, "HGET", record, "settled")
        await make_due(app, handle)

        async def parked_again() -> bool:
            return (await redis_command(app, "HGET", record, "settled")) != settled and await waits_for_a_version(
                handle
            )

        await wait_until(parked_again, "the older worker has parked it again")
        assert await redis_command(app, "HGET", record, "newer_since") == first
        assert (await handle.record()).due_at == last


async def test_no_newer_worker_in_time_makes_it_a_dead_letter_with_its_checkpoint(
    app: App, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await after_one_step(app)
    record = handle.partition.record(handle.id)
    await redis_command(app, "HSET", record, "format", NEXT)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
        await redis_command(app, "HINCRBY", record, "newer_since", -round(app.settings.version_wait * 1000))
        await make_due(app, handle)
        found = await bounded(letter(app, handle))
    assert (found.reason, found.attempts) == (Reason.NEWER_VERSION, 1)
    assert f"needs data format {NEXT}, this worker reads up to {DATA_FORMAT}" in found.message
    assert list(await recorded_steps(app, handle)) == ["d:one"], "it is as it was: no handoff was added"
    upgrade(monkeypatch)
    assert await replay(app.producer.gateway, found, Replay())
    assert await redis_command(app, "HGET", record, "newer_since") is None
    async with running_worker(app):
        await wait_until(lambda: has_state(handle, State.SCHEDULED), "its attempts start again")
    assert ran == ["one"]


async def test_a_message_that_requires_a_newer_version_waits_for_it(
    app: App, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle: TaskHandle[Any] = TaskHandle(
        "acme~new", partition_of(app), app.producer.gateway, app.producer.notifications
    )
    envelope = Envelope(id=handle.id, task="stepped", requires=NEXT).encode()
    entry = await redis_command(app, "XADD", handle.partition.ready, "*", "env", envelope, "args", "{}")
    kept = ("state", "queued", "entry", entry, "env", envelope, "args", "{}")
    await redis_command(app, "HSET", handle.partition.record(handle.id), *kept)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
    assert ran == []
    stored = Envelope.decode(await redis_command(app, "HGET", handle.partition.record(handle.id), "env"))
    assert (stored.requires, stored.tenant) == (NEXT, "acme")
    upgrade(monkeypatch)
    async with running_worker(app):
        await wait_until(lambda: bool_of(ran), "the newer worker runs it")


async def of_newer_envelope(app: App) -> tuple[TaskHandle[Any], bytes]:
    """Return a queued task whose envelope only the next version can read, and that envelope."""
    handle: TaskHandle[Any] = await app.tasks["stepped"].enqueue()
    future = {"v": FORMAT_VERSION + 1, "id": handle.id, "task": {"name": "stepped", "in": "another form"}}
    envelope = orjson.dumps(future)
    await redis_command(app, "XTRIM", handle.partition.ready, "MAXLEN", 0)
    entry = await redis_command(app, "XADD", handle.partition.ready, "*", "env", envelope, "args", '{"n":1}')
    record = handle.partition.record(handle.id)
    await redis_command(app, "HSET", record, "entry", entry, "env", envelope, "args", '{"n":1}')
    await redis_command(app, "HDEL", record, "task", "app")
    return handle, envelope


async def test_an_envelope_of_a_newer_version_waits_for_it(
    app: App, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, envelope = await of_newer_envelope(app)
    record = handle.partition.record(handle.id)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
    assert await redis_command(app, "HMGET", record, "env", "args") == [envelope, b'{"n":1}']
    assert (await handle.record()).crashes == 0

    def decode(data: bytes) -> Envelope:
        assert data == envelope
        return Envelope(id=handle.id, task="stepped")

    upgrade(monkeypatch)
    await redis_command(app, "HSET", record, "args", "{}")
    monkeypatch.setattr(Envelope, "decode", decode)
    async with running_worker(app):
        await wait_until(lambda: bool_of(ran), "the newer worker runs it")


async def test_an_envelope_of_a_newer_version_is_kept_in_its_dead_letter(app: App, ran: list[str]) -> None:
    handle, envelope = await of_newer_envelope(app)
    record = handle.partition.record(handle.id)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
        await redis_command(app, "HINCRBY", record, "newer_since", -round(app.settings.version_wait * 1000))
        await make_due(app, handle)
        found = await bounded(letter(app, handle))
        assert (found.reason, found.task, found.envelope, found.args) == (Reason.NEWER_VERSION, "?", None, b'{"n":1}')
        with pytest.raises(UnreadableEnvelope, match=f"could not edit the arguments of task {handle.id}"):
            await replay(app.producer.gateway, found, Replay(args=b"{}"))
        assert await replay(app.producer.gateway, found, Replay())
        await wait_until(lambda: waits_for_a_version(handle), "it is parked again")
    assert await redis_command(app, "HGET", record, "env") == envelope
    assert ran == []


async def bool_of(found: list[str]) -> bool:
    return bool(found)


async def test_a_task_that_waits_for_a_version_can_be_cancelled(app: App, ran: list[str]) -> None:
    handle = await after_one_step(app)
    await redis_command(app, "HSET", handle.partition.record(handle.id), "format", NEXT)
    async with running_worker(app):
        await wait_until(lambda: waits_for_a_version(handle), "it is parked")
        assert await handle.cancel() is State.CANCELLED
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
