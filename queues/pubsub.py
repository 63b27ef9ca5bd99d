"""News of tasks, pushed: one subscription connection for all who wait in this process.

A task's record key is its channel. News is a hint, never the truth: whoever hears it reads the record, and whoever
begins to listen reads the record after the subscription stands, so nothing falls between. When the connection was
lost, everybody is woken to look for themselves.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
from redis.asyncio.client import PubSub
from redis.exceptions import TimeoutError as ReplyTimeout

from .errors import QueueError, Unavailable
from .transport import Backoff, Gateway, translated

__all__ = ["TaskNotifications"]

LOST = b""
"""What a listener hears when the connection was lost and stands again."""

_RECONNECT: Final = Backoff()
"""Delays before a lost connection is opened again."""

_SILENCE: Final = 10.0
"""Seconds without news after which the server is asked whether it is there."""

_ANSWERING: Final = 5.0
"""Seconds that it has to answer."""

_FAREWELL: Final = 1.0
"""Seconds that leaving a channel may take, also for a waiter who was cancelled: the connection is everybody's."""


class TaskNotifications:
    """Subscriptions of one process; opened by the first listener, closed by `close`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pubsub: PubSub | None = None
        self._listeners: dict[bytes, set[asyncio.Queue[bytes]]] = defaultdict(set)
        self._subscribed: dict[bytes, asyncio.Event] = {}
        self._joining: set[bytes] = set()
        self._leaving: set[bytes] = set()
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
        await self._drop()

    async def _subscribe(self, name: bytes) -> None:
        """Have the channel subscribed. Those who come while others wait for their turn go out in one command."""
        self._joining.add(name)
        async with self._changing:
            if name not in self._subscribed:
                joining = {name, *(one for one in self._joining if one in self._listeners)}
                self._joining.clear()
                self._subscribed.update((one, asyncio.Event()) for one in joining)
                try:
                    await self._add(joining)
                except BaseException:
                    for one in joining:  # the others try again when it is their turn
                        del self._subscribed[one]
                    raise
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._listen(), name="perdure news")
            stands = self._subscribed[name]
        await stands.wait()

    async def _unsubscribe(self, name: bytes) -> None:
        self._leaving.add(name)
        async with self._changing:
            leaving = {one for one in self._leaving if one not in self._listeners}  # else somebody came meanwhile
            self._leaving.clear()
            for one in leaving:
                self._subscribed.pop(one, None)
            if leaving and self._pubsub is not None:
                with translated(self._gateway.address.shown):
                    await self._pubsub.unsubscribe(*leaving)

    async def _listen(self) -> None:
        """Hand out what comes; where the connection is lost, subscribe to everything on another."""
        delays = _RECONNECT.delays()
        while True:
            heard = self._pubsub
            try:
                if heard is None:
                    async with self._changing:
                        if not self._listeners:
                            return
                        if self._pubsub is None:
                            await self._begin_anew()
                    continue
                with translated(self._gateway.address.shown):
                    message = await self._hear(heard)
                delays = _RECONNECT.delays()
                if message is not None:
                    self._hand_out(message)
            except QueueError:
                async with self._changing:
                    if self._pubsub is heard:
                        await self._drop()
                await asyncio.sleep(next(delays))

    async def _hear(self, pubsub: PubSub) -> dict[str, Any] | None:
        """The next message. Where none comes for long, ask whether the server is there at all: nothing else would
        ever tell of a connection that broke without a word.
        """
        message: dict[str, Any] | None = await pubsub.get_message(timeout=_SILENCE)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=_ANSWERING)
            if message is None:
                raise ReplyTimeout(f"no answer on the connection for news within {_ANSWERING:g} s")
        return message

    # with the lock held

    async def _add(self, names: Collection[bytes]) -> None:
        if self._pubsub is not None:
            with suppress(Unavailable), translated(self._gateway.address.shown):
                await self._pubsub.subscribe(*names)
                return
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Subscribe to everything that is listened to, on a connection of its own."""
        await self._drop()
        pubsub = await self._gateway.subscription()
        try:
            with translated(self._gateway.address.shown):
                await pubsub.subscribe(*self._listeners)
        except BaseException:
            await pubsub.aclose()
            raise
        self._pubsub = pubsub

    async def _drop(self) -> None:
        lost, self._pubsub = self._pubsub, None
        if lost is not None:
            await lost.aclose()

    def _hand_out(self, message: dict[str, Any]) -> None:
        channel: bytes = message["channel"]
        if message["type"] == "subscribe" and channel in self._subscribed:
            if self._subscribed[channel].is_set():  # it stands again: what was published in between was not heard
                for inbox in self._listeners.get(channel, ()):
                    inbox.put_nowait(LOST)
            self._subscribed[channel].set()
        elif message["type"] == "message":
            for inbox in self._listeners.get(channel, ()):
                inbox.put_nowait(message["data"])
