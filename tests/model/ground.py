"""The real server for the model: an event loop, a gateway, and a subscriber of what is published."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis.asyncio
from perdure.queues import Address, EntriesLost, Gateway, LeaseLost, Namespace
from redis.asyncio.client import PubSub

__all__ = ["Ground"]

R = TypeVar("R")


class Ground:
    """A server that is opened once for many runs; each run has a namespace of its own."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.gateway = Gateway(Address(url))
        self._client = redis.asyncio.Redis.from_url(url)
        self._ear: PubSub | None = None

    def __enter__(self) -> Ground:
        self.run(self.gateway.open())
        self.run(self.gateway.load_scripts())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._client.aclose())
        self.run(self.gateway.close())
        self._runner.close()

    def run(self, act: Coroutine[Any, Any, R]) -> R:
        """Carry out one act."""
        return self._runner.run(act)

    def accepted(self, act: Coroutine[Any, Any, object]) -> bool:
        """Return whether an act on a delivery was carried out; False if the lease or entries of the run were lost."""
        try:
            self.run(act)
        except (LeaseLost, EntriesLost):
            return False
        return True

    def command(self, *command: str | bytes | int | float) -> Any:
        """Send one plain command."""
        return self.run(self.gateway.command(*command))

    def listen(self, namespace: Namespace) -> None:
        """Subscribe to all channels of a namespace."""
        self._ear = self._client.pubsub()
        self.run(self._ear.psubscribe(f"{{{namespace.name}:*"))

    def heard(self) -> list[tuple[str, str]]:
        """Return channel and message of all that was published since the last call."""
        return self.run(self._hear())

    async def _hear(self) -> list[tuple[str, str]]:
        assert self._ear is not None
        await self._ear.ping()
        found: list[tuple[str, str]] = []
        while (message := await self._ear.get_message(timeout=10)) is None or message["type"] != "pong":
            if message is not None and message["type"] == "pmessage":
                found.append((message["channel"].decode(), message["data"].decode()))
        return found

    def empty(self, namespace: Namespace) -> None:
        """Unsubscribe, and delete the keys of the run."""
        if self._ear is not None:
            self.run(self._ear.aclose())
        for pattern in (f"{{{namespace.name}:*", f"{{{namespace.name}}}:*"):
            for key in self.command("KEYS", pattern):
                self.command("DEL", key)
