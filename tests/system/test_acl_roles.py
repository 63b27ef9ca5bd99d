"""Users of Redis with few rights, one for each role: what is granted is enough for all it does, and no more."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    PlanStep,
    Producer,
    Retry,
    Settings,
    State,
    TaskCancelled,
    TaskFailed,
    TaskHandle,
)
from perdure.context import Commitment
from perdure.queues import Gateway, Namespace, Refused
from perdure.queues.catalog import read_catalog
from perdure.queues.partitions.resharding import load_route
from perdure.queues.sessions.record import list_sessions
from perdure.queues.transport.gateway import GatewayTimings
from perdure.worker.agents.session_sweeper import SessionSweeper

from tests.conftest import ON_SERVERS
from tests.support.acl import create_user
from tests.support.command_line import Answer, Running, call
from tests.support.servers import find_program
from tests.support.servers.nodes import Node, free_ports
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import BOUND, bounded, history, letter, running_worker, wait_until
from tests.topology.test_managed_servers import refused

pytestmark = pytest.mark.integration

ROLES = ("producer", "worker", "operator")


@pytest.fixture(scope="module", params=ON_SERVERS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A server on a port of its own: users belong to a server, not to a namespace."""
    program = find_program(request.param)
    assert program is not None
    (port,) = free_ports(1)
    node = Node(program, port, ["--port", str(port), "--bind", "127.0.0.1", "--save", ""], {})
    try:
        node.start()
        yield node
    finally:
        node.stop()


@pytest.fixture
def users(node: Node, namespace_name: str) -> Iterator[dict[str, Settings]]:
    """The roles' users, for this test's namespace; by role, the settings of a process that has its user."""
    for role in ROLES:
        create_user(node, role, namespace_name)
    url = f"redis://operator:of-operator@127.0.0.1:{node.port}/0"
    assert call("server", "prepare", "roles", "other", "--redis-url", url, "--namespace", namespace_name).code == 0
    node.command("ACL", "LOG", "RESET")
    yield {
        role: with_keys(
            Settings(
                redis_url=f"redis://{role}:of-{role}@127.0.0.1:{node.port}/0",
                namespace=namespace_name,
                lease=1.0,
                grace=5.0,
            ),
            FIRST,
        )
        for role in ROLES
    }
    for role in ROLES:
        node.command("ACL", "DELUSER", role)


def build(settings: Settings) -> App:
    app = App("roles", settings=settings)

    @app.task
    async def works(ctx: Context, number: int) -> int:
        return await ctx.options(risky=True).step("one", lambda: number + 1)

    @app.task(queue="other", retry=Retry(max_attempts=2, base=0.0))
    async def fails(ctx: Context, mended: bool = False) -> str:
        if not mended:
            raise ValueError("not yet")
        inner = await works.enqueue(1)
        return str(await inner.result())

    @app.task(queue="other")
    async def holds(ctx: Context) -> None:
        await asyncio.sleep(BOUND)

    @app.task(queue="other")
    async def reads(ctx: Context, late: str) -> list[str]:
        (first,) = await ctx.inbox(wait=3600)
        await ctx.send(late, first.content)
        answer = await ctx.ask("operator", "Go on?")
        return [first.content, answer]

    return app


async def waits_for(handle: TaskHandle[Any], what: str) -> bool:
    return (await handle.record()).waits == what


