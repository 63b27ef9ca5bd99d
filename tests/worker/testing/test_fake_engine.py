"""Engine of servers in memory, at times that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from perdure.worker.testing.fake_engine import EngineSocket, new_engine, timed_engine

SECOND = 1_795_375_466

TIMES = [SECOND + micros / 1e6 for micros in (0, 1, 499, 500, 990, 998, 999, 1000, 123_000, 123_990, 123_999, 999_999)]
"""Times at the start, in the middle and at the end of milliseconds."""


class Client(EngineSocket):
    """A client whose commands are executed at a time that the test sets."""

    def __init__(self) -> None:
        self.at = float(SECOND)
        self._replies: list[Any] = []
        super().__init__(new_engine(self.at))

    def execute(self, *fields: object) -> Any:
        data = [str(field).encode() for field in fields]
        self.feed(b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%b\r\n" % (len(field), field) for field in data))
        [reply] = self._replies
        self._replies.clear()
        return reply

    def put_response(self, msg: Any) -> None:
        self._replies.append(msg)

    def _time(self) -> float:
        return self.at

    def _call_soon(self, callback: Callable[[], None]) -> None:
        callback()

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> NoReturn:
        raise AssertionError("no command of these tests waits")


@pytest.fixture
def client() -> Iterator[Client]:
    with timed_engine():
        yield Client()


@pytest.mark.parametrize("at", TIMES)
def test_a_key_with_a_lifetime_of_0_is_gone_at_once(client: Client, at: float) -> None:
    client.at = at
    client.execute("SET", "key", "value")
    assert client.execute("PEXPIRE", "key", 0) == 1
    assert client.execute("EXISTS", "key") == 0


@pytest.mark.parametrize("at", TIMES)
def test_a_key_lives_until_its_millisecond_is_over(client: Client, at: float) -> None:
    """Redis compares whole milliseconds: a key is gone once the present one is later than the one of its end."""
    client.at = at
    client.execute("SET", "key", "value")
    assert client.execute("PEXPIRE", "key", 1) == 1
    assert client.execute("EXISTS", "key") == 1
    client.at = at + 0.001
    assert client.execute("EXISTS", "key") == 1
    client.at = at + 0.002
    assert client.execute("EXISTS", "key") == 0


@pytest.mark.parametrize("millisecond", [0, 1, 7, 123, 501, 999])
def test_a_key_that_ends_at_a_time_lives_until_that_millisecond_is_over(client: Client, millisecond: int) -> None:
    client.execute("SET", "key", "value")
    client.execute("PEXPIREAT", "key", SECOND * 1000 + 1000 + millisecond)
    client.at = SECOND + 1 + (millisecond * 1000 + 999) / 1e6
    assert client.execute("EXISTS", "key") == 1
    client.at = SECOND + 1 + (millisecond + 1) / 1e3
    assert client.execute("EXISTS", "key") == 0
