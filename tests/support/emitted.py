"""What is visible in the streams of a task: its items without those that a mark has made void."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
from perdure import App, TaskHandle
from perdure.queues.stream_items import CUT_ALL, StoredItem, decode_item, stream_names

__all__ = ["Item", "entries_of", "items_of", "names_of", "values_of", "visible"]


class Item(NamedTuple):
    """A visible item."""

    number: int
    value: Any
    unit: str
    attempt: int


def visible(entries: Sequence[StoredItem]) -> list[StoredItem]:
    """Return the items that a client shows which drops what a mark voids, and notices of a resume."""
    shown: list[StoredItem] = []
    for item in entries:
        if item.is_notice:
            continue
        if not item.cut:
            shown.append(item)
        elif item.cut == CUT_ALL:
            shown = [one for one in shown if one.key]
        else:
            shown = [one for one in shown if one.key or one.unit != item.unit or one.attempt > item.attempt]
    return shown


async def entries_of(app: App, handle: TaskHandle[Any], stream: str = "output") -> list[StoredItem]:
    """Return the entries of a stream, marks included."""
    found = await app.producer.gateway.command("XRANGE", handle.partition.stream(handle.id, stream), "-", "+")
    return [decode_item(entry, fields) for entry, fields in found]


async def items_of(app: App, handle: TaskHandle[Any], stream: str = "output") -> list[Item]:
    """Return the visible items of a stream."""
    cipher = app.producer.gateway.encryptor.of(handle.partition, handle.id)
    decrypt: Callable[[str, bytes], bytes] = cipher.decrypt
    return [
        Item(item.number, orjson.loads(decrypt(item.field(stream), item.data)), item.unit, item.attempt)
        for item in visible(await entries_of(app, handle, stream))
    ]


async def values_of(app: App, handle: TaskHandle[Any], stream: str = "output") -> list[Any]:
    return [item.value for item in await items_of(app, handle, stream)]


async def names_of(app: App, handle: TaskHandle[Any]) -> list[str]:
    """Return the names of a task's streams."""
    return stream_names(await app.producer.gateway.command("HGET", handle.partition.record(handle.id), "streams"))
