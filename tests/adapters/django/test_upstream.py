"""Django's own tests of django.tasks, from its source distribution, with this backend.

In test_tasks.py it takes the place of the dummy backend, which is the default there, and in test_custom_backend.py it
is the base of the custom backends. What names another backend keeps it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from perdure.testing import PerdureFixture

EXCLUDED: Final = {
    "test_backend_does_not_support_priority": "this backend supports priorities",
    "test_no_enqueue": "a backend without enqueue, which this one has",
}
"""Tests of test_custom_backend.py, and why this backend cannot be their base."""

KEPT: Final = """
from perdure.integrations.django import PerdureBackend


class KeptBackend(PerdureBackend):
    # The results of the dummy backend, which its tests look at.
    def __init__(self, alias, params):
        super().__init__(alias, params)
        self.results = []

    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        self.results.append(result)
        return result

    def clear(self):
        self.results.clear()
"""


def test_the_tests_of_django(perdure: PerdureFixture, tmp_path: Path) -> None:
    sources = dict(part.split("=", 1) for part in os.environ["PERDURE_ADAPTER_SOURCES"].split(os.pathsep))
    upstream = Path(sources["django"]) / "tests"
    folder = tmp_path / "tests"
    folder.mkdir()
    shutil.copytree(upstream / "tasks", folder / "tasks")
    for name in ("runtests.py", "test_sqlite.py", "urls.py"):
        shutil.copy(upstream / name, folder / name)
    shutil.copytree(upstream / "templates", folder / "templates")
    (folder / "kept_backend.py").write_text(KEPT)
    for name, old, new in (
        ("test_tasks.py", "from django.tasks.backends.dummy import", "from kept_backend import KeptBackend as"),
        ("test_tasks.py", '"django.tasks.backends.dummy.DummyBackend"', '"kept_backend.KeptBackend"'),
        (
            "test_custom_backend.py",
            "from django.tasks.backends.base import BaseTaskBackend",
            "from perdure.integrations.django import PerdureBackend as BaseTaskBackend",
        ),
    ):
        path = folder / "tasks" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "-W", "ignore", "runtests.py", "--settings", "test_sqlite", "--parallel", "1", "-v", "2"]
    done = subprocess.run(
        [*command, "tasks.test_tasks", "tasks.test_custom_backend"],
        env=environment,
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    outcomes = dict(re.findall(r"^(test_\w+) \(.*?\)(?:\n.*?)? \.\.\. (\w+)$", done.stderr, re.MULTILINE))
    failed = {name for name, outcome in outcomes.items() if outcome != "ok"}
    assert failed == set(EXCLUDED), done.stderr[-6000:]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} tests of django.tasks passed")
