"""Engine of servers in memory: fakeredis with one Lua interpreter for all servers, at the time of each server.

The clock of `perdure.testing` and the simulation of the project (tests/simulation) run on it. Importing this module
needs the extra `testing`.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, Final, Protocol
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
import hiredis
from fakeredis import FakeServer
from fakeredis._core import Database
from fakeredis._helpers import NoResponse, SimpleError
from fakeredis._socket._fakesocket import FakeSocket
from fakeredis.model._stream import StreamGroup

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

INFO: Final = b"redis_version:7.2.16\r\nredis_mode:standalone\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
"""Reply to the command of this name."""


class _Milliseconds(Database):
    """Database whose keys expire in whole milliseconds, as those of Redis do: after, not at, the stored one."""

    def expired(self, item: Any) -> bool:
        return item.expireat is not None and _millisecond(item.expireat) < _millisecond(self.time)

    def schedule_expiry(self, key: bytes, expireat: float | None) -> None:
        """Remove a key at once whose lifetime has ended when it is set, as with PEXPIRE key 0."""
        super().schedule_expiry(key, expireat)
        if expireat is not None and _millisecond(expireat) <= _millisecond(self.time):
            self._dict.pop(key, None)


def _millisecond(seconds: float) -> int:
    """Return the millisecond of a time. `at_time` keeps it away from the next one by more than the error of a float."""
    return int(seconds * 1000)


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


def new_engine(now: float) -> FakeServer:
    """Return an empty engine."""
    with at_time(now):
        engine = FakeServer(version=_VERSION, server_type="redis")
    engine.dbs[0] = _Milliseconds(engine.lock)
    engine.dbs[0]._change_callbacks = _Callbacks()  # type: ignore[assignment]  # fakeredis declares a set
    engine._lua_runtime = _LUA  # type: ignore[attr-defined]  # fakeredis sets it when a script first runs
    for name, value in _LUA.state.items():
        setattr(engine, name, value)
    return engine


def encoded(reply: Any, *, resp3: bool = False) -> bytes:
    """Return a reply in RESP, https://redis.io/docs/latest/develop/reference/protocol-spec/."""
    if isinstance(reply, SimpleError):
        return f"-{reply.value}\r\n".encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, (list, tuple)):
        return b"*%d\r\n" % len(reply) + b"".join([encoded(item, resp3=resp3) for item in reply])
    return _encoded_as_3(reply) if resp3 else _encoded_as_2(reply)


def _encoded_as_2(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    data = reply if isinstance(reply, bytes) else str(reply).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _encoded_as_3(reply: Any) -> bytes:
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, float):
        return f",{reply:.17g}\r\n".encode()
    if isinstance(reply, dict):
        items = [encoded(item, resp3=True) for pair in reply.items() for item in pair]
        return b"%%%d\r\n" % len(reply) + b"".join(items)
    return _encoded_as_2(reply)


@contextmanager
def at_time(now: float) -> Iterator[None]:
    """Let the engine read this time in this thread, in whole microseconds as a server does.

    It is set a little later than that: a number between two milliseconds must not become the one before when the engine
    computes them.
    """
    former, _TIME.now = _TIME.now, (round(now * 1e6) + 0.25) / 1e6
    try:
        yield
    finally:
        _TIME.now = former


class _Time(threading.local):
    """Takes the place of the module `time` in the engine. Outside of `at_time`, it is the time of the host."""

    now: float | None = None

    def time(self) -> float:
        return time.time() if self.now is None else self.now


_TIME: Final = _Time()


@contextmanager
def timed_engine() -> Iterator[None]:
    """Let the engine read the time of the server that executes, and count idle times as Redis does."""
    with ExitStack() as stack:
        for module in _TIMED:
            stack.enter_context(patch.object(module, "time", _TIME))
        stack.enter_context(patch.object(StreamGroup, "pending", _list_pending))
        stack.enter_context(patch.object(StreamGroup, "claim", _claim))
        yield


