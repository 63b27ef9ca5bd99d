"""Migration of a namespace to a newer format: each piece once, again after an interruption, and never under workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from perdure import Producer
from perdure.queues import Gateway, Namespace, Refused, WorkerInfo
from perdure.queues.keys import KEY_FORMAT
from perdure.queues.migrations import MIGRATIONS, Migration, migrate, plan_migration
from perdure.queues.partitions.resharding import read_schema
from perdure.queues.presence import announce, withdraw

KEYS = 5


def renamed(source: str, target: str) -> Migration:
    """Return a migration that renames some keys one after the other, and may be repeated."""

    async def convert(gateway: Gateway, namespace: Namespace) -> AsyncIterator[int]:
        for number in range(KEYS):
            old, new = (f"{{{namespace.name}}}:junk:{name}:{number}" for name in (source, target))
            if (value := await gateway.command("GET", old)) is not None:
                await gateway.pipeline([("SET", new, value, "PX", 600_000), ("DEL", old)])
                yield 1

    return Migration(KEY_FORMAT + ord(source) - ord("a"), f"{source} is now {target}", convert)


PLAN = [renamed("a", "b"), renamed("b", "c")]
TARGET = KEY_FORMAT + 2


@pytest.fixture
async def old(gateway: Gateway, namespace: Namespace, producer: Producer) -> Namespace:
    """A namespace of the format of today, with keys that a later one names otherwise."""
    await producer.enqueue("t", queue="default")
    for number in range(KEYS):
        await gateway.command("SET", f"{{{namespace.name}}}:junk:a:{number}", number, "PX", 600_000)
    return namespace


async def values(gateway: Gateway, namespace: Namespace, name: str) -> list[bytes | None]:
    found = [await gateway.command("GET", f"{{{namespace.name}}}:junk:{name}:{number}") for number in range(KEYS)]
    return [value for value in found if value is not None]


async def run(gateway: Gateway, namespace: Namespace) -> int:
    return sum([count async for _, count in migrate(gateway, namespace, target=TARGET, migrations=PLAN)])


async def test_all_migrations_run_in_order_and_once(gateway: Gateway, old: Namespace) -> None:
    assert await plan_migration(gateway, old, target=TARGET, migrations=PLAN) == PLAN
    assert await run(gateway, old) == 2 * KEYS
    assert await values(gateway, old, "c") == [b"0", b"1", b"2", b"3", b"4"]
    assert (await read_schema(gateway, old)).shown == f"format {TARGET}"
    assert await run(gateway, old) == 0


@pytest.mark.parametrize("pieces", [1, 3, KEYS, KEYS + 2, 2 * KEYS])
async def test_a_migration_that_was_killed_is_refused_by_all_and_continues(
    gateway: Gateway, old: Namespace, pieces: int
) -> None:
    done = 0
    async with aclosing(migrate(gateway, old, target=TARGET, migrations=PLAN)) as steps:
        async for _, count in steps:
            done += count
            if done == pieces:
                break  # as by SIGKILL: nothing after it runs
    async with Producer(namespace=old.name, gateway=gateway) as later:
        with pytest.raises(Refused, match=r"a migration of it is under way, or was interrupted; .*'perdure migrate'"):
            await later.enqueue("t", queue="default")
    assert done + await run(gateway, old) == 2 * KEYS
    assert len(await values(gateway, old, "c")) == KEYS
    assert (await read_schema(gateway, old)).shown == f"format {TARGET}"


async def test_the_older_release_refuses_migrated_data(gateway: Gateway, old: Namespace) -> None:
    await run(gateway, old)
    async with Producer(namespace=old.name, gateway=gateway) as older:
        with pytest.raises(Refused, match=r"and this version reads up to format 1; upgrade this process: pip install"):
            await older.enqueue("t", queue="default")
    with pytest.raises(Refused, match="upgrade this process"):
        await plan_migration(gateway, old)


async def test_a_newer_release_refuses_older_data_with_the_command(
    gateway: Gateway, old: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.partitions.resharding.KEY_FORMAT", TARGET)
    async with Producer(namespace=old.name, gateway=gateway) as newer:
        with pytest.raises(Refused, match=r"this version needs format 3; stop all workers, then run 'perdure migrate'"):
            await newer.enqueue("t", queue="default")


async def test_workers_that_run_are_noticed(gateway: Gateway, old: Namespace) -> None:
    info = WorkerInfo("one", "shop", "h", 1, "0.1", ("default",), concurrency=1, in_flight=0, started=0)
    await announce(gateway, old, info, ttl=60)
    with pytest.raises(Refused, match=r"1 workers run \(one\); stop all workers"):
        await run(gateway, old)
    assert await values(gateway, old, "a")
    await withdraw(gateway, old, "one")
    assert await run(gateway, old) == 2 * KEYS


async def test_a_format_without_a_way_is_refused(gateway: Gateway, old: Namespace) -> None:
    with pytest.raises(Refused, match="no migration leads from format 1 to 3"):
        await plan_migration(gateway, old, target=TARGET, migrations=PLAN[:1])


async def test_there_is_nothing_to_migrate_today(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    assert await plan_migration(gateway, namespace) == []  # it is empty
    await producer.enqueue("t", queue="default")
    assert await plan_migration(gateway, namespace) == []
    assert [one.source for one in MIGRATIONS] == list(range(1, KEY_FORMAT))
