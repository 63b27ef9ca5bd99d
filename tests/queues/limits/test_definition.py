"""Definitions of limits: what is refused, with one sentence, and what workers publish."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure import Breaker, Limit, Rate
from perdure.queues.errors import InvalidLimitUse
from perdure.queues.limits.definition import (
    LimitCost,
    check_limits,
    given_values,
    key_digest,
    label_text,
    parse_rate,
)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"total": 0}, "total of limit 'x' must be a whole number from 1 to 1,000,000, got 0"),
        ({"running": True}, "running of limit 'x' must be a whole number from 1 to 1,000,000, got True"),
        ({"running": 3, "total": 2, "by": "a"}, "limit 'x': running must be at most total, got running=3 of 2"),
        ({"running": 1, "total": 1}, "limit 'x': total and running mean the same without by: give one of them"),
        ({"rate": "none"}, "rate of limit 'x' must be such as '500/m', with one of the units s, m, h, d, got 'none'"),
        ({"rate": "5/w"}, "rate of limit 'x' must be such as '500/m'"),
        ({"rate": "0/m"}, "rate of limit 'x': count of a Rate must be a whole number from 1 to"),
        ({"cost": "9000000/s"}, "cost of limit 'x': a rate must be at most 1,000,000 per second, got 9,000,000 in 1 s"),
        ({"burst": 5}, "burst of limit 'x' must go with either rate or cost: give rate or cost"),
        ({"burst": 5, "rate": "5/m", "cost": "5/m"}, "burst of limit 'x' must go with either rate or cost: give each"),
        ({"burst": 5, "rate": Rate(5, burst=9)}, "burst of limit 'x' must be given once, got 9 and 5"),
        ({"burst": 0, "rate": "5/m"}, "burst of limit 'x' must be a whole number from 1 to"),
        ({"over": "skip"}, "over of limit 'x' must be 'wait', 'drop' or 'replace', got 'skip'"),
        ({"ordered": True}, "limit 'x': ordered must go with running, the number of tasks of a key that run at once"),
        ({"ordered": True, "by": "a", "total": 3}, "limit 'x': ordered must go with running"),
        ({"by": []}, "by of limit 'x' must be names of arguments, each once, or a function of them"),
        ({"by": ["a", "a"]}, "by of limit 'x' must be names of arguments, each once"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused_with_one_sentence(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="^" + problem.replace("(", r"\(")) as caught:
        Limit("x", **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rate": 5}, "rate of limit 'x' must be such as '500/m' or Rate"),
        ({"ordered": 1, "total": 1}, "ordered of limit 'x' must be True or False, got 1"),
        ({"while_parked": "yes"}, "while_parked of limit 'x' must be True or False, got 'yes'"),
        ({"breaker": 0.5}, "breaker of limit 'x' must be a Breaker, such as Breaker"),
    ],
)
def test_a_part_of_another_type_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match="^" + problem):
        Limit("x", **given)


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "a b", "x" * 65, 5])
def test_a_name_that_is_no_part_of_a_key_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="the name of a limit must be 1 to 64 letters, digits"):
        Limit(name)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Rate(0), "count of a Rate must be a whole number"),
        (lambda: Rate(5, per=0), "per of a Rate must be more than 0 seconds"),
        (lambda: Rate(5, burst=0), "burst of a Rate must be a whole number"),
        (lambda: Breaker(errors=0), "errors of a Breaker must be a share, more than 0 and at most 1, got 0"),
        (lambda: Breaker(errors=1.5), "errors of a Breaker must be a share"),
        (lambda: Breaker(calls=0), "calls of a Breaker must be a whole number"),
        (lambda: Breaker(window=-1), "window of a Breaker must be more than 0 seconds"),
        (lambda: Breaker(open=0), "open of a Breaker must be more than 0 seconds"),
    ],
)
def test_rates_and_breakers_check_their_numbers(make: Any, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + problem):
        make()


def test_a_rate_is_read_from_a_text() -> None:
    assert parse_rate("90_000/m") == Rate(90_000, per=60)
    assert Limit("x", rate=" 5 / s ").rate == Rate(5, per=1)
    assert Limit("x", rate="5/h", burst=2).rate == Rate(5, per=3_600, burst=2)
    assert Limit("x", cost="5/d", burst=2).cost == Rate(5, per=86_400, burst=2)
    assert Rate(30, per=timedelta(minutes=1)) == Rate(30, per=60)
    assert [str(rate) for rate in (Rate(500), Rate(5, per=90), Rate(1_000, per=1, burst=7))] == [
        "500/m",
        "5/90 s",
        "1,000/s (burst 7)",
    ]


def test_workers_publish_numbers_that_scripts_read() -> None:
    limit = Limit("openai", total=20, running=2, by="tenant", rate="500/m", cost="90_000/m", over="drop", ordered=True)
    assert limit.published() == {
        "total": "20",
        "running": "2",
        "interval": "120",
        "burst": "500",
        "rate": "500/m",
        "cost_interval": "0.66666666666666663",
        "cost_burst": "90000",
        "cost": "90,000/m",
        "by": "tenant",
        "over": "drop",
        "ordered": "1",
    }
    assert limit.flags == "od"
    assert Limit("x", running=3).published() == Limit("x", total=3).published() == {"total": "3"}
    breaker = Limit("x", breaker=Breaker(errors=0.25, calls=5, window=10, open=timedelta(seconds=3)), by=len)
    assert breaker.published() == {
        "errors": "0.25",
        "calls": "5",
        "window": "10000",
        "open": "3000",
        "by": "a function",
    }
    assert Limit("x", total=3).digest != Limit("x", total=4).digest


def test_the_limits_of_a_task_are_at_most_four_and_each_once() -> None:
    limits = [Limit(name, total=1) for name in "edcba"]
    with pytest.raises(ValueError, match=r"^a task must have at most 4 limits, got 5$"):
        check_limits(limits)
    assert [limit.name for limit, _ in check_limits(limits[1:])] == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match=r"^a task must have each limit once, got a twice$"):
        check_limits([Limit("a"), Limit("a")])
    ordered = [Limit(name, total=1, ordered=True) for name in "ab"]
    with pytest.raises(ValueError, match=r"^a task must have at most one ordered limit, got a and b$"):
        check_limits(ordered)
    with pytest.raises(ValueError, match="must agree on over, got 'drop' and 'replace'"):
        check_limits([Limit("a", over="drop"), Limit("b", over="replace")])
    for wrong in (Limit("a"), "openai", None):
        with pytest.raises(TypeError, match="limits must be a list of limits"):
            check_limits(wrong)
    with pytest.raises(TypeError, match=r"limits must be limits of app.limit"):
        check_limits(["openai"])


def test_a_cost_fits_into_the_burst_of_its_limit() -> None:
    openai = Limit("openai", cost="90_000/m")
    assert openai.costs(90_000) == LimitCost(openai, 90_000)
    assert openai.costs(0).cost == 0
    with pytest.raises(ValueError, match="must be at most its burst, 90,000 of 90,000/m, got 90,001"):
        openai.costs(90_001)
    for wrong in (-1, 1.5, True, "5"):
        with pytest.raises(ValueError, match="a cost of limit 'openai' must be a whole number, 0 or more"):
            openai.costs(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"limit 'session' has no cost: define it with app.limit\('session', cost="):
        Limit("session", total=1).costs(5)


async def test_a_limit_without_an_app_cannot_be_held() -> None:
    limit = Limit("openai", total=1)
    with pytest.raises(ValueError, match=r"it has no app; define it with app.limit"):
        await limit.hold(5)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="hold of limit 'openai' must be"):
            await limit.hold(wrong)


scalars = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))


@given(st.lists(scalars, min_size=1, max_size=3), st.lists(scalars, min_size=1, max_size=3))
def test_keys_differ_as_their_values_do(one: list[Any], other: list[Any]) -> None:
    first, second = key_digest("x", given_values("x", tuple(one))), key_digest("x", given_values("x", tuple(other)))
    assert len(first) == 16
    assert (first == second) == (repr(given_values("x", tuple(one))) == repr(given_values("x", tuple(other))))
    assert key_digest("y", given_values("x", tuple(one))) != first


def test_a_key_that_a_caller_gives_is_made_of_scalars() -> None:
    assert key_digest("x", None) == "-"
    assert key_digest("x", given_values("x", 1)) == key_digest("x", given_values("x", (1.0,)))
    assert label_text(given_values("x", ("acme", 5, None))) == "acme, 5, null"
    with pytest.raises(InvalidLimitUse, match="key of limit 'x' must be a text, a number, true, false or null"):
        given_values("x", {"a": 1})
