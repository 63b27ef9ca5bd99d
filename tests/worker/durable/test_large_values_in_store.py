"""Values above the limit of large ones, in an artifact store that every worker reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from perdure import App, Context, Producer, Retry, Settings
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import ConfigurationError
from perdure.queues.inspection.views import linked_objects
from perdure.queues.security.encryption import MARK
from perdure.worker.agents.journal.forks import fork
from perdure.worker.errors import ArtifactDamaged, ArtifactMissing

from tests.support.servers.shared_store import objects, shared_url
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, letter, recorded_steps, redis_command, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)
SIZE = 600_000
TEXT = "é" * SIZE


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def shared(settings: Settings, store: Path) -> Settings:
    limits = {"payload_limit": 10_000, "large_limit": 100_000, "artifact_limit": 3_000_000}
    return settings.model_copy(update={**limits, "artifacts": shared_url(store)})


@pytest.fixture(params=["plain", "encrypted"])
async def app(request: pytest.FixtureRequest, shared: Settings) -> AsyncIterator[App]:
    async with App("large", settings=with_keys(shared, FIRST) if request.param == "encrypted" else shared) as app:
        yield app


async def names_in_redis(app: App) -> set[str]:
    return {name async for name in linked_objects(app.producer.gateway, app.producer.namespace)}


def names_in_store(store: Path) -> set[str]:
    return {path.parent.name + path.name for path in objects(store)}


async def test_arguments_and_results_are_objects_that_their_task_links(app: App, store: Path) -> None:
    calls: list[int] = []

    def repeat(text: str) -> str:
        calls.append(len(text))
        return text + "!"

    @app.task(retry=AGAIN)
    async def job(ctx: Context, text: str) -> bytes:
        longer = await ctx.step("repeat", repeat, text)
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return longer.encode() + b"\xff"

    handle = await job.enqueue(TEXT)
    assert await names_in_redis(app) == names_in_store(store)
    await work_off(app)
    assert await bounded(handle.result()) == TEXT.encode() + b"!\xff"
    assert calls == [SIZE]
    assert len(objects(store)) == 3
    assert await names_in_redis(app) == names_in_store(store)
    encrypted = app.producer.gateway.encryptor.active
    for path in objects(store):
        assert (path.read_bytes()[:1] == MARK) == encrypted
        assert ("é".encode() * 10 in path.read_bytes()) != encrypted
    record = await handle.record()
    assert record.shown_arguments() == b"(1,200,011 bytes, stored in the artifact store)"
    assert (record.shown_result() or b"").endswith(b"stored in the artifact store)")
    assert max(map(len, (await recorded_steps(app, handle)).values())) < 1_000

    same = await job.options(task_id=handle.id).enqueue(TEXT)
    assert same.id == handle.id
    await redis_command(app, "DEL", handle.partition.record(handle.id), handle.partition.steps(handle.id))
    assert await names_in_redis(app) == set()


async def test_a_fork_and_a_successor_have_objects_of_their_own(app: App, store: Path) -> None:
    @app.task(retry=AGAIN)
    async def first(ctx: Context, text: str) -> str:
        made = await ctx.step("make", lambda: text + "?")
        if len(made) == SIZE + 1:
            await ctx.continue_as(first, arguments={"text": made})
        return made

    handle = await first.enqueue(TEXT)
    await work_off(app)
    assert await bounded(handle.result()) == TEXT + "??"
    forked = await fork(app.producer, handle.id)
    for key in (handle.partition.record, handle.partition.steps):
        await redis_command(app, "DEL", key(handle.id), key(f"{handle.id}.h1"))
    assert len(await names_in_redis(app)) == 2, "the arguments and the step of the fork"
    assert await names_in_redis(app) <= names_in_store(store)
    await work_off(app)
    assert await bounded(forked.handle.result()) == TEXT + "??"


async def test_what_is_above_the_limit_of_artifacts_is_refused(app: App, store: Path) -> None:
    @app.task
    async def job(ctx: Context) -> str:
        return "x" * 3_000_000

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.UNSERIALISABLE_RESULT
    assert "size of the result is 3,000,002 bytes, over the limit of 3,000,000 bytes" in found.message
    assert objects(store) == []


@pytest.mark.parametrize("place", ["", "folder", "file://{}", "memory://values"])
async def test_a_local_folder_keeps_none(shared: Settings, store: Path, place: str) -> None:
    local = shared.model_copy(update={"artifacts": place.format(store)})
    async with App("large", settings=local) as app:

        @app.task
        async def length(ctx: Context, text: str) -> int:
            return len(text)

        with pytest.raises(ValueError, match=r"over the limit of 100,000 bytes.*raise PERDURE_LARGE_LIMIT"):
            await length.enqueue(TEXT)


async def test_a_process_without_the_store_names_it(app: App, shared: Settings, store: Path) -> None:
    @app.task
    async def repeat(ctx: Context, text: str) -> str:
        return text

    handle = await repeat.enqueue(TEXT)
    once = {"artifacts": "", "unknown_task": Retry(max_attempts=2, base=0.0)}
    async with App("large", settings=app.settings.model_copy(update=once)) as local:
        local.task(name="repeat")(repeat.handler)
        await work_off(local)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.UNREADABLE, 0)
    assert f"could not read the arguments of task {handle.id}: it is in the artifact store" in found.message
    await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    assert await bounded(handle.result()) == TEXT
    encryptor = app.encryptor
    async with Producer(shared.redis_url, namespace=shared.namespace, encryptor=encryptor) as producer:
        known = await producer.find(handle.id)
        assert known is not None
        with pytest.raises(ConfigurationError, match=rf"it is in the artifact store shared://{store}; set PERDURE_ART"):
            await known.result()


async def test_an_object_that_is_gone_or_changed_is_an_error(app: App, store: Path) -> None:
    @app.task
    async def make(ctx: Context) -> str:
        return TEXT

    handle = await make.enqueue()
    await work_off(app)
    (path,) = objects(store)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(ArtifactMissing, match=f"the result of task {handle.id}"):
        await handle.result()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactDamaged, match=f"the result of task {handle.id} is damaged"):
        await handle.result()
    (name,) = [
        name for name in await redis_command(app, "HKEYS", handle.partition.record(handle.id)) if b"result:" in name
    ]
    await redis_command(app, "HSET", handle.partition.record(handle.id), name, b"{}")
    with pytest.raises(Exception, match="its link to the artifact store was changed"):
        await handle.result()
