"""`perdure demo` as a person calls it: real workers, real kills, a real server, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from perdure.worker.cli import main
from perdure.worker.cli.demo.replicas import ReplicaEnded, Replicas

FILES = 60
KILLS = 2
STEPS = FILES + 2

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@dataclass(frozen=True)
class Scene:
    """Calls of the demo in a temporary folder of their own. The path is short: a socket has to fit in."""

    temporary: Path
    mark: str

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "perdure.worker.cli", "demo", *arguments],
            env=os.environ | {"TMPDIR": str(self.temporary), "DEMO_TEST_MARK": self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left_behind(self) -> list[str]:
        """Files in the temporary folder, and processes that were started by the demo and still live."""
        processes = [process for process in psutil.process_iter() if self._started(process)]
        return [*(path.name for path in self.temporary.iterdir()), *map(str, processes)]

    def _started(self, process: psutil.Process) -> bool:
        try:
            marked = process.environ().get("DEMO_TEST_MARK") == self.mark
            return marked and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it ended meanwhile, or is somebody else's
            return False


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        yield Scene(Path(folder), uuid.uuid4().hex)


def figures(told: dict[str, Any]) -> dict[str, Any]:
    return {claim["id"]: claim["figure"] for claim in told["evidence"]}


def check(told: dict[str, Any], report: Path) -> None:
    """That the figures fit each other, whatever the verdicts say."""
    counted = figures(told)
    assert told["holds"] is True
    assert all(claim["holds"] for claim in told["evidence"])
    assert counted["killed_at_work"] == counted["deliveries_lost"] == len(told["kills"]) == KILLS
    assert counted["steps_recorded"] == STEPS
    assert counted["recorded_twice"] == 0
    assert counted["steps_run"] == STEPS + counted["steps_run_twice"]
    assert counted["steps_run_twice"] <= KILLS
    assert counted["seconds_to_resume"] == max(kill["seconds"] for kill in told["kills"])
    assert counted["report"] == counted["published"] == told["sha256"] == told["undisturbed_sha256"]
    assert told["sha256"] == sha256(report.read_bytes()).hexdigest()
    assert told["dead_letter"]["reason"] == "attempts_exhausted"
    assert told["dead_letter"]["error"] == "FileNotFoundError"
    assert told["dead_letter"]["kept"] == ["checksum", "contents"]
    for kill in told["kills"]:
        assert kill["by"] != kill["worker"]
        assert kill["seconds"] > 0


def test_the_whole_story(scene: Scene, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    process = scene.start("--json", "--files", str(FILES), "--kills", str(KILLS), "--output", str(report))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err + out
    check(json.loads(out), report)
    assert scene.left_behind() == []


def test_on_a_server_that_is_there_it_removes_its_keys_and_no_others(
    scene: Scene, redis_url: str, namespace_name: str, tmp_path: Path
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.set(f"{{{namespace_name}}}:mine", 1, ex=300)
    before = set(client.keys("*"))
    process = scene.start(
        *("--json", "--files", str(FILES), "--kills", str(KILLS), "--output", str(tmp_path / "report.md")),
        *("--redis-url", redis_url),
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err + out
    check(json.loads(out), tmp_path / "report.md")
    assert set(client.keys("*")) <= before
    assert client.get(f"{{{namespace_name}}}:mine") == b"1"
    client.close()
    assert scene.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_cleans_up(scene: Scene, tmp_path: Path, number: signal.Signals) -> None:
    report = tmp_path / "report.md"
    process = scene.start("--output", str(report))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("killed worker"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert out == ""
    assert not report.exists()
    assert scene.left_behind() == []


def test_killed_it_takes_its_workers_and_its_server_along(scene: Scene) -> None:
    process = scene.start()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("killed worker"):
            break
    process.kill()
    process.communicate(timeout=30)
    for _ in range(200):
        if not [left for left in scene.left_behind() if scene.mark in left]:
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {scene.left_behind()}")


async def test_a_worker_that_ends_by_itself_is_noticed_with_what_it_said(tmp_path: Path) -> None:
    replicas = Replicas(os.environ | {"PERDURE_LEASE": "never"}, tmp_path / "log")
    pid = replicas.start()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - nothing else runs in this loop
    with pytest.raises(ReplicaEnded, match=rf"worker {pid} ended by itself with status 1;.*PERDURE_LEASE"):
        replicas.check()
    await replicas.stop()
    assert replicas.pids == []


class TestRefusals:
    """What cannot be meant is one line, and nothing is started."""

    def refused(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["demo", *arguments])
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("perdure: ")
        assert said.err.count("\n") == 1
        return int(left.value.code or 0), said.err

    def test_a_folder_that_is_not_there(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, said = self.refused(capsys, str(tmp_path / "nowhere"))
        assert code == 1
        assert "does not exist" in said

    def test_a_folder_without_python_files(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, said = self.refused(capsys, str(tmp_path))
        assert code == 1
        assert "holds no Python files" in said

    def test_more_kills_than_there_is_room_for(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "one.py").touch()
        code, said = self.refused(capsys, str(tmp_path), "--kills", "2")
        assert code == 2
        assert "ask for 1 or fewer" in said

    @pytest.mark.parametrize("options", [("--kills", "0"), ("--files", "0"), ("--kills", "many")])
    def test_numbers_that_make_no_sense(self, capsys: pytest.CaptureFixture[str], options: tuple[str, str]) -> None:
        code, said = self.refused(capsys, *options)
        assert code == 2
        assert options[0] in said

    def test_a_report_where_none_can_be(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, said = self.refused(capsys, "--output", str(tmp_path / "nowhere" / "report.md"))
        assert code == 1
        assert "cannot be put" in said
