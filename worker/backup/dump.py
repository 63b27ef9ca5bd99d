"""Reader of all keys of a namespace, page by page.

What is left out has a meaning for running processes only: registrations of workers and supervisors, fleet locks, hints
and marks. For a backup of a namespace that is at work, the order matters: first where the tasks of a partition are,
then their records and checkpoints, and last the list of all tasks. A task that moved meanwhile has a record that says
so, and the restore puts it where its record says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeAlias

from ...queues.errors import Refused
from ...queues.inspection.views import queue_partitions
from ...queues.junk import split
from ...queues.keys import DATA_FORMAT, Namespace, Partition, is_name
from ...queues.partitions.resharding import read_schema
from ...queues.presence import present_workers
from ...queues.transport.clients import translated
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Command
from ...queues.transport.scripts import milliseconds, pairs
from ...queues.wording import listed
from .backup_file import BackupError, BackupWriter, to_text

_SCANNED: Final = 500
_TOGETHER: Final = 64
"""Keys whose first pages are read in one round trip."""

_FIELDS: Final = 128
_MEMBERS: Final = 1000
_ENTRIES: Final = 100
"""Fields of a hash, members of a set or list, entries of a stream in a page."""

_PENDING: Final = 1000


_Rest: TypeAlias = Callable[[Gateway, str, Any], AsyncIterator[list[Any]]]


async def backup_header(gateway: Gateway, namespace: Namespace, *, live: bool) -> dict[str, Any]:
    """Return the header of a backup.

    Raises:
        BackupError: The namespace is empty, or workers run and `live` is not set.
        Refused: The namespace has another format, or is being changed.
    """
    stored = await read_schema(gateway, namespace)
    stored.check(namespace)
    if stored.format is None:
        raise BackupError(f"namespace {namespace.name!r} on {gateway.address.shown} has no data")
    workers = sorted(await present_workers(gateway, namespace))
    if workers and not live:
        raise BackupError(
            f"{len(workers)} workers run in namespace {namespace.name!r} ({listed(workers, 3)}): stop them, or use "
            "--live, whose backup may run a step again that was recorded meanwhile"
        )
    now = milliseconds(await gateway.command("TIME", node_of=namespace.queues))
    identity = await gateway.command("HGET", namespace.deployment, "id")
    return {
        "namespace": namespace.name,
        "deployment": (identity or b"").decode("utf-8", "replace"),
        "format": stored.format,
        "data_format": DATA_FORMAT,
        "time": now,
        "live": bool(workers),
        "partitions": [(found.queue, found.index) for found in await queue_partitions(gateway, namespace)],
        "perdure": version("perdure"),
    }


async def dump(gateway: Gateway, namespace: Namespace, writer: BackupWriter) -> AsyncIterator[int]:
    """Write all keys, and yield how many so far."""
    partitions = await queue_partitions(gateway, namespace)
    first = [key for partition in partitions for key in partition.shared_keys if key != partition.timeline]
    last = {partition.timeline for partition in partitions}
    known = {*first, *last}
    for start in range(0, len(first), _TOGETHER):
        await _write(gateway, writer, [key for key in first[start : start + _TOGETHER] if _is_kept(namespace, key)])
        yield writer.keys
    async for keys in scan(gateway, namespace):
        wanted = [key for key in keys if key not in known and _is_kept(namespace, key)]
        for start in range(0, len(wanted), _TOGETHER):
            await _write(gateway, writer, wanted[start : start + _TOGETHER])
            yield writer.keys
    for key in sorted(last):
        await _write(gateway, writer, [key])
        yield writer.keys


async def signature(gateway: Gateway, namespace: Namespace) -> Mapping[str, Any]:
    """Return figures by queue that change with each task that is stored or moved."""
    found: dict[str, list[Any]] = {}
    for partition in await queue_partitions(gateway, namespace):
        found.setdefault(partition.queue, []).append(await _figures(gateway, partition))
    return found


async def _figures(gateway: Gateway, partition: Partition) -> Any:
    counts: list[Command] = [("ZCARD", key) for key in (partition.due, partition.timeline, partition.waiting)]
    counts += [("XLEN", partition.ready), ("XREVRANGE", partition.ready, "+", "-", "COUNT", 1)]
    counts += [("XREVRANGE", partition.dead, "+", "-", "COUNT", 1)]
    return [str(reply) for reply in await gateway.pipeline_each(counts)]


async def scan(gateway: Gateway, namespace: Namespace) -> AsyncIterator[list[str]]:
    """Yield the keys of the namespace on all primaries, page by page; a key may come twice."""
    pattern = f"{{{namespace.name}[:}}]*"
    for primary in gateway.primaries().values():
        cursor: bytes | str = "0"
        while True:
            command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED)
            with translated(gateway.address.shown, command):
                cursor, keys = await primary(command)
            yield split(keys).good  # a key that is no text is of another program
            if cursor == b"0":
                break


async def partitions_with_keys(gateway: Gateway, namespace: Namespace, kind: str = "") -> set[Partition]:
    """Return the partitions of queues that have keys, or a key of one kind, whether a route names them or not."""
    found = set()
    async for keys in scan(gateway, namespace):
        for key in keys:
            tag, _, name = key[1:].partition("}:")
            parts = tag.split(":")
            if len(parts) == 3 and is_name(parts[1]) and parts[2].isdigit() and kind in ("", name):
                found.add(namespace.partition(parts[1], int(parts[2])))
    return found


_LEFT_OUT: Final = (
    *("registry:worker", "registry:supervisor", "registry:sharing", "registry:crashes", "lock:"),
    *("mark", "nudge", "seen", "checked", "upload:"),
)


def _is_kept(namespace: Namespace, key: str) -> bool:
    kind = key.partition("}:")[2]
    return key != namespace.deployment and not kind.startswith(_LEFT_OUT)


async def _write(gateway: Gateway, writer: BackupWriter, keys: Sequence[str]) -> None:
    """Write some keys; those that do not exist are left out."""
    if not keys:
        return
    read: list[Command] = []
    for key in keys:
        read += [("TYPE", key), ("PTTL", key)]
    *replies, time = await gateway.pipeline([*read, ("TIME",)], node_of=keys[0])
    now = milliseconds(time)
    kinds = {key: kind.decode() for key, kind in zip(keys, replies[::2], strict=True)}
    ends = {key: None if left < 0 else now + left for key, left in zip(keys, replies[1::2], strict=True)}
    there = [key for key in keys if kinds[key] in _PAGES]
    streams = []
    pages = await gateway.pipeline_each([_PAGES[kinds[key]].first(key) for key in there])
    for key, page in zip(there, pages, strict=True):
        if isinstance(page, Refused):
            raise page
        kind = kinds[key]
        if page is None:
            continue  # it has expired
        head: dict[str, Any] = {"k": to_text(key.encode()), "t": kind, "x": ends[key]}
        async for values in _PAGES[kind].rest(gateway, key, page):
            writer.write({**head, "v": values})
            head = {"k": head["k"]}
        writer.keys += 1
        if kind == "stream":
            streams.append(key)
    await _write_streams(gateway, writer, streams, ends)


def _flat(values: Iterable[bytes]) -> list[str]:
    return [to_text(value) for value in values]


async def _string(_: Gateway, __: str, page: Any) -> AsyncIterator[list[Any]]:
    yield [to_text(page)]


def _scanned(name: str, count: int) -> _Rest:
    """Return a reader of a hash, a set or a sorted set. Items that exist all the time are found, some twice."""

    async def rest(gateway: Gateway, key: str, page: Any) -> AsyncIterator[list[Any]]:
        cursor, values = page
        yield _flat(values)
        while cursor != b"0":
            cursor, values = await gateway.command(name, key, cursor, "COUNT", count)
            yield _flat(values)

    return rest


async def _listed(gateway: Gateway, key: str, page: Any) -> AsyncIterator[list[Any]]:
    start = 0
    while page:
        yield _flat(page)
        start += len(page)
        page = await gateway.command("LRANGE", key, start, start + _MEMBERS - 1)


async def _entries(gateway: Gateway, key: str, page: Any) -> AsyncIterator[list[Any]]:
    while True:
        yield [[to_text(entry), _flat(fields)] for entry, fields in page]
        if len(page) < _ENTRIES:
            return
        page = await gateway.command("XRANGE", key, b"(" + page[-1][0], "+", "COUNT", _ENTRIES)


class _Pages(NamedTuple):
    """Reader of a type: the command of the first page, and what yields all pages from its reply."""

    first: Callable[[str], Command]
    rest: _Rest


_PAGES: Final[Mapping[str, _Pages]] = {
    "string": _Pages(lambda key: ("GET", key), _string),
    "hash": _Pages(lambda key: ("HSCAN", key, 0, "COUNT", _FIELDS), _scanned("HSCAN", _FIELDS)),
    "set": _Pages(lambda key: ("SSCAN", key, 0, "COUNT", _MEMBERS), _scanned("SSCAN", _MEMBERS)),
    "zset": _Pages(lambda key: ("ZSCAN", key, 0, "COUNT", _MEMBERS), _scanned("ZSCAN", _MEMBERS)),
    "list": _Pages(lambda key: ("LRANGE", key, 0, _MEMBERS - 1), _listed),
    "stream": _Pages(lambda key: ("XRANGE", key, "-", "+", "COUNT", _ENTRIES), _entries),
}


async def _write_streams(
    gateway: Gateway, writer: BackupWriter, keys: Sequence[str], ends: Mapping[str, int | None]
) -> None:
    """Write the last ids and groups of streams, and what is pending, with the time of its last renewal."""
    read: list[Command] = []
    for key in keys:
        read += [("XINFO", "STREAM", key), ("XINFO", "GROUPS", key)]
    replies = await gateway.pipeline_each(read) if read else []
    for key, info, found in zip(keys, replies[::2], replies[1::2], strict=True):
        if isinstance(info, Refused) or isinstance(found, Refused):
            continue  # it has expired
        name, groups = to_text(key.encode()), [pairs(group) for group in found]
        shown = []
        for group in groups:
            consumers = await gateway.command("XINFO", "CONSUMERS", key, group[b"name"])
            shown.append(
                {
                    "name": to_text(group[b"name"]),
                    "last": to_text(group[b"last-delivered-id"]),
                    "consumers": [to_text(pairs(consumer)[b"name"]) for consumer in consumers],
                }
            )
        last = to_text(pairs(info)[b"last-generated-id"])
        writer.write({"k": name, "x": ends[key], "stream": {"last": last, "groups": shown}})
        for group in groups:
            await _write_pending(gateway, writer, key, group[b"name"])


async def _write_pending(gateway: Gateway, writer: BackupWriter, key: str, group: bytes) -> None:
    start = b"-"
    while True:
        read: Command = ("XPENDING", key, group, start, "+", _PENDING)
        pending, time = await gateway.pipeline([read, ("TIME",)], node_of=key)
        now = milliseconds(time)
        values = [
            [to_text(entry), to_text(consumer), now - int(idle), int(count)] for entry, consumer, idle, count in pending
        ]
        if values:
            writer.write({"k": to_text(key.encode()), "x": None, "group": to_text(group), "pending": values})
        if len(pending) < _PENDING:
            return
        start = b"(" + pending[-1][0]
