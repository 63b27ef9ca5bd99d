"""Checks of the user of the connection: which roles it has the rights of; and of TLS certificates.

The rights are found out by ACL DRYRUN, which an administrator may run for any user. Another user tries each command in
a form without effect, on keys that do not exist. Commands that have no such form (`HSET`, `SADD`, `RPUSH`) are then
left out. The server logs each refusal in its ACL LOG.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from redis.exceptions import NoPermissionError, ResponseError

from ...queues.keys import Namespace
from ...queues.transport.address import Address
from ...queues.transport.gateway import Primary
from ...queues.transport.pipelining import Argument
from ...queues.transport.rights import EVERYTHING, ROLES, AclRole
from ...queues.transport.server_check import place_of
from ...queues.wording import duration, listed
from .result import CheckResult, Severity

_Allowed: TypeAlias = Callable[[Sequence[Argument]], Awaitable[bool]]

_MAX_SHOWN: Final = 12

_SOON: Final = 14 * 86_400.0
"""Seconds before its expiry from which on a certificate is mentioned."""

_CONNECT: Final = 3.0
"""Seconds for the connection that reads the server's certificate."""

_OF_CATEGORY: Final[Mapping[str, Sequence[str]]] = {
    "@hash": ("hget", "hmget", "hgetall", "hset", "hsetnx", "hdel", "hincrby", "hexists", "hkeys", "hlen", "hscan"),
    "@stream": (
        *("xadd", "xlen", "xrange", "xrevrange", "xpending", "xinfo", "xgroup", "xreadgroup", "xclaim", "xautoclaim"),
        *("xack", "xdel", "xtrim"),
    ),
    "@sortedset": ("zadd", "zrem", "zcard", "zcount", "zscore", "zrange", "zrangebyscore", "zremrangebyscore", "zscan"),
}
"""Commands of Perdure in the categories that roles have."""

_FORMS: Final[Mapping[str, Sequence[Argument] | None]] = {
    "evalsha": ("EVALSHA", "0" * 40, 1, "KEY"),
    "ping": ("PING",),
    "select": None,  # a connection of a cluster refuses it
    "info": ("INFO", "server"),
    "time": ("TIME",),
    "exists": ("EXISTS", "KEY"),
    "get": ("GET", "KEY"),
    "getex": ("GETEX", "KEY"),
    "getset": None,
    "set": ("SET", "KEY", "x", "XX"),
    "del": ("DEL", "KEY"),
    "unlink": ("UNLINK", "KEY"),
    "persist": ("PERSIST", "KEY"),
    "pexpire": ("PEXPIRE", "KEY", 1),
    "pttl": ("PTTL", "KEY"),
    "rename": ("RENAME", "KEY", "KEY"),
    "type": ("TYPE", "KEY"),
    "scan": ("SCAN", 0, "COUNT", 1),
    "publish": ("PUBLISH", "KEY", ""),
    "subscribe": None,
    "unsubscribe": None,
    "script|load": ("SCRIPT", "LOAD", "return 1"),
    "script|exists": ("SCRIPT", "EXISTS", "0" * 40),
    "client|id": ("CLIENT", "ID"),
    "client|unblock": ("CLIENT", "UNBLOCK", 0),
    "hget": ("HGET", "KEY", "x"),
    "hmget": ("HMGET", "KEY", "x"),
    "hgetall": ("HGETALL", "KEY"),
    "hset": None,
    "hsetnx": None,
    "hincrby": None,
    "hdel": ("HDEL", "KEY", "x"),
    "hexists": ("HEXISTS", "KEY", "x"),
    "hkeys": ("HKEYS", "KEY"),
    "hlen": ("HLEN", "KEY"),
    "hscan": ("HSCAN", "KEY", 0),
    "hstrlen": ("HSTRLEN", "KEY", "x"),
    "xadd": ("XADD", "KEY", "NOMKSTREAM", "*", "x", "x"),
    "xlen": ("XLEN", "KEY"),
    "xrange": ("XRANGE", "KEY", "-", "+", "COUNT", 1),
    "xrevrange": ("XREVRANGE", "KEY", "+", "-", "COUNT", 1),
    "xpending": ("XPENDING", "KEY", "x"),
    "xinfo": ("XINFO", "STREAM", "KEY"),
    "xgroup": ("XGROUP", "DESTROY", "KEY", "x"),
    "xreadgroup": ("XREADGROUP", "GROUP", "x", "x", "COUNT", 1, "STREAMS", "KEY", ">"),
    "xclaim": ("XCLAIM", "KEY", "x", "x", 0, "1-1"),
    "xautoclaim": ("XAUTOCLAIM", "KEY", "x", "x", 0, "0-0"),
    "xack": ("XACK", "KEY", "x", "1-1"),
    "xdel": ("XDEL", "KEY", "1-1"),
    "xtrim": ("XTRIM", "KEY", "MAXLEN", 1000),
    "zadd": ("ZADD", "KEY", "XX", 1, "x"),
    "zrem": ("ZREM", "KEY", "x"),
    "zcard": ("ZCARD", "KEY"),
    "zcount": ("ZCOUNT", "KEY", 0, 1),
    "zscore": ("ZSCORE", "KEY", "x"),
    "zrange": ("ZRANGE", "KEY", 0, 0),
    "zrevrange": ("ZREVRANGE", "KEY", 0, 0),
    "zrangebyscore": ("ZRANGEBYSCORE", "KEY", 0, 1),
    "zrevrangebyscore": ("ZREVRANGEBYSCORE", "KEY", 1, 0),
    "zremrangebyscore": ("ZREMRANGEBYSCORE", "KEY", 0, 1),
    "zscan": ("ZSCAN", "KEY", 0),
    "sadd": None,
    "srem": ("SREM", "KEY", "x"),
    "scard": ("SCARD", "KEY"),
    "sismember": ("SISMEMBER", "KEY", "x"),
    "smembers": ("SMEMBERS", "KEY"),
    "sscan": ("SSCAN", "KEY", 0),
    "rpush": None,
    "lrange": ("LRANGE", "KEY", 0, 0),
    "llen": ("LLEN", "KEY"),
    "ltrim": ("LTRIM", "KEY", 0, 0),
}
"""Forms of the commands that change nothing on a key that does not exist; None if a command has no such form."""

