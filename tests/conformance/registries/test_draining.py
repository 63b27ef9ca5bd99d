"""Requests to drain a worker: kept with its registration until it has left."""

from __future__ import annotations

from dataclasses import replace

from perdure.queues import Gateway, Namespace
from perdure.queues.presence import DrainAnswer, WorkerInfo, announce, drain_worker, list_workers, withdraw

INFO = WorkerInfo("w1", "app", "host", 7, "0.1", ("default",), concurrency=8, in_flight=0, started=0)


async def test_the_next_registration_returns_the_request(gateway: Gateway, namespace: Namespace) -> None:
    assert not (await announce(gateway, namespace, INFO, 60.0)).drain
    assert await drain_worker(gateway, namespace, "w1", by="ada") is DrainAnswer.ASKED
    (asked,) = await list_workers(gateway, namespace)
    assert (asked.draining, asked.drain_by, asked.status) == (False, "ada", "draining")
    assert asked.drain is not None
    for _ in range(2):
        assert (await announce(gateway, namespace, replace(INFO, draining=True), 60.0)).drain
    (follows,) = await list_workers(gateway, namespace)
    assert (follows.draining, follows.drain, follows.drain_by) == (True, asked.drain, "ada")


async def test_the_first_request_stays(gateway: Gateway, namespace: Namespace) -> None:
    await announce(gateway, namespace, INFO, 60.0)
    await drain_worker(gateway, namespace, "w1", by="ada")
    assert await drain_worker(gateway, namespace, "w1", by="bob") is DrainAnswer.ASKED_BEFORE
    (found,) = await list_workers(gateway, namespace)
    assert found.drain_by == "ada"


async def test_a_worker_that_is_not_registered_is_not_asked(gateway: Gateway, namespace: Namespace) -> None:
    assert await drain_worker(gateway, namespace, "w1") is DrainAnswer.NOT_REGISTERED
    await announce(gateway, namespace, INFO, 60.0)
    await withdraw(gateway, namespace, "w1")
    assert await drain_worker(gateway, namespace, "w1") is DrainAnswer.NOT_REGISTERED
    assert await list_workers(gateway, namespace) == []
    assert 0 < await gateway.command("PTTL", namespace.worker("w1")) <= 3_600_000


async def test_a_worker_of_an_earlier_version_is_not_asked(gateway: Gateway, namespace: Namespace) -> None:
    await announce(gateway, namespace, INFO, 60.0)
    await gateway.command("HDEL", namespace.worker("w1"), "draining")
    assert await drain_worker(gateway, namespace, "w1") is DrainAnswer.UNSUPPORTED
    (found,) = await list_workers(gateway, namespace)
    assert (found.draining, found.drain, found.status) == (None, None, "?")


async def test_a_request_keeps_the_ttl_of_the_registration(gateway: Gateway, namespace: Namespace) -> None:
    await announce(gateway, namespace, INFO, 60.0)
    await drain_worker(gateway, namespace, "w1")
    assert 0 < await gateway.command("PTTL", namespace.worker("w1")) <= 60_000
