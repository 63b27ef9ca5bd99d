"""Planned times: changes of daylight saving by hand, what never fires, missed runs, jitter."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from perdure import Cron, Every
from perdure.queues.schedules.definition import (
    MAX_MISSED,
    Rules,
    check_schedule_name,
    last_times,
    make_plan,
    read_when,
    task_id_of,
)

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def local(cron: Cron, after: str, count: int) -> list[str]:
    """Return planned times as the clock of the zone shows them, with its offset from UTC."""
    zone = ZoneInfo(cron.tz)
    found = [planned for planned, _ in zip(cron.times(ms(after)), range(count), strict=False)]
    return [datetime.fromtimestamp(planned / 1000, zone).strftime("%d %H:%M:%S %z") for planned in found]


@pytest.mark.parametrize(
    ("zone", "after", "expected"),
    [
        ("Europe/Berlin", "2026-03-28T12:00Z", ["29 03:00:00 +0200", "30 02:30:00 +0200", "31 02:30:00 +0200"]),
        ("Europe/Berlin", "2026-10-24T12:00Z", ["25 02:30:00 +0200", "26 02:30:00 +0100", "27 02:30:00 +0100"]),
        ("America/New_York", "2026-03-07T12:00Z", ["08 03:00:00 -0400", "09 02:30:00 -0400", "10 02:30:00 -0400"]),
        ("America/New_York", "2026-10-31T12:00Z", ["01 02:30:00 -0500", "02 02:30:00 -0500", "03 02:30:00 -0500"]),
        ("Asia/Tokyo", "2026-03-28T20:00Z", ["30 02:30:00 +0900", "31 02:30:00 +0900", "01 02:30:00 +0900"]),
    ],
)
def test_a_time_of_day_fires_once_a_day_at_both_changes(zone: str, after: str, expected: list[str]) -> None:
    assert local(Cron("30 2 * * *", tz=zone), after, 3) == expected
    assert local(Cron("0 30 2 * * *", tz=zone), after, 3) == expected, "with a field for seconds it is the same"


def test_a_repeated_hour_fires_once_for_a_time_and_twice_for_each_hour() -> None:
    assert local(Cron("30 1 * * *", tz="America/New_York"), "2026-11-01T00:00Z", 2) == [
        "01 01:30:00 -0400",
        "02 01:30:00 -0500",
    ]
    assert local(Cron("0 * * * *", tz="America/New_York"), "2026-11-01T04:30Z", 3) == [
        "01 01:00:00 -0400",
        "01 01:00:00 -0500",
        "01 02:00:00 -0500",
    ]
    assert local(Cron("0 * * * *", tz="Europe/Berlin"), "2026-03-29T00:30Z", 2) == [
        "29 03:00:00 +0200",
        "29 04:00:00 +0200",
    ]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])
@pytest.mark.parametrize(
    "expression", ["30 2 * * *", "15,45 30 1-3 * * *", "*/20 * * * *", "0 */2 * * *", "0 1,2 * * SUN"]
)
def test_planned_times_do_not_depend_on_where_the_search_begins(zone: str, expression: str) -> None:
    cron = Cron(expression, tz=zone)
    for day in ("2026-03-07", "2026-03-28", "2026-04-04", "2026-10-03", "2026-10-24", "2026-10-31"):
        start = ms(f"{day}T00:00Z")
        times = last_times(cron, start, start + 2 * DAY, 10_000)
        assert times == sorted({*times})
        for after in range(start, start + 2 * DAY - HOUR, 67 * MINUTE + 7 * SECOND):
            following = [planned for planned in times if planned > after]
            if following:
                assert next(cron.times(after)) == following[0]


def test_an_interval_is_a_multiple_since_1970() -> None:
    assert next(Every(timedelta(hours=6)).times(ms("2026-03-29T01:00Z"))) == ms("2026-03-29T06:00Z")
    assert next(Every(90).times(90_000)) == 180_000
    assert (str(Every(90)), str(Every(7200)), str(Every(86_400))) == ("every 90 s", "every 2 h", "every 1 d")


@pytest.mark.parametrize("when", [Every(90), Cron("0 2 * * *", tz="Europe/Berlin")])
def test_a_definition_is_read_back(when: Cron | Every) -> None:
    assert read_when(when.form()) == when


@pytest.mark.parametrize(
    ("expression", "zone", "problem"),
    [
        ("0 0 31 2 *", "UTC", "must fire at some time, got '0 0 31 2 \\*', which never does"),
        ("0 0 30 2 *", "Europe/Berlin", "which never does"),
        ("61 * * * *", "UTC", "must have five fields, or six with seconds, got '61 \\* \\* \\* \\*': minute"),
        ("* * *", "UTC", "wrong number of fields"),
        ("", "UTC", "wrong number of fields"),
        ("0 2 * * *", "Europe/Berlim", "tz must be a time zone of the IANA database, such as 'Europe/Berlin'"),
        ("0 2 * * *", "../etc/passwd", "tz must be a time zone"),
        ("0 2 * * *", "Europe", "tz must be a time zone"),
    ],
)
def test_what_never_fires_and_an_unknown_zone_are_refused(expression: str, zone: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Cron(expression, tz=zone)


@pytest.mark.parametrize("interval", [0, -5, 0.5, 1e9, float("nan"), True, "5", timedelta(milliseconds=1500)])
def test_an_interval_is_a_whole_number_of_seconds(interval: object) -> None:
    with pytest.raises((ValueError, TypeError), match="interval of Every must be"):
        Every(interval)  # type: ignore[arg-type]


def test_a_name_makes_a_task_id() -> None:
    assert task_id_of("nightly", ms("2026-03-29T01:00Z")) == "nightly-20260329T010000Z"
    for name in ("", "a b", "x" * 65, "-x"):
        with pytest.raises(ValueError, match="schedule must be"):
            check_schedule_name(name)


LAST = ms("2026-03-01T00:00Z")


def plan_after(missed: str, passed: int, every: int = 60) -> tuple[list[int], bool]:
    """Return what is fired a time after the last firing, as minutes after that, and whether times were left out."""
    rules = Rules.of(Every(every), missed, 0)
    plan = make_plan("s", Every(every), rules, LAST, LAST + passed)
    assert plan.next is not None
    assert plan.next > LAST + passed
    assert plan.last <= LAST + passed
    return [(planned - LAST) // MINUTE for planned in plan.fire], plan.dropped


def test_missed_times_are_skipped_fired_once_or_all() -> None:
    for missed in ("skip", "once", "all"):
        assert plan_after(missed, 59 * SECOND) == ([], False)
        assert plan_after(missed, MINUTE + 30 * SECOND) == ([1], False), "a late firing is none that was missed"
    assert plan_after("all", 5 * MINUTE + 30 * SECOND) == ([1, 2, 3, 4, 5], False)
    assert plan_after("once", 5 * MINUTE + 30 * SECOND) == ([5], True)
    assert plan_after("skip", 5 * MINUTE + 30 * SECOND) == ([5], True), "the last one is not a minute late"
    assert plan_after("skip", 7 * HOUR, every=3600 * 2) == ([], True)
    assert plan_after("once", 7 * HOUR, every=3600 * 2) == ([360], True)


def test_the_missed_times_that_are_fired_are_bounded() -> None:
    fired, dropped = plan_after("all", 400 * DAY, every=60)
    assert dropped
    assert len(fired) == MAX_MISSED
    assert fired[-1] == 400 * 24 * 60, "the last ones are fired"


def test_a_clock_that_is_set_back_fires_nothing_again() -> None:
    plan = make_plan("s", Every(60), Rules(), LAST, LAST - 3 * HOUR)
    assert (plan.fire, plan.last, plan.next) == ([], LAST, LAST + MINUTE)


def test_jitter_delays_a_firing_by_the_same_time_everywhere() -> None:
    rules = Rules.of(Every(3600), "once", timedelta(minutes=10))
    delays = {rules.delay("s", LAST + hour * HOUR) for hour in range(50)}
    assert len(delays) > 40
    assert all(0 <= delay < 10 * MINUTE for delay in delays)
    planned = LAST + HOUR
    before = make_plan("s", Every(3600), rules, LAST, planned + rules.delay("s", planned) - 1)
    after = make_plan("s", Every(3600), rules, LAST, planned + rules.delay("s", planned))
    assert (before.fire, before.look) == ([], planned + rules.delay("s", planned))
    assert after.fire == [planned]


@pytest.mark.parametrize("jitter", [3600, -1, float("nan"), True, "5"])
def test_jitter_is_less_than_the_time_between_two_firings(jitter: object) -> None:
    with pytest.raises((ValueError, TypeError), match="jitter must be"):
        Rules.of(Every(3600), "once", jitter)


def test_many_missed_times_are_found_in_bounded_work() -> None:
    times = last_times(Cron("* * * * * *"), 0, ms("2026-03-01T00:00Z"), 101)
    assert len(times) == 101
    assert times[-1] == ms("2026-03-01T00:00Z")
    assert datetime.fromtimestamp(times[0] / 1000, UTC).year == 2026
