"""Hash slots of commands: every command that Perdure sends is known, and all others are refused."""

from __future__ import annotations

import ast
from pathlib import Path

import perdure
import pytest
from perdure.queues.transport.cluster.hash_slots import UnknownCommandError, key_of, slot_of
from perdure.queues.transport.pipelining import Command
from redis.crc import key_slot

PACKAGE = Path(perdure.__file__).parent
ROOMS = ("queues", "deadletter", "worker")
SENDERS = {"command", "pipeline", "submit", "read", "execute", "execute_command", "call"}
ELSEWHERE = {"SENTINEL", "ROLE", "CLUSTER", "ASKING", "SCAN", "CLIENT", "CONFIG"}
"""Commands for a server that is chosen before, or named by `node_of`."""
OPTIONS = {"BLOCK", "COUNT", "MATCH"}
"""Parts of commands that are kept in separate tuples."""
SQL = {"ROLLBACK"}
"""Statements for a database."""


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "{a}:x"), "{a}:x"),
        (("hget", b"{a}:x", "field"), b"{a}:x"),
        (("EVALSHA", "sha", 2, "{a}:x", "{a}:y", "argument"), "{a}:x"),
        (("EVAL", "return 1", 0), None),
        (("MGET", "{a}:x", "{a}:y"), "{a}:x"),
        (("XGROUP", "CREATE", "{a}:x", "g", "0"), "{a}:x"),
        (("XINFO", "CONSUMERS", "{a}:x", "g"), "{a}:x"),
        (("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "{a}:x", "{a}:y", ">", ">"), "{a}:x"),
        (("XREADGROUP", "GROUP", "STREAMS", "streams", "BLOCK", 9, "STREAMS", "{a}:x", ">"), "{a}:x"),
        (("XREAD", b"streams", "{a}:x", "0"), "{a}:x"),
        (("TIME",), None),
        (("SCRIPT", "LOAD", "return 1"), None),
    ],
)
def test_the_first_key_decides(command: Command, key: str | bytes | None) -> None:
    assert key_of(command) == key
    assert slot_of(command) == (None if key is None else key_slot(b"{a}:x"))


def test_node_of_overrides_the_key() -> None:
    assert slot_of(("TIME",), "{a}:x") == slot_of(("SCAN", 0), "{a}:y") == key_slot(b"a")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("SCAN", "0"), r"SCAN is executed by one node of the cluster: name it with node_of=key"),
        (("CLIENT", "ID"), r"CLIENT is executed by one node"),
        (
            ("GEOADD", "key", 1, 2, "place"),
            r"the keys of GEOADD are not known: add it to queues/transport/cluster/hash_slots.py",
        ),
    ],
)
def test_an_unknown_command_is_refused(command: Command, why: str) -> None:
    with pytest.raises(UnknownCommandError, match=why):
        slot_of(command)


def test_every_command_that_is_sent_is_known() -> None:
    """The commands are read from the source: words in capitals that begin a call, or a tuple with another part."""
    sent = {name for room in ROOMS for file in (PACKAGE / room).rglob("*.py") for name in commands_in(file.read_text())}
    assert {"EVALSHA", "XREADGROUP", "XPENDING", "HMGET", "TIME"} <= sent
    for name in sorted(sent - ELSEWHERE - OPTIONS - SQL):
        _ = key_of((name, 1, 1, "STREAMS", "STREAMS", "key"))


def _all_constant(parts: ast.Tuple) -> bool:
    return all(isinstance(part, ast.Constant) for part in parts.elts)


def commands_in(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        first: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SENDERS:
            first = node.args[0] if node.args else None
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and not _all_constant(node):
            first = node.elts[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.isupper():
            found.add(first.value)
    return found
