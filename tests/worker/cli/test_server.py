"""`perdure server`: start, stop and status of the embedded server, and its use by other commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.queues.embedded.control import stop
from perdure.queues.embedded.server import EmbeddedServer

from tests.support.command_line import call, process

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "server"
    yield path
    stop(path, force=True)


def test_a_started_server_runs_until_it_is_stopped(folder: Path) -> None:
    place = ("--data-dir", str(folder))
    answer = process("server", "start", *place)
    assert (answer.code, answer.out) == (0, f"embedded:{folder}\n")
    assert f"unix://{folder}" in answer.err
    found = call("server", "status", *place, "--json").json
    assert (found["address"], found["running"], found["pinned"]) == (f"embedded:{folder}", True, True)
    shown = call("server", "status", *place).out
    assert "perdure server stop" in shown
    assert str(found["pid"]) in shown
    answer = call("server", "stop", *place)
    assert (answer.code, answer.out, answer.err) == (0, "", f"perdure: stopped the server in {folder}\n")
    assert call("server", "status", *place, "--json").json["running"] is False
    assert call("server", "stop", *place).err == f"perdure: no server was running in {folder}\n"


def test_start_prints_the_same_json_as_status(folder: Path) -> None:
    started = call("server", "start", "--data-dir", str(folder), "--json").json
    status = call("server", "status", "--data-dir", str(folder), "--json").json
    assert (started["running"], started["pid"], started["pinned"]) == (True, status["pid"], True)


def test_stop_is_refused_while_the_server_is_used_unless_forced(folder: Path) -> None:
    with EmbeddedServer(folder):
        answer = call("server", "stop", "--data-dir", str(folder))
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith(f"perdure: the server in {folder} is still used by 1 processes")
        assert call("server", "status", "--data-dir", str(folder), "--json").json["running"] is True
        assert call("server", "stop", "--force", "--data-dir", str(folder)).code == 0
        assert call("server", "status", "--data-dir", str(folder), "--json").json["running"] is False


def test_the_folder_can_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DATA_DIR", str(folder))
    assert call("server", "status", "--json").json["address"] == f"embedded:{folder}"
    assert not folder.exists()


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("start", "status"):
        answer = call("server", command, "--data-dir", str(tmp_path / "file"))
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith("perdure: ")
        assert f"the data directory {tmp_path / 'file'}" in answer.err
        assert answer.err.count("\n") == 1


def test_all_commands_use_the_server_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://nowhere.invalid")  # the command line is nearer
    call("server", "start", "--data-dir", str(folder))
    [task_id] = call("enqueue", "audit", "--queue", "default", "--data-dir", str(folder)).ids
    shown = call("task", "list", "--json", "--redis-url", f"embedded:{folder}")
    assert [task["id"] for task in shown.json] == [task_id]
    assert call("queue", "list", "--json", "--redis-url", "embedded:", "--data-dir", str(folder)).json[0]["depth"] == 1
