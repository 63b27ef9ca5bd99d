"""What follows a run that raised: the decision alone, without Redis."""

from __future__ import annotations

import pytest
from perdure import PayloadTooLarge, Retry, RetryLater, Snooze, StepInDoubt, StepMismatch, StepTimeout
from perdure.deadletter.burial import Evidence
from perdure.deadletter.policy import Reason
from perdure.queues.delivery.settlement import Counters
from perdure.worker.errors import TaskTimeout, UnserialisableResult
from perdure.worker.runtime.outcome import Burial, Rerun, after_error

STEADY = Retry(max_attempts=3, base=2.0, factor=10.0, jitter=0.0)


class Disk(Exception):
    pass


class FullDisk(Disk):
    pass


def buried(error: BaseException, retry: Retry = STEADY, counters: Counters | None = None) -> Burial:
    outcome = after_error(error, retry, counters or Counters(), None)
    assert isinstance(outcome, Burial)
    return outcome


def rerun(error: BaseException, retry: Retry = STEADY, counters: Counters | None = None) -> Rerun:
    outcome = after_error(error, retry, counters or Counters(), None)
    assert isinstance(outcome, Rerun)
    return outcome


def test_a_failure_counts_and_waits_longer_each_time() -> None:
    first = rerun(Disk(), counters=Counters(attempts=0, crashes=2, requeues=1))
    second = rerun(Disk(), counters=first.counters)
    assert (first.delay, second.delay) == (2.0, 20.0)
    assert first.event == "attempt_failed"
    assert second.counters == Counters(attempts=2, crashes=2, requeues=1)


def test_the_last_attempt_is_the_end() -> None:
    outcome = buried(Disk(), counters=Counters(attempts=2))
    assert outcome.reason is Reason.ATTEMPTS_EXHAUSTED
    assert outcome.counters.attempts == 3


def test_the_producers_word_on_attempts_goes_before_the_tasks() -> None:
    last = after_error(Disk(), STEADY, Counters(), 1)
    assert isinstance(last, Burial)
    assert isinstance(after_error(Disk(), Retry(max_attempts=1), Counters(), 2), Rerun)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StepInDoubt("charge", "id:charge"), Reason.IN_DOUBT),
        (UnserialisableResult("task 't'", "no JSON"), Reason.UNSERIALISABLE_RESULT),
        (StepMismatch("read", "1", "2"), Reason.NOT_RETRYABLE),
        (PayloadTooLarge("a record", 9, 8), Reason.NOT_RETRYABLE),
    ],
)
def test_errors_that_would_come_again_are_buried_at_once(error: Exception, reason: Reason) -> None:
    outcome = buried(error)
    assert outcome.reason is reason
    assert outcome.error is error
    assert outcome.counters.attempts == 1


@pytest.mark.parametrize("error", [TaskTimeout("t", 1.0), StepTimeout("s", 1.0), TimeoutError()])
def test_a_timeout_is_retried_and_named_as_the_reason_in_the_end(error: Exception) -> None:
    assert rerun(error).counters.attempts == 1
    assert buried(error, counters=Counters(attempts=2)).reason is Reason.TIMEOUT


@pytest.mark.parametrize(
    ("retry", "error", "again"),
    [
        (Retry(on=(Disk,)), Disk(), True),
        (Retry(on=(Disk,)), FullDisk(), True),
        (Retry(on=(Disk,)), ValueError(), False),
        (Retry(never=(FullDisk,)), FullDisk(), False),
        (Retry(never=(FullDisk,)), Disk(), True),
        (Retry(on=(Disk,), never=(FullDisk,)), FullDisk(), False),
        (Retry(), SystemExit(1), False),
    ],
)
def test_which_errors_are_worth_another_attempt(retry: Retry, error: BaseException, again: bool) -> None:
    outcome = after_error(error, retry, Counters(), None)
    if again:
        assert isinstance(outcome, Rerun)
    else:
        assert isinstance(outcome, Burial)
        assert outcome.reason is Reason.NOT_RETRYABLE


def test_retry_later_sets_the_delay_and_counts() -> None:
    outcome = rerun(RetryLater(after=30))
    assert (outcome.delay, outcome.counters.attempts) == (30, 1)
    assert buried(RetryLater(after=30), counters=Counters(attempts=2)).reason is Reason.ATTEMPTS_EXHAUSTED


