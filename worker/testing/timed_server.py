"""A Redis server in a thread of this process, with the real Lua scripts, whose time a test can set forward.

Clients reach it over TCP, so workers, producers and subprocesses use it like any other server. Its time is that of the
host at the start, and flows like it; `step` adds to it.

A step passes for what is stored, not for running processes, which had no chance to renew anything: leases and
registrations of workers that are connected move along.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

import orjson

from ...queues.delivery.due_set import CANCEL_REQUEST
from ...queues.keys import GROUP, is_reserved
from ...queues.pubsub import LOST
from .fake_engine import INFO, EngineSocket, at_time, encoded, new_engine, timed_engine

T = TypeVar("T")

_LEASE: Final = 30.0
"""Seconds of the lease of a worker that has not registered."""

_PAGE: Final = 10_000
"""Messages of a partition that are looked at."""


@dataclass(slots=True)
class Work:
    """Work on the queues of the workers that are connected.

    Attributes:
        served: whether there is such a worker.
        left: what is due now and has not ended, in words.
        due: the time at which each of the others is due, in seconds since 1970, by task id; that of '' at which the
            lease of a lost worker expires.
    """

    served: bool
    left: list[str] = field(default_factory=list)
    due: dict[str, float] = field(default_factory=dict)


class TimedServer:
    """One server, which runs in a `with` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.time = ServerTime()
        self.sockets: set[_Socket] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(timed_engine())
        self.engine = new_engine(self.time.now())
        self._own = _Socket(self, None)
        self._thread = threading.Thread(target=self.loop.run_forever, name="perdure test server", daemon=True)
        self._thread.start()
        starting = self.loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)

        async def start() -> asyncio.Server:
            return await starting

        self._server = asyncio.run_coroutine_threadsafe(start(), self.loop).result()
        return self

    def __exit__(self, *raised: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._stack.close()

    async def _close(self) -> None:
        self._server.close()
        for socket in [*self.sockets]:
            socket.abort()
        await asyncio.sleep(0)  # the transports end in the next tick

    @property
    def url(self) -> str:
        """The address of the server."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"redis://{host}:{port}/0"

    def run(self, function: Callable[[], T]) -> T:
        """Call a function between two commands, in the thread of the server; return its result."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def execute(self, *fields: str | bytes | int) -> Any:
        """Execute a command from any thread, and return its reply."""
        return self.run(lambda: self._execute(*fields))

    def _execute(self, *fields: str | bytes | int) -> Any:
        with at_time(self.time.now()):
            return self._own.execute([value if isinstance(value, bytes) else str(value).encode() for value in fields])

    # time

    def step(self, seconds: float) -> None:
        """Set the time forward, and wake all that waits for a time."""
        if seconds > 0:
            self.run(lambda: self._step(seconds))

    def step_to(self, moment: float) -> float:
        """Set the time forward to `moment`, in seconds since 1970, unless it has passed; return the seconds skipped."""
        seconds = max(0.0, moment - self.time.now())
        self.step(seconds)
        return seconds

    def _step(self, seconds: float) -> None:
        leases = [*self._leases()]
        self._extend(math.ceil(seconds * 1000))
        self.time.skip(seconds)
        for stream, owner, entry, idle in leases:
            self._execute("XCLAIM", stream, GROUP, owner, 0, entry, "IDLE", idle, "JUSTID")
        for tag in self._served():
            for why in ("due", "released"):
                if self._execute("EXISTS", tag + b":nudge"):
                    self._execute("XADD", tag + b":nudge", "MAXLEN", 16, "*", "why", why)
        for channel in self._execute("PUBSUB", "CHANNELS"):
            self._execute("PUBLISH", channel, LOST)  # as after a lost connection: each listener looks again

    def _leases(self) -> Iterator[tuple[bytes, bytes, bytes, int]]:
        """Return the messages that connected workers have: stream, worker, entry, milliseconds since the renewal."""
        workers = self._workers()
        for stream in self._keys(b":ready"):
            for entry, owner, idle, _ in self._pending(stream):
                if owner in workers:
                    yield stream, owner, entry, idle

    def _extend(self, skipped: int) -> None:
        """Let registrations last longer by the milliseconds that a step skips, and pass for as recent as before."""
        workers = self._workers()
        for key in [*self._items]:
            _, _, name = key.partition(b"}:")
            if name == b"seen":
                last, space, entry = self._execute("GET", key).partition(b" ")
                self._execute("SET", key, b"%d" % (int(last) + skipped) + space + entry, "KEEPTTL")
            elif name.startswith(b"registry:worker:") and name[16:] in workers:
                for field_name in ("seen", "progress"):
                    if self._execute("HEXISTS", key, field_name):
                        self._execute("HINCRBY", key, field_name, skipped)
            elif name in (b"registry:workers", b"registry:supervisors") or name.startswith(b"registry:sharing:"):
                for member, score in self._scores(key).items():
                    if score > 0 and (name != b"registry:workers" or member.encode() in workers):
                        self._execute("ZINCRBY", key, skipped, member)
            elif not name.startswith(b"registry:supervisor:"):
                continue
            self._prolong(key, skipped)

    def _prolong(self, key: bytes, skipped: int) -> None:
        left = self._execute("PTTL", key)
        if left > 0:
            self._execute("PEXPIRE", key, left + skipped)

    # work

    def work(self) -> Work:
        """Return the work that is left for the workers that are connected, as of now."""
        return self.run(self._work)

    def _work(self) -> Work:
        now = math.floor(self.time.now() * 1000)
        workers = self._workers()
        lease = self._lease()
        found = Work(served=bool(workers))
        for tag in self._served():
            queue = tag.decode("utf-8", "replace").split(":")[1]
            if tag + b":seen" not in self._items:  # its first look restarts the leases of lost workers
                found.left.append(f"no worker has looked at queue {queue!r} yet")
            for member in self._scores(tag + b":outbox"):
                found.left.append(f"the end of task {member} of queue {queue!r} is not delivered")
            for member, score in self._scores(tag + b":due").items():
                if score <= now:
                    found.left.append(f"task {member} of queue {queue!r} is due, and not started")
                else:
                    found.due[member] = math.ceil(score) / 1000
            ready = tag + b":ready"
            groups = self._execute("XINFO", "GROUPS", ready) if ready in self._items else []
            for group in groups:
                known = dict(zip(group[::2], group[1::2], strict=True))
                if known[b"name"] == GROUP.encode():
                    new = self._execute("XRANGE", ready, b"(" + known[b"last-delivered-id"], "+", "COUNT", _PAGE)
                    if new:
                        found.left.append(f"tasks of queue {queue!r} are queued ({len(new)})")
            for entry, owner, idle, _ in self._pending(ready):
                expires = lease * 1000 - idle
                if owner in workers or is_reserved(owner.decode("utf-8", "replace")) or expires <= 0:
                    found.left.append(f"message {entry.decode()} of queue {queue!r} is with {owner.decode()}")
                else:
                    found.due[""] = min(found.due.get("", math.inf), math.ceil(now + expires + 1) / 1000)
        return found

    def _scores(self, key: bytes) -> dict[str, float]:
        """Return the task ids of a sorted set, and their scores."""
        if key not in self._items:
            return {}
        found = self._execute("ZRANGE", key, 0, -1, "WITHSCORES")
        return {
            member.removeprefix(CANCEL_REQUEST).decode("utf-8", "replace"): float(score)
            for member, score in zip(found[::2], found[1::2], strict=True)
        }

    def _pending(self, stream: bytes) -> Sequence[Any]:
        if stream not in self._items:
            return []
        found = self._execute("XPENDING", stream, GROUP, "-", "+", _PAGE)
        return found if isinstance(found, list) else []  # a stream without its group

    def _served(self) -> list[bytes]:
        """Return the tags of the partitions of all queues that connected workers have registered for, or read."""
        queues = {tag.rpartition(b":")[0] for socket in self.sockets for tag in socket.tags}
        for key in [*self._items]:
            tag, _, name = key.partition(b"}:registry:worker:")
            if name and name in self._workers():
                for queue in orjson.loads(self._execute("HGET", key, "queues") or b"[]"):
                    queues.add(tag + b":" + queue.encode())
        return [tag for key in self._keys(b":ready") if (tag := key[:-6]).rpartition(b":")[0] in queues]

    def _lease(self) -> float:
        """Return the shortest lease of the workers that are connected, in seconds."""
        leases = [
            self._execute("HGET", key, "lease")
            for key in [*self._items]
            if key.partition(b"}:registry:worker:")[2] in self._workers()
        ]
        return min((float(lease) for lease in leases if lease), default=_LEASE)

    def _workers(self) -> set[bytes]:
        return {worker for socket in self.sockets for worker in socket.workers}

    def _keys(self, end: bytes) -> list[bytes]:
        return [key for key in self._items if key.endswith(end) and key.startswith(b"{")]

    @property
    def _items(self) -> dict[bytes, Any]:
        return self.engine.dbs[0]._dict


class ServerTime:
    """Time of a server: that of the host at the start, what has passed since, and what was skipped."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time in seconds since 1970. May be called from any thread."""
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


_FINDINGS: Final[dict[bytes, Callable[[list[bytes]], Any]]] = {
    b"INFO": lambda fields: INFO,
    b"CONFIG": lambda fields: [fields[2], b"always"],
    b"COMMAND": lambda fields: [[name] for name in fields[2:]],
}
"""Replies to questions about the server: a test is told of no weakness of its own server."""


_KINDS: Final = ("subscribe", "unsubscribe", "message")
_PUSHES: Final = frozenset(f"{start}{kind}".encode() for start in ("", "p", "s") for kind in _KINDS)
"""First items of what a subscriber gets, which RESP 3 marks."""


class _Socket(EngineSocket):
    """The server's end of a connection; without a connection, that of the server itself, which keeps the reply."""

    def __init__(self, server: TimedServer, connection: _Connection | None) -> None:
        self._owner = server
        self._connection = connection
        self._reply: Any = None
        self._subscribes = False
        self.workers: set[bytes] = set()
        """Workers that use the connection."""
        self.tags: set[bytes] = set()
        """Tags of the partitions that are read over the connection."""
        super().__init__(server.engine)

    def __hash__(self) -> int:
        return id(self)

    def execute(self, fields: list[bytes]) -> Any:
        """Execute a command and return its reply."""
        self._reply = None
        super()._process_command(fields)
        return self._reply

    def abort(self) -> None:
        """Break the connection."""
        if self._connection is not None:
            self._connection.abort()

    def _process_command(self, fields: list[bytes]) -> None:
        name = fields[0].upper()
        if name in _FINDINGS:
            self.put_response(_FINDINGS[name](fields))
            return
        if name.endswith(b"SUBSCRIBE"):
            self._subscribes = True
        elif name == b"XREADGROUP":
            self.workers.add(fields[3])
            self.tags.update(field[:-6] for field in fields if field.endswith(b":ready"))
        elif name == b"EVALSHA" and len(fields) > 3:
            _, _, worker = fields[3].partition(b"}:registry:worker:")
            self.workers |= {worker} if worker else set()
        super()._process_command(fields)

    def put_response(self, msg: Any) -> None:
        if self._connection is None:
            self._reply = msg
            return
        data = encoded(msg, resp3=self._resp_version == 3)
        if self._resp_version == 3 and self._subscribes and isinstance(msg, list) and msg and msg[0] in _PUSHES:
            data = b">" + data[1:]
        self._connection.write(data)

    def _may_block(self) -> bool:
        return self._connection is not None

    def _time(self) -> float:
        return self._owner.time.now()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._owner.loop.call_soon(callback)

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._owner.loop.call_later(seconds, callback)


class _Connection(asyncio.Protocol):
    """A TCP connection of a client."""

    def __init__(self, server: TimedServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._socket = _Socket(self._server, self)
        self._server.sockets.add(self._socket)

    def data_received(self, data: bytes) -> None:
        self._socket.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.sockets.discard(self._socket)
        self._socket.end()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()
