"""Times, durations, counts and lists in texts."""

from __future__ import annotations

import pytest
from perdure.queues.wording import counted, duration, iso_time, listed, shown_time, span


@pytest.mark.parametrize(
    ("seconds", "exact", "whole"),
    [
        (0, "0 ms", "0 s"),
        (0.4, "400 ms", "0 s"),
        (1.5, "1.5 s", "2 s"),
        (90, "1.5 min", "90 s"),
        (150, "2.5 min", "2 min"),
        (7_200, "2.0 h", "2 h"),
        (100_000, "1.2 days", "28 h"),
        (900_000, "10 days", "10 days"),
    ],
)
def test_a_duration_is_in_the_largest_unit_that_fits(seconds: float, exact: str, whole: str) -> None:
    assert (duration(seconds), duration(seconds, whole=True)) == (exact, whole)


def test_a_sentence_has_no_duration_below_a_second() -> None:
    assert (span(-5), span(999), span(2_000)) == ("less than 1 s", "less than 1 s", "2 s")


def test_a_time_that_no_calendar_has_is_the_nearest_one() -> None:
    assert shown_time(1e30) == "9999-12-31 23:59:59 UTC"
    assert iso_time(-1) == "1970-01-01T00:00:00.000Z"
    assert iso_time(None) is None


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "crash", "crashes") for number in (0, 1, 2)] == ["0 crashes", "1 crash", "2 crashes"]
    assert [counted(number, "task") for number in (1, 2)] == ["1 task", "2 tasks"]


def test_a_long_list_ends_with_the_number_of_the_others() -> None:
    assert listed("abc", 3) == "a, b, c"
    assert listed("abcde", 3, "; ") == "a; b; c and 2 more"
    assert listed("ab", 2, total=2_000) == "a, b and 1,998 more"
    assert listed((), 2) == ""
