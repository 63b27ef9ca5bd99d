"""Fingerprints of errors: what makes a group of dead letters, and what does not."""

from __future__ import annotations

import pytest
from perdure.deadletter.letters import FINGERPRINT, fingerprint

TRACEBACK = 'Traceback (most recent call last):\n  File "/srv/a/tasks.py", line 7, in pay\n    raise ValueError\n'
KNOWN = {"task": "pay", "reason": "attempts_exhausted", "error": "ValueError", "message": "", "traceback": TRACEBACK}


def named(**changed: str) -> str:
    return fingerprint(**KNOWN | changed)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("no row 7", "no row 12345"),
        ("took 1.5 s", "took 20.25 s"),
        ("no 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f", "no 01980f2e-7f6a-7c41-b9a5-7d4f0c1dffff"),
        ("commit 9f7c318dee of main", "commit e487654112 of main"),
        ("<A object at 0x7f00aa>", "<A object at 0x7f11>"),
        ("late since 2026-11-27T11:42:17Z", "late since 2025-01-02T00:00:00.5Z"),
        ("10.0.0.1:6379 refused", "10.0.0.23:26379 refused"),
        ("2 validation errors for Order\nname\n  missing", "3 validation errors for Order\nprice\n  missing"),
    ],
)
def test_what_differs_from_task_to_task_makes_no_group(first: str, second: str) -> None:
    assert named(message=first) == named(message=second)


@pytest.mark.parametrize(
    "changed",
    [
        {"task": "refund"},
        {"reason": "timeout"},
        {"error": "KeyError"},
        {"message": "no column"},
        {"traceback": TRACEBACK.replace("pay", "charge")},
        {"traceback": TRACEBACK.replace("tasks.py", "cards.py")},
        {"traceback": ""},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_error_makes_another_group(changed: dict[str, str]) -> None:
    assert named(**{"message": "no row"} | changed) != named(message="no row")


def test_line_and_folder_make_no_group() -> None:
    moved = TRACEBACK.replace("line 7", "line 90").replace("/srv/a", "C:\\b").replace("C:\\b/", "C:\\b\\")
    assert named(traceback=moved) == named()
    assert len(named()) == FINGERPRINT


def test_the_last_frame_counts() -> None:
    chained = TRACEBACK.replace("pay", "look_up") + "\nThe above exception was the cause\n\n" + TRACEBACK
    assert named(traceback=chained) == named()


@pytest.mark.parametrize("message", ["\ud800", "a" * 100_000, "\n\n", "\0", "1" * 100_000])
def test_any_message_has_a_fingerprint(message: str) -> None:
    assert len(named(message=message)) == FINGERPRINT
