"""Check of a server at connect: commands, eviction policy, persistence, and what a user may not ask."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from perdure import Producer
from perdure.queues import Address, Gateway, Refused
from perdure.queues.transport import server_check
from perdure.queues.transport.pipelining import _Transport
from perdure.queues.transport.releases import Condition, FixedRelease, Version
from perdure.queues.transport.server_check import ServerRequirements

from tests.conftest import default_kind
from tests.support.acl import documented_rights
from tests.support.servers import RedisServer, find_program
from tests.support.servers.clusters import private_cluster
from tests.support.servers.sentinels import private_sentinels

pytestmark = pytest.mark.integration

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
EVERYSEC = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
Serve = Callable[..., str]


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, as if this process had not logged any finding before."""
    monkeypatch.setattr(server_check, "_logged", set())
    monkeypatch.setattr(server_check, "missing_fixes", lambda *_: ())  # the server of the test may be an old one
    caplog.set_level(logging.INFO, "perdure")
    return caplog


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Function that starts a server with options and returns its URL."""
    program = find_program(default_kind())
    if program is None:
        pytest.skip(f"no {default_kind()} server here")
    started: list[RedisServer] = []

    def start(*options: str) -> str:
        started.append(RedisServer(program, options).start())
        return started[-1].url

    yield start
    for server in started:
        server.stop()


async def connect(url: str, requirements: ServerRequirements = ServerRequirements()) -> None:  # noqa: B008 - frozen
    gateway = Gateway(Address(url), patience=0.0, requirements=requirements)
    await gateway.open()
    await gateway.close()


def messages(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == level]


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_server_that_evicts_any_key_is_refused(serve: Serve, policy: str) -> None:
    with pytest.raises(Refused, match=rf"{policy}.*noeviction, or accept the loss with PERDURE_ALLOW_EVICTION=1"):
        await connect(serve(*DURABLE, "--maxmemory-policy", policy))


async def test_a_setting_accepts_a_server_that_evicts_any_key(
    serve: Serve, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(*DURABLE, "--maxmemory-policy", "allkeys-lfu")
    monkeypatch.setenv("PERDURE_ALLOW_EVICTION", "1")
    async with Producer(url):
        pass
    (warning,) = messages(logged, logging.WARNING)
    assert warning.startswith(f"{url} deletes tasks when its memory is full (maxmemory-policy allkeys-lfu)")


async def test_eviction_of_keys_with_a_ttl_is_warned_of(serve: Serve, logged: pytest.LogCaptureFixture) -> None:
    await connect(serve(*DURABLE, "--maxmemory-policy", "volatile-lru"))
    (warning,) = messages(logged, logging.WARNING)
    assert "deletes results, dead letters and registrations when its memory is full" in warning
    assert "(maxmemory-policy volatile-lru): set its maxmemory-policy to noeviction" in warning


async def test_a_durable_server_is_not_logged(serve: Serve, logged: pytest.LogCaptureFixture) -> None:
    await connect(serve(*DURABLE), ServerRequirements(require_durable=True))
    assert logged.records == []


async def test_a_server_of_a_version_with_known_holes_is_warned_of(
    serve: Serve, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(*DURABLE)
    known = ("CVE-1", "a user can run code in the server"), ("BUG-2", "it loses writes")
    asked: list[tuple[Any, ...]] = []

    def missing(*question: Any) -> list[tuple[FixedRelease, Version]]:
        asked.append(question)
        return [(FixedRelease(*defect, {}, "page"), (99, 1, index)) for index, defect in enumerate(known)]

    monkeypatch.setattr(server_check, "missing_fixes", missing)
    for _ in range(2):
        await connect(url)
    ((kind, version, uses),) = {(kind, version, tuple(uses)) for kind, version, uses in asked}
    assert uses == ("append-only",)
    shown = f"{kind} {'.'.join(map(str, version))}"
    (warning,) = messages(logged, logging.WARNING)
    assert warning == (
        f"{url} is {shown}, which by its version lacks fixes that {kind} 99.1.1 has: CVE-1, BUG-2; "
        "upgrade it, unless its distributor has added them"
    )


VALKEY = "redis_version:7.2.4\r\nvalkey_version:8.1.4\r\n"


@pytest.mark.parametrize(
    ("info", "uses"),
    [
        (
            "redis_version:7.2.4\r\nvalkey_version:8.1.4\r\nserver_mode:cluster\r\naof_enabled:1",
            ["cluster", "append-only"],
        ),
        ("redis_version:7.2.4\r\nvalkey_version:8.1.4\r\nserver_mode:standalone\r\naof_enabled:0", []),
    ],
)
def test_the_version_and_the_features_in_use_are_read_from_info(info: str, uses: list[Condition]) -> None:
    server = server_check._Server.read(dict(line.split(":", 1) for line in f"{VALKEY}{info}".splitlines()))
    assert (server.kind, server.version, server.uses) == ("Valkey", "8.1.4", uses)
    assert server_check._Server.read({}, encrypted=True).uses == ["tls"]


async def test_the_embedded_server_is_not_logged(logged: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async with Producer(f"embedded:{tmp_path}", requirements=ServerRequirements(require_durable=True)):
        assert logged.records == []


async def test_the_embedded_server_is_logged_once_where_no_server_is_configured(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PERDURE_REDIS_URL", raising=False)
    monkeypatch.setenv("PERDURE_DATA_DIR", str(tmp_path))
    for _ in range(2):
        async with Producer():
            pass
    (record,) = logged.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"embedded:{tmp_path} is used, because PERDURE_REDIS_URL is not set: only processes on this host share it; set "
        "PERDURE_REDIS_URL ('embedded:' if this server is meant)"
    )
    monkeypatch.setenv("PERDURE_REDIS_URL", "embedded:")
    async with Producer():
        assert len(logged.records) == 1


def test_a_program_that_configures_no_logging_sees_it_once(tmp_path: Path) -> None:
    program = """
