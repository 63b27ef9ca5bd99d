"""Tokens of limits that parked tasks keep, and what wakes tasks that are parked for a limit."""

from __future__ import annotations

from typing import Any

from perdure.queues import Gateway, Namespace, Partition, Producer, State
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, park
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.kept import kept_text, renew_kept
from perdure.queues.limits.parked import parked_task, parked_waiter, wake_for_limit, wake_parked
from perdure.queues.limits.store import LimitStore, Released, TakeRequest, token_member
from perdure.queues.transport.scripts import queue_script

from tests.support.task_places import DUE, places

USES = (LimitUse("desk", "-", 1, "p"), LimitUse("other", "-"))
LIFE = 30.0
NOTHING = Released([], [], [])


async def keep(gateway: Gateway, namespace: Namespace, delivery: Delivery, *, renewed_in: float = 0.0) -> str:
    """Park task x with a token that it keeps; return the name of the token."""
    store = LimitStore(gateway, namespace, LIFE)
    await store.publish([Limit("desk", total=1), Limit("other", total=1)], "app", starts=True)
    member = token_member(delivery.partition, "x", "nonce")
    assert (await store.take([TakeRequest(member, USES)])).answers[0].granted
    given: dict[str, Any] = {"delay": 600, "waits": "message", "renewed_in": renewed_in}
    await park(gateway, delivery, "x", Counters(), keeps=kept_text("nonce", USES), **given)
    return member


async def holders(gateway: Gateway, namespace: Namespace, limit: str) -> list[str]:
    view = (await LimitStore(gateway, namespace, LIFE).read([limit]))[0]
    return [holder.member for holder in view.holders]


async def keeps(gateway: Gateway, partition: Partition) -> bytes | None:
    found: bytes | None = await gateway.command("HGET", partition.record("x"), "keeps")
    return found


def test_a_record_names_only_what_is_kept() -> None:
    assert kept_text("nonce", USES) == 'nonce [["desk","-",1]]'
    assert kept_text("nonce", USES[1:]) == ""


async def test_a_kept_token_is_renewed_while_the_task_is_parked(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    member = await keep(gateway, namespace, delivery)
    before = await gateway.command("ZSCORE", partition.kept, "x")
    assert await renew_kept(gateway, partition, LIFE) == (10.0, NOTHING)
    assert float(await gateway.command("ZSCORE", partition.kept, "x")) >= float(before) + 10_000 - 1
    assert await keeps(gateway, partition) == kept_text("nonce", USES).encode()
    assert await holders(gateway, namespace, "desk") == [member]


async def test_one_that_is_gone_is_not_kept_any_more(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await keep(gateway, namespace, delivery)
    await gateway.command("DEL", namespace.limits.holders("desk"))
    await renew_kept(gateway, partition, LIFE)
    assert await gateway.command("EXISTS", partition.kept) == 0
    assert await keeps(gateway, partition) is None


async def test_the_token_of_a_cancelled_task_is_released_at_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery
) -> None:
    await keep(gateway, namespace, delivery, renewed_in=60.0)
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    assert await handle.cancel() is State.CANCELLED
    await renew_kept(gateway, partition, LIFE)
    assert await holders(gateway, namespace, "desk") == []
    assert await gateway.command("EXISTS", partition.kept) == 0


async def test_what_was_seen_before_the_task_was_parked_again_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await keep(gateway, namespace, delivery)
    note = queue_script("note_kept")
    assert await gateway.run(note, [partition.kept], [10_000, "x", "former []", ""]) == 1
    assert await keeps(gateway, partition) is not None


async def test_a_task_that_is_parked_for_a_limit_is_woken_once(
    gateway: Gateway, partition: Partition, delivery: Delivery, namespace: Namespace
) -> None:
    given: dict[str, Any] = {"delay": 600, "waits": "limit desk"}
    await gateway.command("SET", partition.promote_lock, "worker", "PX", 60_000)
    await park(gateway, delivery, "x", Counters(), conditions=[("limit", "desk")], **given)
    assert [await wake_parked(gateway, namespace, [parked_waiter(partition, "x")]) for _ in range(2)] == [1, 0]
    assert await places(gateway, partition, "x") == [DUE]
    assert (await promote_due(gateway, partition))[0] == 1
    assert not await wake_for_limit(gateway, partition, "x")


async def test_a_parked_task_without_a_worker_leaves_the_place_to_others(
    gateway: Gateway, partition: Partition, delivery: Delivery, namespace: Namespace
) -> None:
    given: dict[str, Any] = {"delay": 600, "waits": "limit desk"}
    await park(gateway, delivery, "x", Counters(), conditions=[("limit", "desk")], **given)
    assert await wake_parked(gateway, namespace, [parked_waiter(partition, "x")]) == 0
    assert (await promote_due(gateway, partition))[0] == 1


async def test_a_task_that_waits_for_something_else_is_not_woken(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await park(gateway, delivery, "x", Counters(), delay=600, waits="time", conditions=[("time", "")])
    assert not await wake_for_limit(gateway, partition, "x")
    assert not await wake_for_limit(gateway, partition, "missing")


def test_only_the_waiters_of_parked_tasks_name_one(namespace: Namespace) -> None:
    partition = namespace.partition("default", 3)
    assert parked_task(namespace, parked_waiter(partition, "x")) == (partition, "x")
    for other in ("default/3/o0123/desk", "memory/default/3/x/1.1/1", "default/x/task:x", "a b/3/task:x", "task:x"):
        assert parked_task(namespace, other) is None
