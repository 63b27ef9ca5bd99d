"""Migration of a namespace to the key format of this version.

There is one format, so there is no migration yet. A release that changes key names or their meaning raises
`KEY_FORMAT` and adds a `Migration` from the format before it. A migration is idempotent and works in small pieces, so
that one that was killed is repeated: `perdure migrate` marks the namespace first, which all processes then refuse, and
stores each format that it has reached.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from .errors import Refused
from .keys import KEY_FORMAT, Namespace
from .partitions.resharding import MIGRATION, RESTORE, read_schema
from .presence import present_workers
from .transport.gateway import Gateway
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
    found = [one for one in migrations if stored.format <= one.source < target]
    if [one.source for one in found] != list(range(stored.format, target)):
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
            await end_change(gateway, namespace, stored.format)
        return
    live = sorted(await present_workers(gateway, namespace))
    if live:
        raise Refused(
            f"could not migrate namespace {namespace.name!r}: {len(live)} workers run ({listed(live, 3)}); stop all "
            "workers and producers first"
        )
    await begin_change(gateway, namespace, MIGRATION)
    for migration in needed:
        async for count in migration.convert(gateway, namespace):
            yield migration, count
        await gateway.command("HSET", namespace.deployment, "format", migration.source + 1)
    await end_change(gateway, namespace, target)


async def begin_change(gateway: Gateway, namespace: Namespace, change: str) -> None:
    """Let every process that looks at the namespace refuse it."""
    await gateway.command("HSET", namespace.deployment, "change", change)


async def end_change(gateway: Gateway, namespace: Namespace, number: int) -> None:
    """Store the format after a change, and let processes use the namespace again."""
    await gateway.pipeline([("HSET", namespace.deployment, "format", number), ("HDEL", namespace.deployment, "change")])
