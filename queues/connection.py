"""Clients for an address, and what their errors mean here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.retry import Retry

from .address import Address
from .errors import BadAddress, Refused, Unavailable

__all__ = ["COMMAND_TIMEOUT", "CONNECT_TIMEOUT", "async_client", "sync_client", "translated", "wire_connection"]

CONNECT_TIMEOUT: Final = 5.0
"""Seconds to wait for a connection."""

COMMAND_TIMEOUT: Final = 10.0
"""Seconds to wait for the reply to a command that does not block."""

_NOTHING_BEHIND_OUR_BACK: Final = AsyncRetry(NoBackoff(), 0, supported_errors=())
"""No retry, and no reconnection as its preparation: a subscription would share it with whoever reads."""


def _options(
    address: Address, socket: Path | None, timeout: float | None, retry: Retry | AsyncRetry
) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "decode_responses": False,
        "protocol": 2,
        "retry": retry,
    }
    url = f"unix://{socket}" if socket is not None else address.url
    return url, options


def async_client(
    address: Address, socket: Path | None, *, timeout: float | None = COMMAND_TIMEOUT, connections: int = 16
) -> redis.asyncio.Redis:
    """A client on a pool of its own. Replies come as the server sends them: no reply is reshaped on the way."""
    url, options = _options(address, socket, timeout, _NOTHING_BEHIND_OUR_BACK)
    with _bad_address(address):
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=connections, timeout=None, **options)
    client = redis.asyncio.Redis.from_pool(pool)
    client.response_callbacks.clear()
    return client


def wire_connection(address: Address, socket: Path | None) -> AbstractConnection:
    """One connection, not yet connected, that leaves all timing to its user."""
    url, options = _options(address, socket, None, _NOTHING_BEHIND_OUR_BACK)
    with _bad_address(address):
        connection: AbstractConnection = redis.asyncio.ConnectionPool.from_url(url, **options).make_connection()
    return connection


def sync_client(address: Address, socket: Path | None, *, timeout: float | None = COMMAND_TIMEOUT) -> redis.Redis:
    """The same for a thread that has no event loop."""
    url, options = _options(address, socket, timeout, Retry(NoBackoff(), 0))
    with _bad_address(address):
        client = redis.Redis.from_url(url, **options)
    client.response_callbacks.clear()
    return client


@contextmanager
def _bad_address(address: Address) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RedisError) as error:
        raise BadAddress(f"{address.shown}: {error}") from None


_CREDENTIALS = (AuthenticationError, AuthorizationError, NoPermissionError)


@contextmanager
def translated(shown: str) -> Iterator[None]:
    """Turn the client library's errors into Perdure's: `Unavailable` may pass by itself, `Refused` will not."""
    try:
        yield
    except _CREDENTIALS as error:
        raise Refused(f"{shown} refused the credentials: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError, ReadOnlyError, OSError) as error:
        if isinstance(error.__cause__, _CREDENTIALS):  # how a connection reports what its handshake met
            raise Refused(f"{shown} refused the credentials: {error.__cause__}") from error
        raise Unavailable(f"cannot reach Redis at {shown}: {_reason(error)}") from error
    except RedisError as error:
        if isinstance(error, OutOfMemoryError) or any(mark in str(error) for mark in _PASSING):
            raise Unavailable(f"Redis at {shown} cannot serve now: {error}") from error
        raise Refused(f"{shown} refused a command: {error}") from error


_PASSING = ("OOM ", "MISCONF ", "NOREPLICAS ", "MASTERDOWN ", "BUSY Redis")
"""Marks of refusals that end when somebody mends the server: memory or disk is full, a replica is missing, a script
that nobody of Perdure sent is running.
"""


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return re.sub(r"^Error (?:-?\d+ )?(?:while )?connecting to \S+?\.? ", "", text)
