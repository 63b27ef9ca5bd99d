"""Imports of a spare: at the lowest priority, beside workers that need the processors."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from perdure.worker.cli import __main__ as entry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def test_the_importing_thread_has_the_lowest_priority_and_the_process_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    imports: list[tuple[str, int]] = []

    def load(target: str) -> None:
        imports.append((target, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    monkeypatch.setattr(entry, "load", load)
    entry.import_in_background()
    assert imports == [(".worker:run", 19), (".support.worker_process:run_worker", 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own < 19


def test_a_failed_import_is_left_to_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(target: str) -> None:
        raise ImportError(target)

    monkeypatch.setattr(entry, "load", load)
    entry.import_in_background()
