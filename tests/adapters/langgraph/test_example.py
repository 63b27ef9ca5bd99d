"""examples/langgraph_agent.py, with an editor who decides."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from perdure.queues import State
from perdure.testing import PerdureFixture

EXAMPLE = Path(__file__).parents[3] / "examples" / "langgraph_agent.py"


@pytest.fixture
def example(perdure: PerdureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUTBOX", str(tmp_path / "newsletters.txt"))
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, EXAMPLE.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("decision", ["publish", "drop"])
async def test_an_issue_is_published_once_if_the_editor_says_so(
    perdure: PerdureFixture, example: Any, decision: str
) -> None:
    async with example.app:
        handle = await example.newsletter.enqueue({"topic": "tides"})
        await perdure.run_until_idle(example.app)
        assert await handle.status() is State.WAITING
        (wait,) = await handle.waits()
        assert wait.shown == {"draft": "All about tides in books and tides in papers."}
        assert not example.OUTBOX.exists()
        await handle.answer(wait.id, decision, by="ada")
        await perdure.run_until_idle(example.app)
        result = await handle.result()
    assert result["draft"] == "All about tides in books and tides in papers."
    assert sorted(result["facts"]) == ["tides in books", "tides in papers"]
    published = example.OUTBOX.read_text().splitlines() if example.OUTBOX.exists() else []
    assert len(published) == (decision == "publish")
