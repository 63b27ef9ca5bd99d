"""Examination of a namespace: what it finds, and the repairs of `--fix`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Producer, Settings, State, Worker
from perdure.queues import WorkerInfo
from perdure.queues.keys import GROUP, Namespace, Partition
from perdure.queues.presence import announce
from perdure.worker.doctor.deployment import check_consumers

from tests.support.command_line import Answer, call

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


async def examine(*options: str) -> Answer:
    return await asyncio.to_thread(call, "doctor", "--json", *options)


def of(answer: Answer, check: str) -> list[dict[str, Any]]:
    return [one for one in answer.json["findings"] if one["check"] == check]


def worker(name: str, **changed: Any) -> WorkerInfo:
    given: dict[str, Any] = {"app": "shop", "queues": ("shop",), "lease": 15.0, "version": "0.1.0", "concurrency": 1}
    return WorkerInfo(name, host="h", pid=1, in_flight=0, started=0, **(given | changed))


@pytest.fixture
def shop(namespace: Namespace) -> Partition:
    return namespace.partition("shop")


async def test_lost_tasks_are_found_and_put_back(producer_of: Producer, shop: Partition) -> None:
    handle = await producer_of.enqueue("pack", queue="shop")
    later = await producer_of.enqueue("pack", queue="shop", delay=3600)
    await producer_of.gateway.command("DEL", shop.due)
    found = of(await examine(), "places")
    assert [(one["severity"], one["fixable"]) for one in found] == [("error", True)]
    assert f"{later.id} (its due time is gone)" in found[0]["found"]
    assert handle.id not in found[0]["found"]
    assert of(await examine("--fix"), "places")[0]["fixed"] == "put 1 tasks of queue 'shop' back"
    assert [one["severity"] for one in of(await examine(), "places")] == ["ok"]
    assert await later.status() is State.SCHEDULED


async def test_values_of_another_type_are_moved_away(producer_of: Producer, shop: Partition) -> None:
    gateway = producer_of.gateway
    await producer_of.enqueue("pack", queue="shop")
    await gateway.command("SET", shop.retentions, "x", "PX", 60_000)
    found = of(await examine(), "foreign values")
    assert [one["severity"] for one in found] == ["error"]
    assert shop.retentions in found[0]["found"]
    assert "to the junk" in of(await examine("--fix"), "foreign values")[0]["fixed"]
    assert not await gateway.command("EXISTS", shop.retentions)
    answer = await examine()
    assert of(answer, "foreign values") == []
    assert "1 items of other programs" in of(answer, "junk")[0]["found"]


async def test_queues_without_a_route_are_registered(producer_of: Producer, namespace: Namespace) -> None:
    await producer_of.enqueue("pack", queue="shop")
    await producer_of.gateway.command("HDEL", namespace.queues, "shop")
    found = of(await examine(), "lost queues")
    assert [(one["severity"], one["found"]) for one in found] == [("error", "queues have tasks and no route: shop")]
    assert of(await examine("--fix"), "lost queues")[0]["fixed"] == "registered shop"
    answer = await examine()
    assert of(answer, "lost queues") == []
    assert "no worker serves queue 'shop'" in of(answer, "queues")[0]["found"]


async def test_a_check_that_a_foreign_value_prevents_names_its_remedy(
    producer_of: Producer, namespace: Namespace
) -> None:
    await producer_of.enqueue("pack", queue="shop")
    await producer_of.gateway.command("SET", namespace.workers, "x", "PX", 60_000)
    answer = await examine()
    prevented = [one for one in answer.json["findings"] if "could not be checked" in one["found"]]
    assert {one["remedy"] for one in prevented} <= {"mend the finding 'foreign values': perdure doctor --fix"}
    await examine("--fix")
    assert not [one for one in (await examine()).json["findings"] if "could not be checked" in one["found"]]


async def test_consumers_of_lost_workers_are_removed(
    producer_of: Producer, namespace: Namespace, shop: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = producer_of.gateway
    await producer_of.enqueue("pack", queue="shop")
    for stream in (shop.ready, shop.nudge):
        await gateway.command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    for name in ("gone", "holds"):
        await gateway.command("XGROUP", "CREATECONSUMER", shop.ready, GROUP, name)
    await gateway.command("XREADGROUP", "GROUP", GROUP, "holds", "COUNT", 1, "STREAMS", shop.ready, ">")
    assert of(await examine(), "consumers") == []  # it may be a worker that has just started
    monkeypatch.setattr("perdure.worker.doctor.deployment.GONE", -1.0)
    found = [one async for one in check_consumers(gateway, namespace) if one.check == "consumers"]
    assert "1 consumers of workers that are gone: gone" in found[0].found
    assert found[0].fix is not None
    assert await found[0].fix() == "removed 1 consumers of workers that are gone"
    assert await found[0].fix()  # a repetition does no harm
    names = [entry[1] for entry in await gateway.command("XINFO", "CONSUMERS", shop.ready, GROUP)]
    assert names == [b"holds"]


async def test_messages_that_no_worker_renews_are_found(
    producer_of: Producer, namespace: Namespace, shop: Partition
) -> None:
    gateway = producer_of.gateway
    await producer_of.enqueue("pack", queue="shop")
    await gateway.command("XGROUP", "CREATE", shop.ready, GROUP, "0", "MKSTREAM")
    read = ("XREADGROUP", "GROUP", GROUP, "lost", "COUNT", 1, "STREAMS", shop.ready, ">")
    ((_, ((entry, _),)),) = await gateway.command(*read)
    assert [one["severity"] for one in of(await examine(), "leases")] == ["ok"]
    await gateway.command("XCLAIM", shop.ready, GROUP, "lost", 0, entry, "IDLE", 60_000, "JUSTID")
    found = of(await examine(), "leases")
    assert [one["severity"] for one in found] == ["warning"]
    assert found[0]["found"].startswith("1 tasks of queue 'shop', partition 0, are held by workers")
    await announce(gateway, namespace, worker("present"), ttl=60)
    assert [one["severity"] for one in of(await examine(), "leases")] == ["error"]


async def test_workers_that_differ_are_found(producer_of: Producer, namespace: Namespace) -> None:
    gateway = producer_of.gateway
    await producer_of.enqueue("pack", queue="shop")
    assert "no worker serves queue 'shop': 1 tasks wait" in of(await examine(), "queues")[0]["found"]
    await announce(gateway, namespace, worker("first"), ttl=60)
    assert of(await examine(), "queues") == []
    await announce(gateway, namespace, worker("second", app="bank", lease=30.0, version="0.2.0"), ttl=60)
    answer = await examine()
    assert answer.code == 1
    assert of(answer, "settings")[0]["found"] == "workers have different leases: 15 s, 30 s"
    assert of(answer, "versions")[0]["found"].endswith("0.1.0, 0.2.0")
    assert of(answer, "sharing")[0]["found"] == "queue 'shop' is served by the apps bank, shop"


async def test_expired_registrations_are_removed(producer_of: Producer, namespace: Namespace) -> None:
    gateway = producer_of.gateway
    await producer_of.enqueue("pack", queue="shop")
    await announce(gateway, namespace, worker("first"), ttl=60)
    await gateway.command("DEL", namespace.worker("first"))
    assert of(await examine(), "workers")[0]["found"] == "1 registrations have expired"
    assert of(await examine("--fix"), "workers")[0]["fixed"] == "removed 1 expired registrations"
    assert of(await examine(), "workers") == []


async def test_settings_that_differ_from_the_stored_ones(
    producer_of: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await asyncio.to_thread(call, "config", "set", "result_ttl", "2h")).code == 0
    monkeypatch.setenv("PERDURE_RESULT_TTL", "3600")
    found = of(await examine(), "settings")
    assert [one["severity"] for one in found] == ["warning"]
    assert "result_ttl is 3600 s in this environment and 7200 s in the namespace" in found[0]["found"]


@pytest.mark.app("shop")
async def test_a_deployment_at_work_has_no_problem_and_its_memory_is_estimated(app: App) -> None:
    @app.task
    async def pack(ctx: Context, name: str) -> str:
        return await ctx.step("wrap", lambda: name * 1000)

    handles = await pack.enqueue_many([{"name": "x"}] * 20)
    async with Worker(app) as worker:
        await worker.run(burst=True)
    assert all([await handle.status() is State.SUCCEEDED for handle in handles])
    answer = await examine()
    assert {one["check"] for one in answer.json["findings"] if one["severity"] == "error"} <= {"persistence"}
    found = of(answer, "queue memory")
    assert "20 tasks of about" in found[0]["found"]
    assert found[0]["where"] == "shop"


async def test_an_app_is_compared_with_the_workers(
    producer_of: Producer, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store.py").write_text(
        "from perdure import App\napp = App('shop')\n@app.task\nasync def pack(ctx) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    found = of(await examine("--app", "store.py:app"), "app")
    assert found[0]["found"] == "no worker of app store.py:app serves queue 'shop'"
    await announce(producer_of.gateway, namespace, worker("first"), ttl=60)
    assert [one["severity"] for one in of(await examine("--app", "store.py:app"), "app")] == ["ok"]
    assert (await examine("--app", "nothing.py:app")).code == 2


@pytest.fixture
async def producer_of(settings: Settings) -> Any:
    """A producer on the server of the command."""
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer
