"""The one way by which commands reach Redis.

Everything else in Perdure submits commands here and awaits their replies; what goes out together, on which
connection, and what is asked again after a lost reply, is decided in this file alone.

Repeatable means: asked twice, it does no more than asked once. Reads are, and so is every script of Perdure, by
design (enqueue by id, settle by fence, record by value). A repeatable command whose reply was lost is asked again
for `patience` seconds; any other raises `Unavailable` at once, and its caller finds out what became of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import redis.asyncio
from redis.asyncio.client import PubSub
from redis.exceptions import NoScriptError, RedisError, ResponseError

from .address import Address
from .connection import COMMAND_TIMEOUT, async_client, translated, wire_connection
from .embedded import EmbeddedServer
from .errors import Refused, Unavailable
from .scripts import Script, loaded_scripts
from .wire import Argument, ClientWire, Command, PipelinedWire, Wire

__all__ = ["BLOCK", "Argument", "Command", "Gateway", "Reader"]

OLDEST_SERVER: Final = (6, 2)

BLOCK: Final = 5.0
"""Seconds for which a blocking read waits on the server before it asks again."""

_FIRST_DELAY: Final = 0.02
"""Seconds before a command is asked again for the first time."""

_READ_MARGIN: Final = 10.0
"""Seconds a blocking read may take beyond BLOCK before its connection is taken for dead."""

_TROUBLE: Final = (RedisError, OSError)
"""What the client library raises."""


class Gateway:
    """Commands, scripts and pipelines on one server."""

    clustered = False
    """Whether the server is a cluster, where a command stays within one slot."""

    def __init__(self, address: Address, *, patience: float = 3.0) -> None:
        """`patience`: seconds for which a repeatable command is asked again before `Unavailable` is raised."""
        self.address = address
        self.patience = patience
        self._embedded = EmbeddedServer(address.directory) if address.directory is not None else None
        self._client: redis.asyncio.Redis | None = None
        self._open_wire: Wire | None = None
        self._borrowed = False

    @classmethod
    def over(cls, client: redis.asyncio.Redis) -> Gateway:
        """A gateway over a client that is there already, such as a fake one; it is not checked and not closed."""
        gateway = cls(Address("redis://borrowed"))
        client.response_callbacks.clear()
        gateway._client = client
        gateway._open_wire = ClientWire(client)
        gateway._borrowed = True
        return gateway

    async def open(self) -> None:
        """Connect and check the server; `Unavailable` or `Refused` says what is wrong."""
        socket = await self._join()
        self._client = async_client(self.address, socket)
        self._open_wire = PipelinedWire(wire_connection(self.address, socket), COMMAND_TIMEOUT)
        try:
            await self._check_version()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        wire, self._open_wire = self._open_wire, None
        with anyio.CancelScope(shield=True):
            if wire is not None:
                await wire.close()
            if client is not None and not self._borrowed:
                await client.aclose()
            if self._embedded is not None:
                await anyio.to_thread.run_sync(self._embedded.leave)

    async def _join(self) -> Path | None:
        if self._embedded is None:
            return None
        return await anyio.to_thread.run_sync(self._embedded.ensure)

    @property
    def socket(self) -> Path | None:
        """The embedded server's socket; None for any other server."""
        return None if self._embedded is None else self._embedded.socket

    async def _check_version(self) -> None:
        try:
            info: bytes = await self.command("INFO", "server")
        except Refused as error:
            if "permission" in str(error).lower():
                return  # a managed server may hide INFO; what is too old will refuse its first command
            raise
        found = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        version = found.get("redis_version", "")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < OLDEST_SERVER:
            oldest = ".".join(map(str, OLDEST_SERVER))
            raise Refused(f"{self.address.shown} is Redis {version or '?'}: Perdure needs {oldest} or newer")

    # commands

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        """Carry out one command; returns the raw reply. node_of: on the node of a cluster that has this key."""
        try:
            return await self._wire.submit(command)
        except _TROUBLE as error:
            return await self._again(error, lambda: self._wire.submit(command), repeatable)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Carry out one script atomically; all of Perdure's are repeatable."""
        try:
            return await self._wire.submit(("EVALSHA", script.sha, len(keys), *keys, *args))
        except _TROUBLE as error:
            return await self._again(error, lambda: self._evaluate(script, keys, args), True)

    async def _evaluate(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        try:
            return await self._wire.submit(("EVALSHA", script.sha, len(keys), *keys, *args))
        except NoScriptError:
            return await self._wire.submit(("EVAL", script.source, len(keys), *keys, *args))

    async def load_scripts(self) -> None:
        """Make the server know every script of this process, in one round trip."""
        await self.pipeline([("SCRIPT", "LOAD", script.source) for script in loaded_scripts()])

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Carry out commands in order and in one round trip, not atomically. All must be repeatable.

        A command that the server refused raises `Refused`, after all were carried out.
        """

        try:
            return await self._together(commands)
        except _TROUBLE as error:
            replies: list[Any] = await self._again(error, lambda: self._together(commands), True)
            return replies

    async def _together(self, commands: Sequence[Command]) -> list[Any]:
        replies = await asyncio.gather(*map(self._wire.submit, commands), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    @property
    def _wire(self) -> Wire:
        if self._open_wire is None:
            raise Unavailable(
                f"the connection to {self.address.shown} is not open: use 'async with' around what needs it"
            )
        return self._open_wire

    async def _again(self, error: BaseException, call: Callable[[], Awaitable[Any]], repeatable: bool) -> Any:
        """After a call failed: when it may be repeated and repeating may help, again, until patience ends."""
        deadline, delay = time.monotonic() + self.patience, _FIRST_DELAY
        while True:
            if not (repeatable and isinstance(error, NoScriptError)):
                try:
                    with translated(self.address.shown):
                        raise error
                except Unavailable:
                    if not repeatable or time.monotonic() + delay > deadline or self._open_wire is None:
                        raise
                await anyio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
                delay = min(delay * 2, 1.0)
                await self._join()
            try:
                return await call()
            except _TROUBLE as another:
                error = another

    # connections of their own

    def reader(self, key: str | None = None) -> Reader:
        """A connection for blocking reads; in a cluster, to the node that has the key."""
        if self._borrowed:
            return Reader(self._client_or_fail(), self, borrowed=True)
        return Reader(async_client(self.address, self.socket, timeout=BLOCK + _READ_MARGIN, connections=1), self)

    def pubsub(self) -> PubSub:
        """A connection for subscriptions."""
        return self._client_or_fail().pubsub()

    def _client_or_fail(self) -> redis.asyncio.Redis:
        if self._client is None:
            raise Unavailable(f"the connection to {self.address.shown} is not open")
        return self._client


class Reader:
    """One connection for reads that block, and the way to end such a read from outside."""

    def __init__(self, client: redis.asyncio.Redis, gateway: Gateway, *, borrowed: bool = False) -> None:
        self._client = client
        self._borrowed = borrowed
        self._gateway = gateway
        self._client_id: int | None = None

    async def read(self, *command: Argument) -> Any:
        """Carry out one blocking read. Not repeatable: `Unavailable` means that the reply may be lost."""
        try:
            with translated(self._gateway.address.shown):
                if self._client_id is None:
                    self._client_id = int(await self._client.execute_command("CLIENT", "ID"))
                return await self._client.execute_command(*command)
        except BaseException:
            self._client_id = None
            raise

    async def interrupt(self) -> None:
        """End the read that is waiting, as if nothing had come; what has come is returned to its caller."""
        if self._client_id is not None:
            await self._gateway.command("CLIENT", "UNBLOCK", self._client_id)

    async def close(self) -> None:
        if not self._borrowed:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()


def is_missing_group(error: Refused) -> bool:
    """Whether a stream's consumer group is not there (a new queue, or a server that was emptied)."""
    cause = error.__cause__
    return isinstance(cause, ResponseError) and "NOGROUP" in str(cause)
