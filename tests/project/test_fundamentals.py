"""Rule of tests/fundamentals: a tutorial imports the public names of `perdure` and nothing else of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.paths import TESTS

FILES = sorted((TESTS / "fundamentals").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_tutorial_imports_public_names_only(file: Path) -> None:
    modules = {
        node.module
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert {module for module in modules if module.partition(".")[0] in ("perdure", "tests")} == {"perdure"}