def test_retry_later_is_a_request_that_on_and_never_do_not_sort_out() -> None:
    assert rerun(RetryLater(after=5), Retry(on=(Disk,))).delay == 5
    assert rerun(RetryLater(after=5), Retry(never=(Exception,))).delay == 5


def test_snooze_sets_the_delay_and_counts_nothing() -> None:
    spent = Counters(attempts=2, crashes=1, requeues=4)
    outcome = rerun(Snooze(after=3600), counters=spent)
    assert (outcome.delay, outcome.event, outcome.counters) == (3600, "snoozed", spent)


@pytest.mark.parametrize("kind", [RetryLater, Snooze])
@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), 1e300])
def test_a_time_to_wait_is_not_negative_nor_without_end(kind: type[RetryLater | Snooze], after: float) -> None:
    with pytest.raises(ValueError, match=r"after must be (0 to|a number)"):
        kind(after=after)


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_that_decides_alone_decides_within_a_task_group_too(alone: bool) -> None:
    others: list[Exception] = [] if alone else [Disk()]
    doubt = ExceptionGroup("unhandled errors in a TaskGroup", [*others, StepInDoubt("charge", "id:charge")])
    assert buried(doubt).reason is Reason.IN_DOUBT
    snoozed = rerun(ExceptionGroup("outer", [ExceptionGroup("inner", [*others, Snooze(after=7)])]))
    assert (snoozed.event, snoozed.delay, snoozed.counters.attempts) == ("snoozed", 7, 0)


def test_one_error_in_a_group_is_judged_by_its_own_class() -> None:
    picky = Retry(max_attempts=3, never=(FullDisk,))
    assert buried(ExceptionGroup("unhandled", [FullDisk()]), retry=picky).reason is Reason.NOT_RETRYABLE


@pytest.mark.parametrize(
    ("retry", "members", "decides"),
    [
        (Retry(never=(FullDisk,)), [FullDisk("a"), FullDisk("b")], "a"),
        (Retry(never=(FullDisk,)), [Disk("a"), ExceptionGroup("inner", [Disk("b"), FullDisk("c")])], "c"),
        (Retry(never=(FullDisk,)), [Snooze(after=7), FullDisk("a")], "a"),
        (Retry(never=(FullDisk,)), [FullDisk("a"), StepInDoubt("b", "id:b")], "step 'b'"),
        (Retry(on=(Disk,)), [Disk("a"), ValueError("b")], "b"),
    ],
)
def test_a_member_of_a_group_that_must_not_be_retried_decides(
    retry: Retry, members: list[Exception], decides: str
) -> None:
    outcome = buried(ExceptionGroup("unhandled", members), retry)
    assert outcome.reason in (Reason.NOT_RETRYABLE, Reason.IN_DOUBT)
    assert decides in str(outcome.error)


@pytest.mark.parametrize(
    "retry", [STEADY, Retry(on=(Disk,)), Retry(on=(ExceptionGroup,)), Retry(never=(ValueError,))], ids=repr
)
def test_a_group_is_retried_if_all_of_its_members_are(retry: Retry) -> None:
    group = ExceptionGroup("unhandled", [Disk("a"), ExceptionGroup("inner", [FullDisk("b"), Disk("c")])])
    assert rerun(group, retry).error is group
    assert buried(group, retry, Counters(attempts=2)).reason is Reason.ATTEMPTS_EXHAUSTED
    assert buried(group, Retry(never=(ExceptionGroup,))).reason is Reason.NOT_RETRYABLE


def test_the_text_of_a_group_names_its_members() -> None:
    errors = [ValueError("one"), ExceptionGroup("inner", [KeyError("two"), Disk("three")])]
    group = ExceptionGroup("unhandled errors in a TaskGroup", errors)
    text = Evidence.of(group).message
    assert text == f"unhandled errors in a TaskGroup (ValueError: one; KeyError: 'two'; {__name__}.Disk: three)"
    many = Evidence.of(ExceptionGroup("many", [ValueError(str(number)) for number in range(2000)]))
    assert many.message.endswith("ValueError: 4 and 1,995 more)")
    assert len(Evidence.of(ExceptionGroup("long", [ValueError("x" * 10_000)] * 3)).message) < 5_000


def test_running_out_of_time_is_the_reason_whether_or_not_it_is_worth_another_attempt() -> None:
    narrow = Retry(max_attempts=3, on=(Disk,))
    assert buried(TaskTimeout("t", 1.0), retry=narrow).reason is Reason.TIMEOUT
