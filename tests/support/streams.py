"""Items in the streams of tasks, as scripts store them, for tests that need no worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from perdure import TaskHandle
from perdure.queues import Gateway
from perdure.queues.stream_items import CUT_ALL, CUT_UNIT, item_field, key_digest, keyed_field
from perdure.queues.transport.pipelining import Argument


class StreamWriter:
    """Writer of one stream of a task. It notifies the readers of each write."""

    def __init__(
        self, gateway: Gateway, handle: TaskHandle[Any], name: str = "output", *, kept: int = 10_000, pace: int = 1
    ) -> None:
        """kept: items that the stream keeps. pace: milliseconds between two items."""
        self.number = 0
        self._positions: dict[tuple[str, int], int] = {}
        self._pace = pace
        self.key = handle.partition.stream(handle.id, name)
        self._record = handle.partition.record(handle.id)
        self._gateway, self._name, self._kept = gateway, name, kept
        self._cipher = gateway.encryptor.of(handle.partition, handle.id)

    async def emit(self, *values: Any, unit: str = "", attempt: int = 0) -> None:
        """Store items of a unit, and notify the readers once."""
        writes: list[Sequence[Argument]] = []
        before = self._positions.get((unit, attempt), 0)
        self._positions[unit, attempt] = before + len(values)
        for position, value in enumerate(values, before + 1):
            data = self._cipher.encrypt(item_field(self._name, unit, attempt, position), orjson.dumps(value))
            writes.append(self._write("u", unit, "y", attempt, "n", position, "d", data))
        await self._send(writes)

    async def emit_keyed(self, key: str, value: Any) -> None:
        digest = key_digest(key)
        data = self._cipher.encrypt(keyed_field(self._name, digest), orjson.dumps(value))
        await self._send([self._write("u", "", "k", digest, "d", data)])

    async def mark(self, unit: str, attempt: int, cut: bytes = CUT_UNIT) -> None:
        if cut == CUT_ALL:
            self._positions.clear()
        await self._send([self._write("u", unit, "y", attempt, "cut", cut)])

    def _write(self, *fields: Argument) -> Sequence[Argument]:
        self.number += 1
        limit = ("MAXLEN", self._kept)
        return (
            "XADD",
            self.key,
            *limit,
            f"{self.number}-0",
            "t",
            1_700_000_000_000 + self._pace * self.number,
            *fields,
        )

    async def _send(self, writes: list[Sequence[Argument]]) -> None:
        names = ("HSET", self._record, "streams", self._name)
        await self._gateway.pipeline([names, *writes, ("PUBLISH", self.key, self.number)])
