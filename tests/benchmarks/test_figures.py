"""The figures of documents name their origin; the change since the merge base is printed, and decides nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from benchmarks import figures as figures_module
from benchmarks.change import compare
from benchmarks.figures import Figures, documents, figures
from benchmarks.support.origin import Origin, commit_of_tree
from tests.support.paths import ROOT

ORIGIN = Origin("python -m benchmarks.waking", "0123456789ab", "2026-11-20", "2 cores (a processor), Python 3.11.7")

RATE = re.compile(r"\d ?(tasks/s|steps/s|\xb5s)")
"""A measured unit: no setting of Perdure has one of these."""


def test_the_line_of_an_origin_is_read_back() -> None:
    assert Origin.parse(ORIGIN.line()) == ORIGIN
    assert Origin.parse("Figures: none") is None


def test_the_origin_of_this_tree_is_its_commit() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    origin = Origin.now("python -m benchmarks", "Redis 7.0.15")

    assert origin.commit.removesuffix("-dirty") == head
    assert "Redis 7.0.15" in origin.machine


def test_code_that_no_commit_has_makes_the_tree_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        name = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
        command = ["git", *name, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("")
    (tmp_path / "README.md").write_text("")
    git("add", "-A")
    git("commit", "-qm", "Start")
    head = git("rev-parse", "--short=12", "HEAD")
    assert commit_of_tree(tmp_path) == head

    (tmp_path / "README.md").write_text("new figures")
    assert commit_of_tree(tmp_path) == head
    (tmp_path / "code.py").write_text("pass")
    assert commit_of_tree(tmp_path) == f"{head}-dirty"
    git("checkout", "-q", "code.py")
    (tmp_path / "script.lua").write_text("return 1")
    assert commit_of_tree(tmp_path) == f"{head}-dirty"
    assert commit_of_tree(tmp_path.parent) == "unknown"


def test_the_age_is_in_commits_and_days() -> None:
    head = Origin.now("python -m benchmarks").commit.removesuffix("-dirty")
    new = Figures("page.md", 3, replace(ORIGIN, commit=head))
    unknown = Figures("page.md", 3, ORIGIN)
    dirty = Figures("page.md", 3, replace(ORIGIN, commit=f"{head}-dirty"))

    assert new.age(date(2026, 11, 21)) == "0 commits, 1 day"
    assert unknown.age(date(2026, 11, 20)) == "not in this history, 0 days"
    assert dirty.age(date(2026, 11, 28)) == "0 commits, 8 days, of a dirty tree"


def test_figures_are_found_in_a_document(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    page = tmp_path / "docs" / "how-to" / "page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text("# A page\n")
    (tmp_path / "benchmarks" / "README.md").write_text("# A page\n")
    page.write_text(f"# A page\n\n{ORIGIN.line()}\n")

    assert list(figures(tmp_path)) == [Figures(page.relative_to(tmp_path).as_posix(), 3, ORIGIN)]


def test_the_command_of_each_figure_is_a_benchmark() -> None:
    found = list(figures())
    assert found
    for each in found:
        module = each.origin.command.removeprefix("python -m ").split()[0]
        assert module.partition(".")[0] == "benchmarks", each
        assert find_spec(module), each


def test_rates_stand_beside_their_origin() -> None:
    """In one section; the page of the benchmarks has one section of conditions for all of its figures."""
    lacking = [
        f"{path.relative_to(ROOT)}: {section.splitlines()[0]}"
        for path in documents()
        if path not in (ROOT / "docs/explanation/benchmarks.md", ROOT / "benchmarks/README.md")
        for section in re.split(r"(?m)^(?=## )", path.read_text("utf-8"))
        if RATE.search(section) and not any(Origin.parse(line) for line in section.splitlines())
    ]
    assert lacking == []
    assert any(each.page == "docs/explanation/benchmarks.md" for each in figures())


def run(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


def test_check_prints_the_age_of_each_figure() -> None:
    done = run("benchmarks.figures")

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(list(figures()))


@pytest.mark.parametrize(("commit", "refused"), [("0123456789ab", 0), ("0123456789ab-dirty", 1), ("unknown", 1)])
def test_a_release_refuses_figures_of_a_dirty_tree(
    commit: str, refused: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Figures("page.md", 3, ORIGIN), Figures("page.md", 9, replace(ORIGIN, commit=commit))]
    monkeypatch.setattr(figures_module, "figures", lambda: found)
    try:
        figures_module.main(release=True)
    except typer.Exit as error:
        assert (error.exit_code, refused) == (1, 1)
        assert "page.md:9: " in capsys.readouterr().out
    else:
        assert refused == 0
        assert capsys.readouterr().out == ""


def test_without_a_merge_base_nothing_is_compared() -> None:
    done = run("benchmarks.change", "--against", "no-such-branch")

    assert done.returncode == 0
    assert done.stdout == "nothing to compare: no merge base with no-such-branch\n"


def test_a_base_that_does_not_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "perdure").mkdir()
    (tmp_path / "perdure" / "__init__.py").write_text("raise ImportError('an older Python')\n")
    with pytest.raises(Exception, match="failed: ImportError: an older Python"):
        compare(tmp_path, tmp_path, seconds=0, quick=True)


@pytest.mark.integration
@pytest.mark.processes
def test_this_tree_is_compared_with_a_commit() -> None:
    done = run("benchmarks.change", "--against", "HEAD", "--seconds", "0", "--quick")

    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^no-op tasks, concurrency 32: .+: [+-]\d+%$", done.stdout), done.stdout
