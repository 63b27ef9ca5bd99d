"""Which hash slot a command belongs to.

The table holds the commands that Perdure sends. One that is not in it is refused rather than guessed at: a command
sent to the wrong node would do its work on the wrong data, or on none.
"""

from __future__ import annotations

from typing import Final

from redis.crc import key_slot

from ..pipelining import Argument, Command

__all__ = ["UnknownCommandError", "key_of", "slot_of"]

_KEY_AT: Final = {
    **dict.fromkeys(("GET", "SET", "MGET", "DEL", "UNLINK", "EXISTS", "TYPE", "PTTL", "PEXPIRE", "PERSIST"), 1),
    **dict.fromkeys(("HGET", "HSET", "HSETNX", "HMGET", "HGETALL", "HKEYS", "HLEN", "HDEL", "HINCRBY", "HEXISTS"), 1),
    "HSCAN": 1,
    **dict.fromkeys(("LPUSH", "RPUSH", "LPOP", "RPOP", "LRANGE", "LLEN", "SADD", "SREM", "SMEMBERS", "SCARD"), 1),
    **dict.fromkeys(("ZADD", "ZCARD", "ZCOUNT", "ZRANGE", "ZREM", "ZREMRANGEBYSCORE", "ZSCORE", "INCRBY", "INCR"), 1),
    **dict.fromkeys(("XADD", "XLEN", "XRANGE", "XREVRANGE", "XDEL", "XTRIM", "XACK", "XCLAIM", "XAUTOCLAIM"), 1),
    **dict.fromkeys(("XPENDING", "ZRANGEBYSCORE", "ZREVRANGE", "EXPIRE", "TTL", "STRLEN"), 1),
    **dict.fromkeys(("XGROUP", "XINFO", "MEMORY", "OBJECT"), 2),
}
"""Where the first key of a command stands."""

_NO_KEY: Final = frozenset(("TIME", "INFO", "PING", "PUBLISH", "SCRIPT", "WAIT"))
_OF_ONE_NODE: Final = frozenset(("SCAN", "DBSIZE", "CLIENT", "CONFIG"))


class UnknownCommandError(ValueError):
    """A command of which it is not known where in a cluster it must go: a mistake in the program."""


def key_of(command: Command) -> Argument | None:
    """The first key of a command; None where it has none and any node can carry it out."""
    name = _name(command)
    if name in _KEY_AT:
        return command[_KEY_AT[name]]
    if name in ("EVALSHA", "EVAL"):
        return command[3] if int(command[2]) else None
    if name in ("XREADGROUP", "XREAD"):
        return command[_position_of_streams(command) + 1]
    if name in _NO_KEY:
        return None
    raise UnknownCommandError(
        f"{name} concerns one node of the cluster: say which with node_of=key"
        if name in _OF_ONE_NODE
        else f"it is not known which keys {name} has: add it to queues/transport/cluster/hash_slots.py"
    )


def slot_of(command: Command, node_of: str | None = None) -> int | None:
    """The hash slot of a command; None where any node will do. node_of: a key whose node is meant."""
    key = node_of if node_of is not None else key_of(command)
    if key is None:
        return None
    slot: int = key_slot(key if isinstance(key, bytes) else str(key).encode())
    return slot


def _position_of_streams(command: Command) -> int:
    """Where the word STREAMS stands; a group or consumer of that name stands before it, in a place of its own."""
    start = 4 if _name(command) == "XREADGROUP" else 1
    return next(at for at in range(start, len(command)) if _text(command[at]).upper() == "STREAMS")


def _name(command: Command) -> str:
    return _text(command[0]).upper()


def _text(argument: Argument) -> str:
    return argument.decode("latin-1") if isinstance(argument, bytes) else str(argument)
