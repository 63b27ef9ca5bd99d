"""Delays between attempts, and the loop that repeats an act while Redis is unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import islice

import pytest
import redis
from perdure.queues import Refused, Unavailable
from perdure.queues.transport import backoff
from perdure.queues.transport.backoff import Backoff, jittered, retry_while_unavailable
from perdure.queues.transport.clients import translated
from redis.exceptions import AuthenticationError

QUICK = Backoff(first=0.001, longest=0.001)


def failing(errors: list[Exception]) -> Callable[[], Awaitable[str]]:
    """Return an act that raises these errors, one per call, before it succeeds."""
    left = list(errors)

    async def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act


def test_delays_grow_up_to_the_longest() -> None:
    backoff = Backoff(first=1.0, longest=5.0, factor=2.0, jitter=0.0)
    assert list(islice(backoff.delays(), 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_jitter_only_shortens_a_delay() -> None:
    delays = [next(Backoff(first=1.0, jitter=0.25).delays()) for _ in range(200)]
    assert all(0.75 <= delay <= 1.0 for delay in delays)
    assert len(set(delays)) > 1
    assert all(5.0 <= jittered(10.0) <= 10.0 for _ in range(200))


async def test_an_act_is_repeated_while_redis_is_unavailable() -> None:
    errors = [Unavailable("first"), Unavailable("second")]
    waits: list[Unavailable] = []
    assert await retry_while_unavailable(failing([*errors]), on_wait=waits.append, backoff=QUICK) == "done"
    assert waits == errors


async def test_any_other_error_is_raised_at_once() -> None:
    waits: list[Unavailable] = []
    with pytest.raises(Refused):
        await retry_while_unavailable(failing([Refused("no")]), on_wait=waits.append, backoff=QUICK)
    assert waits == []


def refusal(*, in_handshake: bool) -> Refused:
    """Return the error of a command while the password is wrong."""
    wrong = AuthenticationError("NOAUTH Authentication required.")
    error: Exception = wrong
    if in_handshake:
        error = redis.ConnectionError("could not connect")
        error.__cause__ = wrong
    with pytest.raises(Refused) as raised, translated("redis://server"):
        raise error
    return raised.value


@pytest.mark.parametrize("in_handshake", [False, True])
async def test_refused_credentials_count_as_unavailable(in_handshake: bool) -> None:
    refused = refusal(in_handshake=in_handshake)
    waits: list[Unavailable] = []
    assert await retry_while_unavailable(failing([refused, refused]), on_wait=waits.append, backoff=QUICK) == "done"
    assert [str(error) for error in waits] == [str(refused)] * 2


async def test_credentials_that_stay_refused_are_an_error_that_names_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "CREDENTIALS_PATIENCE", 0.01)
    refused = refusal(in_handshake=False)
    with pytest.raises(Refused, match=r"^redis://server refused the credentials: NOAUTH Authentication required"):
        await retry_while_unavailable(failing([refused] * 1000), backoff=QUICK)
