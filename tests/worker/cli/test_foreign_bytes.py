"""Lists of the command line beside bytes of another program: rows that cannot be read are rows with their problem."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import anyio.to_thread
import pytest
import redis
from perdure import Settings
from perdure.queues import Address, Gateway, Namespace, Partition
from perdure.queues.junk import set_aside
from perdure.queues.keys import SessionPartition
from perdure.queues.sessions.record import SessionAddress

from tests.support.command_line import call

pytestmark = pytest.mark.integration

MEMBERS = {
    "not UTF-8": b"\xff",
    "empty": b"",
    "NUL": b"\x00",
    "1 MB": b"a" * 1_000_000,
    "a name of JavaScript": b"__proto__",
    "an id of no task": b"0199aaaa-0000-7000-8000-000000000000",
}
BYTES = [pytest.param(member, id=name) for name, member in MEMBERS.items()]
GROUPS = ("task", "dlq", "session", "worker", "queue")
DIGEST = "0000" + "a" * 28


@pytest.fixture
def server(settings: Settings, environment: None) -> Iterator[redis.Redis]:
    """A client beside one task of the queue `default`; the keys of the namespace are deleted in the end."""
    assert call("enqueue", "sound", "--queue", "default", "--id", "known").code == 0
    with redis.Redis.from_url(settings.redis_url) as client:
        yield client
        for key in client.scan_iter(f"{{{settings.namespace}*"):
            client.delete(key)


def place(settings: Settings) -> Partition:
    return Namespace(settings.namespace).partition("default")


def sessions(settings: Settings) -> SessionPartition:
    return Namespace(settings.namespace).session_partitions[0]


def check_lists() -> dict[str, str]:
    """Print each list as a table and as JSON; return the tables with their notes."""
    shown = {}
    for group in GROUPS:
        table, data = call(group, "list"), call(group, "list", "--json")
        assert (table.code, data.code) == (0, 0), table.err + data.err
        assert "Traceback" not in table.err + data.err
        assert data.json is not None
        shown[group] = table.out + table.err
    assert "known" in shown["task"]
    assert "default" in shown["queue"]
    return shown


@pytest.mark.parametrize("member", BYTES)
def test_lists_print_beside_foreign_members(server: redis.Redis, settings: Settings, member: bytes) -> None:
    names, at, group = Namespace(settings.namespace), place(settings), sessions(settings)
    server.hset(names.queues, member, member)
    for key in (at.due, at.timeline, group.timeline, group.due, names.workers, names.supervisors, names.paused):
        server.zadd(key, {member: 5e12})
        server.zadd(key, {member + b"\xfe": float("inf")})
    server.zadd(names.catalog, {member: 5e12})
    server.hset(group.session(DIGEST), mapping={b"born": member, b"agent": member, b"id": member})
    server.zadd(group.timeline, {DIGEST: 5e12})
    server.hset(names.worker("w"), mapping={b"id": b"w", member: member, b"queues": member})
    server.zadd(names.workers, {"w": 1})
    server.hset(names.supervisor("s"), mapping={b"told": member, b"seen": member})
    server.zadd(names.supervisors, {"s": 1})
    server.xgroup_create(at.ready, "workers", "0")
    server.execute_command("XREADGROUP", "GROUP", "workers", member, "COUNT", 1, "STREAMS", at.ready, ">")
    server.xadd(at.dead, {b"id": member, b"env": member, b"at": member})
    shown = check_lists()
    assert "damaged" in shown["dlq"]
    (row,) = call("session", "list", "--json").json
    assert not member or row["failed"].startswith("could not read")


@pytest.mark.parametrize("field", ["state", "at", "attempts", "finished", "entry", "env", "progress"])
def test_a_broken_record_is_a_row_with_its_problem(server: redis.Redis, settings: Settings, field: str) -> None:
    at = place(settings)
    assert call("enqueue", "sound", "--queue", "default", "--id", "broken").code == 0
    server.hset(at.record("broken"), field, b"\xff")
    check_lists()
    rows = {row["id"]: row for row in call("task", "list", "--json").json}
    assert rows.keys() == {"known", "broken"}
    assert "problem" not in rows["known"]
    if field in ("state", "at", "attempts", "finished"):
        assert "could not read" in rows["broken"]["problem"]


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_a_task_whose_due_time_is_no_time_is_listed(server: redis.Redis, settings: Settings, score: str) -> None:
    assert call("enqueue", "sound", "--queue", "default", "--id", "later", "--delay", "3600").code == 0
    server.zadd(place(settings).due, {"later": score})
    check_lists()
    rows = {row["id"]: row for row in call("task", "list", "--json").json}
    assert rows["later"]["state"] == "scheduled"
    assert "problem" not in rows["later"]
    assert call("task", "show", "later").code == call("task", "why", "later").code == 0


def test_versions_are_listed_beside_a_record_that_cannot_be_read(server: redis.Redis, settings: Settings) -> None:
    at = place(settings)
    for task_id in ("broken", "other"):
        server.hset(at.steps(task_id), "s:#version", "2")
    server.hset(at.record("broken"), mapping={"state": "weird", "entries": "1"})
    server.set(at.record("other"), "another type")
    listed = call("task", "versions")
    assert listed.code == 0, listed.err
    assert "task broken is left out: could not read " in listed.err
    assert "task other is left out: could not read " in listed.err


def test_a_record_of_another_type_is_a_row_with_its_problem(server: redis.Redis, settings: Settings) -> None:
    at = place(settings)
    server.set(at.record("broken"), "x")
    server.zadd(at.timeline, {"broken": 5e12})
    check_lists()
    rows = {row["id"]: row for row in call("task", "list", "--json").json}
    assert "WRONGTYPE" in rows["broken"]["problem"]
    assert "problem" not in rows["known"]


@pytest.mark.parametrize("kind", ["ready", "due", "dead", "timeline", "nudge", "mark", "closed", "seen"])
def test_lists_print_beside_a_key_of_another_type(server: redis.Redis, settings: Settings, kind: str) -> None:
    key = getattr(place(settings), kind)
    server.delete(key)
    server.sadd(key, "x")
    shown = check_lists()
    assert kind not in ("due", "dead", "ready") or "WRONGTYPE" in shown["queue"]
    assert kind != "dead" or "WRONGTYPE" in shown["dlq"]


def test_lists_print_beside_a_stream_whose_ids_are_exhausted(server: redis.Redis, settings: Settings) -> None:
    at = place(settings)
    server.xgroup_create(at.ready, "workers", "0")
    server.xadd(at.ready, {b"a": b"b"}, f"{2**64 - 1}-{2**64 - 1}")
    server.execute_command("XREADGROUP", "GROUP", "workers", "w", "STREAMS", at.ready, ">")
    check_lists()


def test_a_session_of_another_type_is_a_row_with_its_problem(server: redis.Redis, settings: Settings) -> None:
    group = sessions(settings)
    server.sadd(group.session(DIGEST), "x")
    server.zadd(group.timeline, {DIGEST: 5e12})
    check_lists()
    (row,) = call("session", "list", "--json").json
    assert "WRONGTYPE" in row["failed"]


def test_a_damaged_letter_can_be_purged_and_is_not_replayed(server: redis.Redis, settings: Settings) -> None:
    server.xadd(place(settings).dead, {b"id": b"\xff"})
    replayed = call("dlq", "replay", "--all")
    assert replayed.code == 1
    assert "could not replay 1 of them" in replayed.err
    assert call("dlq", "purge", "--all", "--yes").code == 0
    assert call("dlq", "list", "--json").json == []


def test_a_damaged_letter_is_shown_and_purged_by_its_id(server: redis.Redis, settings: Settings) -> None:
    at = place(settings)
    server.xadd(at.dead, {b"id": b"broken", b"task": b"\xff", b"args": b"\x1b[2J"}, "7-7")
    server.hset(at.record("broken"), mapping={"state": "dead", "dead": "7-7"})
    server.set(at.steps("broken"), "another type")
    server.xadd(at.dead, {b"\xff": b"\x00"}, "8-8")
    assert {row["id"] for row in call("dlq", "list", "--json").json} == {"broken", "entry-8-8"}
    for task_id in ("broken", "entry-8-8"):
        shown, data = call("dlq", "show", task_id), call("dlq", "show", task_id, "--json")
        assert (shown.code, data.code) == (0, 0), shown.err + data.err
        assert "damaged" in shown.out
        assert data.json["message"].startswith("could not read entry ")
        assert "\x1b" not in shown.out
        replayed = call("dlq", "replay", task_id)
        assert replayed.code == 1
        assert f"could not replay {task_id}: damaged" in replayed.err
        assert call("dlq", "purge", task_id).out.strip() == task_id
        assert call("dlq", "show", task_id).code == 1
    assert not server.exists(at.record("broken"), at.steps("broken"))
    assert server.xlen(at.dead) == 0


async def moved(settings: Settings, partition: Partition | SessionPartition, key: str, *items: bytes) -> None:
    """Move members of a sorted set to the junk, as workers do."""
    gateway = Gateway(Address(settings.redis_url))
    await gateway.open()
    await set_aside(gateway, partition, key, "zset", items)
    await gateway.close()


async def test_junk_is_listed_with_its_reason(server: redis.Redis, settings: Settings) -> None:
    at, group = place(settings), sessions(settings)
    foreign = [b"\xff\x1b[2J", b"", b"a b", b"x" * 10_000]
    server.zadd(at.due, dict.fromkeys(foreign, 1.0))
    server.zadd(group.timeline, {b"ada": 1.0})
    await moved(settings, at, at.due, *foreign)
    await moved(settings, group, group.timeline, b"ada")
    table = await anyio.to_thread.run_sync(call, "queue", "junk")
    assert table.code == 0, table.err
    assert "\x1b" not in table.out
    listed = await anyio.to_thread.run_sync(call, "queue", "junk", "--json")
    rows = listed.json
    assert [(row["key"], row["item"]) for row in rows[:2]] == [
        (repr(group.timeline), "'ada'"),
        (repr(at.due), mock.ANY),
    ]
    reasons = {row["item"][:20]: (row["bytes"], row["reason"]) for row in rows}
    assert reasons == {
        "'ada'": (3, "it is not the digest of a session"),
        r"'\xff\x1b[2J'": (5, "it is not UTF-8"),
        "''": (0, "it is empty"),
        "'a b'": (3, "it is not the id of a scheduled task"),
        f"'{'x' * 19}": (10_000, "it is not the id of a scheduled task"),
    }
    one_queue = await anyio.to_thread.run_sync(call, "queue", "junk", "default", "--json", "--limit", "2")
    assert [row["queue"] for row in one_queue.json] == ["default"] * 2
    of_sessions = await anyio.to_thread.run_sync(call, "queue", "junk", "--sessions", "--json")
    assert [row["item"] for row in of_sessions.json] == ["'ada'"]
    both = await anyio.to_thread.run_sync(call, "queue", "junk", "default", "--sessions")
    assert both.code == 2


def test_junk_that_is_damaged_itself_is_listed(server: redis.Redis, settings: Settings) -> None:
    at, group = place(settings), sessions(settings)
    assert "no junk" in call("queue", "junk").err
    server.xadd(at.junk, {b"\xff": b"\xff", b"bytes": b"9" * 5000})
    server.set(group.junk, "another type")
    found = call("queue", "junk", "--json")
    assert found.code == 0
    assert [(row["item"], row["bytes"]) for row in found.json] == [("''", 0)]
    assert f"could not read {group.junk}: " in found.err
    assert call("queue", "junk", "unknown").code == 1


def test_lists_name_what_another_program_wrote_into_registries(server: redis.Redis, settings: Settings) -> None:
    names, now = Namespace(settings.namespace), time.time() * 1000
    server.hset(names.queues, mapping={b"odd": b"junk", b"\xff": b"1"})
    server.zadd(names.workers, {"w": now})
    server.rpush(names.worker("w"), "x")
    server.zadd(names.catalog, {b"app:0123456789ab": now, b"\xff": now})
    server.set(names.catalog_entry("app", "0123456789ab"), "junk")
    shown = check_lists()
    assert "queue odd: the route of queue 'odd' is ignored" in shown["queue"]
    assert "w: ignored: " in shown["worker"]
    queues = {row["queue"]: row.get("problem") for row in call("queue", "list", "--json").json}
    assert queues.keys() == {"default", "odd", r"'\xff'"}
    assert [row["id"] for row in call("worker", "list", "--json").json["problems"]] == ["w"]
    rows = call("task", "catalog", "--json").json
    assert {row["name"] for row in rows if row["problem"]} == {"app:0123456789ab", names.catalog}
    assert "problem: ignored" in call("task", "catalog").out


@pytest.mark.parametrize("name", ["queues", "deployment", "workers", "supervisors", "catalog", "paused", "config"])
def test_lists_print_beside_a_registry_of_another_type(server: redis.Redis, settings: Settings, name: str) -> None:
    key = getattr(Namespace(settings.namespace), name)
    server.delete(key)
    server.sadd(key, "x")
    for command in [(group, "list") for group in GROUPS] + [("task", "catalog"), ("config", "show")]:
        for answer in (call(*command), call(*command, "--json")):
            assert answer.code == 0, answer.err
            assert "Traceback" not in answer.err
    assert server.type(key) == b"set"
    assert call("enqueue", "sound", "--queue", "default").code == 0


@pytest.mark.parametrize(
    ("key", "field", "value", "commands"),
    [
        ("record", "error", b"x" * 200, ["result", "show", "why"]),
        ("record", "error", b"[1]", ["result", "show", "why"]),
        ("record", "error", b"\xff", ["result", "show", "why"]),
        ("record", "events", b"many", ["handoff", "export"]),
        ("record", "entries", b"inf", ["export"]),
        ("record", "format", b"\xff", ["export"]),
        ("steps", b"s:#\xff", b"1", ["handoff", "export"]),
        ("steps", b"d:\xff", b"1", ["handoff", "export"]),
        ("steps", b"i:\xff", b"1", ["handoff", "export"]),
    ],
)
def test_commands_of_a_task_explain_a_damaged_field(
    server: redis.Redis,
    settings: Settings,
    tmp_path: Path,
    key: str,
    field: str | bytes,
    value: bytes,
    commands: list[str],
) -> None:
    at = place(settings)
    server.hset(at.record("known"), mapping={"state": "dead", "reason": "timeout", "entries": 1})
    server.hset(getattr(at, key)("known"), field, value)
    for command in commands:
        options = ["-o", str(tmp_path / command)] if command == "export" else []
        shown = call("task", command, "known", *options)
        assert shown.code in {0, 1}, shown.err
        assert "Traceback" not in shown.err
        assert "invalid literal" not in shown.err
        if command == "export" and field != "error":
            assert "could not read {" in shown.err


def test_a_damaged_number_of_a_session_is_named(server: redis.Redis, settings: Settings) -> None:
    address = SessionAddress.of(Namespace(settings.namespace), "chat", "u")
    server.hset(address.session, mapping={"born": 1, "agent": "chat", "id": "u", "at": "inf"})
    server.zadd(address.partition.timeline, {address.digest: 5e12})
    shown = call("session", "list")
    assert "at must be a number, got 'inf'; forget the session" in shown.out.replace("\n", " ")
    assert " days ago" not in shown.out


def test_a_stored_setting_that_is_ignored_is_named(server: redis.Redis, settings: Settings) -> None:
    server.hset(Namespace(settings.namespace).config, mapping={"lease": "inf"})
    shown = call("config", "show")
    assert "the stored lease is ignored: it must be a time, got 'inf'" in shown.err
    assert call("config", "show", "--json").json["lease"]["stored"] is None
    assert call("config", "unset", "lease").code == 0
    assert "is ignored" not in call("config", "show").err
