"""Sentinel: connections that look the primary up each time they are made.

Follows the Sentinel client specification of Redis: ask the sentinels in turn, the first answer counts, the one that
answered is asked first from then on; whoever is reached that way says by ROLE whether it is a primary, and if it is
not, the connection fails, and the next one looks again. When the sentinels tell that the primary was replaced, the
connections to the former one are cut (replaced.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import anyio.to_thread
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.retry import Retry

from .address import Node
from .errors import Refused
from .replaced import cut_from, cut_socket, replaced

__all__ = ["Sentinels", "followed_async", "followed_sync"]

_ASKING: Final = 1.0
"""Seconds that one sentinel has to answer."""


class Sentinels:
    """The sentinels that watch one service."""

    def __init__(self, service: str, sentinels: list[tuple[Node, str]]) -> None:
        """sentinels: each with its plain URL."""
        self.service = service
        self.replaced = replaced(service, [url for _, url in sentinels])
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
                if found is not None and self.replaced.was(found):
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

    def distrust(self) -> None:
        """What the first sentinel said was wrong: ask another one first."""
        self._sentinels = [*self._sentinels[1:], *self._sentinels[:1]]


def _check_role(sentinels: Sentinels, role: Any, host: str, port: int) -> None:
    if role[0] not in (b"master", "master"):
        sentinels.distrust()
        raise ConnectionLost(f"{Node(host, port)} is not the primary of {sentinels.service!r} any more")


class _Followed(redis.asyncio.Connection):
    """A connection to wherever the primary is when it is made."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._primary = sentinels
        super().__init__(redis_connect_func=self._greet, **options)

    async def _connect(self) -> None:
        self.host, self.port = await anyio.to_thread.run_sync(self._primary.locate, abandon_on_cancel=True)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def _greet(self, _: Any) -> None:
        if self._writer is not None:
            self._primary.replaced.follow(self, cut_from(asyncio.get_running_loop(), self._writer.transport))
        await self.on_connect()
        await self.send_command("ROLE", check_health=False)
        try:
            role = await self.read_response()
        except NoPermissionError:
            return  # an ACL may keep ROLE to itself; a replica will refuse the first write
        _check_role(self._primary, role, self.host, int(self.port))


class _FollowedTls(_Followed, redis.asyncio.SSLConnection):
    """The same, encrypted."""


class _SyncFollowed(redis.Connection):
    """The same for a thread that has no event loop."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._primary = sentinels
        super().__init__(redis_connect_func=self._greet, **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        self.host, self.port = self._primary.locate()
        return super()._connect()  # type: ignore[no-untyped-call]

    def _greet(self, _: Any) -> None:
        found: Any = self._sock
        self._primary.replaced.follow(self, cut_socket(found))
        self.on_connect()  # type: ignore[no-untyped-call]
        self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
        try:
            role = self.read_response()
        except NoPermissionError:
            return
        _check_role(self._primary, role, self.host, int(self.port))


class _SyncFollowedTls(_SyncFollowed, redis.SSLConnection):
    """The same, encrypted."""


def followed_async(sentinels: Sentinels, *, encrypted: bool) -> dict[str, Any]:
    """Options that make a pool of the asynchronous client connect to the primary."""
    return {"connection_class": _FollowedTls if encrypted else _Followed, "sentinels": sentinels}


def followed_sync(sentinels: Sentinels, *, encrypted: bool) -> dict[str, Any]:
    """The same for the synchronous client."""
    return {"connection_class": _SyncFollowedTls if encrypted else _SyncFollowed, "sentinels": sentinels}