@contextmanager
def engine_runtime(random: Random) -> Iterator[None]:
    """Let the engine read the time of the server that executes, and draw from `random`.

    It also leaves out the search for global variables before each command of a script, which the conformance suite has.
    """
    with ExitStack() as stack:
        stack.enter_context(timed_engine())
        for module in _RANDOM:
            stack.enter_context(patch.object(module, "random", random))
        scripting = fakeredis.commands_mixins.scripting_mixin
        stack.enter_context(patch.object(scripting, "_check_for_lua_globals", lambda runtime, expected: None))
        yield


class _Timer(Protocol):
    def cancel(self) -> None: ...


class EngineSocket(FakeSocket):
    """The server's end of a connection. A blocking read waits for its event loop, and no thread does."""

    def __init__(self, engine: FakeServer) -> None:
        self._unblock: Callable[[], None] | None = None
        self._commands = hiredis.Reader(notEnoughData=None)
        super().__init__(engine, 0, None, object)

    @abstractmethod
    def _time(self) -> float:
        """Return the time of the server, in seconds since 1970."""

    @abstractmethod
    def _call_soon(self, callback: Callable[[], None]) -> None:
        """Call a function of the server after the current event."""

    @abstractmethod
    def _call_later(self, seconds: float, callback: Callable[[], None]) -> _Timer:
        """Call a function of the server after some time."""

    def _may_block(self) -> bool:
        return True

    def _on_blocked_reply(self, at: float) -> None:
        """Learn that a read that blocked has found something."""

    def feed(self, data: bytes) -> None:
        """Execute the commands that arrive."""
        self._commands.feed(data)
        with at_time(self._time()):
            self._process_commands()

    def resume(self) -> None:
        """Execute the commands that came while a read blocked."""
        self._paused = False
        self._process_commands()

    def _process_commands(self) -> None:
        while not self._paused and (fields := self._commands.gets()) is not None:
            self._process_command(fields)

    def end(self) -> None:
        """Forget the client."""
        self._finish_blocking()
        self._cleanup(self._server)
        if self in self._server.sockets:
            self._server.sockets.remove(self)

    def _lua_redis_pcall(self, lua_runtime: Any, expected_globals: set[Any], op: bytes, *args: Any) -> Any:
        """Return an error as bytes, which become text of Lua. lupa confuses Python objects that it passes often."""
        try:
            return self._lua_redis_call(lua_runtime, expected_globals, op, *args)
        except SimpleError as error:
            return lua_runtime.table_from({b"err": error.value.encode()})

    def _decode_error(self, error: SimpleError) -> Any:
        return error

    def _blocking(self, timeout: float | None, func: Callable[[bool], Any], shape: Any = None) -> Any:
        found = func(True) or None  # the engine answers a read in vain with an empty reply, and would not wait
        if found is not None or self._in_transaction or not self._may_block():
            return found if shape is None else shape(found)
        self.pause()
        self._blocked = True
        woken = False

        def answer(reply: Any) -> None:
            self._finish_blocking()
            self.put_response(self._decode_result(reply))
            with at_time(self._time()):
                self.resume()

        def look() -> None:
            nonlocal woken
            woken = False
            if self._unblock is None:
                return
            at = self._time()
            with at_time(at):
                if self._unblock_reason is not None:
                    try:
                        self._take_unblock_reason()
                        answer(None if shape is None else shape(None))
                    except SimpleError as error:
                        answer(error)
                    return
                reply = func(False) or None
            if reply is not None:
                self._on_blocked_reply(at)
                answer(reply if shape is None else shape(reply))

        def wake() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self._call_soon(look)

        def expire() -> None:
            if self._unblock is not None:
                answer(None if shape is None else shape(None))

        timer = self._call_later(timeout, expire) if timeout else None
        database = self._db
        database.add_change_callback(wake)

        def unblock() -> None:
            database.remove_change_callback(wake)
            if timer is not None:
                timer.cancel()
            self._blocked = False
            self._unblock_reason = None

        self._unblock = unblock
        return NoResponse()

    def _finish_blocking(self) -> None:
        unblock, self._unblock = self._unblock, None
        if unblock is not None:
            unblock()
