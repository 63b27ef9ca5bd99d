"""Rights of the Redis users that run Perdure: one role for each kind of process.

The page on security shows the users of this table and what each may do. An error of a command that the server has
refused names the roles whose users may run it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from .pipelining import Argument, Command
from .scripts import loaded_scripts

_PAGE: Final = "the page on security"

_COMMON: Final = ("evalsha", "ping", "select", "info", "time")

_JOINS: Final = (
    *("sadd", "srem", "scard", "sismember", "smembers", "sscan"),
    *("rpush", "lrange", "llen", "ltrim", "unlink"),
)
"""Commands on the children of joins."""


@dataclass(frozen=True, slots=True)
class AclRole:
    """Rights of one Redis user. The patterns are for a namespace of the name `perdure`.

    Attributes:
        keys: Patterns of the keys that it reads and writes.
        readable: Patterns of the keys that it only reads. Redis 6.2 has no such right: there it may write them as well.
        commands: Commands and categories, in the form of ACL SETUSER without their sign.
        excluded: Commands that are not granted although their category is.
        channels: Patterns of the channels of pub/sub.
    """

    name: str
    keys: tuple[str, ...]
    commands: tuple[str, ...]
    readable: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    channels: tuple[str, ...] = ("{perdure:*",)

    def rules(self, namespace: str = "perdure", *, read_only_keys: bool = True) -> list[str]:
        """Return the arguments of ACL SETUSER after the password.

        read_only_keys: whether the server has rights to read keys without writing them (Redis 7, Valkey).
        """
        found = ["resetchannels", *(f"&{pattern}" for pattern in self.channels)]
        found += [f"{'%R' if read_only_keys else ''}~{pattern}" for pattern in self.readable]
        found += [f"~{pattern}" for pattern in self.keys]
        found += ["-@all", *(f"+{name}" for name in self.commands), *(f"-{name}" for name in self.excluded)]
        return [rule.replace("{perdure", f"{{{namespace}") for rule in found]

    def allows(self, namespace: str, command: Command) -> bool:
        """Return whether the role may run a command on its keys. A script may run further commands."""
        name = _text(command[0]).lower()
        full = f"{name}|{_text(command[1]).lower()}" if len(command) > 1 else name
        if name in self.excluded or not ({name, full, f"@{_category(name)}"} & {*self.commands}):
            return False
        writes = name not in _READS
        patterns = self.keys if writes else (*self.keys, *self.readable)
        return all(any(_matches(namespace, pattern, key) for pattern in patterns) for key in _keys(command))


ROLES: Final = (
    AclRole(
        "producer",
        readable=(
            "{perdure}:queues",
            "{perdure}:deployment",
            "{perdure}:registry:catalog*",
            "{perdure:*}:log:*",
            "{perdure:*}:stream:*",
            "{perdure:*}:dead",
            "{perdure:*}:token:*",
        ),
        keys=(
            "{perdure:*}:record:*",
            "{perdure:*}:inbox:*",
            "{perdure:*}:ready",
            "{perdure:*}:nudge",
            "{perdure:*}:due",
            "{perdure:*}:closed",
            "{perdure:*}:timeline",
            "{perdure:*}:session:*",
            "{perdure:*}:history:*",
            "{perdure:*}:unique:*",
            "{perdure:*}:limited:*",
            "{perdure:*}:turns:*",
            "{perdure:*}:rings",
        ),
        commands=(
            *(
                "exists",
                "get",
                "getex",
                "getset",
                "hget",
                "hset",
                "hmget",
                "hgetall",
                "hexists",
                "hdel",
                "hkeys",
                "hlen",
                "hscan",
                "hstrlen",
            ),
            *(
                "xadd",
                "xrange",
                "xrevrange",
                "xlen",
                "xpending",
                "zadd",
                "zcard",
                "zrange",
                "zrevrange",
                "zscore",
                "publish",
                "subscribe",
                "unsubscribe",
                *_COMMON,
            ),
        ),
    ),
    AclRole(
        "viewer",
        keys=("{perdure:*", "{perdure}:*"),
        commands=(
            *("exists", "get", "pttl", "hget", "hmget", "hgetall", "hexists", "hkeys", "hlen", "hscan", "hstrlen"),
            *("xlen", "xrange", "xrevrange", "xpending", "xinfo", "zcard", "zcount", "zrange", "zrangebyscore"),
            *(
                "zrangebylex",
                "zrevrangebylex",
                "zrevrangebyscore",
                "zscan",
                "zscore",
                "scard",
                "sscan",
                "llen",
                "type",
                "scan",
                "subscribe",
                "unsubscribe",
                *_COMMON,
            ),
        ),
    ),
    AclRole(
        "worker",
        keys=("{perdure:*", "{perdure}:*"),
        commands=(
            *(
                "@hash",
                "@stream",
                "@sortedset",
                "set",
                "get",
                "getex",
                "getset",
                "del",
                "exists",
                "persist",
                "pexpire",
                "pttl",
                "rename",
            ),
            *_JOINS,
            *(
                "type",
                "script|load",
                "script|exists",
                "publish",
                "subscribe",
                "unsubscribe",
                "client|id",
                "client|unblock",
            ),
            *_COMMON,
        ),
    ),
    AclRole(
        "operator",
        keys=("{perdure:*", "{perdure}:*"),
        commands=(
            *(
                "@hash",
                "@stream",
                "@sortedset",
                "set",
                "get",
                "getex",
                "getset",
                "del",
                "exists",
                "persist",
                "pexpire",
                "pttl",
                "rename",
                "type",
            ),
            *("scard", "sscan", "llen", "scan", "script|load", "script|exists", "publish", "subscribe", "unsubscribe"),
            *_COMMON,
        ),
        excluded=("xreadgroup", "xautoclaim", "xclaim"),
    ),
)
"""The documented users, the one with the fewest rights first."""

EVERYTHING: Final = AclRole(
    "perdure",
    keys=("{perdure:*", "{perdure}:*"),
    commands=(
        *(
            "@hash",
            "@stream",
            "@sortedset",
            "set",
            "get",
            "getex",
            "getset",
            "del",
            "exists",
            "persist",
            "pexpire",
            "pttl",
            "rename",
        ),
        *_JOINS,
        *("type", "scan", "script|load", "script|exists", "publish", "subscribe", "unsubscribe", "client|id"),
        *("client|unblock", *_COMMON),
    ),
)
"""One user for all processes of a deployment."""

_READS: Final = frozenset(
    (
        *("exists", "get", "hget", "hmget", "hgetall", "hexists", "hkeys", "hlen", "hscan", "hstrlen", "pttl"),
        *("scard", "sismember", "smembers", "sscan", "lrange", "llen"),
        *("xinfo", "xlen", "xpending", "xrange", "xrevrange", "zcard", "zcount", "zrange", "zrangebyscore"),
        *("zrangebylex", "zrevrange", "zrevrangebyscore", "zscan", "zscore"),
    )
)
_CATEGORIES: Final = {"h": "hash", "x": "stream", "z": "sortedset"}


def describe_refusal(command: Command) -> str:
    """Return what the server has refused, and the roles whose users may run it: the end of an error's text."""
    keys = _keys(command)
    name = _text(command[0]).upper()
    if name == "EVALSHA":
        name = next((f"script {script.name}" for script in loaded_scripts() if script.sha == command[1]), name)
    elif name in _SECOND | {"SCRIPT", "CONFIG", "CLIENT"}:
        name += f" {_text(command[1]).upper()}"
    where = ", ".join(dict.fromkeys(map(_pattern, keys)))
    roles = [role.name for role in ROLES if role.allows(_namespace(keys), command)]
    whose = f"roles with the rights: {', '.join(roles)}" if roles else "no role has the rights"
    return f"{name}{where and f' on {where}'}; {whose} (see {_PAGE})"


