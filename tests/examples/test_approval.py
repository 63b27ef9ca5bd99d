"""examples/approval.py: two days pass by hand."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from perdure.queues import AnswerRefused, State
from perdure.testing import PerdureClock

from tests.support.paths import ROOT


@pytest.fixture
def example(perdure_clock: PerdureClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LEDGER", str(tmp_path / "payments.txt"))
    spec = importlib.util.spec_from_file_location("approval_example", ROOT / "examples" / "approval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "approval_example", module)
    spec.loader.exec_module(module)
    return module


async def test_an_approval_after_a_day_pays(example: Any, perdure_clock: PerdureClock) -> None:
    async with example.app:
        handle = await example.pay.enqueue(17, 900)
        await perdure_clock.run_until_idle(example.app)
        assert await handle.status() is State.WAITING
        await perdure_clock.advance(timedelta(days=1, hours=23))
        await example.app.answer("order:17", example.Approval(approved=True), by="ada")
        await perdure_clock.run_until_idle(example.app)
        assert await handle.result() == "order 17: 900 euros"
    assert len(example.LEDGER.read_text().splitlines()) == 1


async def test_a_payment_without_an_answer_is_refused(example: Any, perdure_clock: PerdureClock) -> None:
    async with example.app:
        handle = await example.pay.enqueue(17, 900)
        await perdure_clock.run_until_idle(example.app)
        await perdure_clock.advance(timedelta(days=2))
        with pytest.raises(AnswerRefused, match="its time has passed"):
            await handle.answer("approval", example.Approval(approved=True))
        await perdure_clock.run_until_idle(example.app)
        assert await handle.result() == "refused: no answer in two days"
    assert not example.LEDGER.exists()
