"""News of tasks, pushed: one subscription connection for all who wait in this process.

A task's record key is its channel. News is a hint, never the truth: whoever hears it reads the record, and whoever
begins to listen reads the record after the subscription stands, so nothing falls between. When the connection was
lost, everybody is woken to look for themselves.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
from redis.asyncio.client import PubSub

from .connection import translated
from .errors import QueueError, Unavailable
from .gateway import Gateway

__all__ = ["News"]

LOST = b""
"""What a listener hears when the connection was lost, and when it stands again."""

_FAREWELL: Final = 1.0
"""Seconds that leaving a channel may take, also for a waiter who was cancelled: the connection is everybody's."""


class News:
    """Subscriptions of one process; opened by the first listener, closed by `close`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pubsub: PubSub | None = None
        self._listeners: dict[bytes, set[asyncio.Queue[bytes]]] = defaultdict(set)
        self._subscribed: dict[bytes, asyncio.Event] = {}
        self._pump: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[asyncio.Queue[bytes]]:
        """Messages of one channel, from when the block is entered; `Unavailable` where Redis cannot be reached."""
        name = channel.encode()
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners[name].add(inbox)
        try:
            await self._subscribe(name)
            yield inbox
        finally:
            self._listeners[name].discard(inbox)
            if not self._listeners[name]:
                del self._listeners[name]
                with anyio.move_on_after(_FAREWELL, shield=True), suppress(QueueError):
                    await self._unsubscribe(name)

    async def close(self) -> None:
        pump, self._pump = self._pump, None
        while pump is not None and not pump.done():
            pump.cancel()  # more than once: up to Python 3.11, `asyncio.wait_for` may swallow a cancellation
            await asyncio.wait([pump], timeout=0.1)
        if self._pubsub is not None:
            await self._pubsub.aclose()
            self._pubsub = None

    async def _subscribe(self, name: bytes) -> None:
        async with self._changing:
            if self._pubsub is None:
                self._pubsub = self._gateway.pubsub()
            if name not in self._subscribed:
                self._subscribed[name] = asyncio.Event()
                try:
                    with translated(self._gateway.address.shown):
                        await self._pubsub.subscribe(name)
                except BaseException:
                    del self._subscribed[name]
                    raise
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._listen(), name="perdure news")
            stands = self._subscribed[name]
        await stands.wait()

    async def _unsubscribe(self, name: bytes) -> None:
        async with self._changing:
            if name in self._listeners:
                return  # somebody came meanwhile
            self._subscribed.pop(name, None)
            if self._pubsub is not None:
                with translated(self._gateway.address.shown):
                    await self._pubsub.unsubscribe(name)

    async def _listen(self) -> None:
        delay = 0.05
        while self._pubsub is not None:
            try:
                with translated(self._gateway.address.shown):
                    message = await self._pubsub.get_message(timeout=30.0)
                delay = 0.05
                if message is not None:
                    self._hand_out(message)
            except Unavailable:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
                delay = min(delay * 2, 2.0)
                for channel in self._listeners:
                    self._wake(channel)

    def _wake(self, channel: bytes) -> None:
        for inbox in self._listeners.get(channel, ()):
            inbox.put_nowait(LOST)

    def _hand_out(self, message: dict[str, Any]) -> None:
        channel: bytes = message["channel"]
        if message["type"] == "subscribe" and channel in self._subscribed:
            if self._subscribed[channel].is_set():  # again: what was published in between was not heard
                self._wake(channel)
            self._subscribed[channel].set()
        elif message["type"] == "message":
            for inbox in self._listeners.get(channel, ()):
                inbox.put_nowait(message["data"])
