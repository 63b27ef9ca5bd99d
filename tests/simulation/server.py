"""A Redis server in memory, with the real Lua scripts, that can lose its last writes.

The engine is fakeredis with Lua, which the conformance suite compares with real servers script by script. Here it gets
the virtual time, replies over the simulated network, and an append-only file: the commands that wrote something, each
with its time. A restart executes those again that were kept.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import cache
from hashlib import sha1
from typing import Any, Final

from fakeredis import FakeServer
from fakeredis._helpers import SimpleError
from fakeredis.model import is_write_command
from perdure.worker.testing.fake_engine import (
    INFO,
    EngineSocket,
    at_time,
    encoded,
    engine_runtime,
    new_engine,
)

from .loop import Machine, SimulatedLoop
from .network import Connection

__all__ = ["SimulatedServer"]

_READS: Final = frozenset(
    b"AUTH CLIENT COMMAND CONFIG DBSIZE ECHO EXISTS GET HELLO HGET HGETALL HKEYS HLEN HMGET HSCAN INFO LLEN LRANGE"
    b" MEMORY MGET PING PSUBSCRIBE PTTL PUBLISH PUNSUBSCRIBE SCAN SCARD SCRIPT SELECT SISMEMBER SMEMBERS SUBSCRIBE"
    b" TIME TTL TYPE UNSUBSCRIBE WAIT XINFO XLEN XPENDING XRANGE XREVRANGE ZCARD ZCOUNT ZRANDMEMBER ZRANGE"
    b" ZRANGEBYSCORE ZSCORE".split()
)
"""Commands that change nothing that an append-only file keeps."""

EPOCH: Final = 1_800_000_000.0
"""Time of each server at the start of a run, in seconds since 1970."""

_DENY_OOM: Final = (
    "append copy hincrby hincrbyfloat hmset hset hsetnx incr incrby lpush mset psetex restore rpush sadd set setex"
    " setnx setrange xadd zadd zincrby"
)
DENY_OOM: Final = frozenset(_DENY_OOM.split())
"""Commands with the flag `denyoom` (COMMAND INFO) that Perdure may use."""

_ADMINISTRATION: Final[dict[bytes, Callable[[list[bytes]], Any]]] = {
    b"INFO": lambda fields: INFO,
    b"CONFIG": lambda fields: [fields[2], b"everysec"],
    b"COMMAND": lambda fields: [[name] for name in fields[2:]],
}
"""Replies to questions about the server, which the engine does not answer as a server does."""

_SNAPSHOT_EVERY: Final = 80
"""Writes between two snapshots, from which a restart begins."""


class SimulatedServer:
    """One server."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.machine = loop.machine(name)
        self.up = True
        self.full = False
        """Whether its memory is full, so that it refuses writes that need some."""
        self.alter: Callable[[bytes], bytes] = lambda source: source
        """Returns what is executed in place of a script, for defects that a test puts into it."""
        self.limits: dict[bytes, bytes] = {}
        """Parts of scripts and what replaces them: limits that a run with few tasks reaches."""
        self.translate: Callable[[Machine, bytes], bytes] = lambda machine, data: data
        """Returns what is executed in place of the commands of a machine."""
        self.offset = 0.0
        """Seconds by which the clock is ahead of the virtual time."""
        self.scripts: dict[bytes, bytes] = {}
        """Sources by digest, of all scripts that were ever loaded."""
        self.log: list[tuple[float, list[bytes]]] = []
        """Writes with their times by the clock of the server."""
        self._written: list[float] = []
        """Virtual times of these writes."""
        self.executed = 0
        self.lost: list[list[bytes]] = []
        """Writes that were lost."""
        self.lost_at = -math.inf
        """Virtual time of the last start without some of them."""
        self.on_write: Callable[[list[bytes]], None] = lambda fields: None
        self.before_script: Callable[[list[bytes]], Any] = lambda fields: None
        """Called with each call of a script; what it returns is passed to `after_script`, unless it is None."""
        self.after_script: Callable[[list[bytes], Any, Any, bool], None] = lambda fields, before, reply, wrote: None
        """Called with the call, what was found before it, the reply, and whether the script has written."""
        self.on_script_error: Callable[[str], None] = lambda text: None
        """Called with the error of a script that ends in its middle."""
        self.on_start: Callable[[], None] = lambda: None
        self._altered: dict[bytes, bytes] = {}
        self._snapshots: list[tuple[int, bytes]] = []
        self._sockets: dict[Connection, _Socket] = {}
        self._engine = new_engine(self.now)

    # clock

    @property
    def now(self) -> float:
        """Seconds since 1970 by the clock of the server."""
        return EPOCH + self.loop.now + self.offset

    @property
    def items(self) -> dict[bytes, Any]:
        """The stored items by key."""
        return self._engine.dbs[0]._dict

    # connections

    def accept(self, connection: Connection) -> Callable[[bytes], None]:
        socket = self._sockets[connection] = _Socket(self, connection)
        return lambda data: socket.feed(self.translate(connection.machine, data))

    def closed(self, connection: Connection) -> None:
        socket = self._sockets.pop(connection, None)
        if socket is not None:
            socket.end()

    # faults

    def stop(self) -> None:
        """End the server; its connections break."""
        self.up = False
        for connection, socket in [*self._sockets.items()]:
            socket.end()
            connection.reset()
        self._sockets.clear()

    def start(self, losing: float = 0.0) -> None:
        """Start the server with what its append-only file has, without the writes of the last seconds.

        The file ends when the server stops, so the seconds count back from the last write.
        """
        kept, times = len(self.log), self._written
        while kept and losing and times[kept - 1] > times[-1] - losing:
            kept -= 1
        if losing:
            self.lost_at = self.loop.now
        self.lost += [fields for _, fields in self.log[kept:]]
        del self.log[kept:], self._written[kept:]
        while self._snapshots and self._snapshots[-1][0] > kept:
            self._snapshots.pop()
        self._engine = new_engine(self.now)
        begin = 0
        if self._snapshots:
            begin, stored = self._snapshots[-1]
            _restore(self._engine, stored)
        if begin < kept:
            replayed = _Socket(self, None)
            for at, fields in self.log[begin:]:
                with at_time(at):
                    replayed.execute(fields)
        self.up = True
        self.on_start()

    def flush_scripts(self) -> None:
        """Forget all scripts, as SCRIPT FLUSH does."""
        self._engine.script_cache.clear()

    def executed_source(self, script: bytes) -> bytes:
        """Return what is executed in place of a script."""
        found = self._altered.get(script)
        if found is None:
            found = self.alter(script)
            for part, other in self.limits.items():
                found = found.replace(part, other)
            self._altered[script] = found
        return found

    # reading for checks, outside of the world

    def replay(self, at: float, command: list[bytes], scripts: dict[bytes, bytes]) -> Any:
        """Execute a command at once, outside of the network, at a time of the server's clock; return its reply."""
        self.scripts |= scripts
        with engine_runtime(self.loop.random), at_time(at):
            return _Socket(self, None).execute(command)

    def record(self, at: float, fields: list[bytes], *, ago: float = 0.0) -> None:
        """Append a write to the file. ago: Virtual seconds since it was written."""
        if fields[0].upper() == b"EVALSHA":
            digest = fields[1].lower()
            self.scripts[digest] = self._engine.script_cache[digest]
        self.log.append((at, fields))
        self._written.append(self.loop.now - ago)
        self.on_write(fields)
        if len(self.log) % _SNAPSHOT_EVERY == 0:
            self._snapshots.append((len(self.log), _snapshot(self._engine)))


