"""Task notifications over pub/sub: one subscription connection for all waiters of this process.

The record key of a task is its channel. A notification is a hint: the waiter reads the record then. A waiter reads the
record after its subscription is confirmed, so that no change is missed in between. After a lost connection all waiters
are woken, and read their records.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
from redis.asyncio.client import PubSub
from redis.exceptions import TimeoutError as ReplyTimeout

from .errors import NotOpen, QueueError, Unavailable
from .transport.backoff import Backoff
from .transport.clients import translated
from .transport.gateway import Gateway

LOST = b""
"""Notification of a listener after a lost connection is restored, and in place of too many others."""

_MAX_WAITING: Final = 32
"""Notifications that wait for a listener. They are hints, so one stands for all others."""

_RECONNECT: Final = Backoff()
"""Delays between attempts to restore a lost connection."""

_UNSUBSCRIBE_TIMEOUT: Final = 1.0
"""Seconds that an unsubscribe may take, also for a cancelled waiter: the connection is shared."""


Listener: TypeAlias = Callable[[bytes, bytes], None]
"""Function that gets a channel and a notification on it. It must not block."""


class TaskNotifications:
    """Subscriptions of one process. The first listener opens the connection, `close` closes it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._shown = gateway.address.shown
        self._pubsub: PubSub | None = None
        self._listeners: dict[bytes, list[Listener]] = defaultdict(list)
        self._subscribed: dict[bytes, asyncio.Event] = {}
        self._joining: set[bytes] = set()
        self._leaving: set[bytes] = set()
        self._pump: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._closes = 0
        self.tails: dict[str, Any] = {}
        """Tails of the streams that this process reads, by key (streams.py); this object does not use them."""

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[asyncio.Queue[bytes]]:
        """Subscribe to a channel for a block; return the queue of its notifications.

        Raises `Unavailable`, and `NotOpen` if the connection is closed meanwhile.
        """
        notifications: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        async with self.watch([channel], partial(_put, notifications)):
            yield notifications

    @asynccontextmanager
    async def watch(self, channels: Collection[str], listener: Listener) -> AsyncIterator[None]:
        """Subscribe to channels for a block, and call a function with each notification. Raises as `listen`."""
        names = [channel.encode() for channel in channels]
        for name in names:
            self._listeners[name].append(listener)
        try:
            with self._until_closed():
                self._joining.update(names)
                for name in names:
                    await self._subscribe(name)
            yield
        finally:
            left = []
            for name in names:
                self._listeners[name].remove(listener)
                if not self._listeners[name]:
                    del self._listeners[name]
                    left.append(name)
            limit = anyio.move_on_after(_UNSUBSCRIBE_TIMEOUT, shield=True)
            with limit, suppress(QueueError), self._until_closed():
                self._leaving.update(left)
                await self._unsubscribe()

    async def close(self) -> None:
        """Close the connection, and wake all listeners, which then find that it is closed."""
        self._closes += 1
        pump, self._pump = self._pump, None
        while pump is not None and not pump.done():
            pump.cancel()  # more than once: up to Python 3.11, `asyncio.wait_for` may swallow a cancellation
            await asyncio.wait([pump], timeout=0.1)
        await self._drop()
        for confirmed in self._subscribed.values():
            confirmed.set()
        self._wake_all()

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Raise `NotOpen` if the connection is closed during the block, whatever error that causes in the client."""
        closes = self._closes
        try:
            yield
        except Exception:
            self._check_open(closes)
            raise
        self._check_open(closes)

    def _check_open(self, closes: int) -> None:
        """Raise `NotOpen` if `close` was called since it had been called so many times."""
        if self._closes != closes:
            raise NotOpen(f"the connection to {self._shown} was closed")

    def _wake_all(self) -> None:
        for channel, listeners in self._listeners.items():
            for listener in listeners:
                listener(channel, LOST)

    async def _subscribe(self, name: bytes) -> None:
        """Subscribe to a channel. Channels of listeners that wait for the lock are joined in one command."""
        self._joining.add(name)
        closes = self._closes
        async with self._changing:
            self._check_open(closes)
            if name not in self._subscribed:
                # Not those that are subscribed: their listeners wait for the confirmation of the first subscription.
                # This one is included if another listener joined it as well, and gave up.
                wanted = self._joining | {name}
                joining = sorted(one for one in wanted if one in self._listeners and one not in self._subscribed)
                self._joining.clear()
                self._subscribed.update((one, asyncio.Event()) for one in joining)
                try:
                    await self._add(joining)
                    if self._closes != closes:
                        await self._drop()
                        self._check_open(closes)
                except BaseException:
                    for one in joining:  # the other listeners try again when they get the lock
                        del self._subscribed[one]
                    raise
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._listen(), name="perdure notifications")
            confirmed = self._subscribed[name]
        await confirmed.wait()

    async def _unsubscribe(self) -> None:
        async with self._changing:
            # The others have a new listener.
            leaving = sorted(one for one in self._leaving if one not in self._listeners)
            self._leaving.clear()
            for one in leaving:
                self._subscribed.pop(one, None)
            if leaving and self._pubsub is not None:
                with translated(self._shown):
                    await self._pubsub.unsubscribe(*leaving)

    async def _listen(self) -> None:
        """Distribute messages; after a lost connection, subscribe to all channels on a new one."""
        delays = _RECONNECT.delays()
        while True:
            pubsub = self._pubsub
            try:
                if pubsub is None:
                    async with self._changing:
                        if not self._listeners:
                            return
                        if self._pubsub is None:
                            await self._resubscribe()
                    continue
                with translated(self._shown):
                    message = await self._next_message(pubsub)
                delays = _RECONNECT.delays()
                if message is not None:
                    self._distribute(message)
            except QueueError:
                async with self._changing:
                    if self._pubsub is pubsub:
                        await self._drop()
                await asyncio.sleep(next(delays))

    async def _next_message(self, pubsub: PubSub) -> dict[str, Any] | None:
        """Return the next message. After a silence, send a PING: nothing else shows that a connection is broken."""
        timings = self._gateway.timings
        message: dict[str, Any] | None = await pubsub.get_message(timeout=timings.silence)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=timings.ping)
            if message is None:
                raise ReplyTimeout(f"no answer on the connection for notifications within {timings.ping:g} s")
        return message

    # The methods below are called with the lock held.

    async def _add(self, names: Collection[bytes]) -> None:
        if self._pubsub is not None:
            with suppress(Unavailable), translated(self._shown):
                await self._pubsub.subscribe(*names)
                return
        await self._resubscribe()

    async def _resubscribe(self) -> None:
        """Subscribe to all channels that have listeners, on a new connection."""
        await self._drop()
        pubsub = await self._gateway.subscription()
        try:
            with translated(self._shown):
                await pubsub.subscribe(*self._listeners)
        except BaseException:
            await pubsub.aclose()
            raise
        self._pubsub = pubsub

    async def _drop(self) -> None:
        lost, self._pubsub = self._pubsub, None
        if lost is not None:
            await lost.aclose()

    def _distribute(self, message: dict[str, Any]) -> None:
        channel: bytes = message["channel"]
        if message["type"] == "subscribe" and channel in self._subscribed:
            if self._subscribed[channel].is_set():  # confirmed again: notifications in between were missed
                for listener in self._listeners.get(channel, ()):
                    listener(channel, LOST)
            self._subscribed[channel].set()
        elif message["type"] == "message":
            for listener in self._listeners.get(channel, ()):
                listener(channel, message["data"])


def _put(queue: asyncio.Queue[bytes], _: bytes, notification: bytes) -> None:
    """Put a notification into a queue. If too many wait, `LOST` replaces them all."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        notification = LOST
    queue.put_nowait(notification)
