"""Claims of the demo: each is counted from what the run left behind, and fails if that does not support it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from perdure.deadletter.letters import DeadLetter
from perdure.deadletter.policy import Reason
from perdure.queues import Namespace
from perdure.worker.cli import demo, main
from perdure.worker.cli.demo import Claim, DemoEvidence, Kill, StepRun, read_step_runs

SHA256 = "ab" * 32
FIRST, SECOND = Kill(11.5, 101, -signal.SIGKILL), Kill(15.5, 102, -signal.SIGKILL)


def runs(*entries: tuple[float, int, str]) -> list[StepRun]:
    return [StepRun(at, pid, "task", step) for at, pid, step in entries]


# Worker 101 is killed in `count`, which runs again; worker 102 after `count#2` was recorded, so nothing runs again.
RUNS = runs(
    (10.0, 101, "list"),
    (11.0, 101, "count"),
    (13.0, 102, "count"),
    (15.0, 102, "count#2"),
    (17.5, 103, "count#3"),
    (18.0, 103, "save"),
)
COMPLETED = ["list", "count", "count#2", "count#3", "save"]
PUBLISHING = runs((20.0, 103, "checksum"), (20.1, 103, "publish"), (21.0, 103, "publish"), (22.0, 103, "publish"))
SOUND = DemoEvidence(
    steps=5,
    planned_kills=2,
    kills=[FIRST, SECOND],
    runs=RUNS,
    crashes=2,
    completed=COMPLETED,
    expected_sha256=SHA256,
    published_sha256=SHA256,
    attempts=3,
    kept=["checksum"],
    publish_runs=PUBLISHING,
    letters=0,
)


def failed(evidence: DemoEvidence) -> set[str]:
    return {claim.id for claim in evidence.claims() if not claim.holds}


def claim(evidence: DemoEvidence, name: str) -> Claim:
    return next(claim for claim in evidence.claims() if claim.id == name)


def test_all_claims_hold_for_sound_evidence() -> None:
    assert failed(SOUND) == set()
    assert claim(SOUND, "repeated").counted == 1
    assert claim(SOUND, "takeover").counted == 2.0


@pytest.mark.parametrize(
    ("changes", "claims"),
    [
        pytest.param({"kills": [FIRST, SECOND._replace(status=0)]}, {"killed"}, id="a worker that exited"),
        pytest.param({"kills": [FIRST, SECOND._replace(pid=999)]}, {"killed"}, id="a killed worker that ran no step"),
        pytest.param({"kills": [FIRST]}, {"killed", "crashes"}, id="a kill too few"),
        pytest.param({"crashes": 3}, {"crashes"}, id="a crash without a kill"),
        pytest.param({"crashes": 1}, {"crashes"}, id="a kill without a crash"),
        pytest.param({"completed": COMPLETED[1:]}, {"completed"}, id="a step not recorded"),
        pytest.param({"completed": [*COMPLETED, "save"]}, {"completed"}, id="a step recorded twice"),
        pytest.param({"completed": [*COMPLETED[1:], "save"]}, {"completed"}, id="one recorded for another"),
        pytest.param({"runs": [*RUNS, *runs((19.0, 103, "list"))]}, {"repeated"}, id="an uncut step run again"),
        pytest.param({"runs": [*RUNS, *runs((19.0, 103, "count"))]}, {"repeated"}, id="a cut step run three times"),
        pytest.param({"kills": [FIRST._replace(at=6.4), SECOND]}, {"takeover"}, id="a takeover after the limit"),
        pytest.param({"runs": RUNS[:4]}, {"takeover"}, id="a kill that no step follows"),
        pytest.param({"published_sha256": "cd" * 32}, {"published"}, id="another published file"),
        pytest.param({"expected_sha256": "cd" * 32}, {"published"}, id="another report without workers"),
        pytest.param({"attempts": 2}, {"attempts"}, id="a dead letter too early"),
        pytest.param(
            {"publish_runs": [*PUBLISHING, *runs((22.0, 103, "checksum"))]},
            {"kept_repeated"},
            id="a kept step run again",
        ),
        pytest.param({"publish_runs": PUBLISHING[1:]}, {"kept_repeated"}, id="a kept step that never ran"),
        pytest.param({"kept": []}, {"kept_repeated"}, id="no step kept"),
        pytest.param({"letters": 1}, {"letters"}, id="a dead letter left"),
        pytest.param({"kills": [], "planned_kills": 0, "crashes": 0}, {"repeated", "takeover"}, id="no kill"),
    ],
)
def test_broken_evidence_fails_its_claim_and_no_other(changes: dict[str, Any], claims: set[str]) -> None:
    assert failed(replace(SOUND, **changes)) == claims


def test_every_claim_is_seen_to_fail() -> None:
    marks = [
        mark for mark in test_broken_evidence_fails_its_claim_and_no_other.pytestmark if mark.name == "parametrize"
    ]
    seen = set[str]().union(*(parameters.values[1] for parameters in marks[0].args[1]))
    assert seen == {claim.id for claim in SOUND.claims()}


def test_a_step_cut_off_twice_may_run_three_times() -> None:
    repeated = runs((10.0, 101, "count"), (13.0, 102, "count"), (17.0, 103, "count"))
    assert claim(replace(SOUND, runs=repeated), "repeated").holds


def test_a_takeover_names_the_next_worker() -> None:
    assert SOUND.takeovers() == [
        {"killed": 101, "resumed_by": 102, "seconds": 1.5},
        {"killed": 102, "resumed_by": 103, "seconds": 2.0},
    ]
    assert replace(SOUND, runs=RUNS[:4]).takeovers()[1] == {"killed": 102, "resumed_by": None, "seconds": None}


def test_the_journal_is_readable_while_a_worker_writes_a_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert read_step_runs(journal, "task") == []
    journal.write_bytes(b'[1.5,7,"task","list"]\n[2.5,7,"ta')
    assert read_step_runs(journal, "task") == [StepRun(1.5, 7, "task", "list")]
    with journal.open("ab") as file:
        file.write(b'sk","count"]\n[3.5,7,"other","list"]\n')
    assert read_step_runs(journal, "task") == [
        StepRun(1.5, 7, "task", "list"),
        StepRun(2.5, 7, "task", "count"),
    ]
    assert read_step_runs(journal, "missing") == []


def result(tmp_path: Path, evidence: DemoEvidence) -> tuple[DemoEvidence, DeadLetter, Path]:
    letter = DeadLetter(
        id="01999999-9999-7999-8999-999999999999",
        entry="1-0",
        partition=Namespace("demo").partition("demo"),
        task="publish",
        reason=Reason.ATTEMPTS_EXHAUSTED,
        error="FileNotFoundError",
        message="No such file: 'site/x'",
        traceback="",
        attempts=3,
        crashes=0,
        worker="demo-host-1-abc",
        enqueued_at=0,
        died_at=1,
        args=b"{}",
        envelope=None,
        raw={},
    )
    return evidence, letter, tmp_path / "\x1b[31mreport.txt"


class TestScreen:
    """The command with a result that is given, not produced by a run."""

    def shown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, evidence: DemoEvidence, *options: str) -> int:
        async def run_demo(*_: object) -> tuple[DemoEvidence, DeadLetter, Path]:
            return result(tmp_path, evidence)

        (tmp_path / "a.py").touch()
        monkeypatch.setattr(demo, "run_demo", run_demo)
        with pytest.raises(SystemExit) as exited:
            main(["demo", str(tmp_path), *options])
        return int(exited.value.code or 0)

    def test_sound_evidence_is_success_on_one_screen(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.shown(monkeypatch, tmp_path, SOUND) == 0
        shown = capsys.readouterr().out
        assert "All 9 claims hold." in shown
        assert "\x1b" not in shown
        assert len(shown.splitlines()) <= 45
        assert max(len(line) for line in shown.splitlines() if ": " not in line) <= 80

    def test_a_failed_claim_is_failure_and_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken = replace(SOUND, runs=[*RUNS, *runs((19.0, 103, "list"))])
        assert self.shown(monkeypatch, tmp_path, broken) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "1 of 9 claims do not hold: Steps run again: 2, allowed up to 2" in shown
        assert self.shown(monkeypatch, tmp_path, broken, "--json") == 1
        assert '"holds": false' in capsys.readouterr().out

    def test_a_kill_that_no_step_follows_is_shown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.shown(monkeypatch, tmp_path, replace(SOUND, runs=RUNS[:4])) == 1
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Slowest kill"))
        assert row.split()[5:] == ["none", "under", "6.5", "s", "journal", "NO"]