class _Socket(EngineSocket):
    """The server's end of a connection; without one, it keeps its replies."""

    def __init__(self, server: SimulatedServer, connection: Connection | None) -> None:
        self._owner = server
        self._connection = connection
        self._waiting: list[bytes] = []  # the read that blocks, without its wait
        self._replied: Any = None
        self._wrote = False  # whether the script that runs has written
        self.replies: list[Any] = []
        super().__init__(server._engine)
        if connection is None:
            server._engine.sockets.remove(self)

    def __hash__(self) -> int:
        return 0 if self._connection is None else self._connection.number

    def _time(self) -> float:
        return self._owner.now

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._owner.loop.call_soon(callback, context=self._context)

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        return self._owner.loop.call_later(seconds, callback, context=self._context)

    @property
    def _context(self) -> Any:
        return self._owner.loop.context_of(self._owner.machine)

    def _may_block(self) -> bool:
        return self._connection is not None

    def _on_blocked_reply(self, at: float) -> None:
        self._owner.record(at, self._waiting)

    def execute(self, fields: list[bytes]) -> Any:
        """Execute a command and return its reply."""
        self.replies.clear()
        self._process_command(fields)
        return self.replies[0] if self.replies else None

    def _process_command(self, fields: list[bytes]) -> None:
        name = fields[0].upper()
        if self._connection is None:
            fields = self._by_source(fields)
            super()._process_command(fields)
            return
        self._owner.executed += 1
        if name in _ADMINISTRATION:
            self.put_response(_ADMINISTRATION[name](fields))
            return
        if name == b"SCRIPT" and fields[1] == b"LOAD":  # each worker loads all scripts
            self.put_response(self._load(fields[2]))
            return
        if name == b"SCRIPT" and fields[1] == b"EXISTS":
            self.put_response([int(digest.lower() in self._server.script_cache) for digest in fields[2:]])
            return
        at = self._owner.now
        before = self._owner.before_script(fields) if name == b"EVALSHA" else None
        super()._process_command(fields)
        if before is not None:
            self._owner.after_script(fields, before, self._replied, self._wrote)
        if name == b"EVALSHA" and isinstance(self._replied, SimpleError) and "@user_script" in self._replied.value:
            self._owner.on_script_error(self._replied.value)
        if name not in _READS:
            written = _unblocked(fields)
            if self._blocked:
                self._waiting = written
            elif not isinstance(self._replied, Exception):
                self._owner.record(at, written)

    def _run_command(self, func: Any, sig: Any, args: list[Any], from_script: bool) -> Any:
        """Refuse what needs memory while the server is full; Redis lets a script go on once it has written."""
        name = sig.name.lower()
        if self._owner.full and self._connection is not None and name in DENY_OOM and not (from_script and self._wrote):
            return SimpleError("OOM command not allowed when used memory > 'maxmemory'.")
        self._wrote = from_script and (self._wrote or is_write_command(name.encode()))
        return super()._run_command(func, sig, args, from_script)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        self._wrote = False
        altered = self._owner.executed_source(script)
        if altered is not script:
            self._load(script)
        return super().eval(altered, numkeys, *keys_and_args)

    def _load(self, script: bytes) -> bytes:
        digest = _digest(script)
        self._server.script_cache[digest] = script
        return digest

    def _by_source(self, fields: list[bytes]) -> list[bytes]:
        if fields[0].upper() != b"EVALSHA" or fields[1].lower() not in self._owner.scripts:
            return fields
        return [b"EVAL", self._owner.scripts[fields[1].lower()], *fields[2:]]

    def put_response(self, msg: Any) -> None:
        self._replied = msg
        if self._connection is None:
            self.replies.append(msg)
        else:
            self._connection.reply(encoded(msg))


def _snapshot(engine: FakeServer) -> bytes:
    return pickle.dumps((engine.dbs[0]._dict, engine.dbs[0]._expiry_heap))


def _restore(engine: FakeServer, stored: bytes) -> None:
    items, expiry = pickle.loads(stored)
    engine.dbs[0]._dict.update(items)
    engine.dbs[0]._expiry_heap.extend(expiry)


@cache
def _digest(script: bytes) -> bytes:
    return sha1(script, usedforsecurity=False).hexdigest().encode()


def _unblocked(fields: list[bytes]) -> list[bytes]:
    """Return a read of a stream without its wait."""
    if fields[0].upper() != b"XREADGROUP":
        return fields
    names = [field.upper() for field in fields]
    if b"BLOCK" not in names:
        return fields
    at = names.index(b"BLOCK")
    return [*fields[:at], *fields[at + 2 :]]


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
