"""Restore of a backup into a namespace without data.

The namespace is marked first, so that every process refuses it until the restore has ended; one that was interrupted is
started again, and deletes what the former one has written. At the end, tasks that are not where their records say are
put there, as workers do once a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...queues.delivery.lost_tasks import put_back_lost
from ...queues.keys import DATA_FORMAT, KEY_FORMAT, Namespace, Partition
from ...queues.migrations import begin_change, cancel_change, end_change, known_partitions
from ...queues.partitions.resharding import RESTORE, read_schema, sync_route
from ...queues.presence import present_workers
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Command
from ...queues.transport.scripts import milliseconds
from ...queues.wording import listed
from .backup_file import BackupError, check_file, read_lines, to_bytes
from .dump import partitions_with_keys, scan

_BATCH_BYTES: Final = 1 << 20
_BATCH: Final = 500
"""Bytes and number of commands that are sent together."""

_PAGE: Final = 200


async def check_restore(gateway: Gateway, namespace: Namespace, path: Path, *, replace: bool = False) -> dict[str, Any]:
    """Check the file and the namespace, and return the file's header with the number of its keys. Changes nothing.

    Raises:
        BackupError: The file is not complete, or of another namespace or a later version; workers run; the namespace
            has data and is not to be replaced.
        OSError
    """
    header = check_file(path)
    name = header.get("namespace")
    if name != namespace.name:
        raise BackupError(f"{path} is a backup of namespace {name!r}: restore it with --namespace {name}")
    if header.get("format", 0) > KEY_FORMAT or header.get("data_format", 0) > DATA_FORMAT:
        raise BackupError(
            f"{path} was written by a later release ({header.get('perdure')}): upgrade this process first"
        )
    workers = sorted(await present_workers(gateway, namespace))
    if workers:
        raise BackupError(
            f"{len(workers)} workers run in namespace {namespace.name!r} ({listed(workers, 3)}): stop all workers and "
            "producers first"
        )
    interrupted = (await read_schema(gateway, namespace)).change == RESTORE
    if not replace and not interrupted and await _has_data(gateway, namespace):
        raise BackupError(
            f"namespace {namespace.name!r} on {gateway.address.shown} has data: --replace deletes it, and then restores"
        )
    return header


async def _has_data(gateway: Gateway, namespace: Namespace) -> bool:
    async for keys in scan(gateway, namespace):
        if any(":registry:" not in key for key in keys):
            return True
    return False


async def restore(
    gateway: Gateway, namespace: Namespace, path: Path, header: Mapping[str, Any], *, replace: bool = False
) -> AsyncGenerator[int]:
    """Delete what the namespace has, restore the file, and yield how many keys so far.

    Args:
        header: What `check_restore` has returned.
        replace: Whether tasks that came in meanwhile may be deleted.

    Raises:
        BackupError: The file changes meanwhile; a producer that was connected has stored tasks.
    """
    wanted = {namespace.partition(queue, index) for queue, index in header.get("partitions", ())}
    closed = {*wanted, *await known_partitions(gateway, namespace), *await partitions_with_keys(gateway, namespace)}
    again = (await read_schema(gateway, namespace)).change == RESTORE
    await begin_change(gateway, namespace, RESTORE, list(closed))
    if not replace:  # what came between the check and now, or after an interruption into queues of no backup
        try:
            await _refuse_to_delete(gateway, closed - wanted if again else closed)
        except BackupError:
            if not again:
                await cancel_change(gateway, namespace, list(closed))
            raise
    marks = {partition.closed for partition in closed}
    async for keys in scan(gateway, namespace):
        doomed = [key for key in keys if key != namespace.deployment and key not in marks]
        for start in range(0, len(doomed), _PAGE):
            await gateway.pipeline([("DEL", key) for key in doomed[start : start + _PAGE]])
    now = milliseconds(await gateway.command("TIME", node_of=namespace.queues))
    loader = _Loader(gateway, now)
    for number, line in enumerate(read_lines(path)):
        if number:
            await loader.add(line)
            yield loader.keys
    await loader.flush()
    restored = await known_partitions(gateway, namespace)
    for partition in restored:
        await put_back_lost(gateway, partition, 0.0)
    if identity := header.get("deployment"):  # artifacts are stored under it
        await gateway.command("HSET", namespace.deployment, "id", identity)
    late = await partitions_with_keys(gateway, namespace) - {*restored}
    await end_change(gateway, namespace, int(header["format"]), [*closed, *restored])
    await _register(gateway, namespace, [partition for partition in late if await _tasks_in(gateway, partition)])


async def _tasks_in(gateway: Gateway, partition: Partition) -> int:
    return int(await gateway.command("ZCARD", partition.timeline))


async def _refuse_to_delete(gateway: Gateway, partitions: set[Partition]) -> None:
    """Raise `BackupError` if partitions have tasks, which a producer that was connected has stored."""
    counts: Counter[str] = Counter()
    for partition in partitions:
        counts[partition.queue] += await _tasks_in(gateway, partition)
    shown = [f"{count} in queue {queue!r}" for queue, count in sorted(counts.items()) if count]
    if shown:
        raise BackupError(
            f"tasks came in from producers that were connected ({', '.join(shown)}): stop these producers; then "
            "'perdure restore FILE --replace' deletes the tasks and restores"
        )


async def _register(gateway: Gateway, namespace: Namespace, partitions: Sequence[Partition]) -> None:
    """Register the queues of tasks that came in during the restore, and raise `BackupError` that names them."""
    counts: Counter[str] = Counter()
    for partition in partitions:
        counts[partition.queue] += await _tasks_in(gateway, partition)
    for queue in counts:
        await sync_route(gateway, namespace, queue)
    if counts:
        shown = ", ".join(f"{count} in queue {queue!r}" for queue, count in sorted(counts.items()))
        raise BackupError(
            f"the backup is restored, but producers that were connected have stored tasks meanwhile ({shown}): the "
            "queues are registered now, and the tasks run when a worker serves them; stop producers before a restore"
        )


class _Loader:
    """Writes the lines of a backup in batches. A key that comes twice is written again."""

    def __init__(self, gateway: Gateway, now: int) -> None:
        self.keys = 0
        self._gateway = gateway
        self._now = now
        self._kind = ""
        self._ends: int | None = None
        self._batch: list[Command] = []
        self._bytes = 0
        self._entries: dict[str, bytes] = {}
        """Last entry of each stream whose state has not come yet."""

    async def add(self, line: Mapping[str, Any]) -> None:
        key = to_bytes(line["k"]).decode()
        if "x" in line:
            self._ends = line["x"]
        if "t" in line:
            self._kind = line["t"]
            self.keys += 1
            await self._send(("DEL", key), 0)
        if self._ends is not None and self._ends <= self._now:
            return  # it has expired since
        if "v" in line:
            if self._kind == "stream" and line["v"]:
                self._entries[key] = to_bytes(line["v"][-1][0])
            for command, size in _commands(self._kind, key, line["v"]):
                await self._send(command, size)
        elif "stream" in line:
            await self._stream(key, line["stream"])
        elif "pending" in line:
            group = to_bytes(line["group"])
            for entry, consumer, at, count in line["pending"]:
                claim: Command = ("XCLAIM", key, group, to_bytes(consumer), 0, to_bytes(entry), "TIME", at)
                await self._send((*claim, "RETRYCOUNT", count, "FORCE", "JUSTID"), 100)
        if self._ends is not None:
            await self._send(("PEXPIRE", key, max(1, self._ends - self._now)), 0)

    async def _stream(self, key: str, state: Mapping[str, Any]) -> None:
        for group in state["groups"]:
            name = to_bytes(group["name"])
            await self._send(("XGROUP", "CREATE", key, name, to_bytes(group["last"]), "MKSTREAM"), 100)
            for consumer in group["consumers"]:
                await self._send(("XGROUP", "CREATECONSUMER", key, name, to_bytes(consumer)), 100)
        last = to_bytes(state["last"])
        if last not in (self._entries.pop(key, b""), b"0-0"):  # entries after the last one were deleted
            await self._send(("XADD", key, last, "x", ""), 50)
            await self._send(("XDEL", key, last), 50)

    async def _send(self, command: Command, size: int) -> None:
        self._batch.append(command)
        self._bytes += size
        if len(self._batch) >= _BATCH or self._bytes >= _BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0
        if batch:
            await self._gateway.pipeline(batch)


def _commands(kind: str, key: str, values: Sequence[Any]) -> list[tuple[Command, int]]:
    """Return the commands that write a page, each with its size."""
    if kind == "stream":
        return [
            (("XADD", key, to_bytes(entry), *map(to_bytes, fields)), sum(map(len, fields))) for entry, fields in values
        ]
    data = [to_bytes(value) for value in values]
    if not data:
        return []
    size = sum(map(len, data))
    if kind == "string":
        return [(("SET", key, data[0]), size)]
    if kind == "zset":  # the score comes first
        flat = [part for member, score in zip(data[::2], data[1::2], strict=True) for part in (score, member)]
        return [(("ZADD", key, *flat), size)]
    names = {"hash": "HSET", "set": "SADD", "list": "RPUSH"}
    if kind not in names:
        raise BackupError(f"a key has the unknown type {kind!r}")
    return [((names[kind], key, *data), size)]
