"""Checks of a server, or of each primary of a cluster: what it keeps, and how it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.exceptions import ResponseError

from ...queues.transport.gateway import Primary
from ...queues.transport.releases import Condition, missing_fixes, parse_version
from ...queues.transport.scripts import pairs
from ...queues.wording import duration
from .result import CheckResult, Severity

_SECTIONS: Final = ("server", "clients", "memory", "persistence", "stats", "replication", "cluster")

_CONFIG: Final = (
    "appendfsync",
    "save",
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "maxmemory-clients",
    "slowlog-log-slower-than",
)

_PINGS: Final = 30
"""PINGs by which the latency is measured, one after the other."""

_SLOW_PING: Final = 0.02
"""Seconds of a round trip from which on each step of a task is slow."""

_SLOW_COMMAND: Final = 0.1
"""Seconds of a command that are noticed: all clients wait meanwhile."""

_CLOCK: Final = 2.0
"""Seconds by which clocks may differ."""

_FULL: Final = 0.85
"""Share of the memory limit from which on there is little left."""

_REFUSES: Final = 0.97
"""Share from which on the server refuses some writes: the buffers of clients count as well."""

_FRAGMENTED: Final = 1.8
"""Ratio of resident to used memory that is noticed, of a server with so many bytes."""
_FRAGMENTED_BYTES: Final = 256 * 1024 * 1024

_BLIND: Final = "a problem there is not found"
_GRANT: Final = "give the user INFO, or examine the server as an administrator"

_OFFSET: Final = 16 * 1024 * 1024
"""Bytes by which a replica may be behind."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Answers of one server.

    Attributes:
        name: Its address in a cluster, empty for one server.
        info: Lines of INFO; empty if the user may not read them.
        config: Configuration parameters that the user may read.
        offset: Seconds by which its clock is ahead of that of this host; None if the user may not run TIME.
        pings: Seconds of each PING, in order.
        slow: Slowest commands of its slow log: seconds and name.
        encrypted: Whether the connection uses TLS.
        denied: Commands that the user may not run.
    """

    name: str
    info: Mapping[str, str]
    config: Mapping[str, str]
    offset: float | None
    pings: Sequence[float]
    slow: Sequence[tuple[float, str]] = ()
    encrypted: bool = False
    denied: Sequence[str] = field(default=())

    @property
    def kind(self) -> str:
        """`Valkey` or `Redis`; the name of another server."""
        for fork in ("valkey", "dragonfly", "garnet", "kvrocks"):
            if f"{fork}_version" in self.info:
                return fork.title()
        return "Redis"

    @property
    def version(self) -> str:
        """Version of the server by its own count."""
        return self.info.get(f"{self.kind.lower()}_version", "?")

    def number(self, name: str, default: int = 0) -> int:
        """Return a number of INFO; `default` if it is missing."""
        text = self.info.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else default


async def observe(name: str, primary: Primary, *, encrypted: bool) -> Observed:
    """Ask a server. Commands that it refuses count as unknown. Raises errors of redis-py."""
    denied: list[str] = []

    async def ask(*command: str | int) -> Any:
        try:
            return await primary(command)
        except ResponseError:
            denied.append(" ".join(map(str, command[:2])))
            return None

    info: dict[str, str] = {}
    for section in _SECTIONS:
        reply = await ask("INFO", section)
        lines = (reply or b"").decode("utf-8", "replace").splitlines()
        info |= dict(line.split(":", 1) for line in lines if ":" in line)
    config: dict[str, str] = {}
    for parameter in _CONFIG:
        reply = await ask("CONFIG", "GET", parameter)
        if reply is None:
            break  # it refuses all of them alike
        config |= {key.decode(): value.decode("utf-8", "replace") for key, value in pairs(reply).items()}
    pings: list[float] = []
    offset: float | None = None
    for _ in range(_PINGS):
        started, before = time.perf_counter(), time.time()
        reply = await ask("TIME")  # a refusal is a round trip, too
        pings.append(time.perf_counter() - started)
        if reply is not None and pings[-1] <= min(pings):
            seconds, micros = reply
            offset = int(seconds) + int(micros) / 1e6 - (before + pings[-1] / 2)
    slow = await ask("SLOWLOG", "GET", 128) if "slowlog-log-slower-than" in config else None
    return Observed(name, info, config, offset, pings, _slowest(slow or ()), encrypted, tuple(denied))


def _slowest(entries: Sequence[Any]) -> list[tuple[float, str]]:
    found = [(int(entry[2]) / 1e6, entry[3][0].decode("utf-8", "replace").upper()) for entry in entries if entry[3]]
    return sorted(found, reverse=True)[:3]


def check_version(server: Observed) -> Iterator[CheckResult]:
    """Compare the version with the releases that have fixes."""
    shown = f"{server.kind} {server.version}"
    version = parse_version(server.version)
    if version is None or server.kind not in ("Redis", "Valkey"):
        text = f"{shown}: no list of its fixed releases is known" if server.info else "the user may not run INFO"
        yield CheckResult("version", Severity.NOTE, text, "missing fixes are not found", "see its release notes")
        return
    uses: list[Condition] = []
    if server.encrypted:
        uses.append("tls")
    if server.info.get("cluster_enabled") == "1":
        uses.append("cluster")
    if server.info.get("aof_enabled") == "1":
        uses.append("append-only")
    if server.config.get("maxmemory-clients", "0") != "0":
        uses.append("client-eviction")
    missing = list(missing_fixes(server.kind, version, uses))
    for defect, fixed in missing:
        yield CheckResult(
            "version",
            Severity.WARNING,
            f"{shown} lacks the fix of {defect.name}",
            defect.text,
            f"upgrade to {server.kind} {'.'.join(map(str, fixed))} or newer (see {defect.source})",
        )
    if not missing:
        yield CheckResult("version", Severity.OK, f"{shown}, no known fix is missing")


def check_persistence(server: Observed) -> Iterator[CheckResult]:
    """Find out what a crash or a power cut loses, and whether the last writes to disk succeeded."""
    info = server.info
    enabled = info.get("aof_enabled")
    if enabled is None:
        yield CheckResult(
            "persistence",
            Severity.WARNING,
            "the server does not report its persistence",
            "what a crash loses is unknown",
            "give the user INFO, or ask the provider for an append-only file",
        )
        return
    fsync = server.config.get("appendfsync")
    if enabled == "0":
        yield CheckResult(
            "persistence",
            Severity.ERROR,
            "no append-only file (appendonly no)",
            "a crash or restart of the server loses acknowledged tasks, back to the last snapshot"
            + ("; there are no snapshots either" if server.config.get("save") == "" else ""),
            "set appendonly yes, in its configuration file and with CONFIG SET",
        )
    elif fsync == "no":
        yield CheckResult(
            "persistence",
            Severity.WARNING,
            "append-only file, synced by the operating system only (appendfsync no)",
            "a power cut loses what was acknowledged in the last half minute or so",
            "set appendfsync everysec, or always",
        )
    else:
        synced = {"always": "synced before each reply", "everysec": "synced once a second"}.get(
            fsync or "", "its appendfsync is unknown"
        )
        yield CheckResult("persistence", Severity.OK, f"append-only file, {synced}")
    if enabled != "0" and info.get("aof_last_write_status", "ok") != "ok":
        yield CheckResult(
            "persistence",
            Severity.ERROR,
            "the last write to the append-only file failed",
            "the server refuses writes, or loses them at a crash",
            "see its log; free space on its disk",
        )
    if enabled != "0" and info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield CheckResult(
            "persistence",
            Severity.WARNING,
            "the last rewrite of the append-only file failed",
            "the file grows until its disk is full",
            "see the server's log; then run BGREWRITEAOF",
        )
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield CheckResult(
            "persistence",
            Severity.ERROR,
            "the last snapshot failed",
            "with stop-writes-on-bgsave-error the server refuses all writes",
            "see its log: the disk is full, or memory for a fork is missing (vm.overcommit_memory)",
        )


def check_eviction(server: Observed) -> Iterator[CheckResult]:
    """Find out whether the server deletes keys when its memory is full, and how full it is."""
    policy, limit = server.info.get("maxmemory_policy"), server.number("maxmemory")
    remedy = "set maxmemory-policy noeviction"
    if policy is None:
        yield CheckResult(
            "eviction",
            Severity.WARNING,
            "the server does not report its maxmemory-policy",
            "it may delete tasks",
            remedy,
        )
    elif policy.startswith("allkeys-"):
        yield CheckResult(
            "eviction",
            Severity.ERROR,
            f"maxmemory-policy {policy}",
            "the server deletes tasks and checkpoints when its memory is full",
            remedy,
        )
    elif policy != "noeviction":
        yield CheckResult(
            "eviction",
            Severity.WARNING,
            f"maxmemory-policy {policy}",
            "the server deletes results, dead letters and registrations when its memory is full",
            remedy,
        )
    else:
        yield CheckResult("eviction", Severity.OK, "maxmemory-policy noeviction")
    if evicted := server.number("evicted_keys"):
        yield CheckResult(
            "eviction",
            Severity.ERROR,
            f"{evicted:,} keys were deleted for lack of memory since the server started",
            "tasks may be lost",
            f"{remedy}; then compare with your own records which tasks are missing",
        )
    used = server.number("used_memory")
    if "used_memory" not in server.info:
        yield CheckResult("memory", Severity.NOTE, "the server does not report its memory", _BLIND, _GRANT)
    elif limit and used > limit * _FULL:
        yield CheckResult(
            "memory",
            Severity.ERROR if used >= limit * _REFUSES else Severity.WARNING,
            f"{_megabytes(used)} of {_megabytes(limit)} used ({used / limit:.0%} of maxmemory)",
            "at the limit the server refuses new tasks and steps",
            "raise maxmemory, shorten result_ttl, or purge dead letters; 'perdure queue list' shows what waits",
        )
    else:
        of = f" of {_megabytes(limit)}" if limit else ", no maxmemory"
        yield CheckResult("memory", Severity.OK, f"{_megabytes(used)}{of}")
    ratio = server.info.get("mem_fragmentation_ratio", "")
    if used > _FRAGMENTED_BYTES and _is_above(ratio, _FRAGMENTED):
        yield CheckResult(
            "memory",
            Severity.NOTE,
            f"fragmentation {ratio}: the process uses {_megabytes(server.number('used_memory_rss'))}",
            "the host may run out of memory before maxmemory is reached",
            "set activedefrag yes where the server has it, or restart it at a quiet time",
        )


def _is_above(text: str, limit: float) -> bool:
    try:
        return float(text) > limit
    except ValueError:
        return False


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def check_replication(server: Observed) -> Iterator[CheckResult]:
    """Find out whether replicas follow, and whether an acknowledged write reaches one."""
    info = server.info
    if "role" not in info:
        yield CheckResult("replication", Severity.NOTE, "the server does not report its replicas", _BLIND, _GRANT)
        return
    if info["role"] != "master":
        yield CheckResult(
            "replication",
            Severity.ERROR,
            "the server is a replica",
            "it refuses writes",
            "connect to the primary, or by redis+sentinel:// so that clients follow it",
        )
        return
    replicas = [dict(part.split("=", 1) for part in text.split(",")) for text in _replicas(info)]
    wanted = int(server.config.get("min-replicas-to-write", "0") or 0)
    online = [replica for replica in replicas if replica.get("state") == "online"]
    if not replicas and not wanted:
        yield CheckResult(
            "replication",
            Severity.NOTE,
            "no replica",
            "while the server is away, no task runs; its disk is the only copy",
            "see how-to/durability.md for replicas and failover; make backups with 'perdure backup'",
        )
        return
    if len(online) < wanted:
        yield CheckResult(
            "replication",
            Severity.ERROR,
            f"{len(online)} replicas follow, and min-replicas-to-write is {wanted}",
            "the server refuses all writes",
            "start its replicas, or lower min-replicas-to-write",
        )
    for replica in replicas:
        behind = server.number("master_repl_offset") - int(replica.get("offset", "0") or 0)
        lag = int(replica.get("lag", "0") or 0)
        if replica.get("state") != "online" or lag > 10 or behind > _OFFSET:
            yield CheckResult(
                "replication",
                Severity.WARNING,
                f"replica {replica.get('ip')}:{replica.get('port')} is {replica.get('state')}, {lag} s and "
                f"{max(0, behind):,} bytes behind",
                "a failover to it loses what it does not have",
                "see the log of the replica, its network and its client-output-buffer-limit",
            )
    if online and not wanted:
        yield CheckResult(
            "replication",
            Severity.NOTE,
            f"{len(online)} replicas, min-replicas-to-write 0",
            "a primary that is cut off from its replicas still accepts tasks, which the failover loses",
            "set min-replicas-to-write 1, or use durability='replicated' for tasks that matter",
        )
    elif len(online) >= wanted:
        yield CheckResult("replication", Severity.OK, f"{len(online)} replicas follow")


def _replicas(info: Mapping[str, str]) -> list[str]:
    return [text for name, text in info.items() if name.startswith("slave") and name[5:].isdigit() and "=" in text]


def check_clock(servers: Sequence[Observed]) -> Iterator[CheckResult]:
    """Compare the clocks of the servers with that of this host, and with each other."""
    known = [(server.name, server.offset) for server in servers if server.offset is not None]
    if not known:
        yield CheckResult("clock", Severity.NOTE, "this user may not run TIME", _BLIND, _GRANT)
        return
    for name, offset in known:
        if abs(offset) > _CLOCK:
            ahead = "ahead of" if offset > 0 else "behind"
            yield CheckResult(
                "clock",
                Severity.WARNING,
                f"the server's clock is {duration(abs(offset))} {ahead} that of this host",
                "Perdure uses the server's clock only; delays given as a time of this host, logs and traces differ",
                "synchronise both hosts (chrony or systemd-timesyncd)",
                where=name,
            )
    offsets = [offset for _, offset in known]
    if max(offsets) - min(offsets) > _CLOCK:
        yield CheckResult(
            "clock",
            Severity.ERROR,
            f"the clocks of the nodes differ by {duration(max(offsets) - min(offsets))}",
            "a failover or a moved slot changes the time of its tasks: leases and delays end early or late",
            "synchronise the hosts of all nodes (chrony or systemd-timesyncd)",
        )
    elif all(abs(offset) <= _CLOCK for offset in offsets):
        yield CheckResult("clock", Severity.OK, f"within {max(map(abs, offsets)) * 1000:.0f} ms of this host")


def check_latency(server: Observed) -> Iterator[CheckResult]:
    """Judge the round trips, and the slow commands that the server has recorded."""
    ordered = sorted(server.pings)
    middle, worst = ordered[len(ordered) // 2], ordered[-1]
    shown = f"round trip {middle * 1000:.1f} ms (median of {len(ordered)}), {worst * 1000:.1f} ms at most"
    if middle > _SLOW_PING:
        yield CheckResult(
            "latency",
            Severity.WARNING,
            shown,
            "each recorded step costs a round trip, so tasks with many short steps are slow",
            "run workers in the zone of the server; see how-to/production.md",
        )
    else:
        yield CheckResult("latency", Severity.OK, shown)
    slow = [f"{name} {seconds * 1000:.0f} ms" for seconds, name in server.slow if seconds > _SLOW_COMMAND]
    if slow:
        yield CheckResult(
            "latency",
            Severity.WARNING,
            f"slow commands in its log: {', '.join(slow)}",
            "all clients wait while one runs; leases are renewed late",
            "see SLOWLOG GET: keep programs with slow commands (KEYS, large deletes, scripts) on another server",
        )


async def observe_all(primaries: Mapping[str, Primary], *, encrypted: bool) -> list[Observed]:
    """Ask all servers at the same time."""
    each = (observe(name, primary, encrypted=encrypted) for name, primary in primaries.items())
    return list(await asyncio.gather(*each))
