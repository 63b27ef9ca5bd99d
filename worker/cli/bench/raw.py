"""The raw client: hiredis on one connection of redis-py, which only connects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import hiredis
import redis
from redis.crc import key_slot

from ....queues import Gateway, Refused
from ....queues.transport import COMMAND_TIMEOUT, sync_client, translated
from ....queues.transport.cluster.topology import discover_topology

__all__ = ["Command", "RawClient", "raw_client"]

Command = tuple[str | bytes | int, ...]


class RawClient:
    """Commands and their replies, unchanged."""

    def __init__(self, connection: redis.Connection) -> None:
        """connection: must be connected and speak RESP2."""
        self._socket: Any = connection._sock  # it has no public name; all else in redis-py costs time
        self._reader = hiredis.Reader()

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Carry out commands in one round trip. Raises `hiredis.ReplyError` where one was refused."""
        self._socket.sendall(b"".join([hiredis.pack_command(command) for command in commands]))  # type: ignore[arg-type]  # its stub says: a tuple of one
        replies: list[Any] = []
        while len(replies) < len(commands):
            received = self._socket.recv(65_536)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._reader.feed(received)
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                replies.append(reply)
        return replies


@contextmanager
def raw_client(gateway: Gateway, key: str) -> Iterator[RawClient]:
    """Connect to the server, in a cluster to the node that serves the key. Raises `Unavailable`, `Refused`."""
    address, node = gateway.address, None
    with translated(address.shown):
        if address.clustered:
            node = discover_topology(address, address.nodes, timeout=COMMAND_TIMEOUT).serving(key_slot(key.encode()))
        with closing(sync_client(address, gateway.socket, node=node)) as client:
            try:
                yield RawClient(client.connection_pool.get_connection())
            except hiredis.HiredisError as error:
                raise Refused(f"{address.shown} refused a command of the raw client: {error}") from error
