"""Catalog of tasks: entries per app and version, lookup by name, arguments checked by their schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from perdure.queues import CatalogError, Gateway, Namespace, Producer, read_catalog
from perdure.queues.catalog import AppEntry, CatalogTask, publish_entry

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"root": {"type": "string"}, "depth": {"type": "integer"}},
    "required": ["root"],
    "additionalProperties": False,
}
REPORT = CatalogTask("report", "reports", "Write a report.", arguments=SCHEMA)
MONTH_MS = 30 * 86_400_000


async def publish(gateway: Gateway, namespace: Namespace, app: str, *tasks: CatalogTask, started: int = 1) -> None:
    await publish_entry(gateway, namespace, AppEntry(app, tasks), started)


async def test_an_entry_is_read_as_it_was_published_and_expires(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, "books", REPORT)
    (task,) = (await read_catalog(gateway, namespace)).tasks
    assert (task.name, task.queue, task.app, task.description) == ("report", "reports", "books", "Write a report.")
    assert task.arguments == SCHEMA
    assert task.result is None
    keys = [namespace.catalog, namespace.catalog_entry("books", task.version)]
    for key in keys:
        assert 0 < await gateway.command("PTTL", key) <= MONTH_MS


async def test_of_two_versions_of_an_app_the_newest_describes_a_task(gateway: Gateway, namespace: Namespace) -> None:
    old = CatalogTask("dropped", "books")
    await publish(gateway, namespace, "books", REPORT, old, started=1)
    await publish(gateway, namespace, "books", CatalogTask("report", "moved"), started=2)
    await publish(gateway, namespace, "books", REPORT, old, started=1)  # a worker of the old version refreshes it
    catalog = await read_catalog(gateway, namespace)
    assert catalog.find("report").queue == "moved"
    assert catalog.find("dropped").queue == "books"


async def test_only_the_newest_entries_are_kept(gateway: Gateway, namespace: Namespace) -> None:
    for number in range(103):
        await publish(gateway, namespace, f"app{number}", CatalogTask("t", "q"), started=number)
    assert {task.app for task in (await read_catalog(gateway, namespace)).tasks} == {f"app{n}" for n in range(3, 103)}


async def test_an_entry_that_cannot_be_read_is_left_out(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, "books", REPORT)
    for number, data in enumerate(("no JSON", "[]", '{"tasks": [{"name": "t"}]}')):
        await gateway.command("SET", namespace.catalog_entry("odd", str(number)), data, "EX", 60)
        await gateway.command("ZADD", namespace.catalog, 9, f"odd:{number}")
    assert [task.name for task in (await read_catalog(gateway, namespace)).tasks] == ["report"]


async def test_a_producer_finds_the_queue_and_checks_the_arguments(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await publish(gateway, namespace, "books", REPORT)
    handle = await producer.enqueue("report", {"root": "src"})
    many = await producer.enqueue_many("report", [{"root": "a"}, {"root": "b"}])
    streamed = [one async for one in producer.enqueue_stream("report", [{"root": "c"}])]
    assert {one.partition.queue for one in (handle, *many, *streamed)} == {"reports"}
    for wrong, problem in (
        ({"root": 5}, 'root: the value is not of type "string"'),
        ({}, '"root" is a required property'),
        ({"root": "a", "dept": 1}, "'dept' was unexpected"),
    ):
        with pytest.raises(CatalogError, match=problem):
            await producer.enqueue("report", wrong)
    with pytest.raises(CatalogError, match="root"):
        await producer.enqueue_many("report", [{"root": "a"}, {"root": 5}])
    assert await gateway.command("XLEN", namespace.partition("reports").ready) == 4


async def test_a_name_that_is_not_in_the_catalog_needs_a_queue(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    with pytest.raises(CatalogError, match="no worker has published its tasks yet; name the queue"):
        await producer.enqueue("report")
    await publish(gateway, namespace, "books", REPORT)
    with pytest.raises(CatalogError, match="did you mean 'report'"):
        await producer.enqueue("reprot", {"root": "src"})
    await publish(gateway, namespace, "films", CatalogTask("report", "films"))
    late = await producer.enqueue("report", {"root": "src"})  # read a moment ago, when one app had the task
    assert late.partition.queue == "reports"
    async with Producer(namespace=namespace.name, gateway=gateway) as other:
        with pytest.raises(
            CatalogError, match=r"in several apps.*app 'books' \(queue 'reports'\), app 'films' \(queue 'films'"
        ):
            await other.enqueue("report", {"root": "src"})
    named = await producer.enqueue("report", {"anything": 1}, queue="films")
    assert named.partition.queue == "films"


async def test_schemas_and_descriptions_are_bounded(gateway: Gateway, namespace: Namespace) -> None:
    large = {"type": "object", "description": "x" * 20_000}
    await publish(gateway, namespace, "books", CatalogTask("report", "q", "d" * 5_000, arguments=large, result=SCHEMA))
    (task,) = (await read_catalog(gateway, namespace)).tasks
    assert (task.arguments, task.result, len(task.description)) == (None, SCHEMA, 1_000)
    task.check(b'{"any": 1}')


async def plant(gateway: Gateway, namespace: Namespace, arguments: object, name: str = "report") -> None:
    """Write an entry as another program may."""
    entry = orjson.dumps({"tasks": [{"name": name, "queue": "reports", "arguments": arguments}]})
    await gateway.command("SET", namespace.catalog_entry("odd", "0123456789ab"), entry, "EX", 60)
    await gateway.command("ZADD", namespace.catalog, 9, "odd:0123456789ab")
    await gateway.command("PEXPIRE", namespace.catalog, 60_000)


async def test_a_schema_that_leaves_the_document_is_reported_and_fetches_nothing(
    gateway: Gateway, namespace: Namespace, producer: Producer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"const": "TOPSECRET"}')
    await plant(gateway, namespace, {"properties": {"x": {"$ref": f"file://{secret}"}}})
    with pytest.raises(CatalogError, match=r"leaves the document; name its queue, 'reports'") as raised:
        await producer.enqueue("report", {"x": "no"})
    assert "TOPSECRET" not in str(raised.value)
    (task,) = (await read_catalog(gateway, namespace)).tasks
    assert task.problem is not None
    assert "leaves the document" in task.problem
    await producer.enqueue("report", {"x": "no"}, queue="reports")


async def test_a_bad_task_hides_no_other_task_of_its_entry(gateway: Gateway, namespace: Namespace) -> None:
    tasks: list[object] = [{"name": 5, "queue": "q"}, "x", {"name": "t", "queue": "}{"}, {"name": "good", "queue": "q"}]
    await gateway.command(
        "SET", namespace.catalog_entry("odd", "0123456789ab"), orjson.dumps({"tasks": tasks}), "EX", 60
    )
    await gateway.command("ZADD", namespace.catalog, 9, "odd:0123456789ab")
    await gateway.command("PEXPIRE", namespace.catalog, 60_000)
    assert [task.name for task in (await read_catalog(gateway, namespace)).tasks] == ["good"]


async def test_a_worker_publishes_no_schema_that_producers_refuse(gateway: Gateway, namespace: Namespace) -> None:
    strange = {"type": "object", "$id": "https://example.com/report"}
    await publish(gateway, namespace, "books", CatalogTask("report", "q", arguments=strange, result=SCHEMA))
    (task,) = (await read_catalog(gateway, namespace)).tasks
    assert (task.arguments, task.result, task.problem) == (None, SCHEMA, None)
