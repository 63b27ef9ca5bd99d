"""The conformance suite of MCP, from npm, against the server with a worker behind it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "build" / "npm-mcp"
PACKAGES: Final = ("node@22", "@modelcontextprotocol/conformance@0.2.0-alpha.12")
EXPECTED: Final = Path(__file__).with_name("expected_failures.yaml")

TASK_SCENARIOS: Final = {
    "tasks-lifecycle": 9,
    "tasks-capability-negotiation": 5,
    "tasks-wire-fields": 4,
    "tasks-request-state-removal": 3,
    "tasks-mrtr-input": 4,
    "tasks-request-headers": 5,
    "tasks-dispatch-and-envelope": 9,
    "tasks-status-notifications": 0,  # the suite checks nothing there yet
    "tasks-required-task-error": 3,
    "tasks-mrtr-composition": 2,
}
"""Scenarios of the tasks extension, and their checks."""


@pytest.fixture(scope="session")
def suite() -> list[str]:
    """Command of the suite; it needs Node.js 22, which npm brings."""
    npm = shutil.which("npm")
    node, program = FOLDER / "node_modules" / "node" / "bin" / "node", FOLDER / "node_modules/.bin/conformance"
    if npm is None:
        pytest.skip("npm is not installed")
    if not (node.exists() and program.exists()):
        FOLDER.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *PACKAGES]
        done = subprocess.run(install, check=False, timeout=170)
        if not done.returncode and not node.exists():  # a release of npm that runs no scripts of packages by itself
            place = FOLDER / "node_modules" / "node"
            subprocess.run(["node", "installArchSpecificPackage"], check=False, cwd=place, timeout=120)
    if not (node.exists() and program.exists()):
        pytest.skip("npm could not install the suite")
    return [str(node), str(program)]


@pytest.fixture
def url(perdure: Any, tmp_path: Path) -> Iterator[str]:
    """Address of a server process, with its worker."""
    command = [sys.executable, "-m", "tests.adapters.mcp.serve", str(tmp_path / "tokens.toml")]
    environment = {**os.environ, "PERDURE_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.kill()


@pytest.mark.timeout(400)
def test_all_scenarios_but_the_expected_ones_pass(suite: list[str], url: str, tmp_path: Path) -> None:
    command = [*suite, "server", "--url", url, "--suite", "all", "--expected-failures", str(EXPECTED)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    report = done.stdout + done.stderr
    summary = report.partition("=== SUMMARY ===")[2]
    print(summary)
    assert done.returncode == 0, summary or report[-4000:]
    found = re.findall(r"(tasks-[a-z-]+): (\d+) passed, (\d+) failed", summary)
    assert {name: (int(passed), int(failed)) for name, passed, failed in found} == {
        name: (checks, 0) for name, checks in TASK_SCENARIOS.items()
    }
