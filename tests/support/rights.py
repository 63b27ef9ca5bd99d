"""The acts of the table of rights on the security page: what each is, who may do it, and how a test tries it.

`tests/system/test_rights.py` tries each act as each role on each kind of server; `tests/project/rights_page.py` writes
the table from the same list, so that page and tests cannot differ.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis
from perdure import App, Context, Producer, Settings, State, TaskHandle, Unique, Worker
from perdure.queues import Namespace, Refused
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse
from perdure.queues.keys import SessionPartition
from perdure.queues.limits.store import LimitStore
from perdure.queues.presence import WorkerInfo, announce, withdraw
from perdure.queues.store.entries import EntryChange, NamespaceEntries
from perdure.queues.store.names import StoreNames
from perdure.queues.transport.rights import ROLES

from tests.support.command_line import BOUND, call
from tests.support.servers.nodes import Node

__all__ = ["ACTS", "APP", "NAMES", "NOT_IN_6_2", "Act", "Denied", "Stage"]

NAMES: Final = tuple(role.name for role in ROLES)
"""Names of the roles, in the order of the page."""

NOT_IN_6_2: Final = "on Redis 6.2, which has no rights to read keys only, a producer may"

APP: Final = """
from perdure import Agent, AgentState, App, Context, PlanStep, Retry

app = App("stage")
scarce = app.limit("scarce", total=2, running=1, by="number")


@app.task(limits=[scarce])
async def limited(ctx: Context, number: int) -> int:
    return number


@app.task
async def adds(ctx: Context, number: int) -> int:
    return await ctx.step("add", lambda: number + 1)


@app.task(retry=Retry(max_attempts=1))
async def fails(ctx: Context) -> None:
    raise ValueError("no")


@app.task
async def reads(ctx: Context) -> str:
    (first,) = await ctx.inbox(wait=3600)
    return str(first.content)


@app.task
async def asks(ctx: Context) -> bool:
    return await ctx.wait_for("approval", bool, token=f"token {ctx.task_id}")