_WRITTEN: Final[Mapping[str, Sequence[Argument]]] = {
    "select": ("SELECT", 0),
    "getset": ("GETSET", "KEY", "x"),
    "subscribe": ("SUBSCRIBE", "KEY"),
    "unsubscribe": ("UNSUBSCRIBE",),
    "hset": ("HSET", "KEY", "x", "x"),
    "hsetnx": ("HSETNX", "KEY", "x", "x"),
    "hincrby": ("HINCRBY", "KEY", "x", 1),
    "sadd": ("SADD", "KEY", "x"),
    "rpush": ("RPUSH", "KEY", "x"),
}
"""Forms of the others, for ACL DRYRUN only."""


async def check_rights(
    primary: Primary, address: Address, namespace: Namespace, role: str | None, user: str | None
) -> list[CheckResult]:
    """Find the roles whose rights a user has.

    Args:
        role: Role that the user must have; None for any.
        user: User to look at, which needs the right to run ACL DRYRUN; None for that of the connection.
    """
    name = user or address.user or "default"
    dry = await _knows_dry_run(primary, name)
    if user is not None and not dry:
        return [
            CheckResult(
                "rights",
                Severity.ERROR,
                f"could not look at user {user!r}",
                "the server has no such user, or this user may not run ACL DRYRUN (Redis 7.0 or newer)",
                "connect as an administrator; ACL LIST shows the users",
            )
        ]
    unknown: set[str] = set()
    channels: set[str] = set()

    async def allowed(command: Sequence[Argument]) -> bool:
        try:
            reply = await primary(("ACL", "DRYRUN", name, *command) if dry else tuple(command))
        except NoPermissionError as error:
            channels.update(["PUBLISH"] if "channel" in str(error) else [])
            return False
        except ResponseError as error:  # for another reason: the ACL comes first
            if not _is_unknown(error):
                return True
            unknown.add(str(command[0]).upper())
            return False
        if dry and b"channel" in bytes(reply):
            channels.add("PUBLISH")
        return not dry or bytes(reply).upper() == b"OK"

    roles = [wanted for wanted in (*ROLES, EVERYTHING) if role in (None, wanted.name)]
    missing = {wanted.name: await _missing(allowed, namespace.name, wanted, dry=dry) for wanted in roles}
    found = [_renamed(sorted(unknown))] if unknown else []
    for lacking in missing.values():
        lacking[:] = [f"the channels &{{{namespace.name}:*" if right in channels else right for right in lacking]
    if dry and user is None and await allowed(("FLUSHALL",)):
        found.append(
            CheckResult(
                "rights",
                Severity.NOTE,
                f"user {name!r} may run every command",
                "a mistake of a process with this user, such as FLUSHALL, hits all data of the server",
                "make one user for each kind of process: how-to/security.md",
            )
        )
        return found
    complete = [holder for holder, lacking in missing.items() if not lacking]
    tried = "" if dry else " (tried; commands without a harmless form are left out)"
    if complete:
        text = f"user {name!r} has the rights of: {', '.join(complete)}{tried}"
        found.append(CheckResult("rights", Severity.OK, text))
        if role is None and (others := {holder: lacking for holder, lacking in missing.items() if lacking}):
            shown = "; ".join(f"{holder} lacks {listed(lacking, 3)}" for holder, lacking in others.items())
            found.append(
                CheckResult(
                    "rights",
                    Severity.NOTE,
                    f"user {name!r} has not the rights of other roles: {shown}",
                    "processes of these roles cannot use this user",
                    "name the role that the user must have: --role worker",
                )
            )
        return found
    nearest = min(missing, key=lambda name: len(missing[name]))
    lacking = [right for right in missing[nearest] if right.partition(" ")[0] not in unknown]
    if lacking:
        found.append(
            CheckResult(
                "rights",
                Severity.ERROR,
                f"user {name!r} lacks {listed(lacking, _MAX_SHOWN)} for the role {nearest}",
                "commands and scripts that need them are refused",
                f"ACL SETUSER {name} with the rights of the role in how-to/security.md, for namespace "
                f"{namespace.name!r}",
            )
        )
    return found