def _keys(command: Command) -> list[str]:
    """Return the keys of a command, the channel of PUBLISH among them not."""
    name = _text(command[0]).upper()
    if name == "EVALSHA":
        return [_text(key) for key in command[3 : 3 + int(command[2])]]
    if name == "XREADGROUP":
        streams = command[command.index("STREAMS") + 1 :]
        return [_text(key) for key in streams[: len(streams) // 2]]
    if name in _EVERY:
        return [_text(key) for key in command[1:]]
    if name in _SECOND:
        return [_text(command[2])]
    return [] if name in _KEYLESS else [_text(command[1])]


_EVERY: Final = frozenset(("EXISTS", "DEL", "UNLINK"))
_SECOND: Final = frozenset(("XGROUP", "XINFO"))
_KEYLESS: Final = frozenset(
    ("TIME", "INFO", "PING", "PUBLISH", "SCRIPT", "WAIT", "SCAN", "CLIENT", "CONFIG", "COMMAND")
)


def _category(name: str) -> str:
    return _CATEGORIES.get(name[0], "")


def _pattern(key: str) -> str:
    """Return the pattern of a key's kind, in the form of the patterns of the roles."""
    return re.sub(
        r"^(\{[^:}]*):[^}]*\}(:[^:]*)(:.*)?$", lambda found: f"{found[1]}:*}}{found[2]}{':*' if found[3] else ''}", key
    )


def _namespace(keys: Sequence[str]) -> str:
    found = re.match(r"\{([^:}]*)", keys[0]) if keys else None
    return found[1] if found else ""


def _matches(namespace: str, pattern: str, key: str) -> bool:
    return fnmatchcase(key, pattern.replace("{perdure", f"{{{namespace}"))


def _text(argument: Argument) -> str:
    return argument.decode("utf-8", "backslashreplace") if isinstance(argument, bytes) else str(argument)
