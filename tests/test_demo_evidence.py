"""The demo's evidence: counted from what a run left behind, and false where the run did not do what is claimed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from perdure.deadletter import DeadLetter, Reason
from perdure.queues import Namespace, TaskEvent
from perdure.worker.cli import main
from perdure.worker.cli.connection import Place
from perdure.worker.cli.demo import command, evidence
from perdure.worker.cli.demo.app import AuditResult
from perdure.worker.cli.demo.journal import Journal, Line
from perdure.worker.cli.demo.killer import draw
from perdure.worker.cli.demo.replicas import Kill
from perdure.worker.cli.demo.report import summarise
from perdure.worker.cli.demo.story import Audited, Ending, Plan, Published
from perdure.worker.cli.demo.takeovers import takeovers

TASK = "task"
STEPS = ["list", "read", "read#2", "read#3", "report"]
KILLS = [Kill(11.5, 101, -signal.SIGKILL), Kill(15.5, 102, -signal.SIGKILL)]


def run(*runs: tuple[float, int, str]) -> list[Line]:
    return [Line(at, pid, TASK, step, f"{step}.py") for at, pid, step in runs]


# Worker 101 is killed in `read`, which runs again; worker 102 once `read#2` was recorded, so nothing runs again.
LINES = run(
    (10.0, 101, "list"),
    (11.0, 101, "read"),
    (13.0, 102, "read"),
    (15.0, 102, "read#2"),
    (17.5, 103, "read#3"),
    (18.0, 103, "report"),
)


class TestKills:
    def test_a_killed_worker_is_one_that_ran_a_step_and_ended_by_sigkill(self) -> None:
        assert evidence.killed_at_work(KILLS, LINES, 2).holds
        assert evidence.killed_at_work(KILLS, LINES, 2).figure == 2

    def test_an_idle_worker_does_not_count(self) -> None:
        assert not evidence.killed_at_work([*KILLS, Kill(16.0, 999, -signal.SIGKILL)], LINES, 3).holds

    def test_another_end_does_not_count(self) -> None:
        assert not evidence.killed_at_work([KILLS[0], Kill(15.5, 102, 0)], LINES, 2).holds

    def test_a_kill_that_did_not_happen_is_missed(self) -> None:
        assert not evidence.killed_at_work(KILLS[:1], LINES, 2).holds

    def test_every_lost_delivery_is_due_to_a_kill(self) -> None:
        assert evidence.deliveries_lost(2, KILLS).holds
        assert not evidence.deliveries_lost(3, KILLS).holds
        assert not evidence.deliveries_lost(1, KILLS).holds


class TestSteps:
    def test_every_step_is_recorded(self) -> None:
        assert evidence.steps_recorded(STEPS, 5).holds
        assert not evidence.steps_recorded(STEPS[:-1], 5).holds
        assert not evidence.steps_recorded([*STEPS[:-1], "read"], 5).holds

    def test_no_step_is_recorded_twice(self) -> None:
        assert evidence.recorded_twice(STEPS).holds
        assert evidence.recorded_twice([*STEPS, "read", "read"]).figure == 2
        assert not evidence.recorded_twice([*STEPS, "read"]).holds

    def test_each_kill_allows_for_one_more_run(self) -> None:
        assert evidence.steps_run(LINES, 5, KILLS).holds
        assert not evidence.steps_run([*LINES, LINES[-1], LINES[-1]], 5, KILLS).holds
        assert not evidence.steps_run(LINES[2:], 5, KILLS).holds

    def test_a_step_that_was_cut_off_may_run_twice(self) -> None:
        claim = evidence.steps_run_twice(LINES, KILLS)
        assert claim.holds
        assert claim.figure == 1

    def test_a_step_that_was_not_cut_off_may_not(self) -> None:
        claim = evidence.steps_run_twice([*LINES, *run((19.0, 103, "list"))], KILLS)
        assert not claim.holds
        assert claim.figure == 2

    def test_a_step_that_was_cut_off_once_may_not_run_three_times(self) -> None:
        assert not evidence.steps_run_twice([*LINES, *run((19.0, 103, "read"))], KILLS).holds

    def test_a_step_that_was_cut_off_twice_may_run_three_times(self) -> None:
        lines = run((1.0, 101, "read"), (3.0, 102, "read"), (5.0, 103, "read"))
        assert evidence.steps_run_twice(lines, KILLS).holds

    def test_without_a_kill_none_may(self) -> None:
        assert evidence.steps_run_twice(run((1.0, 101, "read")), []).holds
        assert not evidence.steps_run_twice(run((1.0, 101, "read"), (2.0, 101, "read")), []).holds


class TestResumption:
    def test_the_slowest_takeover_counts(self) -> None:
        claim = evidence.resumed(LINES, KILLS, lease=1.0)
        assert claim.holds
        assert claim.figure == 2.0

    def test_it_is_bounded_by_the_lease(self) -> None:
        assert not evidence.resumed([*LINES[:2], *run((18.0, 102, "read"))], KILLS[:1], lease=1.0).holds

    def test_a_kill_after_which_nobody_went_on_is_not_passed_over(self) -> None:
        claim = evidence.resumed(LINES[:4], KILLS, lease=1.0)
        assert not claim.holds
        assert claim.figure is None

    def test_a_takeover_tells_what_was_in_hand_and_who_went_on(self) -> None:
        first, second = takeovers(LINES, KILLS)
        assert (first.begun, first.step, first.subject, first.by, first.seconds) == (2, "read", "read.py", 102, 1.5)
        assert (second.begun, second.step, second.by, second.seconds) == (3, "read#2", 103, 2.0)


class TestDeadLetter:
    def test_it_is_given_up_after_its_attempts(self) -> None:
        assert evidence.attempts_before_burial(3, 3).holds
        assert not evidence.attempts_before_burial(2, 3).holds

    def test_what_it_kept_is_not_run_again(self) -> None:
        lines = run((1.0, 1, "checksum"), (2.0, 1, "contents"), (3.0, 1, "publish"), (4.0, 1, "publish"))
        kept = ["checksum", "contents"]
        assert evidence.kept_steps_run_again(lines, kept).holds
        assert not evidence.kept_steps_run_again([*lines, *run((5.0, 2, "contents"))], kept).holds

    def test_what_was_never_run_proves_nothing(self) -> None:
        assert not evidence.kept_steps_run_again([], ["checksum"]).holds
        assert not evidence.kept_steps_run_again(LINES, []).holds

    def test_none_is_left(self) -> None:
        assert evidence.letters_left(0).holds
        assert not evidence.letters_left(1).holds


def test_contents_are_the_same_or_not() -> None:
    assert evidence.same_contents("report", "The report", "ab", "ab", "the other").holds
    assert not evidence.same_contents("report", "The report", "ab", "ac", "the other").holds


class TestMoments:
    def test_a_seed_repeats_them(self) -> None:
        assert draw(7, 3, 302) == draw(7, 3, 302)
        assert draw(7, 3, 302) != draw(8, 3, 302)

    @pytest.mark.parametrize(("kills", "steps"), [(1, 3), (1, 12), (3, 32), (20, 202)])
    def test_they_are_in_order_apart_and_before_the_end(self, kills: int, steps: int) -> None:
        for seed in range(200):
            drawn = [moment.step for moment in draw(seed, kills, steps)]
            assert drawn == sorted(set(drawn))
            assert len(drawn) == kills
            assert drawn[0] >= 1
            assert drawn[-1] < steps


def test_a_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert not journal.refresh()
    with journal.path.open("wb", buffering=0) as file:
        file.write(b'[1.5,7,"task","list",""]\n[2.5,7,"ta')
        assert journal.refresh()
        assert journal.lines == [Line(1.5, 7, "task", "list")]
        assert not journal.refresh()
        file.write(b'sk","read","a.py"]\n')
    assert journal.refresh()
    assert journal.of("task") == [Line(1.5, 7, "task", "list"), Line(2.5, 7, "task", "read", "a.py")]
    assert journal.of("other") == []


def ending(tmp_path: Path, lines: list[Line]) -> Ending:
    letter = DeadLetter(
        id="01999999-9999-7999-8999-999999999999",
        entry="1-0",
        partition=Namespace("demo").partition("demo"),
        task="publish",
        reason=Reason.ATTEMPTS_EXHAUSTED,
        error="FileNotFoundError",
        message=f"No such file: '{tmp_path / 'site' / 'x'}'" + "y" * 300,
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
    published = Published(
        letter=letter,
        site=tmp_path / "site",
        kept=["checksum"],
        seconds=0.1,
        sha256="ab" * 32,
        lines=run((20.0, 103, "checksum"), (21.0, 103, "publish")),
        letters_left=0,
    )
    audited = Audited(
        result=AuditResult(summary=summarise([]), sha256="ab" * 32),
        lines=lines,
        kills=KILLS,
        events=[TaskEvent(f"{number}-0", number, "step_completed", step, None) for number, step in enumerate(STEPS)],
        crashes=2,
        undisturbed="ab" * 32,
    )
    plan = Plan(tmp_path, "a\x1b[31m title", ["a", "b", "c"], 2, 1, tmp_path / "report.md", Place())
    return Ending(plan, audited, published, 12.0)


class TestVerdict:
    """The command as it is called, with a run that somebody else has made."""

    def demo(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[Line], *options: str) -> int:
        (tmp_path / "a.py").touch()
        monkeypatch.setattr(command, "_perform", lambda _: ending(tmp_path, lines))
        with pytest.raises(SystemExit) as left:
            main(["demo", str(tmp_path), *options])
        return int(left.value.code or 0)

    def test_all_that_holds_is_success(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.demo(monkeypatch, tmp_path, LINES) == 0
        shown = capsys.readouterr().out
        assert "All 12 hold." in shown
        assert "\x1b" not in shown

    def test_the_screen_is_one_screen(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.demo(monkeypatch, tmp_path, LINES)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 45
        assert max(map(len, lines)) <= 100

    def test_a_step_that_ran_once_too_often_is_failure(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        again = [*LINES, *run((19.0, 103, "list"))]
        assert self.demo(monkeypatch, tmp_path, again) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "1 of 12 do not hold: Steps run twice: 2, allowed at most 2, in hand at kills" in shown

    def test_json_says_so_too(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        again = [*LINES, *run((19.0, 103, "list"))]
        assert self.demo(monkeypatch, tmp_path, again, "--json") == 1
        assert '"holds": false' in capsys.readouterr().out
