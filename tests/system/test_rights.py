"""The table of rights on the security page: each act as each role, on each kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from perdure import Producer, State
from perdure.queues import Namespace

from tests.conftest import ON_SERVERS
from tests.support.acl import create_user
from tests.support.command_line import BOUND, Running, call
from tests.support.rights import ACTS, APP, NAMES, Act, Denied, Stage
from tests.support.servers import find_program
from tests.support.servers.nodes import Node, free_ports
from tests.topology.test_managed_servers import refused

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture(scope="module", params=ON_SERVERS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with the users of the page, a worker with its user, and tasks."""
    program = find_program(request.param)
    assert program is not None
    folder = tmp_path_factory.mktemp("stage")
    (folder / "stage.py").write_text(APP)
    (port,) = free_ports(1)
    node = Node(program, port, ["--port", str(port), "--bind", "127.0.0.1", "--save", ""], {})
    node.start()
    try:
        for role in NAMES:
            create_user(node, role, "perdure")
        found = Stage(node, Namespace("perdure"))
        options = ("--redis-url", found.url("worker"), "--no-supervisor")
        with Running("worker", "run", "stage.py:app", *options, cwd=folder):
            asyncio.run(prepare(found))
            yield found
    finally:
        node.stop()


async def prepare(stage: Stage) -> None:
    """Enqueue tasks, and wait until they are in their states."""
    async with Producer(stage.url("operator"), namespace=stage.namespace.name) as producer:
        done = await producer.enqueue("adds", {"number": 1}, queue="stage")
        dead = await producer.enqueue("fails", queue="stage")
        waiting = await producer.enqueue("reads", queue="stage")
        assert await done.result(BOUND) == 2
        for handle, state in ((dead, State.DEAD), (waiting, State.WAITING)):
            async with asyncio.timeout(BOUND):
                while (await handle.status()) is not state:  # noqa: ASYNC110 - a process of its own
                    await asyncio.sleep(0.02)
        stage.done, stage.dead, stage.waiting = done.id, dead.id, waiting.id
    identity = b'{"role": "a clerk"}'
    for args in (("session", "send", "echo", "ada", "hello", "--queue", "stage"), ("identity", "set", "echo", "-")):
        answer = await asyncio.to_thread(call, *args, "--redis-url", stage.url("operator"), stdin=identity)
        assert answer.code == 0, answer.err


@pytest.fixture
def as_role(stage: Stage, monkeypatch: pytest.MonkeyPatch, role: str) -> Stage:
    """The stage, with an environment in which the command line is the role."""
    monkeypatch.setenv("PERDURE_REDIS_URL", stage.url(role))
    monkeypatch.setenv("PERDURE_NAMESPACE", stage.namespace.name)
    return stage


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.text.partition(":")[0])
def test_a_role_may_do_what_the_table_says_and_no_more(as_role: Stage, role: str, act: Act) -> None:
    version = as_role.node.info("server")["redis_version"]
    try:
        act.attempt(as_role, role)
    except Denied as error:
        assert not act.allows(role, version), f"{role}: {error}"
    else:
        assert act.allows(role, version), f"{role} could do it"


READS = (
    *(("task", "list"), ("task", "list", "--state", "dead"), ("task", "catalog"), ("task", "versions")),
    *(("task", command, "DONE") for command in ("show", "why", "result", "events", "state", "handoff", "artifact")),
    *(("task", "show", "DEAD"), ("task", "why", "DEAD"), ("task", "inbox", "WAITING"), ("task", "why", "WAITING")),
    *(("task", "watch", "DONE"), ("task", "events", "--stats"), ("queue", "list"), ("queue", "metrics")),
    *(("worker", "list"), ("dlq", "list"), ("dlq", "show", "DEAD"), ("dlq", "export"), ("top", "--json")),
    *(("session", "list"), ("session", "show", "echo", "ada"), ("session", "export", "echo", "ada")),
    *(("limit", "list"), ("limit", "show", "scarce")),
    *(("config", "show"), ("identity", "show", "echo"), ("identity", "log", "echo"), ("artifacts", "list")),
)
"""Every command that only reads."""


@pytest.mark.parametrize("role", ["viewer"])
@pytest.mark.parametrize("command", READS, ids=" ".join)
def test_a_viewer_reads_everything_and_writes_nothing(as_role: Stage, command: tuple[str, ...]) -> None:
    stage = as_role
    stage.node.command("ACL", "LOG", "RESET")
    ids = {"DONE": stage.done, "DEAD": stage.dead, "WAITING": stage.waiting}
    answer = call(*(ids.get(word, word) for word in command))
    assert (answer.code, "Traceback" in answer.err) == (0, False), answer.err
    assert refused(stage.node) == []
