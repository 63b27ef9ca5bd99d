"""examples/openai_agent.py, with a person who approves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from perdure.queues import State
from perdure.testing import PerdureFixture

EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_agent.py"


@pytest.fixture
def example(perdure: PerdureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LEDGER", str(tmp_path / "refunds.txt"))
    monkeypatch.delenv("MODEL", raising=False)
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, EXAMPLE.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("approved", [True, False])
async def test_an_order_is_refunded_if_a_person_approves(perdure: PerdureFixture, example: Any, approved: bool) -> None:
    async with example.app:
        handle = await example.support.enqueue("Refund order 17.")
        await perdure.run_until_idle(example.app)
        assert await handle.status() is State.WAITING
        (wait,) = await handle.waits()
        assert (wait.id, wait.who) == ("approve-refund", "finance")
        await handle.answer("approve-refund", {"approved": approved}, by="ada")
        await perdure.run_until_idle(example.app)
        assert await handle.result() == "Order 17 is refunded."
    refunds = example.LEDGER.read_text().splitlines() if example.LEDGER.exists() else []
    assert len(refunds) == approved
