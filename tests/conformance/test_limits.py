"""Tokens of limits: never more than there are, none that stays, and what a breaker, a hold and a rate let pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import throttled
from perdure import Breaker, Limit, Rate
from perdure.queues import Gateway, Namespace
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.definition import key_digest
from perdure.queues.limits.store import (
    LimitStore,
    Outcome,
    ReleaseRequest,
    TakeAnswer,
    TakeRequest,
    parse_member,
    token_member,
)
from perdure.queues.security.encryption import Encryptor
from perdure.queues.transport.scripts import milliseconds, queue_script
from throttled import utils

from tests.support.consumers import needs_one_server
from tests.support.lossy_proxy import lossy_gateway

pytestmark = pytest.mark.integration

LIFE_MS = 30_000
T1, T2, T3 = (key_digest("openai", [tenant]) for tenant in ("t1", "t2", "t3"))


@pytest.fixture
def store(gateway: Gateway, namespace: Namespace) -> LimitStore:
    return LimitStore(gateway, namespace)


def use(key: str = "-", cost: int = 1, name: str = "openai") -> LimitUse:
    return LimitUse(name, key, cost)


async def publish(store: LimitStore, *limits: Limit) -> None:
    await store.publish(limits, "app", starts=True)


async def take(
    store: LimitStore, member: str, *uses: LimitUse, charge: bool = True, waiter: str = "", labels: Sequence[str] = ()
) -> TakeAnswer:
    taken = await store.take([TakeRequest(member, uses or [use()], charge, waiter, labels)])
    return taken.answers[0]


async def release(
    store: LimitStore, member: str, *uses: LimitUse, outcome: Outcome = "", actual: dict[str, int] | None = None
) -> list[str]:
    released = await store.release([ReleaseRequest(member, uses or [use()], outcome, actual or {})])
    return released.hints


async def clock_of(gateway: Gateway, namespace: Namespace) -> tuple[int, int]:
    """Return the time of the last script, and the virtual time."""
    seen, virtual, *_ = (await gateway.command("GET", namespace.limits.clock)).split()
    return int(seen), int(virtual)


async def set_clock(gateway: Gateway, namespace: Namespace, *, seen: int = 0, virtual: int = 0) -> None:
    """Change the clock by milliseconds."""
    before, time, *rest = (await gateway.command("GET", namespace.limits.clock)).split()
    changed = b"%d %d %b" % (int(before) + seen, int(time) + virtual, b" ".join(rest))
    await gateway.command("SET", namespace.limits.clock, changed, "PX", 60_000)


async def pass_time(gateway: Gateway, namespace: Namespace, ms: int) -> None:
    """Let the virtual clock move on as if scripts had run all the time."""
    await set_clock(gateway, namespace, virtual=ms)


async def be_away(gateway: Gateway, namespace: Namespace, ms: int) -> None:
    """Let the last script have run so long ago; negative: the clock was set back since."""
    await set_clock(gateway, namespace, seen=-ms)


async def now_of(gateway: Gateway, namespace: Namespace) -> int:
    return milliseconds(await gateway.command("TIME", node_of=namespace.limits.clock))


async def held_by(store: LimitStore, name: str = "openai") -> set[str]:
    (view,) = await store.read([name])
    assert view.held == len(view.holders)
    return {holder.member for holder in view.holders}


def places(answers: Sequence[TakeAnswer]) -> list[str]:
    return [answer.reason or ("held" if answer.held else "taken") for answer in answers]


# take


async def test_no_more_tokens_than_total_and_running_are_taken(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=3, running=2, by="tenant"))
    wanted = [("a", T1), ("b", T1), ("c", T1), ("d", T2), ("e", T2), ("f", T3)]
    taken = await store.take([TakeRequest(member, [use(key)]) for member, key in wanted])
    assert places(taken.answers) == ["taken", "taken", "running", "taken", "total", "total"]
    assert [answer.use for answer in taken.answers] == [0] * 6
    assert all(0 < answer.retry <= LIFE_MS / 1000 for answer in taken.answers if not answer.granted)
    assert await held_by(store) == {"a", "b", "d"}
    await release(store, "a", use(T1))
    assert (await take(store, "c", use(T1))).granted
    assert (await take(store, "e", use(T2))).reason == "total"
    for member, key in (("b", T1), ("c", T1), ("d", T2)):
        await release(store, member, use(key))


async def test_all_limits_of_a_request_are_taken_or_none(store: LimitStore, gateway: Gateway) -> None:
    await publish(store, Limit("openai", rate="1/d"), Limit("session", total=1))
    assert (await take(store, "a", use(name="session"))).granted
    both = [use(), use(name="session")]
    answer = await take(store, "b", *both)
    assert (answer.granted, answer.use, answer.reason) == (False, 1, "total")
    assert await held_by(store) == set()
    await release(store, "a", use(name="session"))
    assert (await take(store, "b", *both)).granted  # the rate was not charged before
    assert (await take(store, "c", use())).reason == "rate"
    await release(store, "b", *both)


async def test_a_member_that_holds_is_renewed_and_not_charged_again(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1, cost="10/d"))
    assert (await take(store, "a", use(cost=6))).granted
    for _ in range(3):
        assert (await take(store, "a", use(cost=6))).held
    await pass_time(gateway, namespace, LIFE_MS - 5_000)
    assert (await take(store, "a", use(cost=6))).held
    await pass_time(gateway, namespace, LIFE_MS - 5_000)
    assert await held_by(store) == {"a"}
    await release(store, "a")
    assert (await take(store, "b", use(cost=4))).granted
    await release(store, "b")
    assert (await take(store, "b", use(cost=1))).reason == "cost"


async def test_a_task_that_was_admitted_and_lost_its_token_takes_another_one_without_paying(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=1, rate="1/d"))
    assert (await take(store, "a")).granted
    await release(store, "a")
    assert (await take(store, "a")).reason == "rate"
    assert places([await take(store, "a", charge=False)]) == ["taken"]
    await release(store, "a")


async def test_only_what_a_member_does_not_hold_is_taken(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=1), Limit("session", total=1))
    assert (await take(store, "a", use())).granted
    both = [use(), use(name="session")]
    assert places([await take(store, "a", *both)]) == ["taken"]
    assert places([await take(store, "a", *both)]) == ["held"]
    await release(store, "a", *both)


async def test_a_limit_that_no_worker_has_published_lets_no_task_start(store: LimitStore) -> None:
    assert (await take(store, "a")).reason == "unknown"
    await store.hold("openai", 60)  # which is no definition
    assert (await take(store, "a")).reason == "unknown"


async def test_a_lost_reply_takes_one_token(gateway: Gateway, namespace: Namespace) -> None:
    needs_one_server(gateway, "its line loses replies")
    await publish(LimitStore(gateway, namespace), Limit("openai", total=1, rate="2/d"))
    async with lossy_gateway(gateway) as (lossy, line):
        store = LimitStore(lossy, namespace)
        line.lose(queue_script("take_limits").sha.encode())
        assert places([await take(store, "a")]) == ["held"]
        line.lose(queue_script("release_limits").sha.encode())
        await release(store, "a")
        assert line.lost == 2
        assert (await take(store, "b")).granted
        await release(store, "b")
        assert (await take(store, "b")).reason == "rate"


# the virtual clock


async def test_a_token_without_renewals_expires(store: LimitStore, gateway: Gateway, namespace: Namespace) -> None:
    await publish(store, Limit("openai", total=1, running=1, by="tenant"))
    assert (await take(store, "dead", use(T1))).granted
    await pass_time(gateway, namespace, LIFE_MS - 1_000)
    assert 0 < (await take(store, "b", use(T1))).retry <= 1
    await pass_time(gateway, namespace, 1_000)
    assert (await take(store, "b", use(T1))).granted
    assert await held_by(store) == {"b"}
    await release(store, "b", use(T1))
    assert await gateway.command("EXISTS", namespace.limits.holders("openai", T1)) in (0, 1)


async def test_a_token_outlives_a_time_in_which_redis_was_away(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    assert (await take(store, "a")).granted
    _, before = await clock_of(gateway, namespace)
    await be_away(gateway, namespace, 3_600_000)
    assert (await take(store, "b")).reason == "total"
    assert await store.renew([("a", [use()])]) == []
    assert (await clock_of(gateway, namespace))[1] - before < LIFE_MS * 2 / 3
    await release(store, "a")


async def test_a_dead_token_expires_after_two_steps_of_a_clock_that_stood_still(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    assert (await take(store, "dead")).granted
    for _ in range(2):
        await be_away(gateway, namespace, LIFE_MS)
        await store.touch()
    assert (await take(store, "b")).granted
    await release(store, "b")


async def test_the_shortest_life_of_tokens_bounds_the_steps_of_the_clock(
    gateway: Gateway, namespace: Namespace
) -> None:
    """Workers may differ in their leases: the script of one with a long lease must not end the tokens of another."""
    short, long = LimitStore(gateway, namespace, 10.0), LimitStore(gateway, namespace)
    await publish(long, Limit("openai", total=1))
    assert (await take(short, "a")).granted
    await be_away(gateway, namespace, 60_000)
    assert (await take(long, "b")).reason == "total"
    assert await short.renew([("a", [use()])]) == []
    for _ in range(2):
        await be_away(gateway, namespace, 60_000)
        await long.touch()
    assert (await take(long, "b")).granted
    await release(long, "b")


async def test_a_clock_that_is_set_back_neither_ends_tokens_nor_keeps_them(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    assert (await take(store, "a")).granted
    _, before = await clock_of(gateway, namespace)
    await be_away(gateway, namespace, -3_600_000)
    assert (await take(store, "b")).reason == "total"
    seen, virtual = await clock_of(gateway, namespace)
    assert abs(seen - await now_of(gateway, namespace)) < 60_000
    assert virtual == before
    await pass_time(gateway, namespace, LIFE_MS)
    assert (await take(store, "b")).granted
    await release(store, "b")


# renew


async def test_a_renewal_lets_a_token_expire_later(store: LimitStore, gateway: Gateway, namespace: Namespace) -> None:
    await publish(store, Limit("openai", total=1, running=1, by="tenant"))
    assert (await take(store, "a", use(T1))).granted
    for _ in range(4):
        await pass_time(gateway, namespace, LIFE_MS * 2 // 3)
        assert await store.renew([("a", [use(T1)]), ("other", [use(T1)])]) == [1]
    assert await held_by(store) == {"a"}
    await release(store, "a", use(T1))


async def test_an_expired_token_is_not_renewed_for_another_may_be_in_its_place(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    assert (await take(store, "frozen")).granted
    await pass_time(gateway, namespace, LIFE_MS)
    assert await store.renew([("frozen", [use()])]) == [0]
    assert (await take(store, "b")).granted
    assert await store.renew([("frozen", [use()]), ("b", [use()])]) == [0]
    assert await held_by(store) == {"b"}
    await release(store, "frozen")
    assert await held_by(store) == {"b"}
    await release(store, "b")


async def test_a_token_that_is_gone_in_part_is_reported_and_its_rest_renewed(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1), Limit("session", total=1))
    both = [use(), use(name="session")]
    assert (await take(store, "a", *both)).granted
    await release(store, "a", use())
    await pass_time(gateway, namespace, LIFE_MS // 2)
    assert await store.renew([("a", both)]) == [0]
    await pass_time(gateway, namespace, LIFE_MS * 2 // 3)
    assert await held_by(store, "session") == {"a"}
    await release(store, "a", *both)


async def test_a_renewal_repairs_the_set_of_a_key_that_another_program_removed(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", running=1, by="tenant"))
    assert (await take(store, "a", use(T1))).granted
    await gateway.command("DEL", namespace.limits.holders("openai", T1))
    assert await store.renew([("a", [use(T1)])]) == []
    assert (await take(store, "b", use(T1))).reason == "running"
    await release(store, "a", use(T1))


# release


async def test_a_release_returns_who_waits_for_the_key_and_for_the_limit(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=2, running=1, by="tenant"))
    assert (await take(store, "a", use(T1))).granted
    assert (await take(store, "b", use(T2))).granted
    assert (await take(store, "c", use(T1), waiter="q/0/of-key")).reason == "running"
    assert (await take(store, "d", use(T3), waiter="q/0/first")).reason == "total"
    assert (await take(store, "e", use(T3), waiter="q/0/second")).reason == "total"
    assert (await take(store, "d", use(T3), waiter="q/0/first")).reason == "total"  # and keeps its place
    assert await release(store, "a", use(T1)) == ["q/0/first", "q/0/of-key"]
    assert await release(store, "b", use(T2)) == ["q/0/second"]
    assert await release(store, "b", use(T2)) == []


async def test_each_blocked_request_of_a_batch_leaves_its_waiter_in_order(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=1))
    requests = [TakeRequest(f"m{number}", [use()], waiter=f"q/0/{number}") for number in (7, 3, 9, 1)]
    assert places((await store.take(requests)).answers) == ["taken", "total", "total", "total"]
    hints = []
    for member in ("m7", "m3", "m9"):
        hints += await release(store, member)
        await take(store, {"m7": "m3", "m3": "m9", "m9": "m1"}[member])
    assert hints == ["q/0/3", "q/0/9", "q/0/1"]
    await release(store, "m1")


async def test_a_repeated_release_and_one_without_a_token_do_nothing(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=1, cost="10/d"))
    assert (await take(store, "a", use(cost=10))).granted
    request = ReleaseRequest("a", [use(cost=10)], actual={"openai": 4})
    released = await store.release([request, request, ReleaseRequest("never", [use()])])
    assert released.gone == [1, 2]
    assert (await store.release([request])).gone == [0]
    assert (await take(store, "b", use(cost=6))).granted  # 6 were paid back once
    await release(store, "b")
    assert (await take(store, "b", use(cost=1))).reason == "cost"


async def test_a_waiter_in_memory_is_notified_on_the_channel_of_the_limit(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    needs_one_server(gateway, "a subscription to its channel")
    await publish(store, Limit("openai", running=1, by="tenant"))
    assert (await take(store, "a", use(T1))).granted
    assert (await take(store, "b", use(T1), waiter="memory/b")).reason == "running"
    subscription = await gateway.subscription()
    try:
        await subscription.subscribe(namespace.limits.waiters("openai"))
        await subscription.get_message(timeout=5)
        assert await release(store, "a", use(T1)) == []
        message = await subscription.get_message(timeout=5)
    finally:
        await subscription.aclose()
    assert message is not None
    assert message["data"] in (b"memory/b", "memory/b")


async def test_waiters_of_a_limit_expire_where_no_task_looks_again(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1, running=1, by="tenant"))
    await take(store, "a", use(T1))
    await take(store, "b", use(T1), waiter="q/0/b")
    await take(store, "c", use(T2), waiter="q/0/c")
    for key in (T1, "-"):
        assert 0 < await gateway.command("PTTL", namespace.limits.waiters("openai", key)) <= 3_600_000
    await release(store, "a", use(T1))


# rate and cost


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


STEPS = [0, 0, 0.5, 3, 0, 1.5, 0, 0, 12, 0, 0, 0, 0, 2.5, 0, 61, 0, 0, 0, 0, 0, 7.5, 0.5, 0.5, 0.5]
COSTS = [1, 2, 1, 3, 5, 1, 4, 2, 5, 1, 1, 5, 2, 1, 3, 5, 5, 1, 2, 2, 4, 3, 1, 1, 1]


@pytest.mark.parametrize(("count", "burst"), [(6, 5), (60, 8), (30, 6), (20, 5)])
async def test_a_cost_is_counted_as_by_another_implementation_of_the_algorithm(
    store: LimitStore,
    gateway: Gateway,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    burst: int,
) -> None:
    """The same times and costs in throttled-py. A quarter of an interval more at each step, so that none is a tie."""
    clock = Clock()
    monkeypatch.setattr(utils, "now_mono_f", clock)
    quota = throttled.per_min(count, burst=burst)
    other = throttled.Throttled(key="k", using="gcra", quota=quota, store=throttled.MemoryStore())
    await publish(store, Limit("openai", cost=Rate(count, per=60, burst=burst)))
    place, interval = namespace.limits.cost("openai"), 60 / count
    seen = []
    for number, (step, cost) in enumerate(zip(STEPS, COSTS, strict=True)):
        passed = step * interval + interval / 4
        clock.seconds += passed
        if (stored := await gateway.command("GET", place)) is not None:
            await gateway.command("SET", place, f"{float(stored) - passed * 1000:.4f}", "PX", 600_000)
        answer = await take(store, f"m{number}", use(cost=cost))
        expected = other.limit(cost=cost)
        seen.append(answer.granted)
        assert answer.granted is not expected.limited, number
        if not answer.granted:
            assert answer.retry == pytest.approx(min(15, expected.state.retry_after), abs=1.0)
        await release(store, f"m{number}", use(cost=cost))
    assert len({*seen}) == 2
    await gateway.command("DEL", place)


async def test_a_rate_lets_its_burst_pass_and_then_one_in_each_interval(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", by="tenant", rate=Rate(6, per=60, burst=2)))
    taken = await store.take([TakeRequest(f"m{number}", [use(T1)]) for number in range(3)])
    assert places(taken.answers) == ["taken", "taken", "rate"]
    assert 9 < taken.answers[2].retry <= 10
    assert (await take(store, "other", use(T2))).granted  # each key has a rate of its own
    place = namespace.limits.rate("openai", T1)
    assert 0 < await gateway.command("PTTL", place) <= 20_000
    await gateway.command("SET", place, f"{float(await gateway.command('GET', place)) - 10_000:.4f}", "PX", 60_000)
    taken = await store.take([TakeRequest(f"m{number}", [use(T1)]) for number in (2, 3)])
    assert places(taken.answers) == ["taken", "rate"]
    for member, key in (("m0", T1), ("m1", T1), ("m2", T1), ("other", T2)):
        await release(store, member, use(key))


async def test_a_clock_that_was_set_back_blocks_a_rate_for_one_burst_at_most(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", rate=Rate(60, per=60, burst=2)))
    ahead = await now_of(gateway, namespace) + 3_600_000
    await gateway.command("SET", namespace.limits.rate("openai"), ahead, "PX", 3_600_000)
    answer = await take(store, "a")
    assert answer.reason == "rate"
    assert answer.retry == pytest.approx(1, abs=0.01)
    await gateway.command("DEL", namespace.limits.rate("openai"))


@pytest.mark.parametrize(("actual", "left"), [(2, 8), (9, 1), (0, 10), (10, 0), (50, 0)])
async def test_a_cost_is_corrected_up_and_down_when_it_is_known(
    store: LimitStore, gateway: Gateway, namespace: Namespace, actual: int, left: int
) -> None:
    await publish(store, Limit("openai", cost=Rate(10, per=86_400)))
    assert (await take(store, "a", use(cost=5))).granted
    await release(store, "a", use(cost=5), actual={"openai": actual})
    if left:
        assert (await take(store, "b", use(cost=left))).granted
        await release(store, "b", use(cost=left))
    assert (await take(store, "c", use(cost=1))).reason == "cost"
    await gateway.command("DEL", namespace.limits.cost("openai"))


async def test_a_cost_over_a_burst_that_an_operator_lowered_waits_for_all_of_it(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", cost=Rate(10, per=86_400)))
    control = namespace.limits.control("openai")
    await gateway.command("HSET", control, "cost_burst", "3")
    assert (await take(store, "a", use(cost=8))).granted
    assert (await take(store, "b", use(cost=1))).reason == "cost"
    await release(store, "a", use(cost=8))
    await gateway.command("DEL", control, namespace.limits.cost("openai"))


# hold


async def test_a_hold_lets_nothing_start_and_touches_nothing_that_runs(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=5))
    assert (await take(store, "a")).granted
    await store.hold("openai", 60)
    answer = await take(store, "b")
    assert (answer.granted, answer.reason) == (False, "hold")
    assert 0 < answer.retry <= 15
    assert (await take(store, "a")).held
    assert await store.renew([("a", [use()])]) == []
    await release(store, "a")


async def test_an_earlier_time_never_shortens_a_hold(store: LimitStore) -> None:
    until = await store.hold("openai", 60)
    assert await store.hold("openai", 5) == until
    assert await store.hold("openai", 120) > until
    await publish(store, Limit("openai", total=1))
    assert (await take(store, "a")).reason == "hold"


async def test_a_hold_of_an_operator_counts_as_that_of_a_worker(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    control = namespace.limits.control("openai")
    await gateway.command("HSET", control, "hold", await now_of(gateway, namespace) + 60_000)
    assert (await take(store, "a")).reason == "hold"
    await gateway.command("DEL", control)
    assert (await take(store, "a")).granted
    await release(store, "a")


# breaker

TRIPS = Breaker(errors=0.5, calls=4, window=3_600, open=60)


async def attempt(store: LimitStore, outcome: Outcome, member: str = "x") -> list[tuple[str, int, int]]:
    assert (await take(store, member)).granted
    released = await store.release([ReleaseRequest(member, [use()], outcome)])
    return [(change.state, change.calls, change.failed) for change in released.changes]


async def open_it(store: LimitStore) -> None:
    await publish(store, Limit("openai", total=10, breaker=TRIPS))
    for outcome in ("ok", "ok", "error"):
        assert await attempt(store, outcome) == []
    assert await attempt(store, "error") == [("open", 4, 2)]


async def let_it_try(gateway: Gateway, namespace: Namespace) -> None:
    """End the time for which a breaker is open."""
    now = await now_of(gateway, namespace)
    await gateway.command("HSET", namespace.limits.limit("openai"), "opened", now - 1)


async def test_a_breaker_opens_at_its_share_of_errors_and_not_before_its_calls(store: LimitStore) -> None:
    await open_it(store)
    answer = await take(store, "y")
    assert (answer.granted, answer.reason) == (False, "open")
    assert 0 < answer.retry <= 15


async def test_what_is_neither_success_nor_error_is_not_counted(store: LimitStore) -> None:
    await publish(store, Limit("openai", breaker=TRIPS))
    for _ in range(10):
        assert await attempt(store, "") == []
    for outcome in ("error", "error", "error"):
        assert await attempt(store, outcome) == []
    assert await attempt(store, "error") == [("open", 4, 4)]


async def test_the_success_of_one_probe_closes_a_breaker_and_lets_others_look(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await open_it(store)
    assert (await take(store, "early", waiter="q/0/early")).reason == "open"
    await let_it_try(gateway, namespace)
    taken = await store.take([TakeRequest("probe", [use()]), TakeRequest("second", [use()], waiter="q/0/second")])
    assert places(taken.answers) == ["taken", "open"]
    assert [(change.limit, change.state) for change in taken.changes] == [("openai", "half-open")]
    assert (await take(store, "probe")).held
    released = await store.release([ReleaseRequest("probe", [use()], "ok")])
    assert released.hints == ["q/0/early", "q/0/second"]
    assert [change.state for change in released.changes] == ["closed"]
    for outcome in ("ok", "ok", "error"):  # counted from the start
        assert await attempt(store, outcome) == []


async def test_the_error_of_a_probe_opens_a_breaker_again(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await open_it(store)
    await let_it_try(gateway, namespace)
    assert await attempt(store, "error", "probe") == [("open", 1, 1)]
    assert (await take(store, "y")).reason == "open"


async def test_a_probe_that_dies_or_reports_nothing_lets_the_next_one_pass(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await open_it(store)
    await let_it_try(gateway, namespace)
    assert (await take(store, "dead")).granted
    await pass_time(gateway, namespace, LIFE_MS)
    assert (await take(store, "silent")).granted
    assert (await take(store, "y")).reason == "open"
    await release(store, "silent")
    assert (await take(store, "third")).granted
    assert await release(store, "dead", outcome="error") == []  # its token has expired
    released = await store.release([ReleaseRequest("third", [use()], "ok")])
    assert [change.state for change in released.changes] == ["closed"]


async def test_a_task_that_started_before_a_breaker_opened_does_not_close_it(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=10, breaker=TRIPS))
    assert (await take(store, "earlier")).granted
    for outcome in ("error", "error", "error"):
        await attempt(store, outcome)
    await attempt(store, "error")
    await let_it_try(gateway, namespace)
    assert (await take(store, "probe")).granted
    assert (await store.release([ReleaseRequest("earlier", [use()], "ok")])).changes == []
    assert (await take(store, "y")).reason == "open"
    await release(store, "probe", outcome="ok")


async def test_errors_of_an_earlier_window_do_not_count(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", breaker=TRIPS))
    for _ in range(3):
        await attempt(store, "error")
    place = namespace.limits.limit("openai")
    slot = int(await gateway.command("HGET", place, "slot"))
    await gateway.command("HSET", place, "slot", slot - 2)
    for _ in range(3):
        assert await attempt(store, "error") == []
    await gateway.command("HSET", place, "slot", slot - 1)  # the half before this one counts
    assert await attempt(store, "error") == [("open", 4, 4)]


# definitions


async def test_the_worker_that_started_last_decides_and_both_apps_learn_of_it(store: LimitStore) -> None:
    one, two = Limit("openai", total=1, rate="5/m"), Limit("openai", total=2)
    assert await store.publish([one], "a", starts=True) == []
    assert await store.publish([two], "b", starts=True) == [("openai", "a")]
    assert await store.publish([one], "a", starts=False) == [("openai", "b")]
    (view,) = await store.read(["openai"])
    assert (view.defined["total"], view.defined["app"], "interval" in view.defined) == ("2", "b", False)
    assert await store.publish([Limit("openai", total=3)], "b", starts=True) == []  # another version of the app
    (view,) = await store.read(["openai"])
    assert view.defined["total"] == "3"


async def test_a_definition_that_was_lost_is_published_again_and_keeps_its_state(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    limit, place = Limit("openai", total=1), namespace.limits.limit("openai")
    await publish(store, limit)
    assert 0 < await gateway.command("PTTL", place) <= 30 * 86_400_000
    await store.hold("openai", 60)
    await publish(store, limit)
    assert (await take(store, "a")).reason == "hold"
    await gateway.command("DEL", place)
    assert await store.publish([limit], "app", starts=False) == []
    assert (await take(store, "a")).granted
    await release(store, "a")


async def test_publishing_drops_tokens_that_have_expired(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    limit = Limit("openai", running=1, by="tenant")
    await publish(store, limit)
    for number in range(3):
        await take(store, f"m{number}", use(key_digest("openai", [number])))
    assert len(await gateway.command("ZRANGE", namespace.limits.holders("openai"), 0, -1)) == 3
    await pass_time(gateway, namespace, LIFE_MS)
    await store.publish([limit], "app", starts=False)
    places = [namespace.limits.holders("openai"), namespace.limits.holders("openai", key_digest("openai", [1]))]
    assert await gateway.command("EXISTS", *places) == 0


async def test_what_operators_set_counts_in_place_of_the_definition(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    await publish(store, Limit("openai", total=1))
    control = namespace.limits.control("openai")
    await gateway.command("HSET", control, "total", "2")
    answers = (await store.take([TakeRequest(member, [use()]) for member in "abc"])).answers
    assert places(answers) == ["taken", "taken", "total"]
    await gateway.command("HSET", control, "total", "-")  # no such number
    assert (await take(store, "c")).granted
    await gateway.command("DEL", control)
    assert (await take(store, "d")).reason == "total"
    for member in "abc":
        await release(store, member)


async def test_limits_are_listed_with_holders_waiters_and_texts_of_keys(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([b"k" * 32]))
    store = LimitStore(gateway, namespace)
    await publish(store, Limit("openai", total=1, by="tenant"), Limit("session", total=1))
    member = token_member(namespace.partition("mail", 3), "task-1", "1-0")
    assert await store.names() == ["openai", "session"]
    await take(store, member, use(T1), labels=["acme"])
    await take(store, "q/0/y/n", use(T2), waiter="q/0/KEY/openai")
    (view,) = await store.read(["openai"])
    (holder,) = view.holders
    assert (holder.member, holder.key, 29 < holder.left <= 30) == (member, T1, True)
    assert parse_member(holder.member) == ("mail", 3, "task-1", "1-0")
    assert parse_member("nonsense") is None
    assert (view.held, view.waiters, view.waiting) == (1, ["q/0/KEY/openai"], 1)
    assert await store.labels([("openai", T1), ("openai", T2)]) == {("openai", T1): "acme"}
    assert b"acme" not in await gateway.command("GET", namespace.limits.label("openai", T1))
    await release(store, member, use(T1))


# keys of another type


async def test_a_value_of_another_type_under_a_key_that_scripts_make_is_moved_away(
    store: LimitStore, gateway: Gateway, namespace: Namespace
) -> None:
    limit = Limit("openai", total=1, running=1, by="tenant", rate="5/m", cost="5/m")
    keys = namespace.limits
    each: list[Any] = [*dict.fromkeys(keys.of_uses([("openai", T1)])), keys.clock]
    for key in each:
        await publish(store, limit)
        await gateway.command("DEL", key)
        text = key.rpartition(":")[0].endswith((":rate", ":cost")) or ":rate:" in key or ":cost:" in key
        await gateway.command(*(("SADD", key, "x") if text or key == keys.clock else ("SET", key, "x")))
        await store.publish([limit], "app", starts=False)
        assert (await take(store, "a", use(T1))).granted, key
        await take(store, "b", use(T1), waiter="q/0/b")
        await take(store, "c", use(T2), waiter="q/0/c")
        assert await store.renew([("a", [use(T1)])]) == []
        await release(store, "a", use(T1), actual={"openai": 1})
        found = await gateway.command("KEYS", f"{{{namespace.name}:~limits:0}}:*", node_of=keys.clock)
        for left in found:
            await gateway.command("DEL", left)
