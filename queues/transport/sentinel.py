"""Sentinel: connections that look the primary up each time they are made.

Follows the Sentinel client specification of Redis: ask the sentinels in turn, the first answer counts, the one that
answered is asked first from then on; whoever is reached that way says by ROLE whether it is a primary, and if it is
not, the connection fails, and the next one looks again. When the sentinels tell that the primary was replaced, the
connections to the former one are cut (replaced.py).

Hearing from sentinels that another server has become the primary, and leaving the former one at once.

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
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import anyio.to_thread
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.retry import Retry

from ..errors import Refused
from .address import Node

__all__ = [
    "FailoverListener",
    "Sentinels",
    "abort_socket",
    "abort_transport",
    "failover_listener",
    "followed_async",
    "followed_sync",
]

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


class FailoverListener:
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
_KNOWN: dict[tuple[str, tuple[str, ...]], FailoverListener] = {}


def failover_listener(service: str, urls: Sequence[str]) -> FailoverListener:
    """The one listener of this process for a service and its sentinels."""
    with _LOCK:
        return _KNOWN.setdefault((service, tuple(urls)), FailoverListener(service, urls))


def abort_transport(loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> Callable[[], object]:
    """What cuts a connection of an event loop from another thread."""
    return lambda: loop.call_soon_threadsafe(transport.abort)


def abort_socket(found: socket.socket) -> Callable[[], object]:
    """What cuts a connection that a thread reads, from another thread; TLS has no say in it."""
    return lambda: socket.socket.shutdown(found, socket.SHUT_RDWR)


_ASKING: Final = 1.0
"""Seconds that one sentinel has to answer."""


class Sentinels:
    """The sentinels that watch one service."""

    def __init__(self, service: str, sentinels: list[tuple[Node, str]]) -> None:
        """sentinels: each with its plain URL."""
        self.service = service
        self.failover_listener = failover_listener(service, [url for _, url in sentinels])
        self._sentinels = sentinels

    def locate(self) -> Node:
        """Where the primary is now; blocks for up to _ASKING seconds per sentinel that does not answer.

        Raises the client library's error where no sentinel answers, and `Refused` where what they answer is of no use.
        """
        silent: list[str] = []
        for sentinel in list(self._sentinels):
            node, url = sentinel
            try:
                found = self._ask(url)
            except (AuthenticationError, NoPermissionError) as error:
                raise Refused(
                    f"the sentinel {node} refused the credentials ({error}): "
                    "write ?sentinel_username=...&sentinel_password=..."
                ) from error
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                silent.append(f"{node}: {error}")
            except ResponseError as error:
                raise Refused(
                    f"{node} is not a sentinel ({error}): write redis:// for one server, "
                    "redis+cluster:// for a Redis Cluster"
                ) from error
            else:
                if found is not None and self.failover_listener.was(found):
                    silent.append(f"{node}: it has not heard that {found} was replaced")
                elif found is not None:
                    self._prefer(sentinel)
                    return found
        if silent:
            raise ConnectionLost(f"no sentinel knows where {self.service!r} is; {'; '.join(silent)}")
        raise Refused(f"the sentinels know no service {self.service!r}: check the name after the last host")

    def _ask(self, url: str) -> Node | None:
        with redis.Redis.from_url(
            url, socket_timeout=_ASKING, socket_connect_timeout=_ASKING, protocol=2, retry=Retry(NoBackoff(), 0)
        ) as client:
            client.response_callbacks.clear()
            reply: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return None if reply is None else Node(reply[0].decode(), int(reply[1]))

    def _prefer(self, sentinel: tuple[Node, str]) -> None:
        self._sentinels = [sentinel, *(other for other in self._sentinels if other is not sentinel)]

    def rotate(self) -> None:
        """What the first sentinel said was wrong: ask another one first."""
        self._sentinels = [*self._sentinels[1:], *self._sentinels[:1]]


def _check_role(sentinels: Sentinels, role: Any, host: str, port: int) -> None:
    if role[0] not in (b"master", "master"):
        sentinels.rotate()
        raise ConnectionLost(f"{Node(host, port)} is not the primary of {sentinels.service!r} any more")


class _SentinelConnection(redis.asyncio.Connection):
    """A connection to wherever the primary is when it is made."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._primary = sentinels
        super().__init__(redis_connect_func=self._greet, **options)

    async def _connect(self) -> None:
        self.host, self.port = await anyio.to_thread.run_sync(self._primary.locate, abandon_on_cancel=True)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def _greet(self, _: Any) -> None:
        if self._writer is not None:
            self._primary.failover_listener.follow(
                self, abort_transport(asyncio.get_running_loop(), self._writer.transport)
            )
        await self.on_connect()
        await self.send_command("ROLE", check_health=False)
        try:
            role = await self.read_response()
        except NoPermissionError:
            return  # an ACL may keep ROLE to itself; a replica will refuse the first write
        _check_role(self._primary, role, self.host, int(self.port))


class _SentinelTlsConnection(_SentinelConnection, redis.asyncio.SSLConnection):
    """The same, encrypted."""


class _SyncSentinelConnection(redis.Connection):
    """The same for a thread that has no event loop."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._primary = sentinels
        super().__init__(redis_connect_func=self._greet, **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._primary.locate()
        return super()._connect()  # type: ignore[no-untyped-call]

    def _greet(self, _: Any) -> None:
        found: Any = self._sock
        self._primary.failover_listener.follow(self, abort_socket(found))
        self.on_connect()  # type: ignore[no-untyped-call]
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        try:
            role = self.read_response()
        except NoPermissionError:
            return
        _check_role(self._primary, role, self.host, int(self.port))


class _SyncSentinelTlsConnection(_SyncSentinelConnection, redis.SSLConnection):
    """The same, encrypted."""


def followed_async(sentinels: Sentinels, *, encrypted: bool) -> dict[str, Any]:
    """Options that make a pool of the asynchronous client connect to the primary."""
    return {"connection_class": _SentinelTlsConnection if encrypted else _SentinelConnection, "sentinels": sentinels}


def followed_sync(sentinels: Sentinels, *, encrypted: bool) -> dict[str, Any]:
    """The same for the synchronous client."""
    return {
        "connection_class": _SyncSentinelTlsConnection if encrypted else _SyncSentinelConnection,
        "sentinels": sentinels,
    }
