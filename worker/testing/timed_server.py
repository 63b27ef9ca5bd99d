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
from collections.abc import Callable, Collection, Iterator, Sequence
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

_NOTICE_MS: Final = 3000
"""Milliseconds that a worker has for the notice of a task that it has ended, see watched.lua."""

_LAUNCH_MS: Final = 5000
"""Milliseconds that a worker has to launch the next children of a join, see notify_join.lua."""

_QUIET: Final = 0.03
"""Seconds without a command after which no release of a limit is under way: it takes several commands in a row."""

_SHOWN: Final = 5
"""Tasks of a partition that are named."""


@dataclass(slots=True)
class Work:
    """Work on the queues of the workers that are connected.

    Attributes:
        served: whether there is such a worker.
        left: what is due now and has not ended, in words; some of it, if that is much.
        due: when the next of the other tasks is due, or the lease of a lost worker expires, in seconds since 1970.
    """

    served: bool
    left: list[str] = field(default_factory=list)
    due: float = math.inf


class TimedServer:
    """One server, which runs in a `with` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.time = ServerTime()
        self.sockets: set[_Socket] = set()
        self.tags: set[bytes] = set()
        """Hash tags of the keys in commands so far, with the braces."""
        self.registries: set[bytes] = set()
        """Keys of the registries of running processes."""
        self.last_command = time.monotonic()
        """Host time of the last command of a client."""
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
        for tag in self._partitions():
            for entry, owner, idle, _ in self._pending(tag + b":ready"):
                if owner in workers:
                    yield tag + b":ready", owner, entry, idle

    def _extend(self, skipped: int) -> None:
        """Let registrations last longer by the milliseconds that a step skips, and pass for as recent as before."""
        workers = self._workers()
        for key in [tag + b":seen" for tag in self._partitions()]:
            if key in self._items:
                last, space, entry = self._execute("GET", key).partition(b" ")
                self._execute("SET", key, b"%d" % (int(last) + skipped) + space + entry, "KEEPTTL")
                self._prolong(key, skipped)
        if workers:
            self._renew_schedules(skipped)
        for key in [key for key in self.registries if key in self._items]:
            _, _, name = key.partition(b"}:registry:")
            if name.startswith(b"worker:") and name[7:] in workers:
                for field_name in ("seen", "progress"):
                    if self._execute("HEXISTS", key, field_name):
                        self._execute("HINCRBY", key, field_name, skipped)
            elif name in (b"workers", b"supervisors") or name.startswith(b"sharing:"):
                found = self._execute("ZRANGE", key, 0, -1, "WITHSCORES")
                for member, score in zip(found[::2], found[1::2], strict=True):
                    if float(score) > 0 and (name != b"workers" or member in workers):
                        self._execute("ZINCRBY", key, skipped, member)
            elif not name.startswith(b"supervisor:"):
                continue
            self._prolong(key, skipped)

    def _renew_schedules(self, skipped: int) -> None:
        for namespace in self._namespaces():
            for name in self._execute("ZRANGE", namespace + b":schedules", 0, -1):
                if self._execute("HEXISTS", schedule := namespace + b":schedule:" + name, "seen"):
                    self._execute("HINCRBY", schedule, "seen", skipped)

    def _prolong(self, key: bytes, skipped: int) -> None:
        left = self._execute("PTTL", key)
        if left > 0:
            self._execute("PEXPIRE", key, left + skipped)

    # work

    def work(self, only: Collection[str] | None = None) -> Work:
        """Return the work that is left for the workers that are connected, as of now.

        only: ids of the tasks to look at among those that are due later; None for all.
        """
        return self.run(lambda: self._work(only))

    def _work(self, only: Collection[str] | None) -> Work:
        workers, lease = self._workers(), self._lease()
        found = Work(served=bool(workers))
        for tag in self._served():
            queue = tag.decode("utf-8", "replace").split(":")[1]
            if tag + b":seen" not in self._items:  # its first look restarts the leases of lost workers
                found.left.append(f"no worker has looked at queue {queue!r} yet")
            self._add_scheduled(found, queue, tag, only)
            self._add_messages(found, queue, tag + b":ready", workers, lease)
        for namespace in self._namespaces():
            self._add_schedules(found, namespace + b":schedules")
        return found

    def _namespaces(self) -> set[bytes]:
        """Return the tags of the namespaces whose queues are served and that have schedules."""
        tags = {tag.split(b":")[0] + b"}" for tag in self._served()}
        return {tag for tag in tags if tag + b":schedules" in self._items}

    def _add_schedules(self, found: Work, schedules: bytes) -> None:
        now = math.floor(self.time.now() * 1000)
        for name, score in self._scored("ZRANGE", schedules, 0, -1, "WITHSCORES"):
            if score <= now:
                found.left.append(f"schedule {name.decode('utf-8', 'replace')} is due, and not fired")
            else:
                found.due = min(found.due, math.ceil(score) / 1000)

    def _scored(self, *command: str | bytes | int) -> Iterator[tuple[bytes, float]]:
        reply = self._execute(*command)
        for member, score in zip(reply[::2], reply[1::2], strict=True):
            yield member, float(score)

    def _add_scheduled(self, found: Work, queue: str, tag: bytes, only: Collection[str] | None) -> None:
        due, now = tag + b":due", math.floor(self.time.now() * 1000)
        words = {
            due: (now, "is due, and not started"),
            tag + b":outbox": (now + _NOTICE_MS, "has ended, and others are not notified"),
        }
        for key, (until, text) in words.items():
            for member in self._execute("ZRANGEBYSCORE", key, "-inf", until, "LIMIT", 0, _SHOWN):
                task_id = member.removeprefix(CANCEL_REQUEST).decode("utf-8", "replace")
                found.left.append(f"task {task_id} of queue {queue!r} {text}")
        if only is None:
            later = self._execute("ZRANGEBYSCORE", due, f"({now}", "+inf", "WITHSCORES", "LIMIT", 0, 1)[1:]
        else:
            later = [score for task_id in only if (score := self._execute("ZSCORE", due, task_id)) is not None]
        for ring, look in self._scored("ZRANGE", tag + b":rings", 0, 0, "WITHSCORES"):
            quiet = time.monotonic() - self.last_command > _QUIET or look < now + 1000
            if look <= now or not quiet:  # a token that was just released makes an earlier look
                limits = ring.decode("utf-8", "replace")
                found.left.append(f"tasks of queue {queue!r} wait for limit {limits}")
            else:
                later.append(look)
        found.due = min([found.due, *(math.ceil(float(score)) / 1000 for score in later)])
        for join in self._execute("ZRANGEBYSCORE", tag + b":joins", "-inf", now + _LAUNCH_MS):
            if any(name.startswith(b"l:") for name in self._execute("HKEYS", tag + b":join:" + join)):
                parent = join.decode("utf-8", "replace").partition(":")[0]
                found.left.append(f"children of task {parent} of queue {queue!r} are being launched")

    def _add_messages(self, found: Work, queue: str, ready: bytes, workers: set[bytes], lease: float) -> None:
        for group in self._execute("XINFO", "GROUPS", ready) if ready in self._items else ():
            known = dict(zip(group[::2], group[1::2], strict=True))
            if known[b"name"] == GROUP.encode():
                after = b"(" + known[b"last-delivered-id"]
                if self._execute("XRANGE", ready, after, "+", "COUNT", 1):
                    found.left.append(f"a task of queue {queue!r} is queued")
        for entry, owner, idle, _ in self._pending(ready):
            expires = lease - idle / 1000
            if owner in workers or is_reserved(owner.decode("utf-8", "replace")) or expires <= 0:
                found.left.append(f"message {entry.decode()} of queue {queue!r} is with {owner.decode()}")
            else:
                found.due = min(found.due, self.time.now() + expires + 0.001)

    def _pending(self, stream: bytes) -> Sequence[Any]:
        if stream not in self._items:
            return []
        found = self._execute("XPENDING", stream, GROUP, "-", "+", _PAGE)
        return found if isinstance(found, list) else []  # a stream without its group

    def _partitions(self) -> list[bytes]:
        """Return the tags of all partitions that have a ready stream."""
        return [tag for tag in self.tags if tag + b":ready" in self._items]

    def _served(self) -> list[bytes]:
        """Return the tags of the partitions of all queues that connected workers have registered for, or read."""
        queues = {tag.rpartition(b":")[0] for socket in self.sockets for tag in socket.read}
        for key in self._registrations():
            namespace, _, _ = key.partition(b"}:")
            for queue in orjson.loads(self._execute("HGET", key, "queues") or b"[]"):
                queues.add(namespace + b":" + queue.encode())
        return [tag for tag in self._partitions() if tag.rpartition(b":")[0] in queues]

    def _lease(self) -> float:
        """Return the shortest lease of the workers that are connected, in seconds."""
        leases = [self._execute("HGET", key, "lease") for key in self._registrations()]
        return min((float(lease) for lease in leases if lease), default=_LEASE)

    def _registrations(self) -> list[bytes]:
        """Return the keys of the workers that are connected."""
        workers = self._workers()
        found = [key for key in self.registries if key.partition(b"}:registry:worker:")[2] in workers]
        return [key for key in found if key in self._items]

    def _workers(self) -> set[bytes]:
        return {worker for socket in self.sockets for worker in socket.workers}

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
"""Replies to questions about the server, as of a durable one, so that no weakness is logged."""


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
        self.read: set[bytes] = set()
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
        self._owner.last_command = time.monotonic()
        if name in _FINDINGS:
            self.put_response(_FINDINGS[name](fields))
            return
        for argument in fields[1:]:
            if argument.startswith(b"{"):
                tag, end, key = argument.partition(b"}:")
                if end:
                    self._owner.tags.add(tag + b"}")
                if key.startswith(b"registry:"):
                    self._owner.registries.add(argument)
        if name.endswith(b"SUBSCRIBE"):
            self._subscribes = True
        elif name == b"XREADGROUP":
            self.workers.add(fields[3])
            self.read.update(field[:-6] for field in fields if field.endswith(b":ready"))
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
