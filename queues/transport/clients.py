"""Clients of the redis-py library for an address, and translation of their errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.connection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from ..errors import Refused, ServerFull, Unavailable, WrongType
from ..runtime import RUNTIME
from .address import Address, Node
from .pipelining import Command
from .rights import describe_refusal
from .sentinel import followed_async, followed_sync
from .tls import TlsConnection

CONNECT_TIMEOUT: Final = 5.0
"""Seconds to wait for a connection."""

COMMAND_TIMEOUT: Final = 10.0
"""Seconds to wait for the reply to a command that does not block."""

_NO_RETRY: Final = AsyncRetry(NoBackoff(), 0, supported_errors=())
"""Disables retries, and reconnections, which would race with the reader of a subscription."""


def _options(
    address: Address, socket: Path | None, node: Node | None, timeout: float | None, retry: Retry | AsyncRetry
) -> dict[str, Any]:
    """Return the options of a connection. Its timeout is no option of the URL: it would cut blocking reads.

    Args:
        socket: socket of the embedded server. node: node of a cluster.
    """
    options = {"path": str(socket)} if socket is not None else address.options(node)
    fixed = {"socket_timeout": timeout, "decode_responses": False, "protocol": 2, "retry": retry}
    return {"socket_connect_timeout": CONNECT_TIMEOUT} | options | fixed


def _pool_options(address: Address, socket: Path | None, timeout: float | None, node: Node | None) -> dict[str, Any]:
    options = _options(address, socket, node, timeout, _NO_RETRY)
    if address.service is not None:
        return options | followed_async(address)
    kind: type[AbstractConnection] = redis.asyncio.Connection
    if "path" in options:
        kind = redis.asyncio.UnixDomainSocketConnection
    elif address.encrypted:
        kind = TlsConnection
    return options | {"connection_class": kind}


def async_client(
    address: Address,
    socket: Path | None,
    *,
    timeout: float | None = COMMAND_TIMEOUT,
    connections: int = 16,
    node: Node | None = None,
) -> redis.asyncio.Redis:
    """Return a client with its own pool, which returns replies as the server sends them."""
    options: dict[str, Any] = _pool_options(address, socket, timeout, node) | {"max_connections": connections}
    pool = redis.asyncio.BlockingConnectionPool(timeout=None, **options)
    client = redis.asyncio.Redis.from_pool(pool)
    client.response_callbacks.clear()
    return client


def pipelined_connection(address: Address, socket: Path | None, node: Node | None = None) -> AbstractConnection:
    """Return one connection, not yet connected, without timeouts."""
    connection: AbstractConnection = redis.asyncio.ConnectionPool(
        **_pool_options(address, socket, None, node)
    ).make_connection()
    return connection


def sync_client(
    address: Address, socket: Path | None, *, timeout: float | None = COMMAND_TIMEOUT, node: Node | None = None
) -> redis.Redis:
    """Return a synchronous client, which returns replies as the server sends them."""
    options = _options(address, socket, node, timeout, Retry(NoBackoff(), 0))
    if timeout is not None:
        options["socket_connect_timeout"] = min(timeout, options["socket_connect_timeout"])
    if address.service is not None:
        options |= followed_sync(address)
    elif "path" in options:
        options["connection_class"] = redis.UnixDomainSocketConnection
    elif address.encrypted:
        options["connection_class"] = redis.SSLConnection
    if RUNTIME.sync_connection is not None:
        options["connection_class"] = RUNTIME.sync_connection
    client = redis.Redis.from_pool(redis.ConnectionPool(**options))
    client.response_callbacks.clear()
    return client


_CREDENTIALS = (AuthenticationError, AuthorizationError, NoPermissionError)


_DENIED_IN_SCRIPT: Final = ("ACL failure in script", "The user executing the script can't")
"""Texts of the error of a script that calls what its caller may not, of Redis 7.2 and of the versions before."""


def _is_denial(error: BaseException | None) -> bool:
    return isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and any(text in str(error) for text in _DENIED_IN_SCRIPT)
    )


def denied(shown: str, command: Command | None, reply: RedisError) -> Refused:
    """Return the error of a command for which the user has no permissions. command: None if it is not known."""
    what = "a command" if command is None else describe_refusal(command)
    error = Refused(f"{shown} refused {what}: {reply}")
    error.__cause__ = reply
    return error


@contextmanager
def translated(shown: str, command: Command | None = None) -> Iterator[None]:
    """Translate errors of the client library: `Unavailable` is transient, `Refused` is not. command: what was sent."""
    try:
        yield
    except NoPermissionError as error:
        raise denied(shown, command, error) from error
    except NoScriptError as error:
        raise Unavailable(
            f"no worker or operator has loaded the scripts of this version into Redis at {shown} yet",
            "start a worker, or run 'perdure server prepare' as an operator",
        ) from error
    except _CREDENTIALS as error:
        raise Refused(f"{shown} refused the credentials: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError, ReadOnlyError, OSError) as error:
        if isinstance(error.__cause__, _CREDENTIALS):  # an error of the handshake
            raise Refused(f"{shown} refused the credentials: {error.__cause__}") from error
        if isinstance(error.__cause__, Refused):
            raise Refused(str(error.__cause__)) from error
        raise _unreachable(shown, _reason(error)) from error
    except AskError as error:  # also MOVED; a cluster connection follows both
        raise Refused(f"{shown} is a node of a Redis Cluster: write redis+cluster:// or rediss+cluster://") from error
    except RedisError as error:
        if _is_denial(error):
            raise denied(shown, command, error) from error
        if isinstance(error, OutOfMemoryError) or "OOM " in str(error):
            raise ServerFull(shown, _MAXMEMORY if "maxmemory" in str(error) else str(error)) from error
        transient = isinstance(error, (TryAgainError, ClusterDownError))
        if transient or any(prefix in str(error) for prefix in _TRANSIENT):
            raise _cannot_serve(shown, error) from error
        if _USED_UP in str(error):
            raise Refused(
                f"{shown} could not add a message: no id is left in the stream, because another program has added the "
                "largest one; workers replace such a stream once a minute: start a worker, and try again"
            ) from error
        raise (WrongType if is_wrong_type(error) else Refused)(f"{shown} refused a command: {error}") from error


def _cannot_serve(shown: str, error: RedisError) -> Unavailable:
    from ..embedded.files import FULL_DISK

    if any(sign in str(error) for sign in FULL_DISK):
        return Unavailable(
            f"the disk of Redis at {shown} is full ({str(error).rstrip('.')})",
            "free space on its disk; until then it stores nothing new",
        )
    return Unavailable(f"Redis at {shown} cannot serve now: {str(error).rstrip('.')}", _remedy(error))


_USED_UP: Final = "exhausted the last possible ID"
"""Part of the error of XADD after the largest id."""

START_REMEDY: Final = "start the server, or name another one with PERDURE_REDIS_URL (or --redis-url of a command)"


def _unreachable(shown: str, reason: str) -> Unavailable:
    """Return the error of a server that does not answer; of an embedded one, a full disk may be the cause."""
    embedded = shown.removeprefix("embedded:")
    if embedded == shown:
        return Unavailable(f"cannot reach Redis at {shown}: {reason}", START_REMEDY)
    from ..embedded.files import full_disk

    if (full := full_disk(Path(embedded))) is not None:
        return Unavailable(f"cannot reach Redis at {shown}: {full}", "free space there: then it continues")
    return Unavailable(f"cannot reach Redis at {shown}: {reason}", f"see its log, {embedded}/redis.log")


def _remedy(error: RedisError) -> str:
    """Return what to do about a server that refuses to serve for now."""
    return next((remedy for prefix, remedy in _REMEDIES.items() if prefix in str(error)), "try again in a while")


_REMEDIES: Final = {
    "MISCONF ": "see the server's log: it cannot write its data to its disk",
    "NOREPLICAS ": "start its replicas, or lower its min-replicas-to-write",
    "BUSY Redis": "end the script of another program with SCRIPT KILL",
    "LOADING ": "wait until it has loaded its data",
}

_MAXMEMORY: Final = "it uses more than its maxmemory, and its maxmemory-policy forbids evictions"

_TRANSIENT = (
    *("MISCONF ", "NOREPLICAS ", "MASTERDOWN ", "BUSY Redis", "READONLY ", "UNBLOCKED "),
    "access a non local key",
)
"""Parts of transient refusals: memory or disk is full, a replica is missing, a foreign script is running, another
server has become the primary, or a stream of a task has migrated to another node before its record (streams.lua).
"""


def is_read_only(error: BaseException | None) -> bool:
    """Whether a replica refused a write, of a command or of a script (which Redis 6.2 reports differently)."""
    return isinstance(error, ReadOnlyError) or "READONLY " in str(error)


def is_wrong_type(error: BaseException | None) -> bool:
    """Whether a key has a value of another type. Redis 6.2 puts the text of a script in front."""
    return isinstance(error, (ResponseError, WrongType)) and "WRONGTYPE " in str(error)


def was_not_executed(error: BaseException | None) -> bool:
    """Whether the reply means that the command was not executed, so that any command may be sent again."""
    return is_read_only(error) or isinstance(error, (BusyLoadingError, TryAgainError, ClusterDownError))


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return re.sub(r"^Error (?:-?\d+ )?(?:while )?connecting to \S+ ", "", text).rstrip(".")


def is_missing_group(error: Refused) -> bool:
    """Whether a stream's consumer group does not exist: the queue is new, or the server was emptied."""
    cause = error.__cause__
    return isinstance(cause, ResponseError) and "NOGROUP" in str(cause)


def is_denied(error: Refused) -> bool:
    """Whether the user has no permissions for the command."""
    return _is_denial(error.__cause__)
