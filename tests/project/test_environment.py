"""The test suite ignores the PERDURE_* settings of its user, so that no test runs on the user's own server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def test_a_test_has_no_settings_but_its_own() -> None:
    names = {name for name in os.environ if name.startswith("PERDURE_")}
    assert names <= {"PERDURE_DATA_DIR", "PERDURE_TEST_SERVER"}


@pytest.mark.processes
def test_settings_of_the_user_do_not_reach_a_test() -> None:
    name = f"{__file__}::{test_a_test_has_no_settings_but_its_own.__name__}"
    given = {"PERDURE_REDIS_URL": "redis://localhost", "PERDURE_NAMESPACE": "own", "PERDURE_LEASE": "7"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", name]
    run = subprocess.run(command, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
