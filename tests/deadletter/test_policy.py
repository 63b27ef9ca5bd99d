"""Retry policy: delays, limits of attempts and crashes, and reasons of dead letters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.deadletter.policy import (
    Bury,
    Reason,
    Retry,
    TryAgain,
    after_crash,
    after_failure,
    backoff,
    must_quarantine,
)
from perdure.queues.delivery.settlement import Counters
from perdure.queues.durations import to_seconds

RETRIES = st.builds(
    Retry,
    max_attempts=st.integers(1, 50),
    max_crashes=st.integers(0, 50),
    base=st.floats(0, 1e4),
    factor=st.floats(1, 100),
    cap=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
)
FAILURES = st.integers(1, 10_000)


@given(RETRIES, FAILURES, st.floats(0, 1))
def test_a_delay_is_between_zero_and_the_cap(retry: Retry, failures: int, chance: float) -> None:
    assert 0 <= backoff(retry, failures, chance) <= to_seconds(retry.cap)


@given(RETRIES, FAILURES)
def test_delays_do_not_decrease_with_failures(retry: Retry, failures: int) -> None:
    assert backoff(retry, failures, 0.0) <= backoff(retry, failures + 1, 0.0)


@given(RETRIES, FAILURES, st.floats(0, 1))
def test_jitter_subtracts_at_most_its_fraction(retry: Retry, failures: int, chance: float) -> None:
    full = backoff(retry, failures, 0.0)
    assert full * (1 - retry.jitter) - 1e-9 <= backoff(retry, failures, chance) <= full


def test_delays_double_up_to_the_cap() -> None:
    retry = Retry(base=1.0, factor=2.0, cap=10.0, jitter=0.5)
    assert [backoff(retry, n, 0.0) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert backoff(retry, 3, 1.0) == 2.0


def test_jitter_spreads_retries_of_simultaneous_failures() -> None:
    waits = {backoff(Retry(jitter=0.5), 5) for _ in range(50)}
    assert len(waits) > 40
    assert all(8 <= wait <= 16 for wait in waits)


@given(RETRIES, st.integers(0, 60), st.none() | st.integers(1, 60))
def test_attempts_are_bounded(retry: Retry, attempts: int, asked: int | None) -> None:
    decision = after_failure(retry, Counters(attempts), ValueError(), asked)
    if attempts >= (asked or retry.max_attempts):
        assert decision == Bury(Reason.ATTEMPTS_EXHAUSTED)
    else:
        assert isinstance(decision, TryAgain)
        assert 0 <= decision.delay <= to_seconds(retry.cap)


@given(RETRIES, st.integers(0, 60))
def test_crashes_in_a_row_are_bounded(retry: Retry, crashes: int) -> None:
    """The first two may be the fault of another task in the same process."""
    limit = max(2, retry.max_crashes) if retry.max_crashes else 0
    expected = Bury(Reason.CRASH_LOOP) if crashes > limit else None
    assert after_crash(retry, crashes, crashes) == expected


@pytest.mark.parametrize(("max_crashes", "limit"), [(1, 10), (3, 10), (50, 50)])
def test_crashes_after_progress_are_bounded_within_the_window(max_crashes: int, limit: int) -> None:
    retry = Retry(max_crashes=max_crashes)
    assert after_crash(retry, 1, limit) is None
    assert after_crash(retry, 1, limit + 1) == Bury(Reason.CRASH_LOOP)


@pytest.mark.parametrize(
    ("in_a_row", "in_window", "expected"),
    [(0, 0, False), (1, 1, False), (2, 2, True), (1, 2, False), (0, 3, True), (1, 3, True)],
)
def test_the_second_crash_in_a_row_or_the_third_in_the_window_quarantines(
    in_a_row: int, in_window: int, expected: bool
) -> None:
    assert must_quarantine(in_a_row, in_window) is expected


def test_one_attempt_means_no_retry() -> None:
    assert after_failure(Retry(max_attempts=1), Counters(1), ValueError(), None) == Bury(Reason.ATTEMPTS_EXHAUSTED)


def test_the_limit_of_the_producer_overrides_the_policy_of_the_task() -> None:
    assert isinstance(after_failure(Retry(max_attempts=1), Counters(1), ValueError(), 5), TryAgain)
    assert after_failure(Retry(max_attempts=9), Counters(2), ValueError(), 2) == Bury(Reason.ATTEMPTS_EXHAUSTED)


def test_a_timeout_of_the_last_attempt_has_a_separate_reason() -> None:
    assert after_failure(Retry(max_attempts=1), Counters(1), TimeoutError(), None) == Bury(Reason.TIMEOUT)
    assert isinstance(after_failure(Retry(max_attempts=2), Counters(1), TimeoutError(), None), TryAgain)


def test_excluded_errors_are_buried_at_once() -> None:
    retry = Retry(on=(OSError,), never=(FileNotFoundError,))
    assert retry.allows(ConnectionError())
    for error in (FileNotFoundError(), ValueError(), KeyboardInterrupt()):
        assert not retry.allows(error)
        assert after_failure(retry, Counters(1), error, None) == Bury(Reason.NOT_RETRYABLE)


def test_a_group_is_retried_if_each_of_its_errors_is() -> None:
    group = ExceptionGroup("unhandled", [ConnectionError(), ExceptionGroup("inner", [TimeoutError()])])
    for retry in (Retry(), Retry(on=(OSError,)), Retry(on=(ExceptionGroup,)), Retry(never=(ValueError,))):
        assert retry.allows(group)
    for retry in (Retry(on=(ConnectionError,)), Retry(never=(TimeoutError,)), Retry(never=(ExceptionGroup,))):
        assert not retry.allows(group)


def test_exceptions_are_retried_by_default_and_exits_are_not() -> None:
    assert Retry().allows(Exception())
    assert not Retry().allows(SystemExit())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_crashes": -1},
        {"base": -0.1},
        {"factor": 0.9},
        {"cap": -1.0},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
    ],
)
def test_an_invalid_policy_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Retry"):
        Retry(**wrong)


@pytest.mark.parametrize("given", [OSError, [OSError], {OSError}, (OSError,)])
def test_exceptions_may_be_a_class_or_a_collection(given: Any) -> None:
    assert Retry(on=given) == Retry(on=(OSError,))
    assert not Retry(never=given).allows(FileNotFoundError())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"on": "x"}, "Retry.on must be exception classes, such as .*, got 'x'"),
        ({"on": (KeyError(),)}, "Retry.on must be exception classes"),
        ({"on": [int]}, "Retry.on must be exception classes"),
        ({"never": "KeyError"}, "Retry.never must be exception classes"),
        ({"never": None}, "Retry.never must be exception classes"),
        ({"factor": "2"}, "Retry.factor must be a number, got '2'"),
        ({"jitter": None}, "Retry.jitter must be a number, got None"),
        ({"base": "1s"}, "Retry.base must be seconds or a timedelta, got '1s'"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Retry(**wrong)


@pytest.mark.parametrize("name", ["base", "factor", "cap"])
def test_a_delay_of_nan_is_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: float("nan")}
    with pytest.raises(ValueError, match="Retry"):
        Retry(**wrong)


def test_values_of_reasons_are_lower_case_names() -> None:
    assert all(str(reason) == reason.name.lower() for reason in Reason)


def test_an_overflowing_delay_is_the_cap() -> None:
    assert backoff(Retry(base=1.0, factor=1e300, cap=60.0, jitter=0.0), 1000) == 60.0


def test_a_reason_of_an_earlier_version_is_read() -> None:
    assert Reason("sealed") is Reason.UNDECRYPTABLE
    assert str(Reason.UNDECRYPTABLE) == "undecryptable"
    with pytest.raises(ValueError, match="'unknown' is not a valid Reason"):
        Reason("unknown")
