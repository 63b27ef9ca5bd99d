"""Stored settings of a namespace: set, removed, read with a registration, and a lease that is being changed."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, Namespace, Producer, WorkerInfo
from perdure.queues.presence import announce
from perdure.queues.shared_config import CHANGE, SharedConfig, load_config, set_config

INFO = WorkerInfo("a", "x", "h", 7, "0.1", ("default",), concurrency=8, in_flight=3, started=0)


async def finish_change(gateway: Gateway, namespace: Namespace) -> None:
    """Let the time of the change pass."""
    await gateway.command("HSET", namespace.config, "lease_changed_at", 1)


async def test_nothing_is_stored_by_a_registration(gateway: Gateway, namespace: Namespace) -> None:
    assert (await announce(gateway, namespace, INFO, ttl=60)).config == SharedConfig()
    assert not await gateway.command("EXISTS", namespace.config)


async def test_a_registration_returns_the_stored_settings(gateway: Gateway, namespace: Namespace) -> None:
    assert await set_config(gateway, namespace, "result_ttl", 3600.5)
    assert not await set_config(gateway, namespace, "result_ttl", 3600.5)
    assert await set_config(gateway, namespace, "dead_letter_ttl", 86_400)
    found = (await announce(gateway, namespace, INFO, ttl=60)).config
    assert found == SharedConfig({"result_ttl": 3600.5, "dead_letter_ttl": 86_400.0})
    assert await set_config(gateway, namespace, "result_ttl", None)
    assert not await set_config(gateway, namespace, "result_ttl", None)
    assert (await load_config(gateway, namespace)).stored == {"dead_letter_ttl": 86_400.0}


@pytest.mark.parametrize(("former", "new"), [(30, 6), (6, 30)])
async def test_a_change_of_the_lease_is_safe_meanwhile(
    gateway: Gateway, namespace: Namespace, former: float, new: float
) -> None:
    """Whether a worker has noticed the change or not: it renews at least as often as each other worker expects."""
    await set_config(gateway, namespace, "lease", former)
    await finish_change(gateway, namespace)
    before = await load_config(gateway, namespace)
    await set_config(gateway, namespace, "lease", new)
    during = await load_config(gateway, namespace)
    assert 0 < during.changing <= CHANGE
    await finish_change(gateway, namespace)
    after = await load_config(gateway, namespace)
    assert (before.leases(15), during.leases(15), after.leases(15)) == ((former,) * 2, (6, 30), (new,) * 2)
    for renewing, claiming in ((before, during), (during, before), (during, after), (after, during)):
        assert renewing.leases(15)[0] <= claiming.leases(15)[1]


async def test_a_second_change_keeps_the_leases_of_the_first(gateway: Gateway, namespace: Namespace) -> None:
    for lease in (10, 40, 20, None):
        await set_config(gateway, namespace, "lease", lease)
    assert (await load_config(gateway, namespace)).leases(15) == (10, 40)
    await finish_change(gateway, namespace)
    assert (await load_config(gateway, namespace)).leases(15) == (15, 15)
    await set_config(gateway, namespace, "lease", 20)
    assert (await load_config(gateway, namespace)).leases(15) == (15, 20)


async def test_what_a_later_version_or_an_operator_wrote_is_ignored(gateway: Gateway, namespace: Namespace) -> None:
    fields = (
        "lease",
        "soon",
        "result_ttl",
        "-1",
        "dead_letter_ttl",
        "nan",
        "stall_limit",
        "9",
        "lease_changed_at",
        "x",
    )
    await gateway.command("HSET", namespace.config, *fields)
    assert await load_config(gateway, namespace) == SharedConfig()


async def test_a_cancelled_task_is_kept_for_the_stored_time(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_config(gateway, namespace, "result_ttl", 7200)
    handle = await producer.enqueue("t", queue="default")
    await handle.cancel()
    assert 7_100_000 < await gateway.command("PTTL", handle.partition.record(handle.id)) <= 7_200_000
