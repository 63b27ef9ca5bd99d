"""Sentinel: connections that look the primary up, and are closed when another server becomes the primary.

The look-up follows the Sentinel client specification of Redis. The sentinels are asked in turn, the first answer
counts, and the sentinel that answered is asked first from then on. The server found must confirm by ROLE that it is a
primary; otherwise the connection fails, and the next one looks again.

A primary that is replaced while it is alive, for maintenance or after a network problem, is demoted some ten seconds
later. Until then it accepts writes, all of which it drops when it becomes a replica. Sentinels publish the change at
once (`+switch-master`, same specification). So one thread per process subscribes to it, and aborts the connections to
the former primary. Their users see a lost connection, and look the primary up again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from ..runtime import RUNTIME
from .address import Address, Node
from .tls import TlsConnection

_logger = logging.getLogger(__name__)

_POLL: Final = 1.0
"""Seconds between checks whether there is still a connection to abort."""

_SUBSCRIBE_TIMEOUT: Final = 5.0
"""Seconds that a sentinel may take to answer before the listener uses another one."""

_RECONNECT_DELAY: Final = 1.0
"""Seconds before the listener uses another sentinel after it has lost one."""

_STALE_FOR: Final = 15.0
"""Seconds for which a former primary is refused as the primary, while other sentinels learn of the failover."""

_CHANNEL: Final = "+switch-master"


class Connection(Protocol):
    """A connection to the primary; host and port are those of its current server."""

    host: str
    port: int


class FailoverListener:
    """A subscription to the failovers of one service, with the connections that lead to its primary."""

    def __init__(self, service: str, sentinels: Sequence[Mapping[str, Any]]) -> None:
        """sentinels: options of a connection to each of the sentinels."""
        self._service = service
        self._sentinels = list(sentinels)
        self._lock = threading.Lock()
        self._aborts: WeakKeyDictionary[Connection, Callable[[], object]] = WeakKeyDictionary()
        self._former: Node | None = None
        self._until = 0.0
        self._listening = False

    def follow(self, connection: Connection, abort: Callable[[], object]) -> None:
        """Call `abort`, from a thread, when the server of this connection is replaced."""
        with self._lock:
            self._aborts[connection] = abort
            if not self._listening:
                self._listening = True
                threading.Thread(target=self._listen, name="perdure sentinels", daemon=True).start()

    def was_replaced(self, node: Node) -> bool:
        """Whether the node was replaced recently; a sentinel that names it does not know of the failover yet."""
        with self._lock:
            return node == self._former and RUNTIME.monotonic() < self._until

    def _listen(self) -> None:
        while self._is_wanted():
            for sentinel in random.sample(self._sentinels, len(self._sentinels)):
                try:
                    self._subscribe(sentinel)
                except (redis.RedisError, OSError):
                    pass  # another sentinel is asked
                except Exception:
                    _logger.exception("could not follow the failovers of %r; trying again", self._service)
                if not self._is_wanted():
                    return
                time.sleep(_RECONNECT_DELAY)

    def _is_wanted(self) -> bool:
        with self._lock:
            self._listening = bool(self._aborts)
            return self._listening

    def _subscribe(self, sentinel: Mapping[str, Any]) -> None:
        """Subscribe to one sentinel, as long as it answers and there are connections to watch."""
        with (
            _client(sentinel, _SUBSCRIBE_TIMEOUT) as client,
            client.pubsub(ignore_subscribe_messages=True) as subscription,
        ):
            subscription.subscribe(_CHANNEL)
            while self._is_wanted():
                message = subscription.get_message(timeout=_POLL)
                if message is not None:
                    self._on_failover(message["data"].decode())

    def _on_failover(self, data: str) -> None:
        """Abort the connections to the former primary. data: service, host and port of the former, of the new one."""
        service, *former_and_new = data.split(" ")
        if service != self._service or len(former_and_new) != 4:
            return
        former = Node(former_and_new[0], int(former_and_new[1]))
        with self._lock:
            self._former, self._until = former, RUNTIME.monotonic() + _STALE_FOR
            aborts = [
                abort for connection, abort in self._aborts.items() if (connection.host, connection.port) == former
            ]
        for abort in aborts:
            with suppress(OSError, RuntimeError):  # the connection or its event loop is closed already
                abort()


_LOCK = threading.Lock()
_LISTENERS: dict[Address, FailoverListener] = {}


def failover_listener(address: Address) -> FailoverListener:
    """Return the process's listener for a service and its sentinels."""
    with _LOCK:
        if address not in _LISTENERS:
            options = [_options(address, node) for node in address.nodes]
            _LISTENERS[address] = FailoverListener(address.service or "", options)
        return _LISTENERS[address]


def _options(address: Address, node: Node) -> dict[str, Any]:
    """Return the options of a connection to one sentinel."""
    kind = redis.SSLConnection if address.encrypted else redis.Connection
    return {**address.sentinel_options(node), "connection_class": kind}


