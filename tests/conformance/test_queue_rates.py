"""Queue rates for autoscalers: rates of the present, drain times computed from them, and a constant cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import orjson
import pytest
from perdure import App, Context, Settings
from perdure.queues import Gateway, Namespace, Partition, Producer, QueueStats, WorkerInfo, list_queues, list_workers
from perdure.queues.presence import announce, withdraw
from perdure.worker.runtime.maintenance.registration import WINDOW, SettleRate

from tests.support.consumers import needs_server, read, read_one, worker
from tests.support.workers import bounded, running_worker, wait_until

INFO = WorkerInfo(
    id="a", app="audit", host="h", pid=7, version="0.1", queues=("default",), concurrency=8, in_flight=3, started=0
)

EMPTY = QueueStats(queue="default", depth=0, in_flight=0, due=0, dead=0, oldest_age=None, consumers={}, rate=0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# the rate of one worker


def test_a_rate_counts_what_was_settled_in_the_window() -> None:
    clock, settled = Clock(), Counter[str]()
    rates = SettleRate(settled, clock)
    for _ in range(100):
        clock.now += 5
        settled["fast"] += 50
        settled["slow"] += 1
        rates.rates()
    assert rates.rates() == {"fast": pytest.approx(10.0), "slow": pytest.approx(0.2)}


def test_the_rate_of_a_young_worker_is_over_its_lifetime() -> None:
    clock, settled = Clock(), Counter[str]()
    rates = SettleRate(settled, clock)
    assert rates.rates() == {}
    clock.now, settled["q"] = 2.0, 40
    assert rates.rates() == {"q": 20.0}


def test_a_rate_ends_with_the_window_and_starts_again() -> None:
    clock, settled = Clock(), Counter[str]()
    rates = SettleRate(settled, clock)
    clock.now, settled["q"] = 5.0, 60
    assert rates.rates() == {"q": 12.0}
    for _ in range(round(WINDOW / 5)):
        clock.now += 5
        rates.rates()
    assert rates.rates() == {}
    clock.now += 5
    settled["q"] += 30
    assert rates.rates() == {"q": 30 / WINDOW}


def test_late_readings_do_not_raise_the_rate() -> None:
    """The loop was blocked for minutes: the rate is over the time that was counted, not over the window."""
    clock, settled = Clock(), Counter[str]()
    rates = SettleRate(settled, clock)
    clock.now, settled["q"] = 300.0, 300
    assert rates.rates() == {"q": 1.0}


# the sum over all workers


async def test_the_rates_of_all_workers_are_added_up(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 30, queue="default")
    await producer.enqueue_many("t", [{}] * 5, queue="mail")
    await announce(gateway, namespace, replace(INFO, rates={"default": 4.0, "other": 1.0}), ttl=30.0)
    await announce(gateway, namespace, replace(INFO, id="b", rates={"default": 2.0}), ttl=30.0)
    default, mail = await list_queues(gateway, namespace)
    assert (default.rate, default.drain_time) == (6.0, 5.0)
    assert (mail.rate, mail.drain_time) == (0.0, None)
    assert orjson.loads(orjson.dumps(default.summary()))["drain_time"] == 5.0


@pytest.mark.parametrize("died", [True, False])
async def test_a_worker_that_left_is_not_counted(
    gateway: Gateway, namespace: Namespace, producer: Producer, died: bool
) -> None:
    await producer.enqueue("t", queue="default")
    await announce(gateway, namespace, replace(INFO, rates={"default": 4.0}), ttl=30.0)
    await announce(gateway, namespace, replace(INFO, id="b", rates={"default": 1.0}), ttl=30.0)
    if died:
        await gateway.command("PEXPIRE", namespace.worker("a"), 0)
    else:
        await withdraw(gateway, namespace, "a")
    (stats,) = await list_queues(gateway, namespace)
    assert stats.rate == 1.0


async def test_announcements_of_newer_versions_are_read(gateway: Gateway, namespace: Namespace) -> None:
    """Unknown fields are ignored; an announcement that cannot be decoded is left out."""
    for name in ("a", "strange", "foreign"):
        await announce(gateway, namespace, replace(INFO, id=name), ttl=30.0)
    await gateway.command("HSET", namespace.worker("a"), "of_the_future", "[1")
    await gateway.command("HSET", namespace.worker("strange"), "queues", "no list")
    await gateway.command("DEL", namespace.worker("foreign"))
    await gateway.command("LPUSH", namespace.worker("foreign"), "x")
    await gateway.command("PEXPIRE", namespace.worker("foreign"), 30_000)
    assert [one.id for one in await list_workers(gateway, namespace)] == ["a"]


@pytest.mark.parametrize(
    ("depth", "in_flight", "rate", "drain_time"),
    [
        (0, 0, 0.0, 0.0),
        (0, 0, 7.0, 0.0),
        (0, 0, None, 0.0),
        (3, 0, 0.0, None),
        (0, 3, 0.0, None),
        (3, 3, None, None),
        (3, 3, 0.5, 12.0),
    ],
)
def test_drain_time(depth: int, in_flight: int, rate: float | None, drain_time: float | None) -> None:
    assert replace(EMPTY, depth=depth, in_flight=in_flight, rate=rate).drain_time == drain_time


# the counts behind the rates


async def test_deleted_pending_entries_do_not_make_the_depth_negative(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 4, queue="default")
    a = await worker(gateway, partition)
    held = await read(a, 4)
    for delivery in held:
        await gateway.command("XDEL", partition.ready, delivery.entry)
    (stats,) = await list_queues(gateway, namespace)
    assert (stats.depth, stats.in_flight, stats.oldest_age) == (0, 4, None)


async def test_the_cost_of_queue_numbers_is_constant(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """The test counts commands and bytes of replies, not time."""
    needs_server(gateway, "it keeps no statistics")
    a = await worker(gateway, partition)

    async def spent() -> tuple[int, int]:
        """Return the number of commands, and the bytes of all replies."""
        info = (await gateway.command("INFO", "stats")).decode()
        found = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        return int(found["total_commands_processed"]), int(found["total_net_output_bytes"])

    async def cost_once() -> tuple[int, int]:
        before = await spent()
        await list_queues(gateway, namespace)
        after = await spent()
        return after[0] - before[0], after[1] - before[1]

    async def cost() -> tuple[int, int]:
        """Return the least of several: a replica acknowledges once a second, which counts too."""
        return min([await cost_once() for _ in range(3)])

    await producer.enqueue_many("t", [{}] * 2, queue="default")
    await read_one(a)
    few = await cost()
    await producer.enqueue_many("t", [{}] * 4000, queue="default")
    assert len(await read(a, 2000)) == 2000
    many = await cost()
    assert many[0] == few[0]
    assert many[1] < few[1] + 200  # larger numbers have more digits


@pytest.mark.integration
async def test_a_worker_announces_what_it_settled_per_queue(settings: Settings) -> None:
    async with App("rates", settings=settings.model_copy(update={"heartbeat": 0.2})) as app:

        @app.task
        async def job(ctx: Context) -> None:
            pass

        @app.task(queue="fails")
        async def fails(ctx: Context) -> None:
            raise ValueError("on purpose")

        async with running_worker(app) as busy:
            handles = await job.enqueue_many({} for _ in range(10))
            for handle in handles:
                await bounded(handle.result())
            await fails.enqueue()
            gateway, namespace = app.producer.gateway, Namespace(settings.namespace)

            async def both_have_a_rate() -> bool:
                rates = {stats.queue: stats.rate for stats in await list_queues(gateway, namespace)}
                return all(rates.get(queue) for queue in ("rates", "fails"))

            await wait_until(both_have_a_rate, "both queues have a rate")
            (info,) = await list_workers(gateway, namespace)
            assert info.rates["rates"] == pytest.approx(10 * info.rates["fails"])
            assert busy.settled == 11
        assert await list_workers(gateway, namespace) == []
