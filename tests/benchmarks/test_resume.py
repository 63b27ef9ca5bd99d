"""The benchmark of resumed runs runs, and writes its table. Nothing here asks how large a figure is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer

from benchmarks.resume import BEGIN, END, Outcome, measure, table, write
from benchmarks.support.deployment import Deployment
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "events.md"


@pytest.mark.integration
@pytest.mark.parametrize("what", ["agent", "function"])
async def test_a_past_is_gone_on_from(redis_url: str, namespace_name: str, what: str) -> None:
    found = await measure(Deployment(redis_url, namespace_name), what, 60)
    assert found.events >= 60
    assert min(found.start, found.memory, found.written, found.checkpoint) > 0
    assert found.resume > found.start


def test_the_table_goes_into_the_document(tmp_path: Path) -> None:
    page = Path(shutil.copy(PAGE, tmp_path / "events.md"))
    rows = table([Outcome("agent", 102_057, 0.0105, 0.0214, 20_480, 866.7, 10_300)])
    write(page, rows)
    write(page, rows)
    text = page.read_text("utf-8")
    assert "| agent | 102,057 | 10 ms | 21 ms | 20 KB | 867 | 10 KB |" in text
    assert text.partition(BEGIN)[0] == PAGE.read_text("utf-8").partition(BEGIN)[0]
    assert text.partition(END)[2] == PAGE.read_text("utf-8").partition(END)[2]
    page.write_text("nothing")
    with pytest.raises(typer.BadParameter, match="must have the lines"):
        write(page, rows)
