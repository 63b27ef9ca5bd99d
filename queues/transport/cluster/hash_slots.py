"""Hash slots of commands, by a table of the commands that Perdure sends.

A command that is not in the table is refused, because on the wrong node it would be redirected or change other data.
"""

from __future__ import annotations

from typing import Final

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError

from ..backoff import Backoff
from ..clients import was_not_executed
from ..pipelining import Argument, Command

_KEY_AT: Final = {
    **dict.fromkeys(("GET", "SET", "MGET", "DEL", "UNLINK", "EXISTS", "TYPE", "PTTL", "PEXPIRE", "PERSIST"), 1),
    **dict.fromkeys(
        ("HGET", "HSET", "HSETNX", "HMGET", "HGETALL", "HKEYS", "HLEN", "HDEL", "HINCRBY", "HEXISTS", "HSTRLEN"), 1
    ),
    **dict.fromkeys(("HSCAN", "SSCAN", "ZSCAN"), 1),
    **dict.fromkeys(("LPUSH", "RPUSH", "LPOP", "RPOP", "LRANGE", "LLEN", "SADD", "SREM", "SMEMBERS", "SCARD"), 1),
    **dict.fromkeys(
        (
            "ZADD",
            "ZCARD",
            "ZCOUNT",
            "ZRANDMEMBER",
            "ZRANGE",
            "ZRANGEBYLEX",
            "ZRANK",
            "ZREM",
            "ZREMRANGEBYRANK",
            "ZREMRANGEBYSCORE",
            "ZREVRANGEBYSCORE",
            "ZSCORE",
            "INCRBY",
            "INCR",
        ),
        1,
    ),
    **dict.fromkeys(("XADD", "XLEN", "XRANGE", "XREVRANGE", "XDEL", "XTRIM", "XACK", "XCLAIM", "XAUTOCLAIM"), 1),
    **dict.fromkeys(("XPENDING", "ZRANGEBYSCORE", "ZREVRANGE", "EXPIRE", "TTL", "STRLEN"), 1),
    **dict.fromkeys(("XGROUP", "XINFO", "MEMORY", "OBJECT"), 2),
}
"""Position of a command's first key."""

_NO_KEY: Final = frozenset(("TIME", "INFO", "PING", "PUBLISH", "SCRIPT", "WAIT", "COMMAND", "ACL"))
_OF_ONE_NODE: Final = frozenset(("SCAN", "DBSIZE", "CLIENT", "CONFIG"))


class UnknownCommandError(ValueError):
    """A command whose node is not known: an error in the program."""


def key_of(command: Command) -> Argument | None:
    """Return the first key of a command, or None if it has no key and any node can execute it."""
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
        f"{name} is executed by one node of the cluster: name it with node_of=key"
        if name in _OF_ONE_NODE
        else f"the keys of {name} are not known: add it to queues/transport/cluster/hash_slots.py"
    )


def slot_of(command: Command, node_of: str | None = None) -> int | None:
    """Return the hash slot of a command or of the key `node_of`, or None if any node can execute it."""
    key = node_of if node_of is not None else key_of(command)
    if key is None:
        return None
    slot: int = key_slot(key if isinstance(key, bytes) else str(key).encode())
    return slot


def _position_of_streams(command: Command) -> int:
    """Return the position of the keyword STREAMS, which is not a group or consumer of that name."""
    start = 4 if _name(command) == "XREADGROUP" else 1
    return next(at for at in range(start, len(command)) if _text(command[at]).upper() == "STREAMS")


def _name(command: Command) -> str:
    return _text(command[0]).upper()


def _text(argument: Argument) -> str:
    return argument.decode("latin-1") if isinstance(argument, bytes) else str(argument)


_TRIES: Final = 12
"""Redirections and transient refusals after which a command fails."""

_AT_ONCE: Final = 2
"""Redirections that are followed without a delay; more of them mean that two nodes disagree for the moment."""

_BACKOFF: Final = Backoff(first=0.01, longest=0.5)
"""Delays before a command is sent again, about 3 s in all."""


class RedirectPolicy:
    """The attempts of one command, with the delay before each."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot
        self._tries = 0
        self._delays = _BACKOFF.delays()

    def pause(self, error: BaseException) -> float:
        """Return the seconds to wait. Raises an error that is not transient, and after too many attempts."""
        if not is_transient(error):
            raise error
        self._tries += 1
        if self._tries > _TRIES:
            raise ClusterDownError(f"slot {self._slot} was not found in {_TRIES} attempts: {error}") from error
        if isinstance(error, AskError) and self._tries <= _AT_ONCE:
            return 0.0
        return next(self._delays)


def is_transient(error: BaseException) -> bool:
    """Whether a command was not executed, and may succeed later or on another node."""
    return isinstance(error, AskError) or was_not_executed(error)
