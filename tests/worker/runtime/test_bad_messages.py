"""Messages that a worker cannot run: each becomes a dead letter with a reason, and the worker continues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import orjson
import pytest
from loguru import logger
from perdure import App, Context, Retry, Settings, State
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.queues import Producer, TaskHandle
from perdure.queues.envelope import FORMAT_VERSION

from tests.support.workers import (
    BOUND,
    bounded,
    history,
    letter,
    partition_of,
    pending,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.app("bad", unknown_task=Retry(max_attempts=3, base=0.05, factor=2.0, jitter=0.0)),
]


@pytest.fixture
def app(app: App) -> App:
    @app.task
    async def sound(ctx: Context) -> str:
        return "sound"

    return app


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{level} {message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def post(app: App, fields: Mapping[str, str | bytes]) -> bytes:
    """Add an entry to the stream without a producer."""
    flat = [part for pair in fields.items() for part in pair]
    entry: bytes = await redis_command(app, "XADD", partition_of(app).ready, "*", *flat)
    return entry


async def letters(app: App) -> list[DeadLetter]:
    found = list_letters(app.producer.gateway, [partition_of(app)], Filter())
    return [one async for one in found]


def envelope(**changes: Any) -> bytes:
    return orjson.dumps({"v": 1, "id": "by-hand", "task": "sound"} | changes)


GARBAGE: dict[str, dict[str, str | bytes]] = {
    "no field of ours": {"hello": "world"},
    "empty": {"env": ""},
    "no JSON": {"env": "{not json", "args": "{}"},
    "no text": {"env": b"\xff\xfe\x00", "args": b"\x00"},
    "no object": {"env": "[1,2]"},
    "null": {"env": "null"},
    "no task": {"env": b'{"v":1,"id":"by-hand"}'},
    "no id": {"env": b'{"v":1,"task":"sound"}'},
    "an id that is no id": {"env": envelope(id="a b\n")},
    "an id that is a key": {"env": envelope(id="x:steps")},
    "a number for a name": {"env": envelope(task=7)},
    "an empty name": {"env": envelope(task="")},
    "options that make no sense": {"env": envelope(options={"timeout": -1})},
    "a time that no clock can hold": {"env": envelope(options={"result_ttl": 1e18})},
    "nested without end": {"env": '{"v":' + "[" * 5000},
    "a version that is no number": {"env": envelope(v="new")},
    "many fields": {f"field{number}": "x" for number in range(2000)},
}


@pytest.mark.parametrize("fields", GARBAGE.values(), ids=GARBAGE.keys())
async def test_an_unreadable_message_becomes_a_raw_dead_letter(app: App, fields: dict[str, str | bytes]) -> None:
    handle = await app.tasks["sound"].enqueue()
    await post(app, fields)
    after = await app.tasks["sound"].enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "sound"
    assert await bounded(after.result()) == "sound"
    (found,) = await letters(app)
    assert found.reason is Reason.UNREADABLE
    assert found.error.endswith("UnreadableEnvelope")
    assert "not an envelope" in found.message
    kept = {name: value.encode() if isinstance(value, str) else value for name, value in fields.items()}
    assert found.raw.items() <= kept.items()
    assert len(found.raw) == min(len(kept), 500)
    assert await redis_command(app, "XLEN", partition_of(app).ready) == 0


async def test_unreadable_messages_do_not_block_tasks(app: App) -> None:
    handles = []
    for number in range(20):
        await post(app, {"env": f"garbage {number}"})
        handles.append(await app.tasks["sound"].enqueue())
    await work_off(app, concurrency=2)
    for handle in handles:
        assert await bounded(handle.result()) == "sound"
    assert len(await letters(app)) == 20


async def test_an_unreadable_message_with_the_id_of_a_task_leaves_the_task_unchanged(app: App) -> None:
    handle = await app.tasks["sound"].options(delay=3600).enqueue()
    await post(app, {"env": envelope(v=FORMAT_VERSION + 1, id=handle.id), "args": "{}"})
    await work_off(app)
    (found,) = await letters(app)
    assert found.id.startswith("unreadable-")
    assert await handle.status() is State.SCHEDULED


async def test_large_integers_are_returned_unchanged(app: App, producer: Producer) -> None:
    @app.task
    async def large(ctx: Context) -> int:
        return 2**80 + 1

    handle = await producer.enqueue("large", queue=app.name)
    await work_off(app)
    assert await bounded(handle.result()) == 2**80 + 1


async def test_a_parsable_message_of_a_newer_version_is_not_run(app: App) -> None:
    await post(app, {"env": envelope(v=FORMAT_VERSION + 1), "args": "{}"})
    await work_off(app)
    (found,) = await letters(app)
    assert found.reason is Reason.UNREADABLE
    assert f"format version {FORMAT_VERSION + 1}" in found.message
    assert "upgrade the worker, then replay" in found.message


async def test_unknown_envelope_fields_are_ignored(app: App) -> None:
    added = envelope(priority=3, options={"timeout": 5, "tenant": "t"})
    await post(app, {"env": added, "args": "{}", "signature": "s"})
    await work_off(app)
    record = TaskHandle[Any]("by-hand", partition_of(app), app.producer.gateway, app.producer.notifications)
    assert await bounded(record.result()) == "sound"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (b"[]", "Input should be an object"),
        (b"not json", "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"[" * 5000, "Invalid JSON"),
        (b'{"number":"\xff"}', "Invalid JSON"),
    ],
)
async def test_arguments_that_are_no_object_become_a_dead_letter(app: App, args: bytes, says: str) -> None:
    ran: list[int] = []

    @app.task(retry=Retry(max_attempts=9, base=0.0))
    async def square(ctx: Context, number: int) -> None:
        ran.append(number)

    await post(app, {"env": envelope(task="square"), "args": args})
    await work_off(app)
    (found,) = await letters(app)
    assert (found.reason, found.attempts, found.id) == (Reason.INVALID_ARGUMENTS, 0, "by-hand")
    assert says in found.message
    assert found.args == args
    assert ran == []


OTHER_CODE = {
    "an argument less": ({}, "number: Field required"),
    "another type": ({"number": "many"}, "number: Input should be a valid integer"),
    "an argument more": ({"number": 1, "extra": 2}, "extra: Extra inputs are not permitted"),
    "another name": ({"amount": 1}, "number: Field required; amount: Extra inputs are not permitted"),
    "large": ({"number": "many " * 300_000}, "number: Input should be a valid integer"),
}


@pytest.mark.parametrize(("args", "says"), OTHER_CODE.values(), ids=OTHER_CODE.keys())
async def test_arguments_of_other_code_are_returned_like_an_unknown_task(
    app: App, producer: Producer, args: dict[str, Any], says: str
) -> None:
    ran: list[int] = []

    @app.task(retry=Retry(max_attempts=9, base=0.0))
    async def square(ctx: Context, number: int) -> None:
        ran.append(number)

    handle = await producer.enqueue("square", args, queue=app.name)
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts, found.crashes) == (Reason.INVALID_ARGUMENTS, 0, 0)
    assert says in found.message
    assert ran == []
    log = [(event.type, event.data.get("returns"), event.data.get("max_returns")) for event in await history(handle)]
    assert log == [("returned", 1, 2), ("returned", 2, 2), ("buried", None, None)]


async def test_a_waiting_task_whose_argument_was_renamed_waits_for_a_worker_with_its_code(
    settings: Settings,
) -> None:
    changed = settings.model_copy(update={"unknown_task": Retry(max_attempts=1000, base=0.05, factor=1.0)})
    older, newer = App("versions", settings=changed), App("versions", settings=changed)

    @older.task(name="sign")
    async def sign(ctx: Context, contract: str) -> str:
        answer = await ctx.ask("boss", "sign")
        return f"{contract} {answer}"

    @newer.task(name="sign")
    async def sign_renamed(ctx: Context, paper: str) -> str:
        raise AssertionError("arguments of other code")

    async with older, newer:
        handle = await sign.enqueue("lease")
        async with running_worker(older):
            await wait_until(lambda: is_in(handle, State.WAITING), "it waits")
        await handle.answer("question", "yes", by="boss")
        async with running_worker(newer):
            await wait_until(lambda: has_event(handle, "returned"), "the newer worker hands it back")
            explained = await handle.explain()
            assert explained is not None
            assert explained.cause in ("invalid_arguments", "ready", "busy")
            async with running_worker(older):
                assert await handle.result(timeout=BOUND) == "lease yes"
        assert (await handle.record()).attempts == 1


async def is_in(handle: TaskHandle[Any], state: State) -> bool:
    return await handle.status() is state


async def has_event(handle: TaskHandle[Any], kind: str) -> bool:
    return kind in [event.type for event in await history(handle)]


async def test_a_backlog_of_other_code_is_logged_once_for_each_task_name(
    app: App, producer: Producer, log: list[str]
) -> None:
    @app.task
    async def square(ctx: Context, number: int) -> None: ...

    for number in range(20):
        await producer.enqueue("square", {"amount": number}, queue=app.name)
        await producer.enqueue("cube", {"number": number}, queue=app.name)
    await work_off(app)
    assert len(await letters(app)) == 40
    warnings = sorted(line for line in log if "WARNING" in line)
    assert len(warnings) == 2
    assert "task 'square': number: Field required" in warnings[1]
    assert "no handler for task 'cube' on this worker" in warnings[0]
    assert all("go back to the queue for workers with other code, up to 2 times each" in line for line in warnings)


async def test_an_unknown_task_is_returned_with_backoff_and_then_buried(app: App, producer: Producer) -> None:
    handle = await producer.enqueue("not-yet-deployed", {"x": 1}, queue=app.name)
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts, found.crashes) == (Reason.UNKNOWN_TASK, 0, 0)
    assert "no handler for task 'not-yet-deployed' on this worker; registered: sound" in found.message
    log = [(event.type, event.data.get("delay")) for event in await history(handle)]
    assert log == [("returned", 0.05), ("returned", 0.1), ("buried", None)]


async def test_a_newer_worker_runs_a_task_that_an_older_worker_returned(settings: Settings, producer: Producer) -> None:
    policy = Retry(max_attempts=1000, base=0.05, factor=1.0)
    changed = settings.model_copy(update={"unknown_task": policy})
    older, newer = App("versions", settings=changed), App("versions", settings=changed)

    @older.task
    async def old(ctx: Context) -> None: ...

    @newer.task
    async def new(ctx: Context, x: int) -> tuple[int, int, int]:
        return x, ctx.attempt, ctx.crashes

    async with older, newer, running_worker(older):
        handle = await producer.enqueue("new", {"x": 1}, queue="versions")

        async def returned() -> bool:
            return "returned" in [event.type for event in await history(handle)]

        await wait_until(returned, "the older worker hands it back")
        async with running_worker(newer):
            assert await handle.result(timeout=BOUND) == [1, 1, 0]
    record = await handle.record()
    assert (record.attempts, record.crashes) == (1, 0)


async def test_a_result_that_is_not_json_becomes_a_dead_letter(app: App) -> None:
    @app.task(retry=Retry(max_attempts=9, base=0.0))
    async def job(ctx: Context) -> Any:
        return object()

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.UNSERIALISABLE_RESULT, 1)
    assert "task 'job': its result cannot be stored" in found.message


async def test_a_result_of_the_wrong_type_becomes_a_dead_letter(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> int:
        return "one"  # type: ignore[return-value]

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.UNSERIALISABLE_RESULT
    assert "valid integer" in found.message


@pytest.mark.parametrize("where", ["result", "step"])
async def test_a_value_over_both_limits_is_refused_with_both_sizes(settings: Settings, where: str) -> None:
    limits = {"payload_limit": 2000, "large_limit": 0}
    async with App("bad", settings=settings.model_copy(update=limits)) as app:

        @app.task(retry=Retry(max_attempts=9, base=0.0))
        async def job(ctx: Context) -> str:
            if where == "step":
                await ctx.step("make", lambda: "x" * 3000)
            return "x" * 3000

        handle = await job.enqueue()
        await work_off(app)
        found = await letter(app, handle)
    expected = Reason.NOT_RETRYABLE if where == "step" else Reason.UNSERIALISABLE_RESULT
    assert (found.reason, found.attempts) == (expected, 1)
    assert ("step 'make'" if where == "step" else "the result") in found.message
    assert "3,0" in found.message
    assert "over the limit of 2,000 bytes" in found.message


async def test_a_deleted_pending_message_is_acknowledged(app: App) -> None:
    await app.tasks["sound"].options(task_id="deleted").enqueue()
    stream = partition_of(app).ready
    if not await redis_command(app, "XINFO", "GROUPS", stream):
        await redis_command(app, "XGROUP", "CREATE", stream, "workers", "0")
    reply = await redis_command(app, "XREADGROUP", "GROUP", "workers", "lost", "STREAMS", stream, ">")
    entry = reply[0][1][0][0]
    await redis_command(app, "XCLAIM", stream, "workers", "lost", 0, entry, "IDLE", 10**7, "JUSTID")
    await redis_command(app, "XDEL", stream, entry)
    async with running_worker(app):
        assert await bounded((await app.tasks["sound"].enqueue()).result()) == "sound"

        async def nothing_pending() -> bool:
            return not await pending(app)

        await wait_until(nothing_pending, "the deleted message is acknowledged")
    await redis_command(app, "DEL", partition_of(app).record("deleted"))


async def test_a_duplicate_message_leaves_one_outcome(app: App) -> None:
    """Both entries of the task id are settled; the record holds one outcome."""
    for _ in range(2):
        await post(app, {"env": envelope(id="twice"), "args": "{}"})
    await work_off(app, concurrency=2)
    handle = TaskHandle[Any]("twice", partition_of(app), app.producer.gateway, app.producer.notifications)
    assert await bounded(handle.result()) == "sound"
    assert await handle.status() is State.SUCCEEDED
    assert await pending(app) == []
