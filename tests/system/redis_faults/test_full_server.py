"""A server whose memory is full: outcomes get through, what is new waits or is refused, and nothing is lost or blamed.

Redis refuses a command that may need memory only as the first write of a script, so scripts that end something begin
with a write that needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
import redis
from perdure import App, Context, Retry, ServerFull, Settings, State, TaskCancelled, TaskFailed, TaskHandle, Worker
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Address, Gateway, Namespace, Partition, Producer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.partitions.assignment import join_group, leave_group
from perdure.queues.presence import WorkerInfo, announce, list_workers, withdraw
from perdure.queues.sessions.record import SessionAddress, read_session
from perdure.queues.sessions.turns import SessionTurnEnd, end_turn, send_to_session
from perdure.queues.supervisors import SupervisorInfo, list_supervisors, supervise, withdraw_supervisor

from tests.conformance.delivery.test_settlement import WHERE
from tests.conftest import ON_SERVERS
from tests.support.command_line import call
from tests.support.consumers import make_due, read_one, worker
from tests.support.delivery_calls import SETTLING, WRITING
from tests.support.servers import RedisServer, find_program
from tests.support.task_places import DEAD, READY, places
from tests.support.workers import bounded, running_worker, take_and_die, wait_until

pytestmark = pytest.mark.integration

WORKER = WorkerInfo("w1", "app", "host", 7, "0.1", ("default",), concurrency=8, in_flight=0, started=0)
SUPERVISOR = SupervisorInfo("s1", "app-host", app="app", host="host", pid=7, processes=2, window=60.0)


@pytest.fixture(scope="module", params=ON_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of these tests' own."""
    program = find_program(request.param)
    assert program is not None
    server = RedisServer(program).start()
    yield server
    server.stop()


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(Address(server.url), patience=0.0)
    await gateway.open()
    yield gateway
    await full(gateway, False)
    await gateway.command("FLUSHALL")
    await gateway.close()


@pytest.fixture
async def producer(gateway: Gateway, namespace_name: str) -> AsyncIterator[Producer]:
    async with Producer(namespace=namespace_name, gateway=gateway) as producer:
        yield producer


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    """Task x, read by worker a."""
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    return await read_one(await worker(gateway, partition))


@pytest.fixture
async def app(server: RedisServer, gateway: Gateway, namespace_name: str) -> AsyncIterator[App]:
    settings = Settings(redis_url=server.url, namespace=namespace_name, lease=0.6, grace=5.0)
    async with App("full", settings=settings) as app:
        yield app


async def full(gateway: Gateway, yes: bool = True) -> None:
    """More memory is used than may be, or it is not."""
    await gateway.command("CONFIG", "SET", "maxmemory", 1 if yes else 0)


