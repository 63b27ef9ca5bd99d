"""`perdure demo` as a user calls it: real workers, real kills, a real server, and nothing left behind."""

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
from perdure.queues import generate_key
from perdure.worker.cli import main
from perdure.worker.cli.demo import Kill, keep_worker
from perdure.worker.cli.support.errors import Failed

FILES = 60
KILLS = 2

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@dataclass(frozen=True)
class DemoCall:
    """Calls of the demo with a separate temporary folder. Its path is short enough for a socket."""

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
        """Return the names of temporary files, and the processes that the demo started and that still run."""
        return [*(path.name for path in self.temporary.iterdir()), *map(str, self.processes())]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that the demo started and that still run."""
        return [process for process in psutil.process_iter() if self._started(process)]

    def _started(self, process: psutil.Process) -> bool:
        try:
            marked = process.environ().get("DEMO_TEST_MARK") == self.mark
            return marked and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it has ended, or belongs to another user
            return False


@pytest.fixture
def demo() -> Iterator[DemoCall]:
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        yield DemoCall(Path(folder), uuid.uuid4().hex)


def check(output: dict[str, Any], demo: DemoCall) -> None:
    """Check that the figures agree with each other, whatever the verdicts are, and that only the report is left."""
    report = Path(output["report"])
    counted = {claim["id"]: claim["counted"] for claim in output["evidence"]}
    kept = output["dead_letter"]["kept"]
    assert output["holds"] is True
    assert all(claim["holds"] for claim in output["evidence"])
    assert counted["killed"] == counted["crashes"] == len(output["kills"]) == KILLS
    assert counted["completed"] == FILES + 2
    assert counted["kept_repeated"] == counted["letters"] == 0
    assert 0 <= counted["repeated"] <= KILLS
    assert counted["takeover"] == max(kill["seconds"] for kill in output["kills"])
    assert counted["published"] == sha256(report.read_bytes()).hexdigest()
    assert report.read_text().count("\n") == FILES + 1
    assert (output["dead_letter"]["reason"], counted["attempts"]) == ("attempts_exhausted", 3)
    assert (output["dead_letter"]["error"], kept) == ("FileNotFoundError", ["checksum"])
    for kill in output["kills"]:
        assert kill["resumed_by"] != kill["killed"]
        assert kill["seconds"] > 0
    assert demo.left_behind() == [report.name]


def test_a_run_ends_with_sound_evidence_and_leaves_only_the_report(demo: DemoCall) -> None:
    process = demo.start("--json", "--files", str(FILES), "--kills", str(KILLS))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err + out
    check(json.loads(out), demo)
    assert err.count("perdure: killed worker ") == KILLS


def test_on_a_given_server_with_encryption_it_removes_its_keys_and_no_others(
    demo: DemoCall, redis_url: str, namespace_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", generate_key())
    client = redis.Redis.from_url(redis_url)
    client.set(f"{{{namespace_name}}}:mine", 1, ex=300)
    before = set(client.keys("*"))
    process = demo.start("--json", "--files", str(FILES), "--kills", str(KILLS), "--redis-url", redis_url)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err + out
    check(json.loads(out), demo)
    assert set(client.keys("*")) <= before
    assert client.get(f"{{{namespace_name}}}:mine") == b"1"
    client.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(demo: DemoCall, number: signal.Signals) -> None:
    process = demo.start()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("perdure: killed worker"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert out == ""
    assert demo.left_behind() == []


def test_a_killed_demo_leaves_no_worker_and_no_server(demo: DemoCall) -> None:
    process = demo.start()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("perdure: killed worker"):
            break
    assert len(demo.processes()) > 1  # the demo itself is one
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while demo.processes():
        assert time.monotonic() < deadline, f"still running: {demo.processes()}"
        time.sleep(0.05)


async def test_a_worker_that_exits_by_itself_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[Kill] = []
    with pytest.raises(Failed, match=r"worker \d+ exited with status 1") as failed:
        await keep_worker({"lease": "never"}, tmp_path / "journal", ended)
    assert [(f"worker {kill.pid} " in str(failed.value), kill.status) for kill in ended] == [(True, 1)]
    assert "PERDURE_LEASE" in capfd.readouterr().err


class TestRefusals:
    """An impossible request is answered in one line, and nothing is started."""

    @pytest.mark.parametrize("folder", ["missing", "file"])
    def test_a_folder_that_does_not_exist(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str
    ) -> None:
        (tmp_path / "file").touch()
        code, error = self.refused(capsys, str(tmp_path / folder))
        assert code == 1
        assert "FOLDER must be a folder with readable files" in error

    def test_a_folder_without_files(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, error = self.refused(capsys, str(tmp_path))
        assert code == 1
        assert "FOLDER must be a folder with readable files" in error

    @pytest.mark.parametrize("options", [("--kills", "0"), ("--files", "0"), ("--kills", "many")])
    def test_invalid_numbers(self, capsys: pytest.CaptureFixture[str], options: tuple[str, str]) -> None:
        code, error = self.refused(capsys, *options)
        assert code == 2
        assert options[0] in error

    def refused(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exited:
            main(["demo", *arguments])
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("perdure: ")
        assert printed.err.count("\n") == 1
        return int(exited.value.code or 0), printed.err
