"""The code of the how-to pages of an adapter, in its environment; `python -m tests.adapters` names the pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.page_execution import run_page, use_server
from tests.support.paths import ROOT

PAGES = os.environ.get("PERDURE_ADAPTER_PAGES", "").split()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_adapter_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with use_server(tmp_path / "data"):
        done = run_page(ROOT / "docs" / "how-to" / f"{name}.md", folder, tmp_path / "data")
    assert done.returncode == 0, done.stdout + done.stderr
