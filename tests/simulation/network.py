"""Network of the simulated world: connections that carry bytes in order, late, or not at all.

A connection has two directions, each of which keeps its order, as TCP does; two connections know nothing of each other.
So what was written to a lost connection may arrive after what was written to the next one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .loop import Machine, SimulatedLoop, current

__all__ = ["LATENCY", "Connection", "Host", "Network", "Trap", "connector"]

LATENCY: Final = (0.00005, 0.0006)
"""Seconds that bytes travel."""


class Host(Protocol):
    """A server at an address."""

    machine: Machine
    up: bool

    def accept(self, connection: Connection) -> Callable[[bytes], None]:
        """Return the function that gets the bytes of a new connection."""
        ...

    def closed(self, connection: Connection) -> None:
        """Learn that the client has closed the connection, or was lost."""
        ...


@dataclass
class Network:
    """All connections of a world, and what is wrong with them.

    Attributes:
        held: Machines whose bytes wait, in both directions, until the line is repaired.
        traps: What waits for bytes that contain something: a function that gets the connection and the bytes in place
            of the server, by what they contain.
        sent: Digest of all bytes that clients and servers have sent, each with its time.
    """

    loop: SimulatedLoop

    def __post_init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.connections: list[Connection] = []
        self.held: set[Machine] = set()
        self.traps: list[tuple[bytes, Trap]] = []
        self.count = 0
        self.sent = hashlib.sha1(usedforsecurity=False)

    def open(self, name: str, receive: Callable[[bytes], None], lost: Callable[[Exception | None], None]) -> Connection:
        """Open a connection from the running machine. Raises `ConnectionRefusedError`."""
        host = self.hosts[name]
        if not host.up:
            raise ConnectionRefusedError(111, "connection refused")
        self.count += 1
        connection = Connection(self, self.count, current(), host, receive, lost)
        self.connections.append(connection)
        return connection

    def of(self, machine: Machine) -> list[Connection]:
        """Return the connections of a machine, oldest first."""
        return [one for one in self.connections if one.machine is machine]

    def is_deaf(self, machine: Machine) -> bool:
        """Return whether a machine waits for a reply that is lost, which it notices after a while."""
        return any(one.is_deaf for one in self.of(machine))

    def hold(self, machine: Machine) -> None:
        """Let bytes of a machine wait from now on."""
        self.held.add(machine)

    def repair(self, machine: Machine) -> None:
        """Deliver the bytes that waited, in order."""
        self.held.discard(machine)
        for connection in self.of(machine):
            connection.resume()


class Connection:
    """One connection of a client with a server."""

    def __init__(
        self,
        network: Network,
        number: int,
        machine: Machine,
        host: Host,
        receive: Callable[[bytes], None],
        lost: Callable[[Exception | None], None],
    ) -> None:
        self.network = network
        self.number = number
        self.machine = machine
        self.host = host
        self.receive, self.lost = receive, lost
        self.open = True  # for the client
        self.accepted = True  # for the server
        self.on_close: Callable[[], None] | None = None
        """Called when the client closes the connection."""
        loop = network.loop
        # The client's callbacks belong to its main loop or to the thread that blocks on the connection.
        self._to_client = _Direction(network, machine, copy_context())
        self._to_server = _Direction(network, machine, loop.context_of(host.machine))
        self._feed = host.accept(self)

    def __hash__(self) -> int:
        return self.number

    def write(self, data: bytes) -> None:
        """Send bytes to the server."""
        if self.open and not self.machine.dead:
            self._note(b">", data)
            self._to_server.send(self._arrive, bytes(data))

    def reply(self, data: bytes) -> None:
        """Send bytes to the client."""
        if self.accepted:
            self._note(b"<", data)
            self._to_client.send(self._deliver, data)

    def close(self) -> None:
        """Close the connection from the client's side. The server learns it after the bytes that were written."""
        if self.open:
            self.open = False
            self._to_server.send(self._hang_up)
            if self.on_close is not None:
                self.on_close()

    @property
    def is_deaf(self) -> bool:
        """Whether the answers of the server are lost, and the client has not noticed it yet."""
        return self.open and self._to_client.dead

    def cut(self, late: float | None = None, data: bytes = b"") -> None:
        """Break the connection.

        Args:
            late: Seconds until the bytes on their way to the server arrive; None loses them.
            data: Bytes that have just arrived, and arrive late instead.
        """
        if late is None:
            self._to_server.drop()
        else:
            self._to_server.put_back(self.deliver, data)
            self._to_server.delay(late)
        self._to_server.send(self._hang_up)
        self._to_client.drop()
        self._to_client.send(self._break)

    def swallow(self) -> None:
        """Lose everything that the server answers from now on, without a sign."""
        self._to_client.drop()
        self._to_client.dead = True

    def reset(self) -> None:
        """End the connection from the server's side, as its end does."""
        self.accepted = False
        self._to_server.drop()
        self._to_client.send(self._break)
        self._forget()

    def resume(self) -> None:
        self._to_server.resume()
        self._to_client.resume()

    def _note(self, direction: bytes, data: bytes) -> None:
        self.network.sent.update(b"%d%b%r %b" % (self.number, direction, self.network.loop.now, data))

    def _arrive(self, data: bytes) -> None:
        for trap in self.network.traps:
            if trap[0] in data and trap[1](self, data):
                self.network.traps.remove(trap)
                return
        self.deliver(data)

    def deliver(self, data: bytes) -> None:
        """Let the server have bytes."""
        if self.accepted:
            self._feed(data)

    def _deliver(self, data: bytes) -> None:
        if self.open:
            self.receive(data)

    def _hang_up(self) -> None:
        if self.accepted:
            self.accepted = False
            self.host.closed(self)
        self._forget()

    def _break(self) -> None:
        if self.open:
            self.open = False
            self.lost(ConnectionResetError(104, "connection reset by peer"))

    def _forget(self) -> None:
        if self in self.network.connections:
            self.network.connections.remove(self)


