"""Migration of a namespace to the key format of this version.

There is one format, so there is no migration yet. A release that changes key names or their meaning raises
`KEY_FORMAT` and adds a `Migration` from the format before it. A migration is idempotent and works in small pieces, so
that one that was killed is repeated: `perdure migrate` marks the namespace first, which all processes then refuse, and
stores each format that it has reached.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from .errors import Refused
from .junk import split
from .keys import KEY_FORMAT, Namespace, Partition, is_name
from .partitions.resharding import MIGRATION, RESTORE, read_schema
from .partitions.route import Route, UnreadableRoute
from .presence import present_workers
from .transport.gateway import Gateway
from .transport.scripts import pairs
from .wording import listed

Convert: TypeAlias = Callable[[Gateway, Namespace], AsyncIterator[int]]
"""Converts the data piece by piece, and yields how many keys each piece has converted."""


@dataclass(frozen=True, slots=True)
class Migration:
    """Step from one format to the next one.

    Attributes:
        source: Format that it reads; it leaves the format after it.
        text: What it changes.
        convert: Idempotent conversion.
    """

    source: int
    text: str
    convert: Convert


MIGRATIONS: Final[Sequence[Migration]] = ()
"""All migrations, the oldest first."""


async def plan_migration(
    gateway: Gateway,
    namespace: Namespace,
    *,
    target: int = KEY_FORMAT,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> list[Migration]:
    """Return the migrations that the namespace needs; none if it is up to date or empty.

    Raises:
        Refused: The data is newer, is being restored, or has a format from which no migration leads.
    """
    stored = await read_schema(gateway, namespace)
    interrupted = stored.change == MIGRATION
    if stored.change == RESTORE or (stored.format or 0) > target or (stored.change and not interrupted):
        stored.check(namespace)
    if stored.format is None or stored.format == target:
        return []
    found = [migration for migration in migrations if stored.format <= migration.source < target]
    if [migration.source for migration in found] != list(range(stored.format, target)):
        raise Refused(
            f"could not migrate namespace {namespace.name!r}: no migration leads from format {stored.format} to "
            f"{target}; migrate it with a release between them first"
        )
    return found


async def migrate(
    gateway: Gateway,
    namespace: Namespace,
    *,
    target: int = KEY_FORMAT,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> AsyncGenerator[tuple[Migration, int]]:
    """Migrate a namespace, and yield each migration with the number of keys that a piece of it has converted.

    Raises:
        Refused: Workers run, or see `plan_migration`.
    """
    needed = await plan_migration(gateway, namespace, target=target, migrations=migrations)
    stored = await read_schema(gateway, namespace)
    if not needed:
        if stored.change == MIGRATION and stored.format is not None:  # killed just before its end
            await end_change(gateway, namespace, stored.format, await known_partitions(gateway, namespace))
        return
    live = sorted(await present_workers(gateway, namespace))
    if live:
        raise Refused(
            f"could not migrate namespace {namespace.name!r}: {len(live)} workers run ({listed(live, 3)}); stop all "
            "workers and producers first"
        )
    await begin_change(gateway, namespace, MIGRATION, await known_partitions(gateway, namespace))
    for migration in needed:
        async for count in migration.convert(gateway, namespace):
            yield migration, count
        await gateway.command("HSET", namespace.deployment, "format", migration.source + 1)
    await end_change(gateway, namespace, target, await known_partitions(gateway, namespace))


_CHANGED: Final = b"~change"
"""Route in the mark of a partition that is closed for the time of a change."""


async def begin_change(gateway: Gateway, namespace: Namespace, change: str, partitions: Sequence[Partition]) -> None:
    """Let every process refuse the namespace, and close partitions to producers that are connected already.

    A producer whose partition is closed looks at the namespace again. Idempotent.
    """
    await gateway.command("HSET", namespace.deployment, "change", change)
    for partition in partitions:
        await gateway.command("HSETNX", partition.closed, "route", _CHANGED)


async def end_change(gateway: Gateway, namespace: Namespace, number: int, partitions: Sequence[Partition]) -> None:
    """Store the format after a change, and let processes use the namespace and its partitions again."""
    await gateway.command("HSET", namespace.deployment, "format", number)
    await cancel_change(gateway, namespace, partitions)


async def cancel_change(gateway: Gateway, namespace: Namespace, partitions: Sequence[Partition]) -> None:
    """Let processes use the namespace and its partitions again, since nothing was changed."""
    for partition in partitions:
        if await is_closed_for_change(gateway, partition):
            await gateway.command("DEL", partition.closed)
    await gateway.command("HDEL", namespace.deployment, "change")


async def is_closed_for_change(gateway: Gateway, partition: Partition) -> bool:
    """Whether a partition is closed only for the time of a change."""
    return bool(await gateway.command("HGET", partition.closed, "route") == _CHANGED)


async def known_partitions(gateway: Gateway, namespace: Namespace) -> list[Partition]:
    """Return the partitions of the stored routes, also of a namespace that this process may not use yet."""
    stored = pairs(await gateway.command("HGETALL", namespace.queues))
    names = split(stored, is_name).good
    return [namespace.partition(name, index) for name in names for index in _indexes(stored[name.encode()])]


def _indexes(route: bytes) -> Sequence[int]:
    with suppress(UnreadableRoute):
        return list(Route.decode(route).indexes)
    return ()
