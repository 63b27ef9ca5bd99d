"""Key-value store: atomic batches with conditions, once each, fenced by the token of a delivery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace
from perdure.queues.errors import PayloadTooLarge, Refused, StoreConflict, StoreError, StoreFenced, StoreFull
from perdure.queues.keys import KEY_FORMAT
from perdure.queues.partitions.resharding import RESTORE
from perdure.queues.store import entries as module
from perdure.queues.store.entries import MAX_CHANGES, EntryChange, Fence, NamespaceEntries, StoredEntry, digest_changes
from perdure.queues.store.names import StoreNames
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import needs_one_server
from tests.support.key_values import namespace_entries
from tests.support.lossy_proxy import lossy_gateway

pytestmark = pytest.mark.integration

FIRST = Fence("x", b"1700000000000-5", 1)


@pytest.fixture
def notes(gateway: Gateway, namespace: Namespace) -> NamespaceEntries:
    return namespace_entries(gateway, namespace)


def put(key: str, data: bytes = b"1", *, expected: int | None = None, ttl_ms: int = 0) -> EntryChange:
    return EntryChange("put", key, expected, ttl_ms, data=data)


async def data_of(notes: NamespaceEntries, *keys: str) -> list[bytes | None]:
    return [None if entry is None else entry.data for entry in await notes.read(keys)]


async def keys_of(notes: NamespaceEntries, prefix: str = "") -> list[str]:
    return [entry.key async for entry in notes.scan(prefix, values=False)]


async def keys_in(gateway: Gateway, namespace: Namespace, *names: str) -> list[int]:
    keys = namespace.store(("notes",))
    return [await gateway.command("EXISTS", getattr(keys, name)) for name in names]


async def test_an_entry_has_the_version_of_its_batch_and_versions_grow(notes: NamespaceEntries) -> None:
    versions = [await notes.write([put("a"), put("b")]) for _ in range(20)]
    assert versions == sorted(set(versions))
    assert await notes.read(["a", "b", "c"]) == [
        StoredEntry("a", versions[-1], 0, "j", b"1"),
        StoredEntry("b", versions[-1], 0, "j", b"1"),
        None,
    ]
    await notes.write([EntryChange("delete", "a"), EntryChange("delete", "b")])
    assert await notes.write([put("a")]) > versions[-1]


async def test_a_batch_with_a_failed_condition_changes_nothing(notes: NamespaceEntries) -> None:
    version = await notes.write([put("a")])
    for conditions in (
        [put("a", b"2", expected=0)],
        [put("b"), put("a", b"2", expected=version - 1)],
        [EntryChange("delete", "a", version + 1)],
        [put("b"), EntryChange("check", "c", version)],
        [EntryChange("delete", "missing", 5), EntryChange("prefix", "")],
    ):
        with pytest.raises(StoreConflict) as caught:
            await notes.write(conditions)
        assert caught.value.key in ("a", "c", "missing")
        assert str(caught.value.version or "does not exist") in str(caught.value)
    assert await keys_of(notes) == ["a"]
    await notes.write([EntryChange("check", "a", version), put("b", expected=0), EntryChange("delete", "a", version)])
    assert await keys_of(notes) == ["b"]


async def test_of_many_writers_that_expect_one_version_one_wins(notes: NamespaceEntries) -> None:
    version = await notes.write([put("a", b"0")])
    found = await asyncio.gather(
        *(notes.write([put("a", b"%d" % one, expected=version)]) for one in range(1, 9)), return_exceptions=True
    )
    won = [index for index, one in enumerate(found, 1) if isinstance(one, int)]
    assert len(won) == 1
    assert all(isinstance(one, StoreConflict) for one in found if not isinstance(one, int))
    assert await data_of(notes, "a") == [b"%d" % won[0]]


async def test_changes_of_a_batch_are_done_in_order_against_what_was_stored(notes: NamespaceEntries) -> None:
    await notes.write([put("c/1"), put("c/2"), put("d")])
    await notes.write(
        [put("c/3"), EntryChange("prefix", "c/"), put("c/4"), put("e"), EntryChange("delete", "e"), put("d", b"2")]
    )
    assert await keys_of(notes) == ["c/4", "d"]
    await notes.write([EntryChange("prefix", ""), put("z")])
    assert await keys_of(notes) == ["z"]


async def test_an_expired_entry_is_gone_for_reads_lists_and_conditions(gateway: Gateway, namespace: Namespace) -> None:
    notes = namespace_entries(gateway, namespace)
    await notes.write([put("kept"), put("short", ttl_ms=1), put("later", ttl_ms=60_000), put("renewed", ttl_ms=1)])
    await notes.write([put("renewed")])
    while await notes.read(["short"]) != [None]:
        pass
    assert await data_of(notes, "short", "later", "renewed") == [None, b"1", b"1"]
    assert await keys_of(notes) == ["kept", "later", "renewed"]
    with pytest.raises(StoreConflict):
        await notes.write([put("short", expected=1)])
    await notes.write([put("other")])
    names = namespace.store(("notes",)).names
    assert await gateway.command("ZRANGE", names, 0, -1) == [b"kept", b"later", b"other", b"renewed"]
    assert await notes.write([put("short", expected=0)])


async def test_a_namespace_whose_entries_all_expire_goes_with_the_last_one(
    gateway: Gateway, namespace: Namespace
) -> None:
    notes, keys = namespace_entries(gateway, namespace), namespace.store(("notes",))
    await notes.write([put("a", ttl_ms=50_000), put("b", b"x" * 5000, ttl_ms=90_000)])
    for key in (keys.entries, keys.names, keys.expiries):
        assert 50_000 < await gateway.command("PTTL", key) <= 90_000
    (value,) = [key async for key in values_of(gateway, namespace)]
    assert 50_000 < await gateway.command("PTTL", value) <= 90_000
    await notes.write([put("b")])
    assert [await gateway.command("PTTL", key) for key in (keys.entries, keys.names, keys.expiries)] == [-1, -1, -1]
    await notes.write([EntryChange("prefix", "")])
    assert await keys_in(gateway, namespace, "names", "expiries") == [0, 0]
    assert 0 < await gateway.command("PTTL", keys.entries) <= 7 * 86_400_000


async def values_of(gateway: Gateway, namespace: Namespace) -> AsyncIterator[bytes]:
    """Yield the keys of large values of the namespace."""
    prefix = namespace.store(("notes",)).value("")
    cursor: bytes | int = 0
    while True:
        cursor, keys = await gateway.command("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000, node_of=prefix)
        for key in keys:
            yield key
        if int(cursor) == 0:
            return


async def test_a_list_is_sorted_by_bytes_and_continues_after_a_key(notes: NamespaceEntries) -> None:
    names = [f"c/{number:03}" for number in range(450)]
    for start in range(0, 450, 150):
        await notes.write([put(name) for name in reversed(names[start : start + 150])])
    await notes.write([put("c"), put("c0"), put("d/ä"), put("d/z")])
    assert await keys_of(notes, "c/") == names
    assert await keys_of(notes, "d/") == ["d/z", "d/ä"]
    assert [entry.key async for entry in notes.scan("c/", after="c/447")] == names[448:]
    assert [entry.key async for entry in notes.scan("c/", reverse=True, after="c/002")] == ["c/001", "c/000"]
    assert [entry.key async for entry in notes.scan("c/", reverse=True)] == names[::-1]
    assert [entry.key async for entry in notes.scan(limit=2)] == ["c", "c/000"]
    assert [entry.key async for entry in notes.scan("c/", limit=201)] == names[:201]
    assert [entry.data async for entry in notes.scan("d/")] == [b"1", b"1"]
    assert [entry.data async for entry in notes.scan("d/", values=False)] == [None, None]


async def test_pages_of_a_list_end_by_the_bytes_of_their_values(notes: NamespaceEntries, gateway: Gateway) -> None:
    big = NamespaceEntries.__new__(NamespaceEntries)
    big.__dict__.update(notes.__dict__)
    big._payload_limit = 1024 * 1024
    for number in range(6):
        await big.write([put(f"{number}", b"x" * 300_000)])
    assert [len(entry.data or b"") async for entry in big.scan()] == [300_000] * 6


async def test_a_large_value_is_stored_in_chunks_which_go_with_its_entry(
    gateway: Gateway, namespace: Namespace
) -> None:
    notes = namespace_entries(gateway, namespace)
    data = bytes(range(256)) * 5000
    await notes.write([EntryChange("put", "a", form="b", data=data), put("b", b"x" * 2000), put("c")])
    assert await data_of(notes, "a", "b") == [data, b"x" * 2000]
    assert [len(entry.data or b"") async for entry in notes.scan()] == [len(data), 2000, 1]
    assert len([key async for key in values_of(gateway, namespace)]) == 2
    await notes.write([put("a")])
    assert len([key async for key in values_of(gateway, namespace)]) == 1
    await notes.write([EntryChange("prefix", "")])
    assert [key async for key in values_of(gateway, namespace)] == []
    with pytest.raises(PayloadTooLarge, match="entry 'a' of namespace 'notes'"):
        await notes.write([put("a", b"x" * (4 * 1024 * 1024 + 1))])


async def test_an_upload_that_has_expired_is_sent_again(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, stored = namespace_entries(gateway, namespace), module._Upload.store

    async def late(self: module._Upload, gateway: Gateway) -> None:
        monkeypatch.undo()
        await stored(self, gateway)
        await gateway.command("DEL", self.key)

    monkeypatch.setattr(module._Upload, "store", late)
    await notes.write([put("a", b"x" * 5000)])
    assert await data_of(notes, "a") == [b"x" * 5000]


async def test_a_batch_whose_reply_is_lost_is_done_once(gateway: Gateway, namespace: Namespace) -> None:
    needs_one_server(gateway, "one server is shared by two gateways")
    async with lossy_gateway(gateway) as (late, proxy):
        notes = namespace_entries(late, namespace)
        proxy.lose(queue_script("store_write").sha.encode())
        version = await notes.write([put("a", expected=0)])
        assert proxy.lost == 1
    (found,) = await namespace_entries(gateway, namespace).read(["a"])
    assert found is not None
    assert found.version == version


async def test_a_step_that_is_repeated_does_not_conflict_with_itself(notes: NamespaceEntries) -> None:
    async def write(changes: list[EntryChange]) -> int:
        return await notes.write(changes, batch=f"act/{digest_changes(changes)}", act="act")

    version = await write([put("a", b"1", expected=0)])
    assert await write([put("a", b"1", expected=0)]) == version
    later = await write([put("a", b"2", expected=0)])  # the model has answered otherwise
    assert later > version
    assert await data_of(notes, "a") == [b"2"]
    await notes.write([put("a", b"3")])
    assert await write([put("a", b"2", expected=0)]) == later
    assert await data_of(notes, "a") == [b"3"]
    with pytest.raises(StoreConflict):
        await write([put("a", b"4", expected=0)])


@pytest.mark.parametrize(
    "later",
    [Fence("x", b"1700000000000-5", 2), Fence("x", b"1700000000000-6", 1), Fence("x", b"1700000000001-0", 1)],
)
@pytest.mark.parametrize("look", ["read", "scan", "write", "conflict"])
async def test_a_run_is_fenced_once_a_later_one_has_looked(notes: NamespaceEntries, later: Fence, look: str) -> None:
    await notes.write([put("a")], fence=FIRST)
    if look == "read":
        await notes.read(["a"], later)
    elif look == "scan":
        assert [entry.key async for entry in notes.scan(fence=later)] == ["a"]
    elif look == "write":
        await notes.write([put("b")], fence=later)
    else:
        with pytest.raises(StoreConflict):
            await notes.write([put("a", expected=1)], fence=later)
    with pytest.raises(StoreFenced, match="task x: use of namespace 'notes'"):
        await notes.write([put("a", b"2")], fence=FIRST)
    with pytest.raises(StoreFenced):
        await notes.read(["a"], FIRST)
    with pytest.raises(StoreFenced):
        _ = [entry async for entry in notes.scan(fence=FIRST)]
    await notes.write([put("c")], fence=Fence("y", b"1-1", 1))
    await notes.write([put("d")], fence=later)
    await notes.write([put("e")])
    assert await data_of(notes, "a") == [b"1"]


async def test_tokens_and_ids_of_batches_expire_and_are_bounded(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCHES", (3_600_000, 5))
    notes, keys = namespace_entries(gateway, namespace), namespace.store(("notes",))
    for number in range(8):
        await notes.write([put("a")], fence=Fence(f"t{number}", b"1-1", 1))
    await notes.write([put("a")], batch="b", act="a")
    assert await gateway.command("ZCARD", keys.batches) == 5
    assert 0 < await gateway.command("PTTL", keys.batches) <= 3_600_000
    for key in (keys.fences, keys.users, keys.acts):
        assert 3_600_000 < await gateway.command("PTTL", key) <= 7 * 86_400_000
    old = int(await gateway.command("ZSCORE", keys.users, "t0")) - 8 * 86_400_000
    await gateway.command("ZADD", keys.users, old, "t0")
    await notes.write([put("a")], fence=Fence("t9", b"1-1", 1))
    assert await gateway.command("HEXISTS", keys.fences, "t0") == 0
    assert await gateway.command("HLEN", keys.fences) == await gateway.command("ZCARD", keys.users) == 8


async def test_reads_without_a_task_write_nothing(gateway: Gateway, namespace: Namespace) -> None:
    notes = namespace_entries(gateway, namespace)
    assert await notes.read(["a"]) == [None]
    assert await keys_of(notes) == []
    assert await keys_in(gateway, namespace, "entries", "names", "fences", "users", "batches") == [0] * 5


async def test_a_namespace_has_a_limit_of_entries_and_a_batch_of_changes(
    notes: NamespaceEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    await notes.write([put("a"), put("b"), put("c")])
    with pytest.raises(StoreFull, match="has 3 entries"):
        await notes.write([put("d")])
    await notes.write([put("d"), EntryChange("delete", "a")])
    await notes.write([put("d", b"2")])
    assert await keys_of(notes) == ["b", "c", "d"]
    with pytest.raises(StoreError, match="make several batches"):
        await notes.write([put("a")] * (MAX_CHANGES + 1))


async def test_namespaces_are_listed_while_they_have_entries(gateway: Gateway, namespace: Namespace) -> None:
    names = StoreNames(gateway, namespace)

    async def listed(*prefix: str, after: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        return [name async for name in names.list(prefix, after=after)]

    wanted = [("a", "b"), ("a", "c", "d"), ("ab",), ("b",)]
    for name in reversed(wanted):
        await namespace_entries(gateway, namespace, name).write([put("x")])
    assert await listed() == wanted
    assert await listed("a") == wanted[:2]
    assert await listed(after=("a", "b")) == wanted[1:]
    emptied = namespace_entries(gateway, namespace, ("b",))
    await emptied.write([EntryChange("prefix", "")])
    assert await listed() == wanted[:3]
    await emptied.write([put("x")])
    assert await listed() == wanted


async def test_a_process_lists_a_namespace_again_that_a_list_has_removed(
    gateway: Gateway, namespace: Namespace
) -> None:
    notes, lister = namespace_entries(gateway, namespace), StoreNames(gateway, namespace)
    await notes.write([put("x")])
    await notes.write([EntryChange("delete", "x")])
    assert [name async for name in lister.list()] == []
    await notes.write([put("x")])
    assert [name async for name in lister.list()] == [("notes",)]


async def test_a_namespace_that_is_filled_while_a_list_removes_its_name_stays_listed(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, lister, command = namespace_entries(gateway, namespace), StoreNames(gateway, namespace), gateway.command
    await notes.write([put("x")])
    await notes.write([EntryChange("delete", "x")])

    async def filled_before(*given: Any, **options: Any) -> Any:
        if given[0] == "ZREM":
            monkeypatch.undo()
            await notes.write([put("x")])
        return await command(*given, **options)

    monkeypatch.setattr(gateway, "command", filled_before)
    assert [name async for name in lister.list()] == []
    assert [name async for name in lister.list()] == [("notes",)]


async def test_what_another_program_wrote_is_left_out_of_lists_and_ends_nothing(
    gateway: Gateway, namespace: Namespace
) -> None:
    notes, keys = namespace_entries(gateway, namespace), namespace.store(("notes",))
    await notes.write([put("a"), put("b"), put("c"), put("d")])
    for key, value in (("a", b"x"), ("b", b"1 0 q 1"), ("c", b"1 0 J u #{"), ("version", b"x")):
        await gateway.command("HSET", keys.entries, key if key == "version" else f"e:{key}", value)
    await gateway.command("ZADD", keys.names, 0, b"\xff", 0, "gone")
    await gateway.command("HSET", keys.entries, b"e:\xff", b"1 0 j 1")
    await gateway.command("ZADD", namespace.stores, 0, b"\xff", 0, b"a\x00\x00b\x00")
    assert [entry.key async for entry in notes.scan()] == ["d"]
    assert [name async for name in StoreNames(gateway, namespace).list()] == [("notes",)]
    assert await data_of(notes, "a", "d") == [None, b"1"]
    with pytest.raises(StoreError, match="could not read entry 'b' of namespace 'notes': another program"):
        await notes.read(["b"])
    await notes.write([put("b", b"2"), EntryChange("delete", "c")])
    assert await data_of(notes, "b", "c") == [b"2", None]


async def test_a_large_value_whose_chunks_are_gone_is_named(gateway: Gateway, namespace: Namespace) -> None:
    notes = namespace_entries(gateway, namespace)
    await notes.write([put("a", b"x" * 5000)])
    for key in [key async for key in values_of(gateway, namespace)]:
        await gateway.command("DEL", key)
    with pytest.raises(
        StoreError, match="entry 'a' of namespace 'notes': chunk 1 of 1 is missing; store the entry again"
    ):
        await notes.read(["a"])
    await notes.write([put("a", b"x" * 5000)])
    assert await data_of(notes, "a") == [b"x" * 5000]


async def test_a_deployment_gets_a_format_and_is_refused_while_it_is_restored(
    gateway: Gateway, namespace: Namespace
) -> None:
    await namespace_entries(gateway, namespace).write([put("a")])
    assert await gateway.command("HGET", namespace.deployment, "format") == b"%d" % KEY_FORMAT
    await gateway.command("HSET", namespace.deployment, "change", RESTORE)
    notes = namespace_entries(gateway, namespace)
    for call in (notes.write([put("b")]), notes.read(["a"]), anext(notes.scan())):
        with pytest.raises(Refused, match="a restore of it is under way"):
            await call
    await gateway.command("HDEL", namespace.deployment, "change")
    assert await keys_of(notes) == ["a"]