@pytest.mark.parametrize("act", SETTLING)
async def test_whatever_ends_a_delivery_is_let_through(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    await full(gateway)
    await SETTLING[act](gateway, delivery, "x")
    await full(gateway, False)
    assert await places(gateway, partition, "x") == [WHERE[act]]


@pytest.mark.parametrize("act", WRITING)
async def test_what_a_run_writes_is_refused_and_leaves_nothing(
    gateway: Gateway, partition: Partition, delivery: Delivery, act: str
) -> None:
    await full(gateway)
    with pytest.raises(ServerFull):
        await WRITING[act](gateway, delivery, "x")
    assert await gateway.command("EXISTS", partition.steps("x")) == 0
    await full(gateway, False)
    await WRITING[act](gateway, delivery, "x")


@pytest.mark.parametrize("outcome", ["answered", "failed"])
async def test_the_end_of_a_turn_is_let_through(
    gateway: Gateway, namespace: Namespace, outcome: Literal["answered", "failed"]
) -> None:
    turn = await send_to_session(gateway, namespace, "bot", "ada", "hello", queue="default")
    address = SessionAddress.of(namespace, "bot", "ada")
    await full(gateway)
    assert await end_turn(gateway, address, turn, SessionTurnEnd(outcome, b'"done"', b"{}"))
    await full(gateway, False)
    found = await read_session(gateway, address)
    assert found is not None and (found.failed is not None) == (outcome == "failed")


async def test_a_dead_letter_stays_one_until_there_is_room(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await SETTLING["bury"](gateway, delivery, "x")
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    await full(gateway)
    with pytest.raises(ServerFull):
        await replay(gateway, letter, Replay())
    assert await places(gateway, partition, "x") == [DEAD]
    await full(gateway, False)
    assert await replay(gateway, letter, Replay())
    assert await places(gateway, partition, "x") == [READY]


async def test_a_producer_gets_an_error_with_cause_and_remedy_when_the_server_is_full(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="known", queue="default")
    await full(gateway)
    for refused in (
        producer.send_message("known", "hello"),
        producer.enqueue("t", task_id="one", queue="default"),
        producer.enqueue("t", task_id="later", delay=60, queue="default"),
        producer.enqueue_many("t", [{"n": 1}, {"n": 2}], queue="default"),
    ):
        with pytest.raises(ServerFull, match=r"maxmemory.*raise its maxmemory, or make room"):
            await refused
    assert await gateway.command("XLEN", partition.ready) == 1
    assert await gateway.command("EXISTS", partition.due, partition.record("one")) == 0
    assert await gateway.command("HKEYS", partition.record("known")) == [b"state", b"entry", b"task", b"args"]
    await full(gateway, False)
    assert await (await producer.enqueue("t", task_id="one", queue="default")).status() is State.QUEUED


def test_the_command_line_prints_cause_and_remedy_when_the_server_is_full(
    server: RedisServer, namespace_name: str
) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        try:
            answer = call(
                "enqueue", "t", "--queue", "default", "--redis-url", server.url, "--namespace", namespace_name
            )
        finally:
            client.config_set("maxmemory", 0)
    assert (answer.code, answer.out) == (1, "")
    assert "maxmemory" in answer.err
    assert "start the server" not in answer.err
    assert answer.err.count("\n") == 1


async def test_a_task_can_be_cancelled_in_every_state(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    queued = await producer.enqueue("t", task_id="queued", queue="default")
    scheduled = await producer.enqueue("t", task_id="scheduled", delay=60, queue="default")
    crew = await worker(gateway, partition)
    running = await producer.enqueue("t", task_id="running", queue="other")
    await read_one(await worker(gateway, running.partition))
    await full(gateway)
    assert await queued.cancel() is State.CANCELLED
    assert await scheduled.cancel() is State.CANCELLED
    assert await running.cancel() is State.RUNNING
    assert await running.cancel() is State.RUNNING
    assert await gateway.command("HGET", running.partition.control("running"), "cancel") == b"1"
    await crew.leave()


@pytest.mark.parametrize("member", ["worker", "supervisor", "reader of a queue"])
async def test_who_has_left_a_full_server_is_not_listed(gateway: Gateway, namespace: Namespace, member: str) -> None:
    """The mark that refuses late registrations needs memory, so it is not set."""
    await announce(gateway, namespace, WORKER, 60.0)
    await supervise(gateway, namespace, SUPERVISOR, 60.0)
    await join_group(gateway, namespace, "default", "w1", 60.0)
    await full(gateway)
    match member:
        case "worker":
            await withdraw(gateway, namespace, "w1")
            assert await list_workers(gateway, namespace) == []
        case "supervisor":
            await withdraw_supervisor(gateway, namespace, "s1")
            assert await list_supervisors(gateway, namespace) == []
        case _:
            await leave_group(gateway, namespace, "default", "w1")
            assert await join_group(gateway, namespace, "default", "w2", 60.0) == {"w2"}


async def test_what_is_due_is_moved_and_a_worker_can_leave_and_share(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    crew = await worker(gateway, partition)
    handle = await producer.enqueue("t", delay=60, queue="default")
    await make_due(gateway, partition, handle.id)
    await full(gateway)
    assert await join_group(gateway, namespace, "default", "a", 15.0) == {"a"}
    async with App("promotes", settings=Settings(redis_url=gateway.address.url, namespace=namespace.name)) as app:

        @app.task(name="t", queue="default")
        async def t(ctx: Context) -> str:
            return "done"

        async with running_worker(app):
            assert await bounded(handle.result()) == "done"
    await crew.leave()


async def test_workers_that_start_on_a_full_server_drain_it(app: App, gateway: Gateway) -> None:
    """Also what waits for its time, what a dead worker held, and beside a task that cannot record its step."""
    recording, go_on = asyncio.Event(), asyncio.Event()

    async def record() -> str:
        recording.set()
        await go_on.wait()
        return "x" * 1000

    @app.task
    async def steps(ctx: Context) -> int:
        return len(await ctx.step("record", record))

    @app.task(retry=Retry(max_attempts=2, base=0.01, max_crashes=5))
    async def simple(ctx: Context, number: int) -> int:
        if number % 3 == 1 and ctx.attempt == 1:
            raise ValueError("once more")
        if number % 3 == 2:
            raise ValueError("never")
        return number

    waiting = await steps.enqueue()
    async with running_worker(app):
        await bounded(recording.wait())
        left = await simple.enqueue(0)
        await bounded(left.result())
        handles: list[TaskHandle[int]] = await simple.options(delay=0.2).enqueue_many({"number": n} for n in range(6))
        await full(gateway)
        go_on.set()
        # those that are due run through though one waits with its step
        await bounded(asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True))
        assert await waiting.status() is State.RUNNING
        await full(gateway, False)
        assert await bounded(waiting.result()) == 1000
        record_of = await waiting.record()
        assert (record_of.attempts, record_of.crashes) == (1, 0)

    handles = await simple.enqueue_many({"number": n} for n in range(6))
    await take_and_die(app)
    await full(gateway)
    async with running_worker(app):
        for number, handle in enumerate(handles):
            if number % 3 == 2:
                with pytest.raises(TaskFailed):
                    await bounded(handle.result())
            else:
                assert await bounded(handle.result()) == number
    await full(gateway, False)
    assert await gateway.command("XLEN", handles[0].partition.ready) == 0


async def test_the_first_worker_of_a_queue_drains_a_full_server(app: App, gateway: Gateway) -> None:
    """Its consumer groups do not exist yet."""

    @app.task
    async def task(ctx: Context, number: int) -> int:
        return number

    handles = [await task.enqueue(number) for number in range(3)]
    await full(gateway)
    async with running_worker(app):
        assert [await bounded(handle.result()) for handle in handles] == [0, 1, 2]


async def test_leases_are_renewed_and_a_step_waits_until_there_is_room(app: App, gateway: Gateway) -> None:
    in_step, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        in_step.set()
        await go_on.wait()
        return "x" * 1000

    @app.task
    async def task(ctx: Context) -> int:
        return len(await ctx.step("work", work))

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await task.enqueue()
        await in_step.wait()
        await full(gateway)
        go_on.set()
        await asyncio.sleep(3 * app.settings.lease)  # long enough for a lease to be lost, were it not renewed
        assert not running.done()
        await full(gateway, False)
        assert await handle.result(timeout=30) == 1000
        record = await handle.record()
        assert (record.state, record.attempts, record.crashes) == (State.SUCCEEDED, 1, 0)
        worker.stop()
        await running


async def test_progress_does_not_delay_the_end_of_a_task(app: App, gateway: Gateway) -> None:
    running_now, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def task(ctx: Context) -> str:
        running_now.set()
        await go_on.wait()
        for page in range(3):
            await ctx.progress(page + 1, 3)
        return "done"

    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        handle = await task.enqueue()
        await bounded(running_now.wait())
        await full(gateway)
        go_on.set()
        await wait_until(lambda: has_ended(handle), "the task has ended while the server is full")
        await full(gateway, False)
        progress = await handle.progress()
        assert progress is not None
        assert progress.done == 3
        worker.stop()
        await running


async def has_ended(handle: TaskHandle[str]) -> bool:
    return await handle.status() is State.SUCCEEDED


async def test_a_task_that_waits_with_its_step_can_be_cancelled(app: App, gateway: Gateway) -> None:
    in_step, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        in_step.set()
        await go_on.wait()

    @app.task
    async def task(ctx: Context) -> None:
        await ctx.step("work", work)

    async with running_worker(app):
        handle = await task.enqueue()
        await bounded(in_step.wait())
        await full(gateway)
        go_on.set()

        async def refused() -> bool:
            return b"errorstat_" in await gateway.command("INFO", "errorstats")

        await wait_until(refused, "the record was refused")
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await bounded(handle.result())
