"""The clusters that the tests start: migration of slots and failover."""

from __future__ import annotations

import pytest
import redis

from tests.support.servers import BUNDLED, find_program
from tests.support.servers.clusters import Cluster, private_cluster, slot_of

pytestmark = [pytest.mark.cluster, pytest.mark.integration]


def test_a_slot_is_migrated_with_its_keys_and_back(shared_cluster: Cluster) -> None:
    key = "{moved:default:0}:ready"
    slot = slot_of(key)
    source = shared_cluster.owner(slot)
    target = next(node for node in shared_cluster.serving() if node is not source)
    source.command("SET", key, "value", "EX", 60)
    shared_cluster.move_slot(slot, target)
    assert target.command("GET", key) == b"value"
    with pytest.raises(redis.ResponseError, match=f"{slot} 127.0.0.1:{target.port}"):  # MOVED
        source.command("GET", key)
    shared_cluster.move_slot(slot, source)
    assert source.command("GETDEL", key) == b"value"


def test_a_migrating_slot_redirects_keys_that_have_moved(shared_cluster: Cluster) -> None:
    here, gone = "{under-way:default:0}:here", "{under-way:default:0}:gone"
    slot = slot_of(here)
    source = shared_cluster.owner(slot)
    target = next(node for node in shared_cluster.serving() if node is not source)
    for key in (here, gone):
        source.command("SET", key, "value", "EX", 60)
    move = shared_cluster.migrate(slot, target)
    move.begin()
    move.move(gone)
    assert source.command("GET", here) == b"value"
    with pytest.raises(redis.exceptions.AskError):
        source.command("GET", gone)
    target.command("ASKING")
    with pytest.raises(redis.exceptions.TryAgainError):
        target.command("MGET", here, gone)
    move.keys()
    move.finish()
    assert target.command("MGET", here, gone) == [b"value", b"value"]
    shared_cluster.move_slot(slot, source)


def test_a_replica_replaces_a_killed_primary() -> None:
    program = find_program(BUNDLED)
    assert program is not None
    with private_cluster(program) as cluster:
        slot = slot_of("key")
        cluster.owner(slot).command("SET", "key", "value")
        assert cluster.owner(slot).command("WAIT", 1, 20_000) == 1
        victim = cluster.kill_primary(slot)
        heir = cluster.failed_over(slot, victim)
        assert heir.command("GET", "key") == b"value"
        cluster.restart(victim)
        assert victim.info("replication")["role"] == "slave"
        assert victim.command("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
    assert not any(node.alive for node in cluster.nodes)
