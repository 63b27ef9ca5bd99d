"""Fixture: workers that look for lost tasks and foreign bytes often."""

from __future__ import annotations

import pytest
from perdure import Worker
from perdure.worker.runtime.shared_settings import WorkerTimings


@pytest.fixture
def quick_cleaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "timings", WorkerTimings(clean_interval=0.05, clean_lock=0.05))
