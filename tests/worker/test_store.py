"""The key-value store as apps and tasks use it: values, fences of runs, changes within steps, plain functions."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from perdure import (
    App,
    Context,
    DecryptionError,
    Retry,
    Settings,
    State,
    StoreConflict,
    StoreEntry,
    StoreError,
    StoreFenced,
    SyncContext,
    Worker,
    current_step,
)
from perdure.worker.durable.steps.current import CURRENT_RUN
from perdure.worker.store import name_of
from perdure.worker.sync_producer import close_sync_producers
from pydantic import BaseModel, SecretStr

from tests.support.workers import bounded

pytestmark = pytest.mark.integration


class Note(BaseModel):
    text: str
    tags: list[str] = []


@pytest.fixture
def app(settings: Settings) -> App:
    return App("stored", settings=settings)


async def run_all(app: App) -> None:
    async with Worker(app) as worker:
        await bounded(worker.run(burst=True))


async def test_values_are_json_or_bytes_with_a_version_and_times(app: App) -> None:
    async with app:
        notes = app.store("notes", "ada")
        before = datetime.now(UTC) - timedelta(seconds=5)
        put = await notes.put("a", Note(text="x"), ttl=timedelta(hours=1))
        assert put.value == {"text": "x", "tags": []}
        assert put.expires_at is not None
        assert put.expires_at - put.updated_at == timedelta(hours=1)
        assert before < put.updated_at < before + timedelta(seconds=60)
        assert await notes.entry("a") == put
        assert await notes.get("a", type=Note) == Note(text="x")
        await notes.put("b", b"\xff\x00")
        await notes.put("c", bytearray(b"c"))
        assert await notes.get_many(["c", "missing", "b"]) == {"c": b"c", "b": b"\xff\x00"}
        assert (await notes.get("missing"), await notes.get("missing", 5), await notes.entry("missing")) == (
            None,
            5,
            None,
        )
        assert [entry.key async for entry in notes.list(reverse=True, limit=2)] == ["c", "b"]
        assert [entry.value async for entry in notes.list("a", type=Note)] == [Note(text="x")]
        with pytest.raises(StoreError, match="entry 'a' of namespace 'notes/ada' does not fit"):
            await notes.get("a", type=list[int])
        await notes.delete("a", expected=put.version)
        await notes.clear()
        assert [entry async for entry in notes.list()] == []


async def test_a_batch_is_sent_at_the_end_of_its_block_unless_that_raises(app: App) -> None:
    async with app:
        notes = app.store(("notes", "ada"))
        async with notes.batch() as batch:
            batch.put("a", 1)
            batch.put("b", 2)
            assert await notes.get("a") is None
        entry = await notes.entry("a")
        assert entry is not None
        assert entry.version == batch.version
        with pytest.raises(RuntimeError):
            async with notes.batch() as batch:
                batch.delete_prefix("")
                raise RuntimeError
        with pytest.raises(StoreConflict) as caught:
            async with notes.batch() as batch:
                batch.require("b", 7)
                batch.delete("a")
        assert (caught.value.key, caught.value.expected, caught.value.version) == ("b", 7, entry.version)
        async with notes.batch() as batch:
            batch.require("b", entry.version)
            batch.delete("a", expected=entry.version)
        assert await notes.get_many(["a", "b"]) == {"b": 2}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda app: app.store(), "namespace of the store must be 1 to 16 texts"),
        (lambda app: app.store(""), "got ''"),
        (lambda app: app.store("a\nb"), "without control"),
        (lambda app: app.store("a", 5), "got \\('a', 5\\)"),
        (lambda app: app.store("a").put("", 1), "key of the store must be text of 1 to 1,024 bytes"),
        (lambda app: app.store("a").put("x" * 1025, 1), "key of the store"),
        (lambda app: app.store("a").put("k", 1, ttl=0), "ttl must be 0.001 seconds to 100 years, got 0"),
        (lambda app: app.store("a").put("k", 1, expected=-1), "expected must be the version of an entry, 0 or None"),
        (lambda app: app.store("a").delete("k", expected=True), "expected must be"),
        (lambda app: app.store("a").put("k", object()), "could not store entry 'k' of namespace 'a'"),
        (lambda app: app.store("a").get("\ud800"), "key of the store"),
    ],
)
async def test_a_wrong_argument_is_refused_with_its_rule(app: App, call: Any, text: str) -> None:
    async with app:
        with pytest.raises((ValueError, StoreError), match=text):
            await call(app)
        assert [name async for name in app.store.namespaces()] == []


def test_a_namespace_is_given_as_parts_or_as_a_tuple() -> None:
    assert name_of(["a", "b"]) == name_of([("a", "b")]) == ("a", "b")


async def test_a_step_that_is_cut_off_after_its_change_does_not_conflict_with_itself(app: App) -> None:
    versions: list[int] = []

    @app.task
    async def raise_count(ctx: Context) -> int:
        async def add(fail: bool) -> int:
            if current_step().attempt > 1:
                fail = False
            entry = await ctx.store("counts").put("n", len(versions), expected=0)
            versions.append(entry.version)
            if fail:
                raise RuntimeError
            return entry.version

        return await ctx.options(retry=Retry(max_attempts=2, base=0.001)).step("add", add, True)

    async with app:
        handle = await raise_count.enqueue()
        await run_all(app)
        assert await bounded(handle.result()) == versions[1] > versions[0]
        assert await app.store("counts").get("n") == 1


async def test_a_run_that_another_one_has_followed_is_refused_and_ends(app: App) -> None:
    """The store refuses it by itself: its worker has not noticed yet that the lease is lost."""
    seen: list[str] = []
    ended = asyncio.Event()

    @app.task
    async def writes(ctx: Context) -> str:
        notes = ctx.store("notes")
        run = CURRENT_RUN.get()
        assert run is not None
        await notes.put("a", "first")
        delivery = run.delivery
        run.delivery = replace(delivery, count=delivery.count + 1)
        await app.store("notes").put("a", "later")  # as the run that follows
        run.delivery = delivery
        try:
            await notes.put("a", "rolled back")
        except StoreFenced as error:
            seen.append(str(error))
        try:
            await asyncio.Event().wait()  # until the run is cancelled
        finally:
            seen.append(str(run.stop_reason))
            ended.set()
        return "done"

    async with app:
        handle = await writes.options(task_id="w").enqueue()
        async with Worker(app) as worker:
            running = asyncio.create_task(worker.run())
            await bounded(ended.wait())
            worker.stop()
            await bounded(running)
        assert "task w: use of namespace 'notes' of the key-value store refused" in seen[0]
        assert seen[1] == "StopReason.LOST"
        assert await app.store("notes").get("a") == "later"
        assert (await handle.record()).state is not State.SUCCEEDED


async def test_plain_functions_and_plain_tasks_use_the_store_without_await(app: App) -> None:
    @app.task
    def visit(ctx: SyncContext, user: str) -> list[Any]:
        visits = ctx.store("visits", user)
        with visits.batch() as batch:
            batch.put("n", 1, expected=0)
            batch.put("m", 2)
        put: StoreEntry = ctx.step("put", visits.put, "k", "v")
        ctx.step("outer", app.store("visits", user).put_sync, "o", 1)
        return [visits.get("n"), visits.name, [entry.key for entry in visits.list()], type(put).__name__]

    async with app:
        handle = await visit.enqueue("ada")
        await run_all(app)
        assert await bounded(handle.result()) == [1, ["visits", "ada"], ["k", "m", "n", "o"], "StoreEntry"]

    def outside() -> list[Any]:
        store = app.store("visits", "ada")
        with store.batch() as batch:
            batch.delete("o")
        entry = store.entry_sync("k")
        assert entry is not None
        assert store.put_sync("k", 3, expected=entry.version).version > entry.version
        found = [store.get_sync("k"), store.get_many_sync(["m"]), [one.key for one in store.list_sync(values=False)]]
        store.delete_sync("k")
        store.clear_sync()
        return [*found, store.list_sync()]

    close_sync_producers()  # of the step, which stays open until the end of the process
    with app.sync():
        assert await asyncio.to_thread(outside) == [3, {"m": 2}, ["k", "m", "n"], []]
    assert threading.current_thread() is threading.main_thread()


async def test_values_are_encrypted_and_bound_to_their_namespace_and_key(settings: Settings) -> None:
    keys = SecretStr(base64.b64encode(bytes(32)).decode())
    app = App("stored", settings=settings.model_copy(update={"encryption_keys": keys, "payload_limit": 1024}))
    async with app:
        gateway = app.producer.gateway
        notes, others = app.store("notes"), app.store("others")
        for key, value in (("a", "secret text"), ("b", "x"), ("large", "secret text" * 500), ("bytes", b"secret text")):
            await notes.put(key, value)
        stored = await gateway.command("HGETALL", app.producer.namespace.store(("notes",)).entries)
        assert not any(b"secret" in value for value in stored)
        assert await notes.get_many(["a", "large", "bytes"]) == {
            "a": "secret text",
            "large": "secret text" * 500,
            "bytes": b"secret text",
        }
        fields = dict(zip(stored[::2], stored[1::2], strict=True))
        await others.put("a", 1)
        await gateway.command("HSET", app.producer.namespace.store(("others",)).entries, "e:a", fields[b"e:a"])
        await gateway.command("HSET", app.producer.namespace.store(("notes",)).entries, "e:b", fields[b"e:a"])
        for store, key in ((others, "a"), (notes, "b")):
            with pytest.raises(DecryptionError):
                await store.get(key)
