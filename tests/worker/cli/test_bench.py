"""`perdure bench`: complete output, clean-up and consent. The measured values are not checked."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from perdure.queues import Address, Gateway
from perdure.worker.cli.bench.consent import ask, check_room
from perdure.worker.cli.support.errors import Failed, Misuse

from tests.conftest import default_kind
from tests.support.clusters import Cluster
from tests.support.command_line import COMMAND, call, process
from tests.support.sentinels import private_sentinels
from tests.support.servers import BUNDLED, RedisServer, find_program

pytestmark = [pytest.mark.integration]

ROWS = {
    "enqueue": "tasks/s",
    "enqueue_many": "tasks/s",
    "tasks": "tasks/s",
    "steps": "steps/s",
    "latency_p50": "ms",
    "latency_p95": "ms",
    "latency_p99": "ms",
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for one test."""
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    yield server
    server.stop()


@pytest.mark.processes
def test_all_measures_are_printed_and_all_keys_removed(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("{bench}somebody-elses", "1")
        place = ("--redis-url", server.url, "--tasks", "200", "--payload", "100", "--json")
        answer = process("bench", *place)
        assert answer.code == 0, answer.err
        assert client.keys() == [b"{bench}somebody-elses"]
    rows = {row["key"]: row for row in answer.json["rows"]}
    assert {key: row["unit"] for key, row in rows.items()} == ROWS
    assert all(row["value"] > 0 and row["raw"] > 0 for row in rows.values())
    assert answer.json["size"] == {"tasks": 200, "payload": 100}
    assert "appendonly no" in answer.json["server"]
    assert f"this puts {server.url} under load" in answer.err


def test_the_default_output_is_a_table(server: RedisServer) -> None:
    answer = call("bench", "--redis-url", server.url, "--tasks", "100")
    assert answer.code == 0, answer.err
    assert "raw client" in answer.out
    assert "enqueue to start, p99" in answer.out


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_all_keys(server: RedisServer, number: signal.Signals) -> None:
    with (
        redis.Redis.from_url(server.url) as client,
        subprocess.Popen(
            [*COMMAND, "bench", "--redis-url", server.url, "--tasks", "100000", "--yes"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as running,
    ):
        try:
            while not client.keys("*:record:*"):
                assert running.poll() is None
            running.send_signal(number)
            out, err = running.communicate(timeout=30)
        finally:
            running.kill()
        assert (running.returncode, out) == (128 + number, b"")
        assert b"Traceback" not in err
        assert client.keys() == []


@pytest.mark.cluster
def test_on_a_cluster_the_raw_client_works_on_the_node_that_has_the_queue(shared_cluster: Cluster) -> None:
    answer = call("bench", "--redis-url", shared_cluster.url(), "--tasks", "200", "--json")
    assert answer.code == 0, answer.err
    rows = {row["key"]: row for row in answer.json["rows"]}
    assert set(rows) == set(ROWS)
    assert all(row["value"] > 0 for row in rows.values())
    left = [key for node in shared_cluster.serving() for key in keys_of(node.port)]
    assert left == []


def keys_of(port: int) -> list[bytes]:
    with redis.Redis(port=port) as client:
        found: list[bytes] = client.keys("{bench-*")
        return found


@pytest.mark.cluster
def test_under_sentinels_the_raw_client_works_on_the_primary(tmp_path: Path) -> None:
    program = find_program(default_kind())
    assert program is not None
    with private_sentinels(program) as sentinels:
        answer = call("bench", "--redis-url", sentinels.url(), "--tasks", "100", "--json")
    assert answer.code == 0, answer.err
    assert {row["key"] for row in answer.json["rows"]} == set(ROWS)


# nobody is disturbed unasked


@pytest.mark.parametrize(
    "url", ["redis://redis.example.com:6379", "rediss://user:secret@10.0.0.7", "redis+sentinel://localhost,10.0.0.7/x"]
)
def test_a_remote_server_needs_consent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = call("bench", "--redis-url", url)
    assert answer.code == 2
    assert "under load" in answer.err
    assert "--yes" in answer.err
    assert "secret" not in answer.err


@pytest.mark.parametrize(
    "address",
    [
        Address("redis://localhost"),
        Address("redis://127.0.0.1:7000/3"),
        Address("redis://[::1]"),
        Address("unix:///tmp/redis.sock"),
        Address("redis+cluster://127.0.0.1:7000,localhost:7001"),
        Address(directory=Path("data")),
    ],
)
def test_a_local_server_is_announced_without_a_question(address: Address, capsys: pytest.CaptureFixture[str]) -> None:
    ask(address, False)
    assert address.shown in capsys.readouterr().err


def test_yes_skips_the_question() -> None:
    ask(Address("redis://redis.example.com"), True)
    with pytest.raises(Misuse):
        ask(Address("redis://redis.example.com"), False)


async def test_a_server_with_little_free_memory_is_refused(server: RedisServer) -> None:
    gateway = Gateway(Address(server.url))
    await gateway.open()
    try:
        await check_room(gateway, "{x}:ready", 10_000, 0, False)
        await gateway.command("CONFIG", "SET", "maxmemory", 20_000_000)
        await check_room(gateway, "{x}:ready", 100, 0, False)
        with pytest.raises(Failed, match=r"MB free of its maxmemory.*--tasks or --payload"):
            await check_room(gateway, "{x}:ready", 10_000, 0, True)
        with pytest.raises(Failed, match="maxmemory"):
            await check_room(gateway, "{x}:ready", 100, 500_000, True)
    finally:
        await gateway.close()


async def test_a_busy_server_is_refused_without_consent(server: RedisServer) -> None:
    gateway, other = Gateway(Address(server.url)), Gateway(Address(server.url))
    await gateway.open()
    await other.open()

    async def work() -> None:
        while True:
            await other.pipeline([("PING",)] * 100)

    working = asyncio.create_task(work())
    try:
        with pytest.raises(Failed, match="commands per second of other clients: add --yes"):
            await check_room(gateway, "{x}:ready", 100, 0, False)
        await check_room(gateway, "{x}:ready", 100, 0, True)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await gateway.close()
        await other.close()


def test_a_missing_server_is_reported_in_one_line(tmp_path: Path) -> None:
    answer = call("bench", "--redis-url", f"unix://{tmp_path}/nothing.sock")
    assert answer.code == 1
    assert "cannot reach Redis" in answer.err
    assert "Traceback" not in answer.err


def test_an_invalid_size_is_misuse() -> None:
    assert call("bench", "--tasks", "1").code == 2
