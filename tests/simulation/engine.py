"""Engine of the simulated server: fakeredis with one Lua interpreter for all runs, and the time of the server."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, Final
from unittest.mock import patch

import fakeredis._core._database
import fakeredis._helpers
import fakeredis._socket._base
import fakeredis.commands_mixins.hash_mixin
import fakeredis.commands_mixins.scripting_mixin
import fakeredis.commands_mixins.server_mixin
import fakeredis.commands_mixins.sortedset_mixin
import fakeredis.model._client_info
import fakeredis.model._expiring_members_set
import fakeredis.model._stream
from fakeredis import FakeServer
from fakeredis._core import Database
from fakeredis._helpers import SimpleError
from fakeredis._socket._fakesocket import FakeSocket
from fakeredis.model._stream import StreamGroup

__all__ = [
    "DENY_OOM",
    "EPOCH",
    "clock",
    "encoded",
    "engine_runtime",
    "new_engine",
    "restore",
    "set_lua_function",
    "snapshot",
]

_TIMED: Final = (
    fakeredis._helpers,
    fakeredis._socket._base,
    fakeredis.commands_mixins.server_mixin,
    fakeredis.model._client_info,
    fakeredis.model._stream,
)
"""Modules of the engine that ask for the time."""

_RANDOM: Final = (
    fakeredis._core._database,
    fakeredis.commands_mixins.hash_mixin,
    fakeredis.commands_mixins.sortedset_mixin,
    fakeredis.model._expiring_members_set,
)
"""Modules of the engine that draw random members."""

_VERSION: Final = (7, 2)

EPOCH: Final = 1_800_000_000.0


class _Milliseconds(Database):
    """Database whose keys expire in whole milliseconds, as those of Redis do: after, not at, the stored one."""

    def expired(self, item: Any) -> bool:
        return item.expireat is not None and int(item.expireat * 1000 + 0.01) < int(self.time * 1000)


_LIST_PENDING: Final = StreamGroup.pending
_CLAIM: Final = StreamGroup.claim


def _list_pending(group: StreamGroup, idle: int | None, *others: Any) -> list[list[Any]]:
    """List pending entries as Redis does: those that were idle for at least `idle` milliseconds.

    After the clock was set back, an entry is idle for 0 milliseconds, not for less.
    """
    found = _LIST_PENDING(group, idle - 1 if idle else None, *others)
    return [[entry, worker, max(0, since), count] for entry, worker, since, count in found]


def _claim(group: StreamGroup, least_idle: int, *others: Any, **options: Any) -> Any:
    """Claim entries as Redis does, which asks for no time if the least one is 0: the clock may have been set back."""
    return _CLAIM(group, least_idle or -sys.maxsize, *others, **options)


class _Callbacks(list[Callable[[], None]]):
    """Callbacks in the order in which they were added; a set would order them by their addresses."""

    add = list.append


class _Lua:
    """One Lua interpreter for all engines, which compiles each script once and collects garbage seldom."""

    def __init__(self) -> None:
        engine = FakeServer(version=_VERSION, server_type="redis")
        self._runtime = FakeSocket(engine, 0, None, object)._get_server_runtime(engine)
        self.state = {
            name: value for name, value in vars(engine).items() if name.startswith("_lua_") and name != "_lua_runtime"
        }
        self._compiled: dict[bytes | str, Any] = {}

    def execute(self, source: bytes | str) -> Any:
        if source == "collectgarbage()":
            return None
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._compiled[source] = self._runtime.compile(source)
        return compiled()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


_LUA: Final = _Lua()


def set_lua_function(name: str, function: Callable[..., Any]) -> None:
    """Let all scripts of this process call a function."""
    _LUA.globals()[name.encode()] = function


_DENY_OOM: Final = (
    "append copy hincrby hincrbyfloat hmset hset hsetnx incr incrby lpush mset psetex restore rpush sadd set setex"
    " setnx setrange xadd zadd zincrby"
)
DENY_OOM: Final = frozenset(_DENY_OOM.split())
"""Commands with the flag `denyoom` (COMMAND INFO) that Perdure may use."""


def new_engine(now: float) -> FakeServer:
    """Return an empty engine."""
    with clock(now):
        engine = FakeServer(version=_VERSION, server_type="redis")
    engine.dbs[0] = _Milliseconds(engine.lock)
    engine.dbs[0]._change_callbacks = _Callbacks()  # type: ignore[assignment]  # fakeredis declares a set
    engine._lua_runtime = _LUA  # type: ignore[attr-defined]  # fakeredis sets it when a script first runs
    for name, value in _LUA.state.items():
        setattr(engine, name, value)
    return engine


def encoded(reply: Any) -> bytes:
    """Return a reply in RESP 2, https://redis.io/docs/latest/develop/reference/protocol-spec/."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, SimpleError):
        return f"-{reply.value}\r\n".encode()
    if isinstance(reply, bool):
        return b":%d\r\n" % reply
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, (list, tuple)):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    data = reply if isinstance(reply, bytes) else str(reply).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def snapshot(engine: FakeServer) -> bytes:
    return pickle.dumps((engine.dbs[0]._dict, engine.dbs[0]._expiry_heap))


def restore(engine: FakeServer, stored: bytes) -> None:
    items, expiry = pickle.loads(stored)
    engine.dbs[0]._dict.update(items)
    engine.dbs[0]._expiry_heap.extend(expiry)


@contextmanager
def clock(now: float) -> Iterator[None]:
    """Let the engine read this time, in whole microseconds as a server does.

    It is set a little later than that: a number between two milliseconds must not become the one before when the engine
    computes them.
    """
    _TIME.now, former = (round(now * 1e6) + 0.25) / 1e6, _TIME.now
    try:
        yield
    finally:
        _TIME.now = former


class _Time(types.SimpleNamespace):
    now: float = EPOCH

    def time(self) -> float:
        return self.now


_TIME: Final = _Time()


@contextmanager
def engine_runtime(random: Random) -> Iterator[None]:
    """Let the engine read the time of the server that executes, and draw from `random`.

    It also corrects how the engine counts the idle time of pending entries, and leaves out the search for global
    variables before each command of a script, which the conformance suite has.
    """
    with ExitStack() as stack:
        for module in _TIMED:
            stack.enter_context(patch.object(module, "time", _TIME))
        for module in _RANDOM:
            stack.enter_context(patch.object(module, "random", random))
        stack.enter_context(patch.object(StreamGroup, "pending", _list_pending))
        stack.enter_context(patch.object(StreamGroup, "claim", _claim))
        scripting = fakeredis.commands_mixins.scripting_mixin
        stack.enter_context(patch.object(scripting, "_check_for_lua_globals", lambda runtime, expected: None))
        yield
