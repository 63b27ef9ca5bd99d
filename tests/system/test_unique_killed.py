"""kill -9 of producers of unique tasks, before and after each of their acts and at random: one task of each key."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from perdure import App, Context, Producer, Settings, State, Unique
from perdure.queues.unique import CLAIM_MS

from tests.support.paths import PROGRAMS
from tests.support.servers.clusters import Cluster
from tests.support.workers import BOUND, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

ACTS: Final = [
    f"{when} {script}" for script in ("claim_unique", "enqueue_one", "cancel") for when in ("before", "after")
]
"""The scripts of a call, in order; `cancel` is that of a task that is replaced."""

FIRST: Final = {"during": "while_running", "by": "order"}
LAST: Final = {**FIRST, "keep": "last"}


class Producers:
    """Processes that enqueue unique tasks, and their journal."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.journal = settings, folder / "journal"
        self.journal.touch()
        self.running: list[subprocess.Popen[bytes]] = []

    def start(
        self, orders: list[int], rule: Mapping[str, Any] = FIRST, *, kill: str = "", forever: bool = False
    ) -> subprocess.Popen[bytes]:
        given = {"orders": orders, "rule": rule, "kill": kill, "forever": forever}
        environment = os.environ | {
            "JOURNAL": str(self.journal),
            "PERDURE_REDIS_URL": self.settings.redis_url,
            "PERDURE_NAMESPACE": self.settings.namespace,
        }
        command = [sys.executable, str(PROGRAMS / "producing.py"), json.dumps(given)]
        self.running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        return self.running[-1]

    def lines(self) -> list[tuple[int, str, bool]]:
        """Return order, id, and whether it existed, of each call that has returned."""
        lines = [text.rpartition(" ")[2] for text in self.journal.read_text().splitlines()]
        parts = [line.split(":") for line in lines]
        return [(int(order), task_id, existed == "True") for order, task_id, existed in parts]

    async def all_end(self) -> list[int]:
        with anyio.fail_after(BOUND):
            return [await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True) for process in self.running]


@contextmanager
def processes(settings: Settings, folder: Path) -> Iterator[Producers]:
    found = Producers(settings, folder)
    try:
        yield found
    finally:
        for process in found.running:
            process.kill()
            process.wait(BOUND)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(params=["one server", pytest.param("cluster", marks=pytest.mark.cluster)])
def place(request: pytest.FixtureRequest, namespace_name: str) -> Settings:
    """Settings of one server, and of a Redis Cluster, whose slots are on several nodes."""
    if request.param == "cluster":
        cluster: Cluster = request.getfixturevalue("shared_cluster")
        return Settings(redis_url=cluster.url(), namespace=namespace_name, lease=1.0, grace=5.0)
    found: Settings = request.getfixturevalue("settings")
    return found


async def stored(producer: Producer) -> dict[int, list[str]]:
    """Return the ids of the messages in the queue by their orders."""
    found: dict[int, list[str]] = defaultdict(list)
    ready = producer.namespace.partition("shop").ready
    for _, fields in await producer.gateway.command("XRANGE", ready, "-", "+"):
        data = dict(zip(fields[::2], fields[1::2], strict=True))
        found[json.loads(data[b"args"])["order"]].append(json.loads(data[b"env"])["id"])
    return found


