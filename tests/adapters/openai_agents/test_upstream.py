"""The session tests of openai-agents, from its source distribution, with a `PerdureSession` in place of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from perdure.testing import PerdureFixture

PASSED = 61
"""Tests that pass with the release that the adapter was built against."""


@pytest.mark.timeout(300)
def test_the_sessions_of_the_sdk_pass_with_ours(perdure: PerdureFixture, tmp_path: Path) -> None:
    places = dict(one.split("=", 1) for one in os.environ["PERDURE_ADAPTER_SOURCES"].split(os.pathsep) if one)
    if "openai-agents" not in places:
        pytest.skip("the source distribution is not there: run python -m tests.adapters openai_agents")
    shutil.copy(Path(__file__).with_name("upstream_sessions.py"), tmp_path / "test_sessions.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "not run_sync", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", "test_sessions.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": places["openai-agents"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    print(f"sessions of openai-agents: {passed} passed, {counts['skipped']} need its fake of Redis")
    assert passed >= PASSED