import asyncio
from perdure import App
app = App("web")
@app.task
async def send(ctx, number: int) -> None: ...
for number in range(2):
    send.enqueue_sync(number)
"""
    unset = {name: value for name, value in os.environ.items() if name != "PERDURE_REDIS_URL"}
    environment = unset | {"PERDURE_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"embedded:{tmp_path / 'data'} is used, because PERDURE_REDIS_URL is not set")


@pytest.mark.parametrize(
    ("options", "level", "text", "remedy"),
    [
        (("--appendonly", "no"), logging.WARNING, "has no append-only file: a crash or restart", "set appendonly yes"),
        (EVERYSEC, logging.INFO, "once a second (appendfsync everysec): a power cut loses", "set appendfsync always"),
        (
            (*EVERYSEC[:-1], "no"),
            logging.WARNING,
            "when the operating system does (appendfsync no)",
            "appendfsync always",
        ),
    ],
)
async def test_weak_persistence_is_logged_once(
    serve: Serve, logged: pytest.LogCaptureFixture, options: tuple[str, ...], level: int, text: str, remedy: str
) -> None:
    url = serve(*options)
    await connect(url)
    await connect(url)
    (record,) = logged.records
    assert (record.levelno, record.name.partition(".")[0]) == (level, "perdure")
    assert text in record.getMessage()
    assert remedy in record.getMessage()


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        (("--appendonly", "no"), "appendonly must be yes, got no"),
        (EVERYSEC, "appendfsync must be always, got everysec"),
        ((*DURABLE, "--maxmemory-policy", "volatile-ttl"), "maxmemory-policy must be noeviction, got volatile-ttl"),
    ],
)
async def test_a_server_that_must_be_durable_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], lacking: str
) -> None:
    monkeypatch.setenv("PERDURE_REQUIRE_DURABLE", "1")
    monkeypatch.setenv("PERDURE_ALLOW_EVICTION", "1")
    with pytest.raises(Refused, match=f"is not durable, and PERDURE_REQUIRE_DURABLE is set: .*{lacking}"):
        await Producer(serve(*options)).__aenter__()


async def test_a_user_without_config_leaves_only_the_sync_interval_unknown(
    serve: Serve, logged: pytest.LogCaptureFixture
) -> None:
    url = serve(*DURABLE)
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">secret", *documented_rights("perdure", "worker"))
        await connect(url.replace("unix://", "unix://worker:secret@"))
        (record,) = logged.records
        assert record.levelno == logging.INFO
        assert "does not report its appendfsync: what a power cut loses is unknown" in record.getMessage()
        refused = {entry["object"] for entry in client.acl_log()}
        assert refused <= {"client", "client|setinfo"}  # redis-py itself reports its name and version


async def test_a_user_without_info_leaves_everything_unknown(serve: Serve, logged: pytest.LogCaptureFixture) -> None:
    url = serve(*DURABLE)
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-info", "-config", "-command")
    await connect(url)
    assert messages(logged, logging.WARNING) == []
    eviction, persistence = messages(logged, logging.INFO)
    assert "does not report its maxmemory-policy" in eviction
    assert "does not report its persistence" in persistence


async def test_an_unknown_answer_does_not_count_as_durable(serve: Serve) -> None:
    url = serve(*DURABLE)
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-config")
    with pytest.raises(Refused, match="appendfsync must be always, got no answer"):
        await connect(url, ServerRequirements(require_durable=True))


async def test_a_server_without_a_needed_command_is_refused_with_its_version(serve: Serve) -> None:
    url = serve(*DURABLE, "--rename-command", "XAUTOCLAIM", "")
    with redis.Redis.from_url(url) as client:
        info = client.info("server")
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    with pytest.raises(
        Refused, match=rf"{version} and does not have the commands XAUTOCLAIM: Perdure needs Redis 6\.2"
    ):
        await connect(url)


async def test_all_questions_are_one_write(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    send = _Transport.send

    def counted(transport: _Transport, batch: Iterable[Any]) -> None:
        batch = list(batch)
        writes.append(len(batch))
        send(transport, batch)

    monkeypatch.setattr(_Transport, "send", counted)
    await connect(serve(*DURABLE))
    assert writes == [5]


@pytest.mark.cluster
async def test_each_primary_of_a_cluster_is_checked(logged: pytest.LogCaptureFixture) -> None:
    program = find_program(default_kind())
    assert program is not None
    with private_cluster(program, replicas=0) as cluster:
        await connect(cluster.url())
        (warning,) = messages(logged, logging.WARNING)
        assert "has no append-only file" in warning
        assert all(f"127.0.0.1:{node.port}" in warning for node in cluster.nodes)
        last = cluster.nodes[-1]
        last.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(Refused, match=rf"primary 127\.0\.0\.1:{last.port}, deletes tasks"):
            await connect(cluster.url())
        last.freeze()
        await connect(cluster.url())  # a primary that does not answer cannot delay every client


@pytest.mark.cluster
async def test_the_primary_that_sentinels_name_is_checked() -> None:
    program = find_program(default_kind())
    assert program is not None
    policy = ("--maxmemory-policy", "allkeys-lru")
    with (
        private_sentinels(program, replicas=0, sentinels=1, options=policy) as sentinels,
        pytest.raises(Refused, match="deletes tasks"),
    ):
        await connect(sentinels.url())
