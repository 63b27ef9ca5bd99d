"""`perdure queue partitions`."""

from __future__ import annotations

import pytest

from tests.support.command_line import call

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


def test_the_number_of_partitions_is_set_and_shown() -> None:
    assert call("enqueue", "audit", "--queue", "default").code == 0
    answer = call("queue", "partitions", "default", "4")
    assert answer.code == 0
    assert "queue default now has 4 partitions: 1 to 4" in answer.err
    assert len(answer.out.splitlines()) == 2 + 5
    for number in range(8):
        assert call("enqueue", "audit", "--queue", "default", "--id", f"x{number}").code == 0
    found = call("queue", "partitions", "default", "--json").json
    assert found["queue"] == "default"
    assert found["generations"] == [{"first": 0, "count": 1}, {"first": 1, "count": 4}]
    assert [one["index"] for one in found["partitions"]] == [0, 1, 2, 3, 4]
    assert found["partitions"][0]["depth"] == 1
    assert sum(one["depth"] for one in found["partitions"]) == 9
    (stats,) = call("queue", "list", "--json").json
    assert stats["depth"] == 9
    assert [one["depth"] for one in stats["partitions"]] == [one["depth"] for one in found["partitions"]]
    shown = call("task", "show", "x1", "--json").json
    assert shown["partition"] in (1, 2, 3, 4)


def test_the_same_number_of_partitions_changes_nothing() -> None:
    assert "created queue default" in call("queue", "partitions", "default", "3").err
    again = call("queue", "partitions", "default", "3")
    assert again.code == 0
    assert "queue default already has 3 partitions: nothing was changed" in again.err
    assert call("queue", "partitions", "default", "--json").json["generations"] == [{"first": 0, "count": 3}]


@pytest.mark.parametrize(("count", "rule"), [("0", "to 1"), ("1025", "to 1024"), ("many", "integer")])
def test_an_invalid_number_of_partitions_is_misuse(count: str, rule: str) -> None:
    answer = call("queue", "partitions", "default", count)
    assert answer.code == 2
    assert "'[N]'" in answer.err
    assert rule in answer.err


def test_an_unknown_queue_is_refused() -> None:
    call("enqueue", "audit", "--queue", "mail")
    answer = call("queue", "partitions", "male")
    assert (answer.code, answer.out) == (1, "")
    assert "no queue 'male'" in answer.err
    assert "mail" in answer.err


def test_tasks_of_one_key_are_together() -> None:
    call("queue", "partitions", "default", "8")
    lines = b"".join(b'{"args": {}, "key": "k%d"}\n' % (number % 2) for number in range(20))
    assert call("enqueue", "audit", "--queue", "default", "--file", "-", stdin=lines).code == 0
    for _ in range(3):
        assert call("enqueue", "audit", "--queue", "default", "--key", "k0").code == 0
    found = call("queue", "partitions", "default", "--json").json
    assert sorted(one["depth"] for one in found["partitions"])[-2:] == [10, 13]
    assert (
        call(
            "enqueue", "audit", "--queue", "default", "--key", "all", "--file", "-", stdin=b'{"args": {}}\n{"args": {}}'
        ).code
        == 0
    )
    found = call("queue", "partitions", "default", "--json").json
    assert sum(one["depth"] for one in found["partitions"]) == 25


def test_the_partitions_and_tasks_of_each_priority_are_shown() -> None:
    call("queue", "partitions", "default", "2")
    for options in ((), ("--priority", "high"), ("--priority", "high"), ("--idle",)):
        assert call("enqueue", "audit", "--queue", "default", *options).code == 0
    (listed,) = call("queue", "list", "--json").json
    assert {lane: stats["depth"] for lane, stats in listed["lanes"].items()} == {"high": 2, "normal": 1, "idle": 1}
    assert listed["depth"] == 4
    assert "high 2, normal 1, idle 1" in call("queue", "list", "--wide").out
    changed = call("queue", "partitions", "default", "1")
    rows = [line.split()[:4] for line in changed.out.splitlines()[2:]]
    assert [tuple(row) for row in rows] == [
        ("1000000", "high", "1", "no"),
        ("1000001", "high", "1", "no"),
        ("1000002", "high", "2", "yes"),
        ("0", "normal", "1", "no"),
        ("1", "normal", "1", "no"),
        ("2", "normal", "2", "yes"),
        ("3000000", "idle", "1", "no"),
        ("3000001", "idle", "1", "no"),
        ("3000002", "idle", "2", "yes"),
    ]