Trap = Callable[[Connection, bytes], bool]
"""Acts on bytes that arrive at a server. Returns whether it did, and has delivered them or not."""


class _Direction:
    """Deliveries of one direction of a connection, in order."""

    def __init__(self, network: Network, machine: Machine, context: Any) -> None:
        self._network = network
        self._machine = machine
        self._context = context
        self._last = 0.0
        self._queue: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self.dead = False

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        if self.dead:
            return
        loop = self._network.loop
        least, most = LATENCY
        self._last = max(self._last, loop.now + least + (most - least) * loop.random.random())
        self._queue.append((self._last, deliver, args))
        if self._machine not in self._network.held:
            loop.call_at(self._last, self._next, context=self._context)

    def _next(self) -> None:
        if self._queue and self._machine not in self._network.held and self._queue[0][0] <= self._network.loop.now:
            _, deliver, args = self._queue.pop(0)
            deliver(*args)

    def put_back(self, deliver: Callable[..., None], *args: Any) -> None:
        """Make something the next delivery."""
        self._queue.insert(0, (self._network.loop.now, deliver, args))

    def drop(self) -> None:
        self._queue.clear()

    def delay(self, seconds: float) -> None:
        """Deliver what is on its way so many seconds later."""
        self._queue = [(at + seconds, deliver, args) for at, deliver, args in self._queue]
        self._last += seconds
        self.resume()

    def resume(self) -> None:
        now = self._network.loop.now
        for at, _, _ in self._queue:
            self._network.loop.call_at(max(at, now), self._next, context=self._context)


class _Transport(asyncio.Transport):
    """Transport of an asyncio connection."""

    def __init__(self, network: Network, name: str, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._protocol: Any = protocol
        self._closing = False
        self._connection = network.open(name, self._receive, self._lost)
        self._loop = network.loop

    def _receive(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def _lost(self, error: Exception | None) -> None:
        self._closing = True
        self._protocol.connection_lost(error)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        self._connection.write(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._connection.close()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None:
        """Go on: the replies of a run fit into memory."""

    def resume_reading(self) -> None:
        """Go on."""

    def get_write_buffer_size(self) -> int:
        return 0


def connector(network: Network) -> Callable[..., Any]:
    """Return what `create_connection` of the loop does."""

    async def connect(factory: Any, host: str, port: int) -> tuple[_Transport, asyncio.BaseProtocol]:
        await _reach(network)
        protocol = factory()
        transport = _Transport(network, host, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    return connect


async def _reach(network: Network) -> None:
    """Wait for the handshake of TCP, which a machine without a line does not get."""
    await asyncio.sleep(sum(LATENCY))
    while current() in network.held:  # noqa: ASYNC110 - TCP sends its first segment again, too
        await asyncio.sleep(0.2)
