"""`perdure doctor` on real servers: a sound one, and one for each way in which a server is broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from perdure.queues import Namespace

from tests.support.acl import documented_rights
from tests.support.command_line import BOUND, Answer, call
from tests.support.servers import RedisServer
from tests.support.servers.clusters import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.processes]

DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


class Patient:
    """A server of its own, and the command that examines it."""

    def __init__(self, program: Path, *options: str) -> None:
        password = "secret" if "--requirepass" in options else ""
        self.server = RedisServer(program, options=(*DURABLE, *options)).start(password)
        self.client: Any = redis.Redis(unix_socket_path=str(self.server.socket))

    def examine(self, *options: str, url: str | None = None) -> Answer:
        return call("doctor", "--redis-url", url or self.server.url, "--json", *options)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def patient(server_program: Path, request: pytest.FixtureRequest) -> Iterator[Patient]:
    found = Patient(server_program, *getattr(request, "param", ()))
    yield found
    found.close()


def problems(answer: Answer, severity: str = "error") -> dict[str, str]:
    """Return what was found, by check. The output must be complete whatever the exit code is."""
    found = answer.json["findings"]
    assert all(one["meaning"] and one["remedy"] for one in found if one["severity"] in ("warning", "error")), found
    return {one["check"]: one["found"] for one in found if one["severity"] == severity}


def test_a_sound_server(patient: Patient) -> None:
    answer = patient.examine()
    assert (answer.code, problems(answer)) == (0, {})
    assert {one["check"] for one in answer.json["findings"]} >= {
        *("version", "persistence", "eviction", "memory", "replication", "clock", "latency", "rights", "schema"),
        *("scripts", "junk", "settings", "leases", "places"),
    }
    shown = call("doctor", "--redis-url", patient.server.url)
    assert (shown.code, "append-only file, synced once a second" in shown.out) == (0, True)
    assert "error 0, " in shown.err


@pytest.mark.parametrize("patient", [("--appendonly", "no")], indirect=True)
def test_a_server_without_persistence(patient: Patient) -> None:
    answer = patient.examine()
    assert (answer.code, problems(answer)) == (1, {"persistence": "no append-only file (appendonly no)"})
    assert "findings that need work: 1" in answer.err


@pytest.mark.parametrize("patient", [("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")], indirect=True)
def test_a_server_that_deletes_tasks(patient: Patient) -> None:
    answer = patient.examine()
    assert (answer.code, problems(answer)) == (1, {"eviction": "maxmemory-policy allkeys-lru"})


@pytest.mark.parametrize("patient", [("--maxmemory", "16mb")], indirect=True)
def test_a_server_whose_memory_is_full(patient: Patient) -> None:
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        for number in range(1000):
            patient.client.set(f"another:program:{number}", "x" * 50_000)
    answer = patient.examine()
    assert (answer.code, list(problems(answer))) == (1, ["memory"])
    assert "of maxmemory" in problems(answer)["memory"]


@pytest.mark.parametrize("patient", [("--min-replicas-to-write", "1")], indirect=True)
def test_a_server_whose_replicas_are_gone(patient: Patient) -> None:
    answer = patient.examine()
    found = "0 replicas follow, and min-replicas-to-write is 1"
    assert (answer.code, problems(answer)) == (1, {"replication": found})


def test_a_replica(patient: Patient) -> None:
    patient.client.replicaof("127.0.0.1", 1)
    answer = patient.examine()
    assert (answer.code, problems(answer)["replication"]) == (1, "the server is a replica")


def test_a_server_that_cannot_write_its_snapshot(patient: Patient) -> None:
    (patient.server.folder / "dump.rdb").mkdir()
    patient.client.bgsave()
    deadline = time.monotonic() + BOUND
    while patient.client.info("persistence")["rdb_last_bgsave_status"] == "ok" and time.monotonic() < deadline:
        time.sleep(0.01)
    answer = patient.examine()
    assert (answer.code, problems(answer)) == (1, {"persistence": "the last snapshot failed"})


def test_a_user_who_lacks_rights(patient: Patient) -> None:
    patient.client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~{perdure:*", "+@hash", "+info", "+time")
    url = f"unix://shop:secret@{patient.server.socket}"
    answer = patient.examine(url=url)
    assert answer.code == 1
    lacks = problems(answer)["rights"]
    assert lacks.startswith("user 'shop' lacks ")
    assert "XADD" in lacks
    # an administrator looks at the user, and at a role that it should have
    other = patient.examine("--user", "shop", "--role", "worker")
    assert other.code == 1
    assert problems(other)["rights"].endswith("for the role worker")
    assert patient.examine("--user", "missing").code == 1


@pytest.mark.parametrize("patient", [("--rename-command", "EVALSHA", "")], indirect=True)
def test_a_server_without_a_command_that_tasks_need(patient: Patient) -> None:
    answer = patient.examine()
    assert (answer.code, problems(answer)["commands"]) == (1, "the server does not have EVALSHA")
    patient.client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *documented_rights("perdure"))
    limited = patient.examine(url=f"unix://shop:secret@{patient.server.socket}")
    assert (limited.code, problems(limited)["commands"]) == (1, "the server does not have EVALSHA")
    assert "rights" not in problems(limited)


@pytest.mark.parametrize("patient", [("--rename-command", "INFO", "")], indirect=True)
def test_nothing_is_claimed_of_a_server_that_does_not_report(patient: Patient) -> None:
    answer = patient.examine()
    assert problems(answer, "note")["replication"] == "the server does not report its replicas"
    assert problems(answer, "note")["memory"] == "the server does not report its memory"
    assert not {"persistence", "replication", "memory", "eviction", "version"} & problems(answer, "ok").keys()


def test_a_user_that_lacks_one_right_of_its_role(patient: Patient) -> None:
    rights = documented_rights("perdure", "worker")
    channels = [right for right in rights if not right.startswith("&")]
    for name, given in (("noread", [*rights, "-xreadgroup"]), ("nochan", [*channels, "resetchannels"])):
        patient.client.execute_command("ACL", "SETUSER", name, "on", ">pw", *given)
    url = f"unix://noread:pw@{patient.server.socket}"
    answer = patient.examine(url=url)
    assert "worker lacks XREADGROUP" in problems(answer, "note")["rights"]
    assert patient.examine("--role", "worker", url=url).code == 1
    for options in ((), ("--user", "nochan")):
        place = None if options else f"unix://nochan:pw@{patient.server.socket}"
        answer = patient.examine("--role", "worker", *options, url=place)
        assert "lacks the channels &{perdure:*" in problems(answer)["rights"]


def test_a_user_without_any_right(patient: Patient) -> None:
    for name, rights in (("tiny", ("+ping", "+hello", "+select")), ("nothing", ())):
        patient.client.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", *rights)
        answer = patient.examine(url=f"unix://{name}:pw@{patient.server.socket}")
        assert (answer.code, "Traceback" in answer.err) == (1, False)
        assert "rights" in problems(answer)
        assert problems(answer, "note")["clock"] == "this user may not run TIME"


async def test_a_connection_that_is_lost_meanwhile(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise redis.exceptions.ConnectionError("the server closed the connection")

    for name in ("observe_all", "check_rights"):
        with monkeypatch.context() as changed:
            changed.setattr(f"perdure.worker.doctor.examination.{name}", lost)
            answer = await asyncio.to_thread(patient.examine)
        assert (answer.code, list(problems(answer))) == (1, ["server"])
        assert "the server closed the connection" in problems(answer)["server"]


@pytest.mark.parametrize("patient", [("--requirepass", "secret")], indirect=True)
def test_a_password_that_is_wrong(patient: Patient) -> None:
    answer = patient.examine()
    assert (answer.code, "refused the credentials" in problems(answer)["server"]) == (1, True)
    assert any("PERDURE_REDIS_URL" in one["remedy"] for one in answer.json["findings"])


def test_data_of_a_newer_release(patient: Patient) -> None:
    patient.client.hset(Namespace().deployment, mapping={"format": 7})
    answer = patient.examine()
    assert (answer.code, problems(answer)) == (1, {"schema": "format 7"})
    assert any("pip install --upgrade" in one["remedy"] for one in answer.json["findings"])


@pytest.mark.cluster
def test_each_primary_of_a_cluster_is_examined(shared_cluster: Cluster, namespace_name: str) -> None:
    place = ("--redis-url", shared_cluster.url(), "--namespace", namespace_name)
    assert call("enqueue", "pack", "--queue", "shop", *place).code == 0
    try:
        answer = call("doctor", *place, "--json")
        found = answer.json["findings"]
        where = {one["where"] for one in found if one["check"] == "version"}
        assert where == {f"127.0.0.1:{node.port}" for node in shared_cluster.serving()}
        assert [one["severity"] for one in found if one["check"] == "places"] == ["ok"]
        assert not [one for one in found if "could not be checked" in one["found"]]
    finally:
        for node in shared_cluster.serving():
            with redis.Redis(port=node.port) as client:
                for key in client.scan_iter(f"{{{namespace_name}[:}}]*"):
                    client.delete(key)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    answer = call("doctor", "--redis-url", f"unix://{tmp_path}/nothing.sock", "--json")
    assert (answer.code, list(problems(answer))) == (1, ["server"])


@pytest.mark.parametrize("patient", [("--appendfsync", "no")], indirect=True)
def test_strict_counts_warnings(patient: Patient) -> None:
    assert patient.examine().code == 0
    assert patient.examine("--strict").code == 1