@pytest.mark.filterwarnings("ignore:a task waits for the result")  # the worker has other slots for it
async def test_each_role_lives_its_whole_life_as_its_user(
    node: Node, users: dict[str, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def operate(*args: str) -> Answer:
        answer = await asyncio.to_thread(call, *args)
        assert answer.code == 0, answer.err
        return answer

    monkeypatch.setenv("PERDURE_REDIS_URL", users["operator"].redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", users["operator"].namespace)
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", FIRST)
    async with build(users["producer"]) as app:
        tasks = app.tasks
        many = await tasks["works"].enqueue_many({"number": number} for number in range(20))
        delayed = await tasks["works"].options(delay=0.05, key="k", task_id="own").enqueue(20)
        again = await tasks["works"].options(delay=0.05, key="k", task_id="own").enqueue(20)
        late = await tasks["works"].options(delay=3600).enqueue(0)
        failing, holding = await tasks["fails"].enqueue(), await tasks["holds"].enqueue()
        reading = await tasks["reads"].enqueue(late.id)
        waiting = asyncio.create_task(many[0].result())
        async with running_worker(build(users["worker"])) as worker:
            assert [await bounded(handle.result()) for handle in [*many, delayed, again]] == [*range(1, 22), 21]
            assert await bounded(waiting) == 1
            assert "step_completed" in [event.type for event in await history(many[0])]
            assert (await bounded(letter_of(app, failing))).reason == "attempts_exhausted"
            # what an operator does
            assert {one["queue"] for one in (await operate("queue", "list", "--json")).json} == {"roles", "other"}
            assert "perdure_queue_dead_letters" in (await operate("queue", "metrics")).out
            assert len((await operate("task", "list", "--json")).json) == 25
            assert (await operate("task", "show", failing.id, "--json")).json["error"]["message"] == "not yet"
            assert "attempt_failed" in (await operate("task", "events", failing.id)).out
            assert (await operate("task", "events", "--stats", "--json")).json["types"]["attempt_failed"] == 1
            assert (await operate("task", "state", failing.id, "--json")).json["state"]["goal"] == ""
            (forked,) = (await operate("task", "fork", many[0].id)).ids
            assert (await operate("task", "result", forked, "--timeout", "30")).out.strip() == "1"
            assert (await operate("task", "result", many[0].id)).out.strip() == "1"
            assert [one["id"] for one in (await operate("worker", "list", "--json")).json["workers"]] == [worker.id]
            await operate("worker", "health", worker.id)
            assert len((await operate("dlq", "list", "--json")).json) == 1
            assert "not yet" in (await operate("dlq", "show", failing.id)).out
            assert orjson.loads((await operate("dlq", "export")).out)["id"] == failing.id
            await operate("dlq", "replay", failing.id, "--edit-args", '{"mended": true}')
            assert await bounded(failing.result()) == "2"
            await wait_until(partial(waits_for, reading, "message"), "it waits for a message")
            await reading.send("hello")
            await wait_until(partial(waits_for, reading, "answer"), "it waits for an answer")
            (unread,) = (await operate("task", "inbox", late.id, "--json")).lines
            assert unread["content"] == "hello"
            await operate("task", "inbox", late.id, "--drop", str(unread["number"]))
            assert await late.pending_messages() == []
            assert (await operate("task", "waiting", "--json")).lines[0]["wait"] == "question"
            await operate("task", "answer", reading.id, "question", '"yes"', "--by", "operator")
            assert await bounded(reading.result()) == ["hello", "yes"]
            await operate("task", "cancel", holding.id)
            with pytest.raises(TaskCancelled):
                await bounded(holding.result())
            await operate("task", "cancel", late.id)
            assert await late.status() is State.CANCELLED
            gone = await tasks["fails"].enqueue()
            with pytest.raises(TaskFailed):
                await bounded(gone.result())
            await operate("dlq", "purge", gone.id)
            await operate("queue", "partitions", "roles", "3")
            spread = await tasks["works"].enqueue_many({"number": number} for number in range(20))
            assert [await bounded(handle.result()) for handle in spread] == [*range(1, 21)]
            (by_hand,) = (await operate("enqueue", "works", "--queue", "roles", "--args", '{"number": 5}')).ids
            assert (await operate("task", "result", by_hand, "--timeout", "30")).out.strip() == "6"
            assert (await operate("task", "watch", by_hand)).code == 0
    assert refused_but_logs(node) == []


@pytest.mark.parametrize("name", ["ready", "due", "timeline", "closed", "nudge"])
async def test_a_producer_waits_until_a_worker_has_moved_a_value_of_another_type(
    node: Node, users: dict[str, Settings], name: str
) -> None:
    async with build(users["producer"]) as app, running_worker(build(users["worker"])):
        works, key = app.tasks["works"], getattr(app.producer.namespace.partition("roles"), name)
        assert await bounded((await works.enqueue(1)).result()) == 2
        node.command("DEL", key)
        node.command("RPUSH", key, "foreign")
        assert await bounded((await works.enqueue(2)).result()) == 3
        assert await bounded((await works.options(delay=0.05).enqueue(3)).result()) == 4
        assert node.command("TYPE", key) != b"list"


async def test_a_producer_asks_a_worker_for_a_lane_that_it_may_not_add(node: Node, users: dict[str, Settings]) -> None:
    """Its tasks are normal ones until the worker has added the lane, which the nudge brings about at once."""
    if node.info("server")["redis_version"].startswith("6."):
        pytest.skip("Redis 6.2 has no rights to read keys only: the producer adds the lane")
    async with build(users["producer"]) as app:
        works = app.tasks["works"]
        first = await works.options(priority="high", task_id="first").enqueue(1)
        assert first.partition.lane == "normal"
        async with running_worker(build(users["worker"])):
            assert await bounded(first.result()) == 2

            async def is_added() -> bool:
                found = await load_route(app.producer.gateway, app.producer.namespace, "roles")
                return found is not None and "high" in found.lanes

            await wait_until(is_added, "the worker adds the lane")

            async def is_used() -> bool:
                handle = await works.options(priority="high").enqueue(2)
                assert await bounded(handle.result()) == 3
                return handle.partition.lane == "high"

            await wait_until(is_used, "the producer reads the route again")
            again = await works.options(priority="high", task_id="first").enqueue(1)
            assert (again.existed, again.partition) == (True, first.partition)


SUPERVISED = """
import os, signal, sys
from pathlib import Path
from perdure import App, Context

app = App("supervised")
died = Path(__file__).with_name("died")


@app.task
async def dies_once(ctx: Context, word: str) -> str:
    await ctx.step("one", lambda: word)
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return word
"""


@pytest.mark.processes
@pytest.mark.parametrize("node", ON_SERVERS[:1], indirect=True)
async def test_a_supervisor_needs_no_more_than_its_workers(
    node: Node, users: dict[str, Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "supervised.py").write_text(SUPERVISED)
    monkeypatch.setenv("PERDURE_REDIS_URL", users["worker"].redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", users["worker"].namespace)
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", FIRST)
    with Running("worker", "run", "supervised.py:app", "--processes", "1", cwd=tmp_path) as supervisor:
        async with App("sends", settings=users["producer"]) as app:
            await wait_until(partial(is_published, app), "a worker has registered its queue")
            handle = await app.producer.enqueue("dies_once", {"word": "alive"}, queue="supervised")
            assert await bounded(handle.result()) == "alive"
            assert "crashed" in [event.type for event in await history(handle)]
        monkeypatch.setenv("PERDURE_REDIS_URL", users["operator"].redis_url)
        found = await asyncio.to_thread(call, "worker", "list", "--json")
        assert len(found.json["supervisors"]) == 1
        assert (await asyncio.to_thread(call, "worker", "resume", "--all")).code in (0, 1)
        supervisor.send(signal.SIGTERM)
        left = await asyncio.to_thread(supervisor.wait)
    assert left.code == 0
    assert refused_but_logs(node) == []


async def letter_of(app: App, handle: Any) -> Any:
    """A producer has not the rights to read dead letters page by page, but it needs none to read one."""
    return await letter(app, handle)


def refused_but_logs(node: Node) -> list[tuple[bytes, ...]]:
    """Return what the server has refused, but the script by which a producer tries to read a log, once."""
    return [entry for entry in refused(node) if b":log:" not in entry[-1]]


def client(users: dict[str, Settings], role: str) -> redis.Redis:
    return redis.Redis.from_url(users[role].redis_url, protocol=2)


async def test_large_arguments_need_the_documented_rights(
    users: dict[str, Settings], node: Node, namespace_name: str
) -> None:
    text, role = {"text": "x" * 1_100_000}, "producer"
    async with App("roles", settings=users["worker"]) as app:
        assert await app.producer.enqueue("large", text, queue="roles")
        node.command("DEL", app.producer.namespace.partition("roles").ready)
    async with App("roles", settings=users[role]) as app:
        with pytest.raises(Refused, match=r"(?i)permission|can.t run"):
            await app.producer.enqueue("large", text, task_id="x", queue="roles")
        partition = app.producer.namespace.partition("roles")
        assert node.command("EXISTS", partition.record("x"), partition.ready) == 0, "refused before anything changes"
        upload = f"~{{{namespace_name}:*}}:upload:*"
        granted = ["+rename", "+persist", "+pexpire", "+hlen", upload]
        node.command("ACL", "SETUSER", role, *granted)
        node.command("ACL", "LOG", "RESET")
        handle = await app.producer.enqueue("large", text, task_id="x", queue="roles")
        assert node.command("PTTL", handle.partition.record("x")) == -1
    assert refused_but_logs(node) == []


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_may_wait_for_notifications_in_silence(
    users: dict[str, Settings], node: Node, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The connection of a listener sends a PING if nothing was published for a while."""
    monkeypatch.setattr(Gateway, "timings", GatewayTimings(silence=0.01))

    async def has_pinged() -> bool:
        return "cmdstat_ping" in node.info("commandstats")

    node.command("CONFIG", "RESETSTAT")
    channel = namespace.partition("default").record("x")
    async with (
        Producer(users[role].redis_url, namespace=namespace.name) as producer,
        producer.notifications.listen(channel),
    ):
        await wait_until(has_pinged, "a PING is sent")
    assert refused_but_logs(node) == []


async def test_a_producer_learns_what_the_record_says(users: dict[str, Settings]) -> None:
    async with build(users["producer"]) as app:
        handle = await app.tasks["works"].enqueue(1)
        with pytest.raises(TimeoutError, match="it is queued, and no worker of queue 'roles' has taken it yet"):
            await handle.result(timeout=0.1)


async def test_a_worker_cancels_what_a_producer_has_requested(users: dict[str, Settings], node: Node) -> None:
    async with build(users["producer"]) as app:
        tasks = app.tasks
        queued = await tasks["holds"].enqueue()
        late = await tasks["works"].options(delay=3600).enqueue(0)
        for handle, state in ((queued, State.QUEUED), (late, State.SCHEDULED)):
            assert await handle.cancel() is state
            assert await handle.cancel() is state, "a request that is repeated is one"
        async with running_worker(build(users["worker"])):
            for handle in (queued, late):
                with pytest.raises(TaskCancelled):
                    await bounded(handle.result())
            assert await late.cancel() is State.CANCELLED
            running = await tasks["holds"].enqueue()
            await wait_until(partial(is_running, running), "a worker runs it")
            assert await running.cancel() is State.RUNNING
            with pytest.raises(TaskCancelled):
                await bounded(running.result())
        assert node.command("ZCARD", late.partition.due) == 0, "the requests are removed"
        assert node.command("EXISTS", late.partition.junk) == 0


async def test_a_request_that_cannot_be_answered_keeps_no_other_waiting(users: dict[str, Settings], node: Node) -> None:
    async with build(users["producer"]) as app:
        late = await app.tasks["works"].options(delay=3600).enqueue(0)
        due = late.partition.due
        node.command("SET", late.partition.record("list"), "no hash")
        for request in (b"~cancel ", b"~cancel list 1  ", b"~cancel \xff 1", b"~cancel none 1  ", b"~cancel x"):
            node.command("ZADD", due, -1, request)
        await late.cancel()
        async with running_worker(build(users["worker"])):
            with pytest.raises(TaskCancelled):
                await bounded(late.result())
        assert node.command("ZCARD", due) == 0


async def is_published(app: App) -> bool:
    return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)


async def is_running(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.RUNNING


async def test_a_request_to_cancel_spares_the_next_task_of_the_id(users: dict[str, Settings], node: Node) -> None:
    async with build(users["producer"]) as app, build(users["operator"]) as operator:
        first = await app.tasks["works"].options(task_id="x").enqueue(1)
        await first.cancel()
        known = await operator.producer.find("x")
        assert known is not None
        assert await known.cancel() is State.CANCELLED
        node.command("DEL", first.partition.record("x"))  # as if it had expired
        again = await operator.tasks["works"].options(task_id="x").enqueue(1)
        async with running_worker(build(users["worker"])):
            assert await bounded(again.result()) == 2


async def test_each_role_may_do_its_part_in_a_session(users: dict[str, Settings], node: Node) -> None:
    class Echo(Agent[AgentState]):
        wake_when_due = True

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
            raise NotImplementedError

        async def finish(self, ctx: Context, state: AgentState) -> str:
            if state.goal == "fail":
                raise ValueError("failed")
            state.commitments.append(Commitment(what="call", due=datetime.now(UTC) + timedelta(days=1)))
            return state.goal

    def app_of(role: str) -> App:
        app = App("roles", settings=users[role])
        app.agent(Echo, retry=Retry(max_attempts=1))
        return app

    node.command("ACL", "LOG", "RESET")
    async with app_of("producer") as sender, app_of("worker") as runner, app_of("operator") as operator:
        async with running_worker(runner):
            session = sender.session(Echo, "ada")
            assert await (await session.send("one")).result(BOUND) == "one"
            with pytest.raises(TaskFailed):
                await (await session.send("fail")).result(BOUND)
            assert await (await session.send("two", skip_failed=True)).result(BOUND) == "two"
            assert (await session.state()).messages[0].content == "one"
            assert len([one async for one in session.history()]) == 5
        sweeper = SessionSweeper(
            runner.producer.gateway, runner.producer.namespace, ttl=3600.0, worker="w", lock_ttl=1.0
        )
        await sweeper.sweep()
        found, _ = await list_sessions(operator.producer.gateway, operator.producer.namespace, limit=10)
        assert [one.id for one in found] == ["ada"]
        assert await operator.session(Echo, "ada").forget()
    assert refused_but_logs(node) == []


@pytest.mark.parametrize("role", ["producer", "operator"])
async def test_each_role_reads_streams_of_tasks_and_of_turns(users: dict[str, Settings], node: Node, role: str) -> None:
    class Speaker(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
            raise NotImplementedError

        async def finish(self, ctx: Context, state: AgentState) -> str:
            await ctx.emit(state.goal)
            return state.goal

    def app_of(role: str) -> App:
        app = build(users[role])
        app.agent(Speaker)

        @app.task
        async def speaks(ctx: Context) -> None:
            await ctx.emit("hello", key="once")
            await ctx.step("one", int)

        return app

    node.command("ACL", "LOG", "RESET")
    async with app_of(role) as reader, app_of("worker") as runner, running_worker(runner):
        handle = await reader.tasks["speaks"].enqueue()
        assert [item.value async for item in handle.stream()] == ["hello", None]
        assert [item.value async for item in handle.stream(last=1, after=0)] == ["hello", None]
        events = [event.type async for event in handle.events(include="emitted")]
        assert sorted(events) == ["emitted", "step_completed"]
        turn = await reader.session(Speaker, "ada").send("one")
        assert [item.value async for item in turn.stream()] == ["one", None]
    assert refused_but_logs(node) == []
