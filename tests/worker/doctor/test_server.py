"""Checks of a server by its answers: each finding has a meaning and a remedy, and a sound server has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
from perdure.worker.doctor.result import CheckResult, Severity
from perdure.worker.doctor.server import (
    Observed,
    check_clock,
    check_eviction,
    check_latency,
    check_persistence,
    check_replication,
    check_version,
)

SOUND = {
    "redis_version": "7.2.4",
    "valkey_version": "9.1.9",
    "aof_enabled": "1",
    "maxmemory_policy": "noeviction",
    "maxmemory": "0",
    "used_memory": "1000000",
    "role": "master",
    "slave0": "ip=10.0.0.2,port=6379,state=online,offset=1000,lag=0",
    "master_repl_offset": "1000",
}
CONFIG = {"appendfsync": "always", "save": "3600 1", "min-replicas-to-write": "1", "maxmemory-clients": "0"}

Check = Callable[[Observed], Iterable[CheckResult]]
OF_A_SERVER: list[Check] = [check_version, check_persistence, check_eviction, check_replication, check_latency]


def server(
    info: Mapping[str, str] | None = None,
    config: Mapping[str, str] | None = None,
    *,
    offset: float = 0.0,
    pings: tuple[float, ...] = (0.001,),
    slow: tuple[tuple[float, str], ...] = (),
) -> Observed:
    return Observed("", {**SOUND, **(info or {})}, {**CONFIG, **(config or {})}, offset, pings, slow)


@pytest.mark.parametrize("check", OF_A_SERVER)
def test_a_sound_server_has_no_problem(check: Check) -> None:
    assert {finding.severity for finding in check(server())} == {Severity.OK}


CASES: list[tuple[Check, Observed, Severity, str]] = [
    (
        check_version,
        server({"valkey_version": "8.1.3"}),
        Severity.WARNING,
        "8.1.3 lacks the fix of CVE-2025-49844",
    ),
    (check_version, server({"valkey_version": "beta"}), Severity.NOTE, "no list of its fixed releases"),
    (check_persistence, server({"aof_enabled": "0"}), Severity.ERROR, "no append-only file"),
    (check_persistence, server(config={"appendfsync": "no"}), Severity.WARNING, "appendfsync no"),
    (check_persistence, server({"aof_last_write_status": "err"}), Severity.ERROR, "the last write to the append-only"),
    (check_persistence, server({"aof_last_bgrewrite_status": "err"}), Severity.WARNING, "the last rewrite"),
    (check_persistence, server({"rdb_last_bgsave_status": "err"}), Severity.ERROR, "the last snapshot failed"),
    (check_eviction, server({"maxmemory_policy": "allkeys-lru"}), Severity.ERROR, "maxmemory-policy allkeys-lru"),
    (check_eviction, server({"maxmemory_policy": "volatile-ttl"}), Severity.WARNING, "maxmemory-policy volatile-ttl"),
    (check_eviction, server({"evicted_keys": "12"}), Severity.ERROR, "12 keys were deleted"),
    (check_eviction, server({"maxmemory": "1100000"}), Severity.WARNING, "91% of maxmemory"),
    (check_eviction, server({"maxmemory": "900000"}), Severity.ERROR, "111% of maxmemory"),
    (
        check_eviction,
        server({"used_memory": "400000000", "mem_fragmentation_ratio": "2.5", "used_memory_rss": "1000000000"}),
        Severity.NOTE,
        "fragmentation 2.5",
    ),
    (check_replication, server({"role": "slave"}), Severity.ERROR, "the server is a replica"),
    (
        check_replication,
        server({"slave0": "ip=10.0.0.2,port=1,state=wait_bgsave,offset=0,lag=0"}),
        Severity.ERROR,
        "0 replicas follow, and min-replicas-to-write is 1",
    ),
    (
        check_replication,
        server({"slave0": "ip=10.0.0.2,port=1,state=online,offset=0,lag=0", "master_repl_offset": "99000000"}),
        Severity.WARNING,
        "99,000,000 bytes behind",
    ),
    (check_replication, server(config={"min-replicas-to-write": "0"}), Severity.NOTE, "min-replicas-to-write 0"),
    (check_latency, server(pings=(0.05, 0.06, 0.05)), Severity.WARNING, "round trip 50.0 ms"),
    (check_latency, server(slow=((0.4, "KEYS"),)), Severity.WARNING, "KEYS 400 ms"),
]


@pytest.mark.parametrize(("check", "observed", "severity", "text"), CASES, ids=[case[3] for case in CASES])
def test_each_problem_has_a_meaning_and_a_remedy(
    check: Check, observed: Observed, severity: Severity, text: str
) -> None:
    found = [finding for finding in check(observed) if text in finding.found]
    assert [finding.severity for finding in found] == [severity]
    assert found[0].meaning
    assert found[0].remedy


def test_a_server_without_info_is_not_called_sound() -> None:
    blind = Observed("", {}, {}, 0.0, (0.001,))
    for check in (check_version, check_persistence):
        assert all(finding.severity is not Severity.OK for finding in check(blind))
    assert any("does not report its maxmemory-policy" in finding.found for finding in check_eviction(blind))


def test_clocks_that_differ_between_nodes_are_an_error() -> None:
    assert [one.severity for one in check_clock([server(), server(offset=0.5)])] == [Severity.OK]
    found = list(check_clock([server(), server(offset=-60.0)]))
    assert [one.severity for one in found] == [Severity.WARNING, Severity.ERROR]
    assert "1.0 min behind that of this host" in found[0].found
