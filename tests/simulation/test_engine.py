"""The engine of the simulated server against a real one: the same commands at the same times have the same replies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import hiredis
import pytest
from perdure.worker.testing.fake_engine import encoded

from tests.support.servers.clock import SettableClock, compiler
from tests.support.servers.redis import SYSTEM, RedisServer, find_program

from .plan import draw
from .server import SimulatedServer
from .world import World

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(compiler() is None, reason="needs a C compiler for the clock"),
    # The bundled Valkey reads the processor's counter between two ticks, which no library can replace.
    pytest.mark.skipif(find_program(SYSTEM) is None, reason="needs a redis-server on PATH"),
]

_KEPT: list[World] = []


@pytest.fixture
def clock(tmp_path: Path) -> SettableClock:
    return SettableClock(tmp_path)


@pytest.fixture
def server(clock: SettableClock) -> Iterator[RedisServer]:
    program = find_program(SYSTEM)
    assert program is not None
    started = RedisServer(program, environment=clock.environment).start()
    yield started
    started.stop()


class RealServer:
    """A connection on which each command is executed at a time of the clock."""

    def __init__(self, server: RedisServer, clock: SettableClock) -> None:
        self._clock = clock
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(str(server.socket))
        self._replies = hiredis.Reader(notEnoughData=Ellipsis)

    def close(self) -> None:
        self._socket.close()

    def execute(self, at: float, command: list[bytes]) -> Any:
        self._clock.hold(at)
        self._socket.sendall(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]  # its stub means one argument
        while (reply := self._replies.gets()) is Ellipsis:
            self._replies.feed(self._socket.recv(65536))
        return reply


def parsed(reply: Any) -> Any:
    reader = hiredis.Reader()
    reader.feed(encoded(reply))
    return reader.gets()


def same(found: Any, real: Any, slack: int = 0) -> bool:
    """Return whether two replies are equal.

    Of an error only the kind is compared, since its text names places in the script. slack: by which integers may
    differ, since the engine keeps the ends of lifetimes as floating-point numbers of seconds.
    """
    if isinstance(found, list) and isinstance(real, list):
        return len(found) == len(real) and all(same(*pair, slack) for pair in zip(found, real, strict=True))
    if isinstance(found, hiredis.ReplyError) and isinstance(real, hiredis.ReplyError):
        return str(found).split(" ", 1)[0] == str(real).split(" ", 1)[0]
    if isinstance(found, int) and isinstance(real, int):
        return abs(found - real) <= slack
    return bool(found == real)


@pytest.mark.parametrize(
    ("seed", "element"), [(2, ""), (7, ""), (42, ""), (57, ""), (118, ""), (4, "supervised hosts")]
)
def test_the_writes_of_a_run_have_the_same_replies_and_leave_the_same_data(
    seed: int, element: str, server: RedisServer, clock: SettableClock
) -> None:
    world = World(replace(draw(seed, element), restarts=250))  # as the scripts say, which both execute unchanged
    _KEPT.append(world)
    world.play()
    writes = [*world.server.log]
    assert len(writes) > 100
    engine = SimulatedServer(world.loop, "again")
    with closing(RealServer(server, clock)) as real:
        for source in set(world.server.scripts.values()):
            real.execute(writes[0][0], [b"SCRIPT", b"LOAD", source])
        for number, (at, command) in enumerate(writes):
            replies = parsed(engine.replay(at, command, world.server.scripts)), real.execute(at, command)
            source = source_of(world, command)
            if b"'INFO'" in source:  # its reply is about the server, not about data
                continue
            if b"HGETALL" in source or b"HSCAN" in source:
                replies = ordered(replies[0]), ordered(replies[1])
            slack = 1 if b"PTTL" in source else 0
            assert same(*replies, slack), f"write {number}: {command[:3]}: {replies}"
        at = writes[-1][0]
        for key in sorted(engine.items):
            for command in _reads(engine.replay(at, [b"TYPE", key], {}), key):
                replies = parsed(engine.replay(at, command, {})), real.execute(at, command)
                if command[0] == b"HGETALL":
                    replies = ordered(replies[0]), ordered(replies[1])
                assert same(*replies, slack=1 if command[0] == b"PTTL" else 0), f"{command}: {replies}"


def test_pending_entries_are_the_same_when_the_clock_was_set_back(server: RedisServer, clock: SettableClock) -> None:
    world = World(draw(2))
    _KEPT.append(world)
    of_group = b"XPENDING ready workers".split()
    commands = [
        (10.0, b"XGROUP CREATE ready workers 0 MKSTREAM"),
        (10.0, b"XADD ready 1-0 env text"),
        (10.0, b"XREADGROUP GROUP workers w1 COUNT 1 STREAMS ready >"),
        (10.5, b"XPENDING ready workers IDLE 501 - + 1"),
        (10.5, b"XPENDING ready workers IDLE 500 - + 1"),
        (5.0, b"XPENDING ready workers IDLE 0 - + 1"),
        (5.0, b"XPENDING ready workers IDLE 1 - + 1"),
        (5.0, b"XCLAIM ready workers w2 1 1-0 JUSTID"),
        (5.0, b"XCLAIM ready workers w2 0 1-0 JUSTID"),
        (5.7, b"XCLAIM ready workers w1 0 1-0 IDLE 300 JUSTID"),
        (5.0, b"XCLAIM ready workers w2 0 1-0 RETRYCOUNT 4 JUSTID"),
    ]
    with closing(RealServer(server, clock)) as real:
        for after, command in commands:
            at = world.server.now + after
            for fields in (command.split(), [*of_group, b"-", b"+", b"9"]):
                replies = parsed(world.server.replay(at, fields, {})), real.execute(at, fields)
                assert same(*replies), f"{fields} at {after} s: {replies}"


def ordered(reply: Any) -> Any:
    """Return a reply with the fields of each hash in it sorted: Redis promises no order, so clients ask for none."""
    if not isinstance(reply, list):
        return reply
    if reply and len(reply) % 2 == 0 and all(isinstance(item, bytes) for item in reply):
        pairs = sorted(zip(reply[::2], reply[1::2], strict=True))
        return [item for pair in pairs for item in pair]
    return [ordered(item) for item in reply]


def source_of(world: World, command: list[bytes]) -> bytes:
    """Return the script that a command runs, or the name of the command."""
    name = command[0].upper()
    if name == b"EVALSHA":
        return world.server.scripts[command[1].lower()]
    return command[1] if name == b"EVAL" else name


def _reads(kind: bytes, key: bytes) -> list[list[bytes]]:
    """Return commands that read all of a key."""
    reads = {
        b"hash": [b"HGETALL", key],
        b"zset": [b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"],
        b"set": [b"SMEMBERS", key],
        b"list": [b"LRANGE", key, b"0", b"-1"],
        b"stream": [b"XRANGE", key, b"-", b"+"],
    }
    found = [[b"PTTL", key], reads.get(kind, [b"GET", key])]
    if kind == b"stream" and key.endswith((b":ready", b":nudge")):
        found.append([b"XPENDING", key, b"workers", b"-", b"+", b"1000"])
    return found
