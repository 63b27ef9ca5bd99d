"""Backup and restore of a namespace: all that it holds, on every kind of server, and what is refused."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from perdure import Producer
from perdure.queues import Gateway, Namespace, Refused, WorkerInfo
from perdure.queues.keys import GROUP
from perdure.queues.presence import announce, deployment_id, withdraw
from perdure.queues.transport.scripts import pairs
from perdure.worker.backup.backup_file import BackupError, BackupWriter, check_file
from perdure.worker.backup.dump import backup_header, dump, scan
from perdure.worker.backup.load import check_restore, restore


async def save(gateway: Gateway, namespace: Namespace, path: Path, *, live: bool = False) -> int:
    """Write a backup; return the number of its keys."""
    header = await backup_header(gateway, namespace, live=live)
    with path.open("wb") as file, BackupWriter(file, header) as writer:
        async for _ in dump(gateway, namespace, writer):
            pass
    return writer.keys


async def load(gateway: Gateway, namespace: Namespace, path: Path, *, replace: bool = False) -> None:
    header = await check_restore(gateway, namespace, path, replace=replace)
    async for _ in restore(gateway, namespace, path, header, replace=replace):
        pass


async def state(gateway: Gateway, namespace: Namespace) -> dict[str, Any]:
    """Return all keys with their values, the groups of streams and what is pending; TTLs as whether there is one."""
    found: dict[str, Any] = {}
    async for keys in scan(gateway, namespace):
        for key in keys:
            kind = (await gateway.command("TYPE", key)).decode()
            reads: dict[str, tuple[Any, ...]] = {
                "string": ("GET", key),
                "hash": ("HGETALL", key),
                "zset": ("ZRANGE", key, 0, -1, "WITHSCORES"),
                "set": ("SMEMBERS", key),
                "list": ("LRANGE", key, 0, -1),
                "stream": ("XRANGE", key, "-", "+"),
            }
            value = await gateway.command(*reads[kind])
            more: list[Any] = []
            if kind == "hash":
                value = pairs(value)
            if kind == "set":
                value = sorted(value)
            if kind == "stream":
                info = pairs(await gateway.command("XINFO", "STREAM", key))
                more.append(info[b"last-generated-id"])
                for group in map(pairs, await gateway.command("XINFO", "GROUPS", key)):
                    pending = await gateway.command("XPENDING", key, group[b"name"], "-", "+", 100)
                    more.append((group[b"name"], group[b"last-delivered-id"]))
                    more.append([(entry, consumer, count) for entry, consumer, _, count in pending])
            found[key] = (kind, value, more, await gateway.command("PTTL", key) > 0)
    return found


async def empty(gateway: Gateway, namespace: Namespace) -> None:
    async for keys in scan(gateway, namespace):
        for key in keys:
            await gateway.command("DEL", key)


@pytest.fixture
async def filled(gateway: Gateway, namespace: Namespace, producer: Producer) -> AsyncIterator[Namespace]:
    """A namespace with queued, delayed and running tasks, and keys of every type, some of several pages."""
    for number in range(3):
        await producer.enqueue("pack", {"name": "x" * 1000, "number": number}, queue="shop")
    await producer.enqueue("pack", queue="shop", delay=3600)
    place = namespace.partition("shop")
    await gateway.command("XGROUP", "CREATE", place.ready, GROUP, "0")
    await gateway.command("XREADGROUP", "GROUP", GROUP, "one", "COUNT", 2, "STREAMS", place.ready, ">")
    fields = [part for number in range(700) for part in (f"d:{number}", bytes([0, 255, number % 256]))]
    await gateway.command("HSET", place.steps("t"), *fields)
    await gateway.command("PEXPIRE", place.steps("t"), 600_000)
    for number in range(250):
        await gateway.command("XADD", place.log("t"), f"{number + 1}-0", "x", b"\xff\x00")
    await gateway.command("XDEL", place.log("t"), "250-0")  # the last id is that of a deleted entry
    await gateway.command("PEXPIRE", place.log("t"), 600_000)
    join, launched, waiting = place.join_keys("t", "1")
    await gateway.command("HSET", join, "a", 1)
    await gateway.command("SADD", launched, *[f"c{number}" for number in range(2500)])
    await gateway.command("RPUSH", waiting, *[f"c{number}" for number in range(2500)])
    for key in (join, launched, waiting):
        await gateway.command("PEXPIRE", key, 600_000)
    await gateway.command("ZADD", place.retentions, 1.5, b"\xfe", 1e15 + 0.5, "y")
    await gateway.command("PEXPIRE", place.retentions, 600_000)
    await gateway.command("SET", place.fired("nightly"), "17", "PX", 600_000)
    await deployment_id(gateway, namespace)
    yield namespace
    await empty(gateway, namespace)


async def test_everything_is_restored(gateway: Gateway, filled: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "shop.backup"
    before = await state(gateway, filled)
    assert await save(gateway, filled, path) >= 14
    await empty(gateway, filled)
    await load(gateway, filled, path)
    after = await state(gateway, filled)
    place = filled.partition("shop")
    left_out = {place.nudge, place.mark, place.seen, place.checked}
    assert {key: value for key, value in after.items() if key not in left_out} == {
        key: value for key, value in before.items() if key not in left_out
    }


async def test_a_lease_and_an_expiry_keep_their_times(gateway: Gateway, filled: Namespace, tmp_path: Path) -> None:
    place = filled.partition("shop")
    path = tmp_path / "shop.backup"
    (entry, *_), *_ = await gateway.command("XPENDING", place.ready, GROUP, "-", "+", 1)
    await gateway.command("XCLAIM", place.ready, GROUP, "one", 0, entry, "IDLE", 90_000, "RETRYCOUNT", 4, "JUSTID")
    await gateway.command("PEXPIRE", place.fired("nightly"), 1)
    await save(gateway, filled, path)
    await empty(gateway, filled)
    await load(gateway, filled, path)
    (found, consumer, idle, count), *_ = await gateway.command("XPENDING", place.ready, GROUP, "-", "+", 1)
    assert (found, consumer, count) == (entry, b"one", 4)
    assert 90_000 <= idle < 600_000
    assert 0 < await gateway.command("PTTL", place.steps("t")) <= 600_000
    assert not await gateway.command("EXISTS", place.fired("nightly"))


async def test_an_interrupted_restore_is_refused_by_all_and_given_again(
    gateway: Gateway, filled: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "shop.backup"
    await save(gateway, filled, path)
    await empty(gateway, filled)
    header = await check_restore(gateway, filled, path)
    async with aclosing(restore(gateway, filled, path, header)) as steps:
        async for keys in steps:
            if keys > 5:
                break
    async with Producer(namespace=filled.name, gateway=gateway) as later:
        with pytest.raises(Refused, match=r"a restore of it is under way, or was interrupted.*'perdure restore FILE'"):
            await later.enqueue("pack", queue="shop")
    with pytest.raises(Refused, match="a restore of it"):
        await backup_header(gateway, filled, live=False)
    await load(gateway, filled, path)  # the namespace has data, of the restore
    async with Producer(namespace=filled.name, gateway=gateway) as later:
        await later.enqueue("pack", queue="shop")


async def test_a_producer_that_is_connected_is_refused_and_no_task_of_it_is_lost(
    gateway: Gateway, filled: Namespace, producer: Producer, tmp_path: Path
) -> None:
    path = tmp_path / "shop.backup"
    await save(gateway, filled, path)
    other = await producer.enqueue("pack", queue="other")  # after the backup, by a client that stays open
    header = await check_restore(gateway, filled, path, replace=True)
    async with aclosing(restore(gateway, filled, path, header, replace=True)) as steps:
        async for keys in steps:
            if keys > 5:
                break
    for queue in ("shop", "other"):
        with pytest.raises(Refused, match="a restore of it is under way"):
            await producer.enqueue("pack", queue=queue)
    assert not await gateway.command("EXISTS", filled.partition("other").record(other.id))
    # a queue that neither the backup nor the namespace knew
    late = filled.partition("late")
    await gateway.command("ZADD", late.timeline, 1, "x")
    await gateway.command("PEXPIRE", late.timeline, 600_000)
    with pytest.raises(BackupError, match=r"tasks came in .* \(1 in queue 'late'\): stop these producers"):
        await load(gateway, filled, path)
    assert await gateway.command("EXISTS", late.timeline)
    await load(gateway, filled, path, replace=True)
    for queue in ("shop", "other"):
        await producer.enqueue("pack", queue=queue)


async def test_a_task_that_comes_in_before_the_first_deletion_is_kept(
    gateway: Gateway, filled: Namespace, producer: Producer, tmp_path: Path
) -> None:
    path = tmp_path / "shop.backup"
    await save(gateway, filled, path)
    await empty(gateway, filled)
    header = await check_restore(gateway, filled, path)
    handle = await producer.enqueue("pack", queue="shop")
    with pytest.raises(BackupError, match=r"\(1 in queue 'shop'\): stop these producers"):
        async for _ in restore(gateway, filled, path, header):
            pass
    assert await gateway.command("EXISTS", filled.partition("shop").record(handle.id))
    await producer.enqueue("pack", queue="shop")  # nothing was changed, so the namespace is in use again


async def test_tasks_that_come_in_during_a_restore_are_named_and_their_queue_is_registered(
    gateway: Gateway, filled: Namespace, tmp_path: Path
) -> None:
    path, late = tmp_path / "shop.backup", filled.partition("late")
    await save(gateway, filled, path)
    await empty(gateway, filled)
    header = await check_restore(gateway, filled, path)
    with pytest.raises(BackupError, match=r"is restored, but producers .* \(1 in queue 'late'\)"):
        async for keys in restore(gateway, filled, path, header):
            if keys == 1:
                await gateway.command("ZADD", late.timeline, 1, "x")
                await gateway.command("PEXPIRE", late.timeline, 600_000)
    assert await gateway.command("HGET", filled.queues, "late") == b"1"


async def test_a_namespace_with_data_is_replaced_only_if_that_is_wanted(
    gateway: Gateway, filled: Namespace, producer: Producer, tmp_path: Path
) -> None:
    path = tmp_path / "shop.backup"
    await save(gateway, filled, path)
    later = await producer.enqueue("pack", queue="shop")
    with pytest.raises(BackupError, match="has data: --replace deletes it"):
        await load(gateway, filled, path)
    assert await gateway.command("EXISTS", filled.partition("shop").record(later.id))
    await load(gateway, filled, path, replace=True)
    assert not await gateway.command("EXISTS", filled.partition("shop").record(later.id))


async def test_workers_that_run_are_noticed(gateway: Gateway, filled: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "shop.backup"
    info = WorkerInfo("one", "shop", "h", 1, "0.1", ("shop",), concurrency=1, in_flight=0, started=0)
    await announce(gateway, filled, info, ttl=60)
    with pytest.raises(BackupError, match=r"1 workers run in namespace .* \(one\): stop them, or use --live"):
        await save(gateway, filled, path)
    await save(gateway, filled, path, live=True)
    assert check_file(path)["live"]
    with pytest.raises(BackupError, match=r"1 workers run .*: stop all workers"):
        await load(gateway, filled, path, replace=True)
    await withdraw(gateway, filled, "one")
    await load(gateway, filled, path, replace=True)
    assert not await gateway.command("EXISTS", filled.worker("one"))


async def test_a_task_whose_place_was_read_too_early_is_put_back(
    gateway: Gateway, namespace: Namespace, producer: Producer, tmp_path: Path
) -> None:
    """As in a backup of a namespace at work: the message had been read, the due time not yet."""
    path, place = tmp_path / "shop.backup", namespace.partition("shop")
    handle = await producer.enqueue("pack", queue="shop", delay=3600)
    await gateway.command("ZREM", place.due, handle.id)
    await save(gateway, namespace, path)
    await load(gateway, namespace, path, replace=True)
    assert await gateway.command("ZSCORE", place.due, handle.id)


async def test_an_empty_namespace_is_no_backup(gateway: Gateway, namespace: Namespace, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="has no data"):
        await save(gateway, namespace, tmp_path / "shop.backup")


@pytest.mark.parametrize("gateway", ["fake"], indirect=True)
async def test_files_that_are_no_complete_backup_change_nothing(
    gateway: Gateway, filled: Namespace, tmp_path: Path
) -> None:
    path, other = tmp_path / "shop.backup", tmp_path / "other"
    await save(gateway, filled, path)
    data = path.read_bytes()
    lines = gzip.decompress(data).splitlines(keepends=True)
    damaged = {
        "is no complete backup": data[: len(data) // 2],
        "was cut off after": gzip.compress(b"".join(lines[:-1])),
        "its checksum differs": gzip.compress(b"".join([*lines[:3], *lines[4:]])),
        "data after its end": gzip.compress(b"".join([*lines, lines[1]])),
        "is no backup of this version": gzip.compress(b'{"hello": 1}\n'),
        "no complete backup: Not a gzipped file": b"hello",
        "cut off after 0 lines": gzip.compress(b""),
    }
    before = await state(gateway, filled)
    for said, content in damaged.items():
        other.write_bytes(content)
        with pytest.raises(BackupError, match=said):
            await load(gateway, filled, other, replace=True)
    with pytest.raises(BackupError, match=f"is a backup of namespace '{filled.name}': .*--namespace {filled.name}"):
        await load(gateway, Namespace("another"), path)
    other.write_bytes(gzip.compress(b'{"perdure_backup": 99}\n'))
    with pytest.raises(BackupError, match="no backup of this version"):
        check_file(other)
    assert await state(gateway, filled) == before
