"""Dead letters, read: listed, filtered, shown."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ..queues import Envelope, Gateway, Partition, UnreadableEnvelope, pairs
from .reasons import Reason

__all__ = ["DeadLetter", "Filter", "count_letters", "find_letter", "list_letters"]

_PAGE = 200


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task given up. Times are milliseconds of Redis' clock; `raw` holds the fields of an unreadable message."""

    id: str
    entry: str
    partition: Partition
    task: str
    reason: Reason | str
    error: str
    message: str
    traceback: str
    attempts: int
    crashes: int
    worker: str
    enqueued_at: int
    died_at: int
    args: bytes | None
    envelope: Envelope | None
    raw: Mapping[str, bytes]

    def summary(self) -> dict[str, Any]:
        """The letter as plain data, for programs; bytes that are not UTF-8 as base64."""
        return {
            "id": self.id,
            "queue": self.partition.queue,
            "partition": self.partition.index,
            "task": self.task,
            "reason": str(self.reason),
            "error": self.error,
            "message": self.message,
            "traceback": self.traceback,
            "attempts": self.attempts,
            "crashes": self.crashes,
            "worker": self.worker,
            "enqueued_at": self.enqueued_at,
            "died_at": self.died_at,
            "args": _data(self.args),
            "headers": self.envelope.headers if self.envelope else {},
            "raw": {name: _text(value) for name, value in self.raw.items()},
        }


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters are meant; what is None does not matter."""

    reason: Reason | None = None
    task: str | None = None

    def matches(self, letter: DeadLetter) -> bool:
        return (self.reason is None or letter.reason == self.reason) and self.task in (None, letter.task)


async def list_letters(
    gateway: Gateway, partitions: Sequence[Partition], wanted: Filter, *, oldest_first: bool = False
) -> AsyncIterator[DeadLetter]:
    """Dead letters of the partitions that match, newest first by default, read page by page."""
    for partition in partitions:
        async for letter in _walk(gateway, partition, oldest_first):
            if wanted.matches(letter):
                yield letter


async def count_letters(gateway: Gateway, partitions: Sequence[Partition]) -> int:
    """How many dead letters the partitions hold."""
    return sum(await gateway.pipeline([("XLEN", partition.dead) for partition in partitions]))


async def find_letter(gateway: Gateway, partitions: Sequence[Partition], task_id: str) -> DeadLetter | None:
    """The dead letter of one task, or None."""
    entries = await gateway.pipeline([("HGET", partition.record(task_id), "dead") for partition in partitions])
    for partition, entry in zip(partitions, entries, strict=True):
        if entry is not None:
            found = await gateway.command("XRANGE", partition.dead, entry, entry)
            return _letter(partition, *found[0]) if found else None
    return None


async def _walk(gateway: Gateway, partition: Partition, oldest_first: bool) -> AsyncIterator[DeadLetter]:
    newest = await gateway.command("XREVRANGE", partition.dead, "+", "-", "COUNT", 1)
    end = newest[0][0] if newest else "+"  # what is buried from now on is not waited for: a replay may die again
    last = ""
    while True:
        if oldest_first:
            command = ("XRANGE", partition.dead, f"({last}" if last else "-", end, "COUNT", _PAGE)
        else:
            command = ("XREVRANGE", partition.dead, f"({last}" if last else end, "-", "COUNT", _PAGE)
        page = await gateway.command(*command)
        for entry, fields in page:
            yield _letter(partition, entry, fields)
        if len(page) < _PAGE:
            return
        last = page[-1][0].decode()


def _letter(partition: Partition, entry: bytes, flat: list[bytes]) -> DeadLetter:
    fields = pairs(flat)
    evidence = orjson.loads(fields[b"evidence"])
    died_at = int(entry.partition(b"-")[0])
    return DeadLetter(
        id=fields[b"id"].decode(),
        entry=entry.decode(),
        partition=partition,
        task=fields[b"task"].decode(),
        reason=_reason(fields[b"reason"].decode()),
        error=evidence.get("error", ""),
        message=evidence.get("message", ""),
        traceback=evidence.get("traceback", ""),
        attempts=int(fields[b"attempts"]),
        crashes=int(fields[b"crashes"]),
        worker=fields[b"worker"].decode(),
        enqueued_at=int(float(fields.get(b"at", died_at))),
        died_at=died_at,
        args=fields.get(b"args", fields.get(b"raw:args")),
        envelope=_envelope(fields.get(b"env")),
        raw={
            name.removeprefix(b"raw:").decode("utf-8", "replace"): value
            for name, value in fields.items()
            if name.startswith(b"raw:")
        },
    )


def _reason(text: str) -> Reason | str:
    """The reason; one that a newer version has given stays as it is."""
    return Reason(text) if text in set(Reason) else text


def _envelope(data: bytes | None) -> Envelope | None:
    if data is None:
        return None
    try:
        return Envelope.decode(data)
    except UnreadableEnvelope:
        return None


def _data(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return _text(value)


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()