async def test_a_producer_that_is_killed_at_any_act_leaves_one_task(place: Settings, tmp_path: Path) -> None:
    """Each of its acts for a key of its own; then others enqueue tasks of all these keys, all at once."""
    orders = range(len(ACTS))
    async with Producer(place.redis_url, namespace=place.namespace) as producer:
        with processes(place, tmp_path) as producers:
            earlier = producers.start([order for order in orders if "cancel" in ACTS[order]])
            assert await anyio.to_thread.run_sync(earlier.wait) == 0
            began = time.monotonic()
            for order, act in enumerate(ACTS):
                producers.start([order], LAST if "cancel" in act else FIRST, kill=act)
            assert [*(await producers.all_end())[1:]] == [-9] * len(ACTS)
            before = await stored(producer)
            assert [len(before[order]) for order in orders[:4]] == [0, 0, 0, 1]
            for _ in range(4):
                producers.start(list(orders))
            assert (await producers.all_end())[-4:] == [0] * 4
            took = time.monotonic() - began
            found: dict[int, set[str]] = defaultdict(set)
            for order, task_id, _ in producers.lines():
                found[order].add(task_id)
        after = await stored(producer)
        assert {order: len(ids) for order, ids in after.items()} == dict.fromkeys(orders, 1)
        for order in orders[:4]:
            assert found[order] == {*after[order]}, ACTS[order]
        assert after[3] == before[3], "the task whose producer died after it was stored"
        assert took > CLAIM_MS / 1000, "the claims of the dead were respected for their time"
        await empty(producer)


async def test_producers_that_are_killed_at_random_leave_one_task_of_each_key(place: Settings, tmp_path: Path) -> None:
    seed = time.time_ns()
    chance = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    orders = list(range(400))
    async with Producer(place.redis_url, namespace=place.namespace) as producer:
        with processes(place, tmp_path) as producers:
            for _ in range(3):
                producers.start(orders, forever=True)
            for _ in range(8):
                process = producers.running[-chance.randint(1, 3)]
                before = len(producers.lines())
                await wait_until(lambda least=before: more(producers, least + 20), "they enqueue")  # type: ignore[misc]
                await anyio.sleep(chance.uniform(0.0, 0.05))  # the random moment itself
                process.kill()
                producers.start(orders, forever=True)
            for process in producers.running:
                process.kill()
            with ExitStack():
                last = producers.start(orders)
                assert await anyio.to_thread.run_sync(last.wait) == 0
            lines = producers.lines()
        found = await stored(producer)
        assert {order: len(found[order]) for order in orders} == dict.fromkeys(orders, 1)
        assert {(order, task_id) for order, task_id, _ in lines} == {(order, found[order][0]) for order in orders}
        new = Counter(task_id for _, task_id, existed in lines if not existed)
        assert max(new.values()) == 1, "one call each has stored it"
        await empty(producer)


async def more(producers: Producers, least: int) -> bool:
    return len(producers.lines()) >= least


async def test_at_no_time_two_tasks_of_a_key_run(place: Settings, tmp_path: Path) -> None:
    """While producers die at random: handlers of a key overlap never, and each key runs again once it is free."""
    seed = time.time_ns()
    chance = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    running: Counter[int] = Counter()
    together: list[int] = []
    runs: Counter[int] = Counter()
    orders = list(range(20))
    app = App("shop", settings=place)

    @app.task(unique=Unique("while_running", by="order"))
    async def pay(ctx: Context, order: int) -> int:
        running[order] += 1
        runs[order] += 1
        if running[order] > 1:
            together.append(order)
        await anyio.sleep(chance.uniform(0.0, 0.02))
        running[order] -= 1
        return order

    async with app:
        with processes(place, tmp_path) as producers:
            async with running_worker(app, concurrency=64):
                for _ in range(3):
                    producers.start(orders, forever=True)
                for _ in range(6):
                    least = len(producers.lines()) + 100
                    await wait_until(lambda least=least: more(producers, least), "they enqueue")  # type: ignore[misc]
                    producers.running[-chance.randint(1, 3)].kill()
                    producers.start(orders, forever=True)
                for process in producers.running:
                    process.kill()
                handle = await pay.enqueue(orders[0])
                assert await handle.result(BOUND) == orders[0]
        assert together == []
        assert min(runs[order] for order in orders) > 1
        await empty(app.producer)


async def empty(producer: Producer) -> None:
    """Let no live task stay."""
    for ids in (await stored(producer)).values():
        for task_id in ids:
            handle = await producer.find(task_id)
            assert handle is not None
            assert await handle.cancel() in (State.CANCELLED, State.SUCCEEDED)
