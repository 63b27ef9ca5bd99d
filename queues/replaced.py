"""Hearing from sentinels that another server has become the primary, and leaving the former one at once.

A primary that is replaced while it lives, for maintenance or because the sentinels did not hear of it for a moment, is
told so some ten seconds later. Until then it takes writes, all of which it drops when it becomes a replica. Sentinels
publish the change as soon as they know it (`+switch-master`, see the Sentinel client specification of Redis), so one
thread per process listens, and cuts the connections that still lead to the former primary. Their users see a lost
connection, and look the primary up anew.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .address import Node

__all__ = ["Replaced", "cut_from", "cut_socket", "replaced"]

_HEARING: Final = 1.0
"""Seconds of listening after which it is looked whether there is still a connection to cut."""

_ANSWERING: Final = 5.0
"""Seconds that a sentinel may take to answer before another one is listened to."""

_PAUSE: Final = 1.0
"""Seconds before another sentinel is listened to when one was lost."""

_MEMORY: Final = 15.0
"""Seconds for which a former primary is not believed to be the primary: what other sentinels need to hear of it."""

_CHANGED: Final = "+switch-master"


class Connection(Protocol):
    """One that follows the primary; where it leads, it says itself."""

    host: str
    port: int


class Replaced:
    """What was said of one service, and the connections that follow its primary."""

    def __init__(self, service: str, urls: Sequence[str]) -> None:
        """urls: of the sentinels."""
        self._service = service
        self._urls = list(urls)
        self._lock = threading.Lock()
        self._cuts: WeakKeyDictionary[Connection, Callable[[], object]] = WeakKeyDictionary()
        self._former: Node | None = None
        self._until = 0.0
        self._listening = False

    def follow(self, connection: Connection, cut: Callable[[], object]) -> None:
        """Have `cut` called, from a thread, when the server that the connection leads to is replaced."""
        with self._lock:
            self._cuts[connection] = cut
            if not self._listening:
                self._listening = True
                threading.Thread(target=self._listen, name="perdure sentinels", daemon=True).start()

    def was(self, node: Node) -> bool:
        """Whether the node was replaced lately: a sentinel that names it has not heard of that yet."""
        with self._lock:
            return node == self._former and time.monotonic() < self._until

    def _listen(self) -> None:
        while self._is_wanted():
            urls = random.sample(self._urls, len(self._urls))
            for url in urls:
                with suppress(redis.RedisError, OSError):
                    self._hear(url)
                if not self._is_wanted():
                    return
                time.sleep(_PAUSE)

    def _is_wanted(self) -> bool:
        with self._lock:
            self._listening = bool(self._cuts)
            return self._listening

    def _hear(self, url: str) -> None:
        """Listen to one sentinel, for as long as it answers and anybody wants to know."""
        options = {"socket_timeout": _ANSWERING, "socket_connect_timeout": _ANSWERING, "protocol": 2}
        with (
            redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options) as client,
            client.pubsub(ignore_subscribe_messages=True) as told,
        ):
            told.subscribe(_CHANGED)
            while self._is_wanted():
                message = told.get_message(timeout=_HEARING)
                if message is not None:
                    self._take(message["data"].decode())

    def _take(self, said: str) -> None:
        """said: service, host and port of the former primary, host and port of the new one."""
        service, *former_and_new = said.split(" ")
        if service != self._service or len(former_and_new) != 4:
            return
        former = Node(former_and_new[0], int(former_and_new[1]))
        with self._lock:
            self._former, self._until = former, time.monotonic() + _MEMORY
            cuts = [cut for connection, cut in self._cuts.items() if (connection.host, connection.port) == former]
        for cut in cuts:
            with suppress(OSError, RuntimeError):  # it is closed already, or its event loop is
                cut()


_LOCK = threading.Lock()
_KNOWN: dict[tuple[str, tuple[str, ...]], Replaced] = {}


def replaced(service: str, urls: Sequence[str]) -> Replaced:
    """The one listener of this process for a service and its sentinels."""
    with _LOCK:
        return _KNOWN.setdefault((service, tuple(urls)), Replaced(service, urls))


def cut_from(loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> Callable[[], object]:
    """What cuts a connection of an event loop from another thread."""
    return lambda: loop.call_soon_threadsafe(transport.abort)


def cut_socket(found: socket.socket) -> Callable[[], object]:
    """What cuts a connection that a thread reads, from another thread; TLS has no say in it."""
    return lambda: socket.socket.shutdown(found, socket.SHUT_RDWR)
