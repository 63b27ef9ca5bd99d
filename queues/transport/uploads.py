"""Uploads: data of a task that is not stored yet, written in portions to keys with a TTL.

The script that stores the task renames them to keys of the task (see upload.lua). So the task has all of them or none,
no command holds up Redis for long, and what is left of a caller that dies expires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .gateway import Gateway
from .large_values import CHUNK_BYTES
from .pipelining import Argument
from .scripts import queue_script

UPLOAD_ATTEMPTS: Final = 3
"""Attempts to store a task before its uploads are gone."""

_CHUNK = queue_script("upload_chunk")
_EVENTS = queue_script("upload_events")

_TTL: Final = 600_000
"""Milliseconds for which an upload is kept after its last portion."""

_PORTION: Final = 1_000
"""Largest number of arguments of a portion: Redis adds them in less than a millisecond."""


class FieldUpload:
    """Upload of fields of a hash. Repeated, it changes nothing.

    Attributes:
        count: Number of fields.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self.key = key
        self.count = 0
        self._gateway = gateway
        self._portion: list[Argument] = []
        self._size = 0

    async def put(self, name: Argument, value: Argument) -> None:
        """Add a field."""
        self.count += 1
        await self._add([name, value])

    async def flush(self) -> None:
        """Write the last portion."""
        if self._portion:
            await self._gateway.run(_CHUNK, [self.key], [_TTL, *self._portion])
            self._portion, self._size = [], 0

    async def _add(self, part: list[Argument]) -> None:
        self._portion += part
        self._size += sum(len(one) for one in part if isinstance(one, bytes))
        if self._size >= CHUNK_BYTES or len(self._portion) >= _PORTION:
            await self.flush()


class LogUpload(FieldUpload):
    """Upload of the entries of a log, in their order.

    Attributes:
        count: Number of entries.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        super().__init__(gateway, key)
        self._written = 0

    async def add(self, entry: str, fields: Mapping[str, Argument]) -> None:
        """Add an entry. entry: its id; `*` for the time of Redis."""
        self.count += 1
        await self._add([entry, len(fields), *(part for pair in fields.items() for part in pair)])

    async def flush(self) -> None:
        """Write the last portion."""
        if self._portion:
            await self._gateway.run(_EVENTS, [self.key], [_TTL, self._written, *self._portion])
            self._portion, self._size, self._written = [], 0, self.count
