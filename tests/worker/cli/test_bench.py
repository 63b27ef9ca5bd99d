"""`perdure bench`: complete output, clean-up and consent. Of the measured values, only that of recovery is checked."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import default_kind
from tests.support.command_line import COMMAND, Answer, call, process
from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.servers.clusters import Cluster
from tests.support.servers.sentinels import private_sentinels

pytestmark = [pytest.mark.integration]

ROWS = {
    "enqueue": "tasks/s",
    "tasks": "tasks/s",
    "steps": "steps/s",
    "latency_p50": "ms",
    "latency_p99": "ms",
    "recovery": "s",
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for one test."""
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    yield server
    server.stop()


def check(answer: Answer) -> None:
    """Check that all rows are there, and that a lost worker's task ran after its lease."""
    assert answer.code == 0, answer.err
    rows = {row["key"]: row for row in answer.json["rows"]}
    assert {key: row["unit"] for key, row in rows.items()} == ROWS
    assert all(row["value"] > 0 and row["limit"] > 0 for row in rows.values())
    assert rows["recovery"]["value"] > 0.99 * rows["recovery"]["limit"]


@pytest.mark.processes
def test_all_measures_are_printed_and_all_keys_removed(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("{bench}other", "1")
        answer = process("bench", "--redis-url", server.url, "--tasks", "200", "--payload", "100", "--yes", "--json")
        check(answer)
        assert client.keys() == [b"{bench}other"]
    assert (answer.json["server"], answer.json["tasks"], answer.json["payload"]) == (server.url, 200, 100)


def test_the_default_output_is_a_table(tmp_path: Path) -> None:
    answer = call("bench", "--data-dir", str(tmp_path), "--tasks", "100")
    assert answer.code == 0, answer.err
    assert "redis-py" in answer.out
    assert "enqueue to start, p99" in answer.out


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_all_keys(server: RedisServer, number: signal.Signals) -> None:
    with (
        redis.Redis.from_url(server.url) as client,
        subprocess.Popen(
            [*COMMAND, "bench", "--redis-url", server.url, "--tasks", "10000", "--yes"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as running,
    ):
        try:
            while not client.keys("*:record:*"):
                assert running.poll() is None
                time.sleep(0.01)  # each look at all keys stops the server
            running.send_signal(number)
            out, err = running.communicate(timeout=30)
        finally:
            running.kill()
        assert (running.returncode, out) == (128 + number, b"")
        assert b"Traceback" not in err
        assert client.keys() == []


@pytest.mark.cluster
def test_on_a_cluster_bare_commands_go_to_the_node_that_has_the_queue(shared_cluster: Cluster) -> None:
    check(call("bench", "--redis-url", shared_cluster.url(), "--tasks", "200", "--yes", "--json"))
    left = [key for node in shared_cluster.serving() for key in keys_of(node.port)]
    assert left == []


def keys_of(port: int) -> list[bytes]:
    with redis.Redis(port=port) as client:
        found: list[bytes] = client.keys("{bench-*")
        return found


@pytest.mark.cluster
def test_under_sentinels_bare_commands_go_to_the_primary() -> None:
    program = find_program(default_kind())
    assert program is not None
    with private_sentinels(program) as sentinels:
        check(call("bench", "--redis-url", sentinels.url(), "--tasks", "100", "--yes", "--json"))


@pytest.mark.parametrize("url", ["redis://localhost", "unix:///run/redis.sock", "rediss://user:secret@10.0.0.7"])
def test_any_server_but_the_embedded_one_needs_consent(url: str) -> None:
    answer = call("bench", "--redis-url", url)
    assert answer.code == 2
    assert "under load for about 20 seconds; add --yes" in answer.err
    assert "secret" not in answer.err


def test_a_missing_server_is_reported_in_one_line(tmp_path: Path) -> None:
    answer = call("bench", "--redis-url", f"unix://{tmp_path}/nothing.sock", "--yes")
    assert answer.code == 1
    assert "cannot reach Redis" in answer.err
    assert "Traceback" not in answer.err


def test_an_invalid_size_is_misuse() -> None:
    assert call("bench", "--tasks", "1").code == 2
