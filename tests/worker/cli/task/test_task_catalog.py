"""`perdure task catalog` and `perdure enqueue` by a name that workers have published."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import anyio
import pytest
import redis
from perdure import App, Context, Settings
from perdure.queues import Namespace

from tests.support.command_line import call
from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


async def report(ctx: Context, root: str, depth: int = 1) -> list[str]:
    """Write a report.

    More about it.
    """
    return [root] * depth


@pytest.fixture
def deploy(settings: Settings, environment: None) -> Callable[[str], None]:
    """Function that runs a worker of an app until its tasks are published."""

    async def run(name: str) -> None:
        app = App(name, settings=settings)
        app.task(report)
        async with running_worker(app):

            async def published() -> bool:
                index = app.producer.namespace.catalog
                found = await app.producer.gateway.command("ZRANGE", index, 0, -1)
                return any(member.startswith(name.encode()) for member in found)

            await wait_until(published, "the worker has published its tasks")

    return lambda name: anyio.run(run, name)


def test_the_catalog_stays_after_the_last_worker(deploy: Callable[[str], None]) -> None:
    assert "no worker has published tasks" in call("task", "catalog").err
    assert call("task", "catalog", "report").code == 1
    deploy("books")
    assert call("worker", "list", "--json").json["workers"] == []
    (task,) = call("task", "catalog", "report", "--json").json
    assert (task["name"], task["app"], task["queue"]) == ("report", "books", "books")
    assert task["arguments"]["properties"]["depth"]["type"] == "integer"
    assert task["result"] == {"items": {"type": "string"}, "type": "array"}
    shown = call("task", "catalog").out
    for text in ("report", "books", "root, [depth]", "Write a report."):
        assert text in shown


def test_enqueue_finds_the_queue_and_checks_the_arguments(deploy: Callable[[str], None]) -> None:
    deploy("books")
    answer = call("enqueue", "report", "--args", '{"root": "src"}')
    assert answer.code == 0
    assert "enqueued report on queue books" in answer.err
    assert "no worker serves queue 'books' now; start one: perdure worker run APP --queues books" in answer.err
    wrong = call("enqueue", "report", "--args", '{"root": 5}')
    assert (wrong.code, wrong.out) == (2, "")
    assert 'root: the value is not of type "string"' in wrong.err
    typo = call("enqueue", "reprot", "--args", '{"root": "src"}')
    assert (typo.code, typo.out) == (2, "")
    assert "did you mean 'report'?" in typo.err
    listed = call("enqueue", "report", "--queue", "books", "--args", '{"rot": "src"}')
    assert listed.code == 2
    assert "'rot' was unexpected" in listed.err
    assert call("enqueue", "report", "--queue", "elsewhere", "--args", '{"rot": "src"}').code == 0


def test_a_name_in_two_apps_asks_which(deploy: Callable[[str], None]) -> None:
    deploy("books")
    deploy("films")
    answer = call("enqueue", "report", "--args", '{"root": "src"}')
    assert (answer.code, answer.out) == (2, "")
    assert "app 'books' (queue 'books'), app 'films' (queue 'films')" in answer.err
    assert call("enqueue", "report", "--queue", "films", "--args", '{"root": "src"}').code == 0


def test_lines_of_a_file_are_checked_too(deploy: Callable[[str], None]) -> None:
    deploy("books")
    lines = [{"args": {"root": "a"}}, {"args": {"root": 5}}]
    answer = call("enqueue", "report", "--file", "-", stdin="\n".join(map(json.dumps, lines)).encode())
    assert (answer.code, answer.out) == (2, "")
    assert "line 2: task 'report': root: the value is not of type \"string\"" in answer.err
    assert call("enqueue", "report", "--file", "-", stdin=json.dumps(lines[0]).encode()).code == 0


def plant(settings: Settings, schema: object) -> None:
    """Write a catalog entry of the task `report` as another program may."""
    names = Namespace(settings.namespace)
    entry = {"tasks": [{"name": "report", "queue": "books", "arguments": {"properties": {"x": schema}}}]}
    with redis.Redis.from_url(settings.redis_url) as client:
        client.set(names.catalog_entry("odd", "0123456789ab"), json.dumps(entry), ex=60)
        client.zadd(names.catalog, {"odd:0123456789ab": 1})
        client.pexpire(names.catalog, 60_000)


def test_no_schema_connects_anywhere_or_opens_a_file(deploy: Callable[[str], None], settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        port = silent.getsockname()[1]
        for reference in (f"http://127.0.0.1:{port}/hang", "file:///etc/hostname"):
            plant(settings, {"$ref": reference})
            refused = call("enqueue", "report", "--args", '{"x": "no"}')
            assert refused.code == 2
            assert "leaves the document" in refused.err
            assert "name its queue, 'books', to enqueue the task unchecked" in refused.err
            (task,) = call("task", "catalog", "--json").json
            assert "leaves the document" in task["problem"]
            assert "(unusable schema)" in call("task", "catalog").out
            assert call("enqueue", "report", "--args", '{"x": "no"}', "--queue", "books").code == 0
        with pytest.raises(BlockingIOError):
            silent.accept()
