"""The benchmark of many replicas runs and writes its page. Nothing here asks how large a figure is, counts apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.origin import Origin
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PAGE = ROOT / "docs" / "explanation" / "scaling.md"

BEGIN, END = "<!-- begin: written by make bench-scale -->", "<!-- end: written by make bench-scale -->"


def scale(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--quick", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_constant_is_measured_and_written_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nfrom another run\n{END}\nafter\n")

    done = scale("--json", "--write", page)

    assert done.returncode == 0, done.stderr
    crews = json.loads(done.stdout)["crews"]
    assert set(crews) == {"1 worker", "4 workers"}
    for figures in crews.values():
        assert figures["least"] <= figures["median"] <= figures["most"]
        assert 0 <= figures["gini"] < 1
        assert round(figures["promotions"]) == 1  # only the worker that holds the lock tries; a registration looks once
        for key in ("tasks_per_second", "load", "idle_load", "idle_commands", "connections", "memory"):
            assert figures[key] > 0, key
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "from another run" not in text
    assert "| Redis CPU to deliver and settle a task | µs/task |" in text
    assert "| 10 steps |" in text
    assert any(Origin.parse(line) for line in text.splitlines())


def test_the_page_has_the_marks() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)