def _client(options: Mapping[str, Any], timeout: float) -> redis.Redis:
    """Return a client of one sentinel. timeout: seconds to connect, and for a reply."""
    limits: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    return redis.Redis.from_pool(redis.ConnectionPool(**options, **limits, protocol=2, retry=Retry(NoBackoff(), 0)))


def abort_transport(loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> Callable[[], object]:
    """Return a function that aborts a connection of an event loop from another thread."""
    return lambda: loop.call_soon_threadsafe(transport.abort)


def abort_socket(found: socket.socket) -> Callable[[], object]:
    """Return a function that aborts a connection that another thread reads, below the TLS layer."""
    return lambda: socket.socket.shutdown(found, socket.SHUT_RDWR)


_QUERY_TIMEOUT: Final = 1.0
"""Seconds that one sentinel may take to answer a query."""


class Sentinels:
    """The sentinels that monitor the service of an address."""

    def __init__(self, address: Address) -> None:
        self.service = address.service or ""
        self.failover_listener = failover_listener(address)
        self._sentinels = [(node, _options(address, node)) for node in address.nodes]

    def locate(self) -> Node:
        """Return the node of the primary. Blocks for up to _QUERY_TIMEOUT seconds per silent sentinel.

        Raises the client library's error if no sentinel answers, and `Refused` if their answers are of no use.
        """
        silent: list[str] = []
        for sentinel in list(self._sentinels):
            node, options = sentinel
            try:
                found = self._ask(options)
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
                if found is not None and self.failover_listener.was_replaced(found):
                    silent.append(f"{node}: it does not know yet that {found} was replaced")
                elif found is not None:
                    self._prefer(sentinel)
                    return found
        if silent:
            raise ConnectionLost(f"no sentinel knows the primary of {self.service!r}; {'; '.join(silent)}")
        raise Refused(f"the sentinels do not monitor {self.service!r}: check the service name after the last host")

    def _ask(self, options: Mapping[str, Any]) -> Node | None:
        with _client(options, _QUERY_TIMEOUT) as client:
            client.response_callbacks.clear()
            reply: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return None if reply is None else Node(reply[0].decode(), int(reply[1]))

    def _prefer(self, sentinel: tuple[Node, dict[str, Any]]) -> None:
        self._sentinels = [sentinel, *(other for other in self._sentinels if other is not sentinel)]

    def rotate(self) -> None:
        """Ask another sentinel first, because the answer of the first one was wrong."""
        self._sentinels = [*self._sentinels[1:], *self._sentinels[:1]]


def _check_role(sentinels: Sentinels, role: Any, host: str, port: int) -> None:
    if role[0] not in (b"master", "master"):
        sentinels.rotate()
        raise ConnectionLost(f"{Node(host, port)} is not the primary of {sentinels.service!r} any more")


class _SentinelConnection(redis.asyncio.Connection):
    """A connection to the server that is the primary when the connection is made."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(redis_connect_func=self._on_connected, **options)

    async def _connect(self) -> None:
        self.host, self.port = await anyio.to_thread.run_sync(self._sentinels.locate, abandon_on_cancel=True)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def _on_connected(self, _: Any) -> None:
        if self._writer is not None:
            self._sentinels.failover_listener.follow(
                self, abort_transport(asyncio.get_running_loop(), self._writer.transport)
            )
        await self.on_connect()
        await self.send_command("ROLE", check_health=False)
        try:
            role = await self.read_response()
        except NoPermissionError:
            return  # an ACL may forbid ROLE; a replica refuses the first write
        _check_role(self._sentinels, role, self.host, int(self.port))


class _SentinelTlsConnection(_SentinelConnection, TlsConnection):
    """A connection to the primary with TLS."""


class _SyncSentinelConnection(redis.Connection):
    """A synchronous connection to the server that is the primary when the connection is made."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(redis_connect_func=self._on_connected, **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.locate()
        return super()._connect()  # type: ignore[no-untyped-call]

    def _on_connected(self, _: Any) -> None:
        found: Any = self._sock
        self._sentinels.failover_listener.follow(self, abort_socket(found))
        self.on_connect()  # type: ignore[no-untyped-call]
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        try:
            role = self.read_response()
        except NoPermissionError:
            return
        _check_role(self._sentinels, role, self.host, int(self.port))


class _SyncSentinelTlsConnection(_SyncSentinelConnection, redis.SSLConnection):
    """A connection to the primary with TLS."""


def followed_async(address: Address) -> dict[str, Any]:
    """Return options that make a pool of the asynchronous client connect to the primary of a service."""
    kind = _SentinelTlsConnection if address.encrypted else _SentinelConnection
    return {"connection_class": kind, "sentinels": Sentinels(address)}


def followed_sync(address: Address) -> dict[str, Any]:
    """Return options that make a pool of the synchronous client connect to the primary of a service."""
    kind = _SyncSentinelTlsConnection if address.encrypted else _SyncSentinelConnection
    return {"connection_class": kind, "sentinels": Sentinels(address)}
