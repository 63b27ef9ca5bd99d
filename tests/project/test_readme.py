"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.processes
def test_the_example_works_when_pasted(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "quickstart.py").write_text(example)
    (tmp_path / "sample.py").write_text("one = 1\ntwo = 2\n")
    environment = os.environ | {"PERDURE_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "quickstart.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = len(example.splitlines())
    assert done.stdout.strip() == repr({"quickstart.py": lines, "sample.py": 2})


def test_the_example_has_about_thirty_lines_of_code() -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 30


def test_every_make_target_named_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = set()
    for document in (README, (ROOT / "CONTRIBUTING.md").read_text("utf-8")):
        named |= set(re.findall(r"(?:^    |`)make ([a-z-]+)", document, re.MULTILINE))
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)


def test_every_linked_file_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_what_the_documents_name_is_there(document: Path) -> None:
    """Files of the tests, tests in them, make targets, and other documents."""
    text = document.read_text("utf-8")
    for name, test in re.findall(r"(tests/[a-z_/]+\.py)::(\w+)", text):
        assert f"def {test}(" in (ROOT / name).read_text("utf-8"), f"{name}::{test}"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for name in re.findall(r"tests/[a-z_/]+\.py", text):
        assert (ROOT / name).is_file(), name
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
