"""Check of a server at connect: its kind, version and commands, known holes, and whether it keeps what it acknowledges.

All questions to a server share one round trip. What it may not answer counts as unknown. The findings that do not
prevent its use go to the standard library's logging, once per process: a program that configures no logging still sees
the warnings.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from redis.exceptions import RedisError, ResponseError

from ..errors import Refused
from ..runtime import RUNTIME
from .address import Address, Node
from .pipelining import Command
from .releases import Condition, missing_fixes, parse_version

OLDEST_SERVER: Final = (6, 2)

_NEEDED: Final = ("XREADGROUP", "XAUTOCLAIM", "XCLAIM", "XPENDING", "EVALSHA")
"""Commands that servers of other makers may lack although they report the version of a Redis that has them."""

_INFO: Final = (("INFO", "server"), ("INFO", "memory"), ("INFO", "persistence"))
_ADMIN: Final = (("CONFIG", "GET", "appendfsync"), ("COMMAND", "INFO", *_NEEDED))

_NODE_TIMEOUT: Final = 1.0
"""Seconds that a primary of a cluster may take to answer; one that is being replaced must not delay every client."""

_FORKS: Final = ("valkey", "dragonfly", "garnet", "kvrocks")
"""Servers that report a version of their own next to the Redis version that they are compatible with."""

_EVICTION: Final = "set its maxmemory-policy to noeviction"
_ALWAYS: Final = "set appendfsync always, or wait for replicas with durability='replicated'"
_REFUSAL: Final = "PERDURE_REQUIRE_DURABLE=1 refuses such a server"
_ASSUMED: Final = (
    "is used, because PERDURE_REDIS_URL is not set: only processes on this host share it; set PERDURE_REDIS_URL "
    "('embedded:' if this server is meant)"
)

_logger = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()
"""Addresses and findings that this process has logged."""


@dataclass(frozen=True, slots=True)
class ServerRequirements:
    """Conditions under which a server is used.

    Args:
        allow_eviction: use a server that deletes any key when its memory is full (`allkeys-*`).
        require_durable: use only a server that never evicts keys and that has each write on its disk before it replies:
            `maxmemory-policy noeviction`, `appendonly yes`, `appendfsync always`, none of them unknown.
    """

    allow_eviction: bool = False
    require_durable: bool = False


DEFAULT_REQUIREMENTS: Final = ServerRequirements()


@dataclass(frozen=True, slots=True)
class _Server:
    """Answers of one server; None is unknown."""

    kind: str
    version: str
    uses: Sequence[Condition]
    eviction: str | None
    append_only: str | None
    fsync: str | None
    missing: Sequence[str]

    @classmethod
    def read(cls, info: Mapping[str, str], fsync: Any = None, commands: Any = None, *, encrypted: bool = False) -> Self:
        """Args:
        info: lines of the INFO sections.
        encrypted: whether the connection uses TLS.
        fsync, commands: replies to the questions of `_ADMIN`.
        """
        enabled = info.get("aof_enabled")
        kind, version = _kind_and_version(info)
        return cls(
            kind=kind,
            version=version,
            uses=_uses(info, encrypted=encrypted),
            eviction=info.get("maxmemory_policy"),
            append_only=None if enabled is None else "no" if enabled == "0" else "yes",
            fsync=fsync[1].decode() if fsync else None,
            missing=[name for name, found in zip(_NEEDED, commands or (), strict=False) if not found],
        )

    @property
    def shown(self) -> str:
        return f"{self.kind} {self.version}"

    def lacking(self) -> Iterator[str]:
        """Yield what a durable server would have."""
        pairs = (("maxmemory-policy", self.eviction, "noeviction"), ("appendonly", self.append_only, "yes"))
        for name, value, wanted in (*pairs, ("appendfsync", self.fsync, "always")):
            if value != wanted:
                yield f"{name} must be {wanted}, got {value or 'no answer (the user may not run INFO or CONFIG GET)'}"

    def findings(self) -> Iterator[tuple[int, str]]:
        """Yield level and text of what an operator should know."""
        version = parse_version(self.version)
        missing = [] if version is None else list(missing_fixes(self.kind, version, self.uses))
        if missing:
            names = ", ".join(defect.name for defect, _ in missing)
            fixed = ".".join(map(str, max(release for _, release in missing)))
            text = f"is {self.shown}, which by its version lacks fixes that {self.kind} {fixed} has: {names}"
            yield logging.WARNING, f"{text}; upgrade it, unless its distributor has added them"
        if self.eviction is None:
            yield logging.INFO, "does not report its maxmemory-policy: any but noeviction may lose tasks"
        elif self.eviction != "noeviction":
            which = "tasks" if self.eviction.startswith("allkeys-") else "results, dead letters and registrations"
            text = f"deletes {which} when its memory is full (maxmemory-policy {self.eviction}): {_EVICTION}"
            yield logging.WARNING, text
        if self.append_only is None:
            yield logging.INFO, f"does not report its persistence: what a crash of it loses is unknown; {_REFUSAL}"
        elif self.append_only == "no":
            text = (
                "has no append-only file: a crash or restart of it loses acknowledged tasks, back to its last snapshot"
            )
            yield logging.WARNING, f"{text}; set appendonly yes; {_REFUSAL}"
        elif self.fsync is None:
            yield logging.INFO, f"does not report its appendfsync: what a power cut loses is unknown; {_REFUSAL}"
        elif self.fsync != "always":
            everysec = self.fsync == "everysec"
            when = "once a second" if everysec else "when the operating system does"
            text = (
                f"syncs its append-only file {when} (appendfsync {self.fsync}): a power cut loses what it acknowledged"
            )
            yield logging.INFO if everysec else logging.WARNING, f"{text} since the last time; {_ALWAYS}"


def _lines(*sections: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for section in sections for line in section.decode().splitlines() if ":" in line)


def _kind_and_version(info: Mapping[str, str]) -> tuple[str, str]:
    for fork in _FORKS:
        if own := info.get(f"{fork}_version"):
            return fork.title(), own
    return "Redis", info.get("redis_version") or "?"


def _uses(info: Mapping[str, str], *, encrypted: bool) -> Sequence[Condition]:
    """Return the features that a server uses, as far as INFO tells them."""
    mode = info.get("redis_mode") or info.get("server_mode")
    found: tuple[tuple[Condition, bool], ...] = (
        ("tls", encrypted),
        ("cluster", mode == "cluster"),
        ("append-only", info.get("aof_enabled") == "1"),
    )
    return [condition for condition, used in found if used]


def check_kind(address: Address, info: bytes) -> None:
    """Raise `Refused` if the server is too old, or of another kind than the address says.

    Args:
        info: the reply to `INFO server`.
    """
    found = _lines(info)
    mode = found.get("redis_mode") or found.get("server_mode", "")  # Valkey's name for it
    secure = "s" if address.encrypted else ""
    if mode == "sentinel":
        raise Refused(f"{address.shown} is a sentinel: write redis{secure}+sentinel://host:port/service")
    if mode == "cluster" and not address.clustered:
        raise Refused(f"{address.shown} is a node of a Redis Cluster: write redis{secure}+cluster://host:port")
    version = found.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_SERVER:
        raise Refused(f"{address.shown} is Redis {version or '?'}: Perdure needs {_oldest()} or newer")


def _oldest() -> str:
    return ".".join(map(str, OLDEST_SERVER))


async def check_servers(
    address: Address,
    requirements: ServerRequirements | None,
    servers: Mapping[str, Callable[[Command], asyncio.Future[Any]]],
    *,
    log: bool = True,
) -> None:
    """Ask the server, or each primary of a cluster, and refuse or log what it is not. Raises errors of redis-py.

    A primary of a cluster that does not answer is left out, unless the server must be durable.

    Args:
        requirements: None checks kind and version only.
        servers: how to submit a command, by the name of the primary; one server has an empty name.
        log: log the findings.
    """
    questions = _questions(address, requirements)
    # All are submitted before the first reply is awaited.
    asked = {name: asyncio.gather(*map(ask, questions), return_exceptions=True) for name, ask in servers.items()}
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    if requirements is not None and address.assumed:
        found[logging.WARNING, _ASSUMED] = [""]
    for name, replies in asked.items():
        try:
            async with asyncio.timeout(_NODE_TIMEOUT if name else None):
                answers = [_answer(*pair) for pair in zip(questions, await replies, strict=True)]
        except (RedisError, OSError):
            if not name or (requirements is not None and requirements.require_durable):
                raise
            continue
        if requirements is not None:
            for finding in _check(address, requirements, name, answers):
                found[finding].append(name)
        elif answers[0]:
            check_kind(address, answers[0])
    for (level, text), names in found.items():
        if log and (address.shown, text) not in _logged:
            _logged.add((address.shown, text))
            primaries = f" ({', '.join(names)})" if names[0] else ""
            _logger.log(level, "%s%s %s", address.shown, primaries, text)


def _questions(address: Address, requirements: ServerRequirements | None) -> Sequence[Command]:
    """Return the commands to ask with.

    A user with a name usually has only the rights that it needs, and the server would log each refusal (ACL LOG).
    """
    if requirements is None:
        return _INFO[:1]
    return (*_INFO, *_ADMIN) if requirements.require_durable or not address.user else _INFO


def _answer(question: Command, reply: Any) -> Any:
    """Return the reply, or None if the server refuses the command. Raises any other error."""
    if isinstance(reply, ResponseError):
        text = str(reply).lower()
        if question in _ADMIN or "permission" in text or "unknown command" in text:
            return None
    if isinstance(reply, BaseException):
        raise reply
    return reply


def _check(
    address: Address, requirements: ServerRequirements, name: str, answers: Sequence[Any]
) -> Iterator[tuple[int, str]]:
    """Raise `Refused` if the server cannot be used; return the findings of one that can."""
    server_section, *_ = sections = answers[: len(_INFO)]
    if server_section:
        check_kind(address, server_section)
    info = _lines(*(section for section in sections if section))
    server = _Server.read(info, *answers[len(_INFO) :], encrypted=address.encrypted)
    where = f"{address.shown}, primary {name}," if name else address.shown
    if server.missing:
        raise Refused(
            f"{where} is {server.shown} and does not have the commands {', '.join(server.missing)}: "
            f"Perdure needs Redis {_oldest()} or newer, or Valkey"
        )
    if requirements.require_durable and (lacking := [*server.lacking()]):
        raise Refused(f"{where} is not durable, and PERDURE_REQUIRE_DURABLE is set: {'; '.join(lacking)}")
    if not requirements.allow_eviction and (server.eviction or "").startswith("allkeys-"):
        raise Refused(
            f"{where} deletes tasks when its memory is full (maxmemory-policy {server.eviction}): {_EVICTION}, or "
            "accept the loss with PERDURE_ALLOW_EVICTION=1"
        )
    return server.findings()


_LIMIT: Final = 1.0
"""Seconds for each of at most two questions."""

_QUESTION: Final = b"PING\r\n\r\n"
"""An inline command of Redis, and a request that every HTTP server answers."""

_REDIS: Final = b"+-$*:"
"""First bytes of the replies of Redis."""

_TLS_ALERT: Final = b"\x15\x03"


async def recognise(address: Address) -> str | None:
    """Return what the server at an address speaks instead of what the address says, and the remedy.

    None if it speaks that, does not answer, or has no port. Reads a few bytes over connections of its own.
    """
    place = place_of(address)
    if place is None or RUNTIME.sync_connection is not None:  # simulated processes have no connections of their own
        return None
    reply = await _ask(place, None)
    if reply.startswith(_TLS_ALERT):
        if not address.encrypted:
            return f"{address.shown} speaks TLS: write {address.scheme.replace('redis', 'rediss', 1)}://"
        reply = await _ask(place, _unverified())
    elif address.encrypted and reply[:1] and reply[:1] in _REDIS:
        return f"{address.shown} speaks Redis without TLS: write {address.scheme.replace('rediss', 'redis', 1)}://"
    elif address.encrypted and not reply:
        reply = await _ask(place, _unverified())  # a server with TLS may close a connection without an alert
    if reply.startswith(b"HTTP/") or b"<html" in reply.lower():
        return f"{address.shown} speaks HTTP, not Redis: give the port of the Redis server"
    if reply and reply[:1] not in _REDIS:
        return f"{address.shown} does not speak Redis (it answers {reply[:20]!r}): give the port of the Redis server"
    return None


def place_of(address: Address) -> Node | None:
    """Return host and port of the server, or of the first node; None for a socket file."""
    if address.embedded or address.scheme == "unix":
        return None
    if address.nodes:
        return address.nodes[0]
    parts = urlsplit(address.url)
    return Node(parts.hostname or "localhost", parts.port or 6379)


async def _ask(place: Node, tls: ssl.SSLContext | None) -> bytes:
    """Return the beginning of the server's answer; empty without one."""
    reply = b""
    with suppress(OSError, TimeoutError, ssl.SSLError):
        async with asyncio.timeout(_LIMIT):
            reader, writer = await asyncio.open_connection(place.host, place.port, ssl=tls)
            try:
                writer.write(_QUESTION)
                reply = await reader.read(256)
            finally:
                writer.transport.abort()
    return reply


def _unverified() -> ssl.SSLContext:
    """Return a context for a connection over which nothing secret is sent, and whose certificate does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
