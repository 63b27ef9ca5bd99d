"""The end of sd_notify(3) that belongs to the service manager."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.workers import BOUND


class NotifySocket:
    """A socket that receives notifications.

    with NotifySocket(path) as manager: await manager.until(READY="1")
    """

    def __init__(self, path: Path | str) -> None:
        """path: of the socket; a text that starts with `@` is an abstract name."""
        self.name = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __enter__(self) -> Self:
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.name[1:] if self.name.startswith("@") else self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def next(self) -> dict[str, str]:
        """Return the fields of the next notification."""
        async with asyncio.timeout(BOUND):
            data = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
        return dict(line.split("=", 1) for line in data.decode().splitlines())

    async def until(self, **fields: str) -> dict[str, str]:
        """Return the first notification that has these fields, and drop those before it."""
        while True:
            found = await self.next()
            if fields.items() <= found.items():
                return found

    def drain(self) -> list[dict[str, str]]:
        """Return the notifications that are here already."""
        found: list[dict[str, str]] = []
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return found
            found.append(dict(line.split("=", 1) for line in data.decode().splitlines()))