@app.agent(name="echo")
class Echo(Agent[AgentState]):
    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise NotImplementedError

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return state.goal
"""
"""The app of the worker process that runs meanwhile."""


class Denied(Exception):
    """The server has refused the act for lack of rights."""


@dataclass
class Stage:
    """A server with the documented users, a worker with its user, and some tasks.

    Attributes:
        done, dead, waiting: Ids of tasks in these states.
    """

    node: Node
    namespace: Namespace
    done: str = ""
    dead: str = ""
    waiting: str = ""

    def url(self, role: str) -> str:
        return f"redis://{role}:of-{role}@127.0.0.1:{self.node.port}/0"

    def settings(self, role: str) -> Settings:
        return Settings(redis_url=self.url(role), namespace=self.namespace.name)

    def raw(self, role: str, *command: str | int) -> Any:
        """Run one raw command as a role. `READY` and the like stand for keys. Raises `Denied`."""
        with redis.Redis.from_url(self.url(role), protocol=2) as client:
            try:
                return client.execute_command(
                    *(self.keys.get(word, word) if isinstance(word, str) else word for word in command)
                )
            except redis.exceptions.NoPermissionError as error:
                raise Denied(str(error)) from error
            except redis.exceptions.ResponseError:  # it was executed, and failed for another reason
                return None

    @property
    def keys(self) -> dict[str, str]:
        partition = self.namespace.partition("stage")
        return {
            "READY": partition.ready,
            "RECORD": partition.record("raw"),
            "STEPS": partition.steps("raw"),
            "LOG": partition.log("raw"),
            "INBOX": partition.inbox("raw"),
            "CONTROL": partition.control("raw"),
            "DEAD": partition.dead,
            "DUE": partition.due,
            "ROUTES": self.namespace.queues,
            "DEPLOYMENT": self.namespace.deployment,
            "CATALOG": self.namespace.catalog,
            "SHARED": self.namespace.config,
            "WORKERS": self.namespace.workers,
            "IDENTITY": self.namespace.identity("echo"),
            "LIMIT": self.namespace.limits.limit("scarce"),
            "HOLDERS": self.namespace.limits.holders("raw"),
            "SET-LIMIT": self.namespace.limits.control("raw"),
            "SESSION": SessionPartition(self.namespace.name, 0).session("0" * 32),
        }

    def cli(self, *args: str) -> str:
        """Run one command; the environment names the server and the role. Raises `Denied`."""
        answer = call(*args)
        if answer.code:
            if "permission" in answer.err or "can't run" in answer.err:
                raise Denied(answer.err)
            raise AssertionError(f"{args}: {answer.code}: {answer.err}")
        return answer.out

    def api(self, role: str, work: Callable[[Producer], Awaitable[Any]]) -> Any:
        """Run a coroutine with the producer of a role. Raises `Denied`."""

        async def run() -> Any:
            async with Producer(self.url(role), namespace=self.namespace.name) as producer:
                return await asyncio.wait_for(work(producer), BOUND)

        try:
            return asyncio.run(run())
        except Refused as error:
            if "permission" not in str(error) and "can't run" not in str(error):
                raise
            raise Denied(str(error)) from error


@dataclass(frozen=True)
class Act:
    """A row of the table.

    Attributes:
        text: The row's first cell.
        roles: Names of the roles that may do it.
        attempt: Does it as a role. Raises `Denied` if the server refuses it.
        until_7: Whether a producer may do it on Redis 6.2.
    """

    text: str
    roles: frozenset[str]
    attempt: Callable[[Stage, str], object]
    until_7: bool = False

    def allows(self, role: str, version: str) -> bool:
        return role in self.roles or (self.until_7 and role == "producer" and version.startswith("6."))


P, V, W, O = NAMES  # noqa: E741
ALL: Final = frozenset(NAMES)
SENDERS: Final = frozenset((P, W, O))
INSIDERS: Final = frozenset((V, W, O))
WRITERS: Final = frozenset((W, O))
NONE: Final[frozenset[str]] = frozenset()


def _raw(*commands: tuple[str | int, ...]) -> Callable[[Stage, str], object]:
    """Return an attempt of raw commands: all are refused, or none."""

    def attempt(stage: Stage, role: str) -> None:
        refused = []
        for command in commands:
            try:
                stage.raw(role, *command)
            except Denied as error:
                refused.append((command, error))
        if refused:
            assert len(refused) == len(commands), f"only {[command for command, _ in refused]} were refused"
            raise refused[0][1]

    return attempt


def _enqueue(stage: Stage, role: str) -> None:
    """Enqueue by name, typed, keyed, delayed, unique, limited, as a batch; through the API and the command line."""

    async def work(producer: Producer) -> None:
        by_name = await producer.enqueue("adds", {"number": 1})
        assert await by_name.result(BOUND) == 2
        keyed = await producer.enqueue("adds", {"number": 2}, queue="stage", key="k", delay=0.01)
        assert await keyed.result(BOUND) == 3
        unique = Unique("while_queued", by="number", keep="last")
        first, last = [await producer.enqueue("adds", {"number": 4}, delay=600, unique=unique) for _ in range(2)]
        while (await first.status()) is not State.CANCELLED:  # noqa: ASYNC110 - a worker does it for a producer
            await asyncio.sleep(0.02)
        assert (await producer.enqueue("adds", {"number": 4}, unique=Unique(by="number"))).id == last.id
        await last.cancel()
        many = await producer.enqueue_many("adds", [{"number": number} for number in range(3)])
        assert [await handle.result(BOUND) for handle in many] == [1, 2, 3]
        scarce = await producer.enqueue_many("limited", [{"number": number % 2} for number in range(4)])
        assert [await handle.result(BOUND) for handle in scarce] == [0, 1, 0, 1]

    stage.api(role, work)
    for options in ((), ("--queue", "stage")):
        task_id = stage.cli("enqueue", "adds", "--args", '{"number": 5}', *options).strip()
        assert stage.cli("task", "result", task_id, "--timeout", "30").strip() == "6"


def _drop(stage: Stage, role: str) -> None:
    """Make a task and a message of files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {
            "stage/.taken/task.json": f'{{"task": "adds", "args": {{"number": 5}}, "id": "dropped-{role}"}}',
            f"agents/echo/of-{role}/.taken/hello.txt": "hello",
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text(text)
        stage.cli("drop", name, "--once")
    assert stage.cli("task", "result", f"dropped-{role}", "--timeout", "30").strip() == "6"


def _follow(stage: Stage, role: str) -> None:
    """Wait for a result, find and follow a task: `result`, `show`, `why`, `watch`, `events`."""

    async def work(producer: Producer) -> None:
        handle = await producer.find(stage.done)
        assert handle is not None
        assert await handle.result(BOUND) == 2
        assert await handle.status() is State.SUCCEEDED
        assert (await handle.explain()).task == "adds"
        assert [event async for event in handle.events()]

    stage.api(role, work)
    assert stage.cli("task", "result", stage.done).strip() == "2"
    for command in ("show", "why", "watch", "events"):
        assert stage.cli("task", command, stage.done)


def _send(stage: Stage, role: str) -> None:
    """Send messages to tasks that wait for them."""

    async def work(producer: Producer) -> None:
        handle = await waiting(producer)
        await handle.send("hello")
        assert await handle.result(BOUND) == "hello"

    async def waiting(producer: Producer) -> TaskHandle[Any]:
        handle = await producer.enqueue("reads", queue="stage")
        while (await handle.status()) is not State.WAITING:  # noqa: ASYNC110 - a process of its own
            await asyncio.sleep(0.02)
        return handle

    if role == V:
        stage.api(role, lambda producer: producer.send_message(stage.waiting, "hello"))
    stage.api(role, work)
    for options in ((), ("--queue", "stage")):
        handle = stage.api(O, waiting)
        assert stage.cli("task", "send", handle.id, "yes", *options).strip() == handle.id
        assert stage.cli("task", "result", handle.id, "--timeout", "30").strip() == '"yes"'


def _answer(stage: Stage, role: str) -> None:
    """Answer questions by name, by token and through the command line."""

    async def asked(producer: Producer) -> TaskHandle[Any]:
        handle = await producer.enqueue("asks", queue="stage")
        while (await handle.status()) is not State.WAITING:  # noqa: ASYNC110 - a process of its own
            await asyncio.sleep(0.02)
        return handle

    async def by_name(producer: Producer) -> None:
        handle = await asked(producer)
        assert [wait.id for wait in await handle.waits()] == ["approval"]
        await handle.answer("approval", True)
        assert await handle.result(BOUND) is True

    async def by_token(producer: Producer) -> None:
        handle = await producer.find(waiting.id)
        assert handle is not None
        await producer.answer(f"token {waiting.id}", False)
        assert await handle.result(BOUND) is False

    if role == V:
        late = stage.api(O, asked)
        try:
            stage.cli("task", "answer", late.id, "approval", "true")
        finally:
            stage.api(O, lambda producer: producer.answer(f"token {late.id}", True))
    waiting = stage.api(O, asked)
    stage.api(role, by_token)
    stage.api(role, by_name)
    handle = stage.api(O, asked)
    assert stage.cli("task", "answer", handle.id, "approval", "true").strip() == handle.id


def _update(stage: Stage, role: str) -> None:
    """Set values of a task that waits, through the API and the command line."""

    async def sets(producer: Producer) -> None:
        handle = await producer.find(stage.waiting)
        assert handle is not None
        await handle.update("speed", role)
        assert (await handle.values())["speed"] == role

    stage.api(role, sets)
    assert stage.cli("task", "update", stage.waiting, "speed", "7").strip() == stage.waiting


def _read_values(stage: Stage, role: str) -> None:
    async def reads(producer: Producer) -> None:
        handle = await producer.find(stage.waiting)
        assert handle is not None
        await handle.values()

    stage.api(role, reads)
    stage.cli("task", "values", stage.waiting)


def _cancel(stage: Stage, role: str) -> None:
    """Cancel tasks that wait, through the API and the command line."""

    async def put_off(producer: Producer) -> TaskHandle[Any]:
        return await producer.enqueue("adds", {"number": 1}, queue="stage", delay=3600)

    async def ends(producer: Producer) -> None:
        for task_id in (first.id, second.id):
            handle = await producer.find(task_id)
            assert handle is not None
            while (await handle.status()) is not State.CANCELLED:  # noqa: ASYNC110 - a process of its own
                await asyncio.sleep(0.02)

    first, second = stage.api(O, put_off), stage.api(O, put_off)

    async def cancel(producer: Producer) -> None:
        handle = await producer.find(first.id)
        assert handle is not None
        await handle.cancel()

    stage.api(role, cancel)
    assert stage.cli("task", "cancel", second.id).strip() == second.id
    stage.api(O, ends)


def _session(stage: Stage, role: str) -> None:
    answer = stage.cli("session", "send", "echo", f"of-{role}", f"hello from {role}", "--queue", "stage")
    assert f"hello from {role}" in answer


def _read_session(stage: Stage, role: str) -> None:
    assert "hello" in stage.cli("session", "show", "echo", "ada")


def _runs(stage: Stage, role: str) -> None:
    async def work() -> None:
        async with App("other", settings=stage.settings(role)) as app:

            @app.task
            async def one(ctx: Context) -> int:
                return 1

            async with Producer(stage.url(O), namespace=stage.namespace.name) as producer:
                handle = await producer.enqueue("one", queue="other")
                async with Worker(app) as worker:
                    await worker.run(burst=True)
                assert await handle.status() is State.SUCCEEDED

    try:
        asyncio.run(asyncio.wait_for(work(), BOUND))
    except* Refused as found:
        refused = found
    else:
        return
    raise Denied(str(refused)) from refused


def _limit(stage: Stage, role: str) -> None:
    """Change, hold and release a limit through the command line, and hold it as an app does."""

    async def hold(producer: Producer) -> None:
        assert await LimitStore(producer.gateway, producer.namespace).hold("scarce", 0.01) > 0

    stage.cli("limit", "set", "scarce", "total=3")
    stage.cli("limit", "set", "scarce", "--reset")
    stage.cli("limit", "hold", "scarce", "60")
    stage.cli("limit", "release", "scarce")
    stage.api(role, hold)


def _schedule(stage: Stage, role: str) -> None:
    """Add, change, fire and remove a schedule through the command line."""
    name = f"of-{role}"
    stage.cli("schedule", "add", name, "adds", "--every", "1h", "--args", '{"number": 1}')
    stage.cli("schedule", "edit", name, "--every", "2h")
    stage.cli("schedule", "pause", name)
    stage.cli("schedule", "resume", name)
    stage.cli("schedule", "run", name)
    stage.cli("schedule", "remove", name)


def _pause(stage: Stage, role: str) -> None:
    """Pause a queue and tasks that no other act uses, and resume them."""
    for target in ((f"of-{role}",), ("--task", "none", "--where", f"role={role}")):
        stage.cli("queue", "pause", *target)
        stage.cli("queue", "resume", *target)


def _drain(stage: Stage, role: str) -> None:
    """Drain a worker that does nothing through the command line."""
    info = WorkerInfo(f"of-{role}", "stage", "host", 1, "0", ("none",), concurrency=1, in_flight=0, started=0)
    stage.api("worker", lambda producer: announce(producer.gateway, producer.namespace, info, 60.0))
    try:
        stage.cli("worker", "drain", info.id)
    finally:
        stage.api("worker", lambda producer: withdraw(producer.gateway, producer.namespace, info.id))


def _lists(*commands: tuple[str, ...]) -> Callable[[Stage, str], object]:
    def attempt(stage: Stage, role: str) -> None:
        for command in commands:
            stage.cli(*(stage.dead if word == "DEAD" else stage.done if word == "DONE" else word for word in command))

    return attempt


async def _charge(producer: Producer) -> None:
    use = BudgetUse("raw", "", {"tokens": 100})
    await BudgetStore(producer.gateway, producer.namespace).charge([use], "nonce", {"tokens": 1})


def _show_budget(stage: Stage, role: str) -> None:
    stage.api(O, _charge)
    stage.cli("budget", "list")
    stage.cli("budget", "show", "raw")


def _budget(stage: Stage, role: str) -> None:
    stage.api(O, _charge)
    stage.cli("budget", "raise", "raw", "--tokens", "1")
    stage.cli("budget", "reset", "raw", "--yes")


async def _store(producer: Producer) -> None:
    names = StoreNames(producer.gateway, producer.namespace)
    notes = NamespaceEntries(producer.gateway, producer.namespace, ("notes",), names, payload_limit=9, limit=99)
    await notes.write(
        [EntryChange("put", "a", ttl_ms=60_000, data=b'"large value"'), EntryChange("put", "b", data=b"1")]
    )


def _read_store(stage: Stage, role: str) -> None:
    stage.api(O, _store)
    stage.cli("store", "list")
    stage.cli("store", "list", "notes")
    stage.cli("store", "show", "notes", "a")


def _change_store(stage: Stage, role: str) -> None:
    stage.api(role, _store)
    stage.cli("store", "delete", "notes", "--yes")


def _job(stage: Stage, role: str) -> None:
    """Cancel tasks of a queue as a job through the command line, and let a second job be run later."""
    stage.api(O, _waiting)
    stage.cli("queue", "purge", "stage", "--task", "waits", "--yes", "--job", "raw")
    stage.cli("job", "remove", "raw")
    stage.cli("dlq", "replay", "--all", "--task", "nothing", "--job", "raw2", "--detach")
    stage.cli("job", "abort", "raw2")
    stage.cli("job", "remove", "raw2")


async def _waiting(producer: Producer) -> None:
    await producer.enqueue("waits", queue="stage", delay=3600)


def _replay(stage: Stage, role: str) -> None:
    async def fail(producer: Producer) -> str:
        handle = await producer.enqueue("fails", queue="stage")
        while (await handle.status()) is not State.DEAD:  # noqa: ASYNC110 - a process of its own
            await asyncio.sleep(0.02)
        return handle.id

    stage.cli("dlq", "replay", stage.api(O, fail))
    stage.cli("dlq", "purge", stage.api(O, fail))


def _subscribe(pattern: str) -> Callable[[Stage, str], object]:
    return _raw(("SUBSCRIBE", pattern))


ACTS: Final = (
    Act("enqueue tasks: `enqueue`, `enqueue_many`, `perdure enqueue`, with and without `--queue`", SENDERS, _enqueue),
    Act("make tasks and messages of files: `perdure drop`", SENDERS, _drop),
    Act(
        "find and follow tasks: `find`, `result`, `status`, `events`, `perdure task result`, `show`, `why`, `watch`",
        ALL,
        _follow,
    ),
    Act("send messages to tasks: `handle.send`, `perdure task send`, with and without `--queue`", SENDERS, _send),
    Act("set values of tasks: `handle.update`, `perdure task update`", SENDERS, _update),
    Act("read values of tasks: `handle.values`, `perdure task values`", ALL, _read_values),
    Act(
        "cancel tasks: `handle.cancel`, `perdure task cancel` (a producer requests it, a worker does it)",
        SENDERS,
        _cancel,
    ),
    Act(
        "answer questions of tasks: `handle.answer`, `app.answer` by token, `handle.waits`, `perdure task answer`",
        SENDERS,
        _answer,
    ),
    Act("list the questions of all tasks: `perdure task waiting`", INSIDERS, _lists(("task", "waiting"))),
    Act("talk in sessions: `session.send`, `perdure session send`", SENDERS, _session),
    Act("read sessions: `perdure session show`", ALL, _read_session),
    Act(
        "list tasks, queues and workers: `perdure task list`, `queue list`, `queue metrics`, `worker list`",
        INSIDERS,
        _lists(("task", "list"), ("queue", "list"), ("queue", "metrics"), ("worker", "list")),
    ),
    Act(
        "read dead letters: `perdure dlq list`, `groups`, `show`, `export`",
        ALL,
        _lists(("dlq", "list"), ("dlq", "groups"), ("dlq", "show", "DEAD"), ("dlq", "export")),
    ),
    Act("replay and purge dead letters: `perdure dlq replay`, `purge`", WRITERS, _replay),
    Act("load scripts, register queues: `perdure server prepare`", WRITERS, _lists(("server", "prepare", "stage"))),
    Act(
        "set partitions and shared settings: `perdure queue partitions`, `config set`",
        WRITERS,
        _lists(("queue", "partitions", "spare", "2"), ("config", "set", "result_ttl", "86400")),
    ),
    Act("list limits: `perdure limit list`, `show`", INSIDERS, _lists(("limit", "list"), ("limit", "show", "scarce"))),
    Act("change limits: `limit.hold`, `perdure limit set`, `hold`, `release`", WRITERS, _limit),
    Act("list budgets: `perdure budget list`, `show`", INSIDERS, _show_budget),
    Act("change budgets: `perdure budget raise`, `reset`", WRITERS, _budget),
    Act("read the key-value store: `app.store(...).get`, `list`, `perdure store list`, `show`", INSIDERS, _read_store),
    Act("change the key-value store: `app.store(...).put`, `clear`, `perdure store delete`", WRITERS, _change_store),
    Act("list schedules: `perdure schedule list`", INSIDERS, _lists(("schedule", "list"))),
    Act("change schedules: `perdure schedule add`, `edit`, `pause`, `resume`, `run`, `remove`", WRITERS, _schedule),
    Act("pause queues and tasks: `perdure queue pause`, `resume`", WRITERS, _pause),
    Act("drain workers: `perdure worker drain`", WRITERS, _drain),
    Act("list jobs: `perdure job list`", INSIDERS, _lists(("job", "list"))),
    Act(
        "act on many tasks: `perdure queue purge`, `task cancel --all`, `dlq replay --all`, `job run`, `abort`",
        WRITERS,
        _job,
    ),
    Act("run tasks: `perdure worker run`", frozenset((W,)), _runs),
    Act(
        "take messages from a queue: `XREADGROUP`, `XCLAIM`, `XAUTOCLAIM`",
        frozenset((W,)),
        _raw(
            ("XREADGROUP", "GROUP", "none", "me", "STREAMS", "READY", ">"),
            ("XCLAIM", "READY", "none", "me", 0, "1-1"),
            ("XAUTOCLAIM", "READY", "none", "me", 0, "0-0"),
        ),
    ),
    Act(
        "remove messages from a queue: `XDEL`, `XACK`, `XTRIM`",
        WRITERS,
        _raw(("XDEL", "READY", "1-1"), ("XACK", "READY", "none", "1-1"), ("XTRIM", "READY", "MAXLEN", 100000)),
    ),
    Act("delete keys, give them a TTL: `DEL`, `PEXPIRE`", WRITERS, _raw(("DEL", "RECORD"), ("PEXPIRE", "RECORD", 1))),
    Act(
        "write records and inboxes of tasks, and sessions, without a script",
        SENDERS,
        _raw(("HSET", "RECORD", "x", 1), ("HSET", "INBOX", "x", 1), ("HSET", "SESSION", "x", 1)),
    ),
    Act("read checkpoints", INSIDERS, _raw(("HGET", "STEPS", "d:x"), ("HKEYS", "STEPS"))),
    Act("write checkpoints", WRITERS, _raw(("HSET", "STEPS", "d:x", 1), ("HDEL", "STEPS", "d:x"))),
    Act(
        "write what operators ask of tasks (`control:*`), shared settings and identities",
        WRITERS,
        _raw(("HSET", "CONTROL", "x", 1), ("HSET", "SHARED", "x", 1), ("HSET", "IDENTITY", "x", 1)),
    ),
    Act("read event logs", ALL, _raw(("XRANGE", "LOG", "-", "+"))),
    Act("write event logs", WRITERS, _raw(("XADD", "LOG", "*", "x", 1)), until_7=True),
    Act("write dead letters", WRITERS, _raw(("XADD", "DEAD", "MAXLEN", 100000, "*", "x", 1)), until_7=True),
    Act(
        "read routes, the catalog and the format of the data",
        ALL,
        _raw(("HGETALL", "ROUTES"), ("HGET", "DEPLOYMENT", "format"), ("ZRANGE", "CATALOG", 0, -1)),
    ),
    Act(
        "write routes, the catalog and the format of the data",
        WRITERS,
        _raw(("HSET", "ROUTES", "x", 1), ("HSET", "DEPLOYMENT", "x", 1), ("ZADD", "CATALOG", 1, "x")),
        until_7=True,
    ),
    Act(
        "read the registries of workers",
        INSIDERS,
        _raw(
            ("ZRANGE", "WORKERS", 0, -1),
        ),
    ),
    Act(
        "read limits, and what holds them",
        INSIDERS,
        _raw(("HGETALL", "LIMIT"), ("HGETALL", "SET-LIMIT"), ("ZRANGE", "HOLDERS", 0, -1)),
    ),
    Act(
        "write limits, and what holds them",
        WRITERS,
        _raw(("HDEL", "LIMIT", "x"), ("HDEL", "SET-LIMIT", "x"), ("ZREM", "HOLDERS", "x")),
    ),
    Act("write the registries of workers", WRITERS, _raw(("ZADD", "WORKERS", 1, "x"), ("ZREM", "WORKERS", "x"))),
    Act("list all keys: `SCAN`", frozenset((V, O)), _raw(("SCAN", 0))),
    Act("subscribe to channels of the namespace", ALL, _subscribe("{perdure:stage:0}:record:raw")),
    Act("publish on channels of the namespace", SENDERS, _raw(("PUBLISH", "{perdure:stage:0}:record:raw", "x"))),
    Act("call scripts that are loaded: `EVALSHA`", ALL, _raw(("EVALSHA", "0" * 40, 0))),
    Act("load scripts: `SCRIPT LOAD`", WRITERS, _raw(("SCRIPT", "LOAD", "return 1"), ("SCRIPT", "EXISTS", "0" * 40))),
    Act(
        "run scripts of their own: `EVAL`; `SCRIPT KILL`, `SCRIPT FLUSH`, `FUNCTION`",
        NONE,
        _raw(("EVAL", "return 1", 0), ("SCRIPT", "KILL"), ("SCRIPT", "FLUSH")),
    ),
    Act(
        "read or write keys of another namespace, or of another program",
        NONE,
        _raw(
            ("HGETALL", "{elsewhere:default:0}:record:x"),
            ("HSET", "{elsewhere:default:0}:record:x", "a", 1),
            ("HGET", "another:program", "a"),
        ),
    ),
    Act(
        "publish or subscribe outside of the namespace",
        NONE,
        _raw(("PUBLISH", "{elsewhere:default:0}:record:x", "x"), ("SUBSCRIBE", "another:channel")),
    ),
    Act(
        "administer the server: `CONFIG`, `FLUSHALL`, `FLUSHDB`, `KEYS`, `SHUTDOWN`, `ACL`, `CLIENT LIST`, "
        "`CLIENT KILL`, `MONITOR`, `SAVE`, `RESTORE`, `MIGRATE`, `REPLICAOF`",
        NONE,
        _raw(
            ("CONFIG", "GET", "*"),
            ("CONFIG", "SET", "maxmemory", 1),
            ("FLUSHALL",),
            ("FLUSHDB",),
            ("KEYS", "*"),
            ("SHUTDOWN", "NOSAVE"),
            ("ACL", "LIST"),
            ("CLIENT", "LIST"),
            ("CLIENT", "KILL", "TYPE", "normal"),
            ("MONITOR",),
            ("SAVE",),
            ("RESTORE", "x", 0, "x"),
            ("MIGRATE", "127.0.0.1", 1, "x", 0, 1),
            ("REPLICAOF", "NO", "ONE"),
        ),
    ),
)
"""Rows of the table, in its order."""