def _is_unknown(error: ResponseError) -> bool:
    """Whether the server does not have a command: the replies to the command, and to ACL DRYRUN of it."""
    text = str(error).lower()
    return text.startswith("unknown command") or (text.startswith("command '") and text.endswith("' not found"))


def _renamed(commands: Sequence[str]) -> CheckResult:
    return CheckResult(
        "commands",
        Severity.ERROR,
        f"the server does not have {listed(commands, _MAX_SHOWN)}",
        "tasks cannot be enqueued or run without these commands",
        "remove rename-command from the server's configuration, or use a provider that allows them",
    )


async def _knows_dry_run(primary: Primary, user: str) -> bool:
    try:
        await primary(("ACL", "DRYRUN", user, "PING"))
    except ResponseError:
        return False
    return True


async def _missing(allowed: _Allowed, namespace: str, role: AclRole, *, dry: bool) -> list[str]:
    """Return the commands and patterns of keys that a role has and the user has not."""
    patterns = [pattern.replace("{perdure", f"{{{namespace}", 1) for pattern in role.keys]
    readable = [pattern.replace("{perdure", f"{{{namespace}", 1) for pattern in role.readable]
    key, lacking = _sample(patterns[0]), []
    for name, form in _forms(role, dry=dry):
        if not await allowed([key if part == "KEY" else part for part in form]):
            lacking.append(name.replace("|", " ").upper())
    if "HGET" not in lacking:
        lacking += [f"%R~{pattern}" for pattern in readable if not await allowed(("HGET", _sample(pattern), "x"))]
    writes = ("HDEL", "x") if "hdel" in role.commands or "@hash" in role.commands else ("HGET", "x")
    if writes[0] not in lacking:
        written = [pattern for pattern in patterns[1:] if not await allowed((writes[0], _sample(pattern), writes[1]))]
        lacking += [f"~{pattern}" for pattern in written]
    return lacking


def _forms(role: AclRole, *, dry: bool) -> Iterator[tuple[str, Sequence[Argument]]]:
    """Yield each command of a role that can be asked for, and its form."""
    for granted in role.commands:
        for name in _OF_CATEGORY.get(granted, (granted,)):
            form = _FORMS.get(name) or (_WRITTEN.get(name) if dry else None)
            if form is not None and name not in role.excluded:
                yield name, form


def _sample(pattern: str) -> str:
    """Return a key of a pattern that no deployment has."""
    if pattern.endswith(":*") and "}" not in pattern:
        return pattern.replace(":*", ":~doctor:0}:record:~doctor")
    return pattern.replace(":*}", ":~doctor:0}").replace("*", "~doctor")


async def check_certificates(address: Address) -> list[CheckResult]:
    """Find certificates that expire soon: that of the server, and that of this client."""
    place = place_of(address)
    if not address.encrypted or place is None:
        return []
    found: list[CheckResult] = []
    query = address.query
    with contextlib.suppress(OSError, ssl.SSLError, ValueError):
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        context.check_hostname = False
        if own := query.get("ssl_certfile"):
            context.load_cert_chain(own, query.get("ssl_keyfile"), query.get("ssl_password"))
        found += _judged("the certificate of the server", await _certificate(place.host, place.port, context))
    own = query.get("ssl_certfile")
    if own is not None:
        found += _judged("the certificate of this client", _not_after(Path(own)))
    return found or [
        CheckResult("certificates", Severity.NOTE, "TLS, and no certificate could be read", "its expiry is unknown", "")
    ]


async def _certificate(host: str, port: int, context: ssl.SSLContext) -> float | None:
    """Return the time at which the certificate of a server expires, in seconds since the epoch."""
    async with asyncio.timeout(_CONNECT):
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        certificate: Any = writer.get_extra_info("peercert")
        return ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None
    finally:
        writer.transport.abort()


def _not_after(file: Path) -> float | None:
    """Return the time at which a certificate expires; None without the package cryptography, or if it is unreadable."""
    try:
        from cryptography import x509
    except ImportError:  # an extra
        return None
    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def _judged(what: str, until: float | None) -> list[CheckResult]:
    if until is None:
        return []
    left = until - time.time()
    if left > _SOON:
        return [CheckResult("certificates", Severity.OK, f"{what} is valid for {duration(left, whole=True)}")]
    state = f"expires in {duration(left, whole=True)}" if left > 0 else f"expired {duration(-left, whole=True)} ago"
    return [
        CheckResult(
            "certificates",
            Severity.WARNING if left > 0 else Severity.ERROR,
            f"{what} {state}",
            "after that no process can connect again",
            "renew it in its file: workers and producers read it at each connect",
        )
    ]
