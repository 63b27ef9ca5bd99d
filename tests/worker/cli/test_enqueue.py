"""`perdure enqueue`: one task, files of tasks, and invalid input."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from perdure import App, Context, Settings, TaskFailed, Unique
from perdure.queues.catalog import publish_entry, read_catalog
from perdure.queues.envelope import Envelope
from perdure.worker.cli.support.output import Bar

from tests.support.command_line import Answer, Running, call
from tests.support.workers import bounded, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


def show(task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = call("task", "show", task_id, "--json").json
    return found


def queues() -> list[Any]:
    found: list[Any] = call("queue", "list", "--json").json
    return found


def from_lines(*lines: Any, args: tuple[str, ...] = ("audit", "--queue", "default")) -> Answer:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return call("enqueue", *args, "--file", "-", stdin=text.encode())


def test_the_id_is_on_stdout_and_the_message_on_stderr() -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--args", '{"root": "src"}')
    assert answer.code == 0
    assert len(answer.ids) == 1
    assert answer.err.startswith("perdure: enqueued audit on queue default of unix://")
    found = show(answer.ids[0])
    assert (found["task"], found["args"], found["queue"], found["state"]) == (
        "audit",
        {"root": "src"},
        "default",
        "queued",
    )


@pytest.fixture
async def unique_app(settings: Settings) -> AsyncIterator[App]:
    """An app with unique tasks, whose worker has published them, and has gone."""
    app = App("shop", settings=settings)

    @app.task(unique=Unique("while_running", by="order"))
    async def pay(ctx: Context, order: int, note: str = "") -> None: ...

    @app.task(unique=Unique(by="order", quiet=600))
    async def ship(ctx: Context, order: int) -> None: ...

    scarce = app.limit("scarce", total=1, by="order")

    @app.task(limits=[scarce])
    async def pack(ctx: Context, order: int) -> None: ...

    @app.task(unique=Unique(by=lambda args: args["order"]))
    async def greet(ctx: Context, order: int) -> None: ...

    async def is_published() -> bool:
        return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)

    async with app:
        async with running_worker(app):
            await wait_until(is_published, "the tasks are in the catalog")
        yield app


async def test_a_unique_task_is_one_from_the_command_line_and_from_python(unique_app: App) -> None:
    first = await unique_app.tasks["pay"].enqueue(1, "from Python")

    def commands() -> None:
        answer = call("enqueue", "pay", "--args", '{"order": 1}')
        assert (answer.code, answer.ids) == (0, [first.id])
        assert (
            f"task {first.id} exists already on queue shop, as the task of this unique key, and is queued" in answer.err
        )
        assert "nothing was enqueued" in answer.err
        assert call("enqueue", "pay", "--args", '{"order": 1}', "--queue", "shop", "--json").json == {
            "id": first.id,
            "queue": "shop",
            "existed": True,
        }
        other = call("enqueue", "pay", "--args", '{"order": 2}')
        assert "enqueued pay on queue shop" in other.err
        lines = [{"args": {"order": order}} for order in (1, 2, 3, 3)]
        many = from_lines(*lines, args=("pay",))
        assert many.ids[:2] == [first.id, *other.ids]
        assert many.ids[2] == many.ids[3]
        assert "tasks enqueued on" in many.err
        assert ": 1; existed already: 3" in many.err
        [published] = call("task", "catalog", "pay", "--json").json
        assert published["unique"]["by"] == ["order"]
        [published] = call("task", "catalog", "pack", "--json").json
        assert [limit["name"] for limit in published["limits"]["limits"]] == ["scarce"]
        [row] = [line.split() for line in call("task", "catalog").out.splitlines() if "pack" in line]
        assert row == ["pack", "shop", "shop", "order", "scarce"]
        assert "limits" not in call("task", "catalog", "pay").out

    await anyio.to_thread.run_sync(commands)
    assert (await unique_app.tasks["pay"].enqueue(3)).existed


async def test_a_limited_task_needs_the_same_tokens_from_the_command_line(settings: Settings) -> None:
    app = App("shop", settings=settings)
    openai = app.limit("openai", by="tenant", cost="90_000/m", total=9)
    named = app.limit("named", by=lambda args: args["order"])

    @app.task(limits=[openai.costs(1200)])
    async def pay(ctx: Context, tenant: Any) -> None: ...

    @app.task(limits=[named])
    async def ship(ctx: Context, order: int) -> None: ...

    async def is_published() -> bool:
        return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)

    def commands() -> list[str]:
        for args, problem in (
            (("pay", "--args", '{"tenant": [1]}'), "key of limit 'openai': 'tenant' must be a text, a number"),
            (("pay", "--args", '{"tenant": [1]}', "--queue", "shop"), "key of limit 'openai': 'tenant' must be a text"),
            (("ship", "--args", '{"order": 1}'), "limit 'named' by a function of app 'shop', which only that app can"),
        ):
            answer = call("enqueue", *args)
            assert (answer.code, problem in answer.err) == (2, True), answer.err
        first = call("enqueue", "pay", "--args", '{"tenant": "a"}')
        named_queue = call("enqueue", "pay", "--args", '{"tenant": "a"}', "--queue", "shop")
        return [*first.ids, *named_queue.ids, *from_lines({"args": {"tenant": "a"}}, args=("pay",)).ids]

    async with app:
        async with running_worker(app):
            await wait_until(is_published, "the tasks are in the catalog")
        ids = await anyio.to_thread.run_sync(commands)
        assert len(ids) == 3
        wanted = await pay.enqueue("a")
        stored = []
        for task_id in (wanted.id, *ids):
            handle = await app.producer.find(task_id)
            assert handle is not None
            data = await app.producer.gateway.command("HGET", handle.partition.record(task_id), "env")
            stored.append(Envelope.decode(data).limits)
        assert stored == [stored[0]] * 4
        assert stored[0][0].cost == 1200


async def test_the_command_line_debounces(unique_app: App) -> None:
    def commands() -> list[str]:
        return [call("enqueue", "ship", "--args", '{"order": 1}').ids[0] for _ in range(2)]

    first, second = await anyio.to_thread.run_sync(commands)
    assert first != second
    [earlier, later] = [await unique_app.producer.find(task_id) for task_id in (first, second)]
    assert earlier is not None
    assert later is not None
    assert (await earlier.status(), await later.status()) == ("cancelled", "scheduled")
    why = await anyio.to_thread.run_sync(call, "task", "why", first)
    assert f"since task {second} of the same key replaced it" in why.out


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("pay", "--args", '{"order": [1]}', "--queue", "shop"), "order"),
        (("greet", "--args", '{"order": 1}'), "unique by a function of app 'shop', which only that app can call"),
        (("ship", "--args", '{"order": 1}', "--delay", "5"), "delay must not be given where its rule"),
    ],
)
async def test_a_unique_task_that_cannot_be_enqueued_here_is_one_sentence(
    unique_app: App, args: tuple[str, ...], problem: str
) -> None:
    answer = await anyio.to_thread.run_sync(call, "enqueue", *args)
    assert answer.code in (1, 2)
    assert problem in answer.err
    assert answer.err.count("\n") == 1
    lines = json.dumps({"args": json.loads(args[2])}).encode()
    more = args[3:] if "--delay" in args else ()
    many = await anyio.to_thread.run_sync(lambda: call("enqueue", args[0], "--file", "-", *more, stdin=lines))
    assert many.code in (1, 2)
    assert "nothing was sent" in many.err
    assert queues_of(await anyio.to_thread.run_sync(queues)) == 0


def queues_of(found: list[Any]) -> int:
    return sum(queue["depth"] + queue["due"] for queue in found)


def test_a_task_without_arguments() -> None:
    assert show(call("enqueue", "audit", "--queue", "default").ids[0])["args"] == {}


def test_options_of_one_task() -> None:
    answer = call("enqueue", "audit", "--queue", "slow", "--delay", "60", "--id", "my-own")
    assert answer.ids == ["my-own"]
    found = show("my-own")
    assert (found["queue"], found["state"]) == ("slow", "scheduled")
    enqueued, due = (datetime.fromisoformat(found[name]) for name in ("enqueued_at", "due_at"))
    assert due - enqueued == timedelta(seconds=60)


def ready_messages(url: str, namespace: str) -> list[dict[bytes, bytes]]:
    """Return the messages on the default queue, the oldest first."""
    with redis.Redis.from_url(url) as client:
        entries: Any = client.xrange(f"{{{namespace}:default:0}}:ready")
    return [fields for _, fields in entries]


def test_timeout_attempts_and_retention_travel_with_the_task(redis_url: str, namespace_name: str) -> None:
    call("enqueue", "audit", "--queue", "default", "--timeout", "5", "--max-attempts", "2", "--result-ttl", "60")
    [fields] = ready_messages(redis_url, namespace_name)
    assert json.loads(fields[b"env"])["options"] == {"timeout": 5.0, "max_attempts": 2, "result_ttl": 60.0}


def test_an_existing_id_is_not_enqueued_again() -> None:
    call("enqueue", "audit", "--queue", "default", "--id", "once", "--args", '{"n": 1}')
    again = call("enqueue", "audit", "--queue", "default", "--id", "once", "--args", '{"n": 1}')
    assert (again.code, again.ids) == (0, ["once"])
    said = "perdure: task once exists already on queue default, and is queued: nothing was enqueued"
    assert again.err.splitlines()[0] == said
    refused = call("enqueue", "audit", "--queue", "default", "--id", "once", "--args", '{"n": 2}')
    assert (refused.code, refused.ids) == (1, [])
    assert refused.err == (
        "perdure: task once exists already with other arguments (n); nothing was stored: call again with the same task "
        "and arguments, or choose another id\n"
    )
    assert show("once")["args"] == {"n": 1}
    assert queues()[0]["depth"] == 1


def test_of_a_file_the_tasks_without_a_conflict_are_enqueued() -> None:
    from_lines({"args": {"n": 1}, "id": "once"})
    answer = from_lines({"args": {"n": 2}, "id": "once"}, {"args": {"n": 2}, "id": "new"})
    assert (answer.code, answer.ids) == (1, ["new"])
    assert "perdure: task once exists already with other arguments (n)" in answer.err


def test_a_batch_that_was_killed_is_completed_by_the_same_command(tmp_path: Path) -> None:
    count = 6000  # the pipe has no room for so many ids, so that the command waits for its reader
    text = "".join(json.dumps({"args": {"n": n, "text": "x" * 200}}) + "\n" for n in range(count))
    (tmp_path / "tasks.jsonl").write_text(text)
    options = ("enqueue", "audit", "--queue", "default", "--file", "tasks.jsonl", "--batch", "nightly-2026-11-27")
    with Running(*options, cwd=tmp_path) as command:
        assert command.line() == "nightly-2026-11-27-1"
        command.process.kill()
    stored = queues()[0]["depth"]
    assert 0 < stored < count
    again = call(*options[:-3], str(tmp_path / "tasks.jsonl"), *options[-2:])
    assert (again.code, again.ids) == (0, [f"nightly-2026-11-27-{number}" for number in range(1, count + 1)])
    assert f": {count - stored}; existed already: {stored}" in again.err
    assert queues()[0]["depth"] == count
    assert show(f"nightly-2026-11-27-{count}")["args"]["n"] == count - 1


def test_a_batch_numbers_the_lines_of_the_file() -> None:
    lines = ("", {"args": {"n": 2}}, {"args": {}, "id": "own"}, {"args": {"n": 4}})
    assert from_lines(*lines, args=("audit", "--queue", "default", "--batch", "b")).ids == ["b-2", "own", "b-4"]
    changed = from_lines(*lines[:3], {"args": {"n": 5}}, args=("audit", "--queue", "default", "--batch", "b"))
    assert changed.code == 1
    assert "task b-4 exists already with other arguments (n)" in changed.err
    assert "of 3 lines are stored; correct the line, and give the command again" in changed.err
    taken = from_lines({"args": {}}, {"args": {}, "id": "b-1"}, args=("audit", "--queue", "default", "--batch", "b"))
    assert taken.code == 2
    assert "line 2: id 'b-1' must be unique, line 1 has it too" in taken.err


def test_a_batch_is_for_a_file() -> None:
    refused = call("enqueue", "audit", "--queue", "default", "--batch", "night")
    assert (refused.code, refused.out) == (2, "")
    assert "--batch is for the lines of a file: give --file too, or the --id of the task" in refused.err
    assert call("enqueue", "audit", "--queue", "default", "--file", "-", "--batch", "a b", stdin=b"{}").code == 2


async def test_a_task_that_has_expired_becomes_a_dead_letter(settings: Settings) -> None:
    def enqueued() -> list[str]:
        line = {"args": {}, "expires": 0.001}
        late, timely = (("--queue", "default", "--expires", given) for given in ("0.001", "1h"))
        ids = [*call("enqueue", "audit", *late).ids, *from_lines({"args": {}}, args=("audit", *late)).ids]
        ids += from_lines(line, {"args": {}}, args=("audit", *timely)).ids
        return [*ids, *call("enqueue", "audit", *timely).ids]

    ids = await anyio.to_thread.run_sync(enqueued)
    async with App("default", settings=settings) as app:

        @app.task
        async def audit(ctx: Context) -> int:
            return 1

        async with running_worker(app):
            for number, task_id in enumerate(ids):
                handle = await app.producer.find(task_id)
                assert handle is not None
                if number < 3:
                    with pytest.raises(TaskFailed, match="expired"):
                        await bounded(handle.result())
                else:
                    assert await bounded(handle.result()) == 1
    assert len(ids) == 5


@pytest.mark.parametrize("given", ["0", "2020-01-01T00:00Z"])
def test_a_deadline_that_has_passed_is_misuse(given: str) -> None:
    refused = call("enqueue", "audit", "--queue", "default", "--expires", given)
    assert (refused.code, refused.out) == (2, "")
    assert "--expires must be in the future" in refused.err
    assert queues() == []


def test_json_says_that_a_task_existed() -> None:
    for existed in (False, True):
        answer = call("enqueue", "audit", "--queue", "default", "--delay", "60", "--id", "a", "--json")
        assert (answer.code, answer.json) == (0, {"id": "a", "queue": "default", "existed": existed})
        assert ("task a exists already on queue default, and is scheduled" in answer.err) is existed


def test_of_a_file_the_tasks_that_exist_are_counted() -> None:
    from_lines({"args": {}, "id": "a"})
    answer = from_lines(
        {"args": {}, "id": "a"}, {"args": {}, "id": "b"}, args=("audit", "--queue", "default", "--json")
    )
    shown = [json.loads(line) for line in answer.out.splitlines()]
    assert [(one["id"], one["existed"]) for one in shown] == [("a", True), ("b", False)]
    assert answer.err.splitlines()[0].endswith(": 1; existed already: 1")


def test_the_output_can_be_json() -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--id", "a", "--json")
    assert answer.json == {"id": "a", "queue": "default", "existed": False}
    assert (
        answer.err
        == "perdure: no worker serves queue 'default' now; start one: perdure worker run APP --queues default\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ('{"a": 1,', "--args: not JSON: EOF while parsing a value at line 1 column 8"),
        ("[1]", 'must be a JSON object, such as {"root": "src"}, got an array'),
        ('"a"', "got a string"),
        ("null", "got null"),
        ('{"a": NaN}', "--args: not JSON: expected value at line 1 column 7"),
        ("{'a': 1}", "--args: not JSON: key must be a string at line 1 column 2"),
    ],
)
def test_arguments_must_be_a_json_object(args: str, said: str) -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--args", args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert queues() == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give a TASK"),
        (("",), "task: String should have at least 1 character"),
        (("audit", "--timeout", "0"), "must be a number of seconds, greater than 0; got '0'"),
        (("audit", "--timeout", "5x"), "greater than 0; got '5x'"),
        (("audit", "--result-ttl", "0"), "greater than 0; got '0'"),
        (("audit", "--delay", "-1"), "7d, or an ISO time such as 2026-11-22T18:00; got '-1'"),
        (("audit", "--delay", "nan"), "7d, or an ISO time such as 2026-11-22T18:00; got 'nan'"),
        (("audit", "--id", "a b"), "must be a task id"),
        (("audit", "--queue", "a:b"), "queue must be 1 to 64 letters"),
        (("audit",), "no worker has published its tasks yet; name the queue"),
        (("audit", "--file", "-", "--id", "a"), "--args and --id are for one task"),
        (("audit", "--file", "-", "--args", "{}"), "--args and --id are for one task"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_misuse_sends_nothing(args: tuple[str, ...], said: str) -> None:
    answer = call("enqueue", *args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert queues() == []


SECRETS: dict[str, Any] = {
    "user": "ada",
    "account": {"password": "hunter2", "pins": ["1234"]},
    "spare": None,
    "none": [],
}


@pytest.mark.parametrize(
    ("name", "there_are"),
    [
        ("tokne", "user, account, spare, none"),
        ("", "user, account, spare, none"),
        ("user.password", "none"),
        ("account.pasword", "account.password, account.pins"),
        ("account.pins.pin", "account.pins.*"),
        ("account.pins.*.pin", "none"),
    ],
)
def test_a_secret_that_no_argument_has_is_refused(name: str, there_are: str) -> None:
    line = {"args": SECRETS}
    args = ("enqueue", "audit", "--queue", "default", "--args", json.dumps(SECRETS))
    answer = call(*args, "--secret", "user", "--secret", name)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"perdure: --secret: no argument is called {name!r}; there are {there_are}\n"
    answer = from_lines(line, line, args=("audit", "--queue", "default", "--secret", "user", "--secret", name))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"perdure: --secret: no line has an argument called {name!r}; nothing was sent\n"
    assert queues() == []


@pytest.mark.parametrize("name", ["account.pins", "account.pins.*", "account.*", "spare.password", "none.*.password"])
def test_a_secret_may_be_within_an_argument_that_is_empty_here(name: str) -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--args", json.dumps(SECRETS), "--secret", name)
    assert (answer.code, len(answer.ids)) == (0, 1)


def test_of_a_file_one_line_with_the_secret_suffices() -> None:
    args = ("audit", "--queue", "default", "--secret", "token")
    answer = from_lines({"args": {}}, {"args": {"token": "hunter2"}}, args=args)
    assert (answer.code, len(answer.ids)) == (0, 2)
    assert show(answer.ids[1])["args"] == {"token": "**********"}
    assert from_lines(args=args).code == 0


def test_arguments_over_the_size_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_PAYLOAD_LIMIT", "1024")
    monkeypatch.setenv("PERDURE_LARGE_LIMIT", "0")
    answer = call("enqueue", "audit", "--queue", "default", "--args", json.dumps({"text": "x" * 1024}))
    assert answer.code == 2
    assert "over the limit of 1,024 bytes" in answer.err


def test_numbers_of_any_size_arrive_as_they_were_sent(redis_url: str, namespace_name: str) -> None:
    large = 123456789012345678901234567890
    call("enqueue", "audit", "--queue", "default", "--args", json.dumps({"n": large}))
    [fields] = ready_messages(redis_url, namespace_name)
    assert json.loads(fields[b"args"]) == {"n": large}


def test_a_file_of_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [
        {"args": {"n": 1}},
        {"args": {"n": 2}, "queue": "other", "id": "two", "headers": {"trace": "x"}},
        {"args": {"n": 3}, "task": "another", "delay": "1m"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    answer = call("enqueue", "audit", "--queue", "default", "--file", str(path))
    assert answer.code == 0
    assert ": 3\n" in answer.err
    first, second, third = map(show, answer.ids)
    assert (first["task"], first["args"], first["queue"], first["state"]) == ("audit", {"n": 1}, "default", "queued")
    assert (second["id"], second["queue"], second["headers"]) == ("two", "other", {"trace": "x"})
    assert (third["task"], third["state"]) == ("another", "scheduled")


def test_the_command_line_has_the_defaults_of_a_line() -> None:
    answer = from_lines(
        {"args": {}}, {"args": {}, "queue": "own", "delay": 0}, args=("audit", "--queue", "q", "--delay", "9")
    )
    first, second = map(show, answer.ids)
    assert (first["queue"], first["state"]) == ("q", "scheduled")
    assert (second["queue"], second["state"]) == ("own", "queued")


def test_ids_come_in_the_order_of_the_lines_however_the_queues_alternate() -> None:
    lines: list[dict[str, Any]] = [
        {"args": {}, "id": f"t{n}", "queue": "even" if n % 2 == 0 else "odd"} for n in range(20)
    ]
    assert from_lines(*lines).ids == [line["id"] for line in lines]
    assert {stats["queue"]: stats["depth"] for stats in queues()} == {"even": 10, "odd": 10}


def test_a_large_file_is_sent_in_full_and_in_order(redis_url: str, namespace_name: str) -> None:
    answer = from_lines(*({"args": {"n": n}} for n in range(2500)))
    assert len(set(answer.ids)) == 2500
    messages = ready_messages(redis_url, namespace_name)
    assert [json.loads(fields[b"args"])["n"] for fields in messages] == list(range(2500))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"args": {}', "line 2: not JSON: EOF while parsing an object at column 11"),
        ("[]", "line 2: must be a JSON object"),
        ({}, "line 2: args: Field required"),
        ({"args": []}, "line 2: args: Input should be a valid dictionary"),
        ({"args": {}, "quue": "x"}, "line 2: quue: Extra inputs are not permitted"),
        ({"args": {}, "queue": "a b"}, "line 2: queue: queue must be 1 to 64 letters"),
        ({"args": {}, "delay": -1}, "line 2: delay: must be a time from now, such as 90s, 15m"),
        ({"args": {}, "delay": True}, "line 2: delay: must be a number of seconds, a duration such as 15m, or an ISO"),
        ({"args": {}, "delay": 1e11}, "line 2: delay: must be at most 1e+10 seconds"),
        ({"args": {}, "delay": "2030-01-01T00:00"}, "or an ISO time with a time zone such as 2026-11-22T18:00Z; got"),
        ({"args": {}, "expires": 0}, "line 2: expires must be in the future"),
        ('{"args": {}, "delay": 1e999}', "line 2: delay: must be a time from now, such as 90s, 15m"),
        ('{"args": {"a": -1e999}}', "line 2: args must have no numbers beyond 1.8e308, such as 1e999"),
        ({"args": {}, "id": "a b"}, "line 2: task id must be 1 to 128 letters"),
        ({"args": {}, "id": ""}, "line 2: task id must be 1 to 128 letters"),
        ({"args": {}, "id": "first"}, "line 2: id 'first' must be unique, line 1 has it too"),
        ({"args": {}, "headers": {"n": 1}}, "line 2: headers.n: Input should be a valid string"),
        ({"args": {}, "task": ""}, "line 2: task: String should have at least 1 character"),
        ({"args": {"text": "x" * 2000}}, "line 2: size of the task's envelope and arguments is 2,"),
    ],
    ids=str,
)
def test_one_invalid_line_prevents_the_whole_file(line: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_PAYLOAD_LIMIT", "1024")
    monkeypatch.setenv("PERDURE_LARGE_LIMIT", "0")
    answer = from_lines({"args": {}, "id": "first"}, line, {"args": {}})
    assert (answer.code, answer.out) == (2, "")
    assert "nothing was sent, 1 of 3 lines are invalid" in answer.err
    assert said in answer.err
    assert queues() == []


def test_infinity_as_text_is_an_argument() -> None:
    answer = from_lines({"args": {"a": "Infinity"}})
    assert show(answer.ids[0])["args"] == {"a": "Infinity"}


def test_a_line_without_a_task_needs_a_default() -> None:
    answer = from_lines({"args": {}, "task": "audit"}, {"args": {}}, args=("--queue", "default"))
    assert answer.code == 2
    assert "line 2: task is missing, and the command line has no default for it" in answer.err


def test_a_line_without_a_queue_needs_a_default() -> None:
    answer = from_lines({"args": {}, "queue": "audit"}, {"args": {}}, args=("audit",))
    assert answer.code == 2
    assert "line 2: could not find the queue of task 'audit'" in answer.err


def test_line_numbers_count_empty_lines() -> None:
    assert "line 4: not JSON" in from_lines({"args": {}}, "", "", "{").err


def test_of_many_invalid_lines_the_first_are_listed_and_the_rest_counted() -> None:
    answer = from_lines(*["{"] * 25)
    assert answer.err.count("\n  line ") == 10
    assert "and 15 more lines" in answer.err


def test_invalid_utf_8_is_refused() -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--file", "-", stdin=b'{"args": {"a": "\xff"}}\n')
    assert answer.code == 2
    assert "line 1: not JSON: invalid unicode" in answer.err


def test_a_missing_file_is_refused() -> None:
    answer = call("enqueue", "audit", "--queue", "default", "--file", "nothing.jsonl")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "perdure: could not read nothing.jsonl: No such file or directory\n"


def test_a_file_with_json_output_prints_one_object_per_line() -> None:
    answer = call(
        "enqueue",
        "audit",
        "--queue",
        "default",
        "--file",
        "-",
        "--json",
        stdin=b'{"args": {}, "id": "a"}\n{"args": {}, "id": "b"}',
    )
    assert answer.lines == [{"id": name, "queue": "default", "existed": False} for name in ("a", "b")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stderr look like a terminal, and every command look slow."""
    monkeypatch.setattr(Bar, "shown_after", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", os.environ.get("TERM") or "xterm")


@pytest.mark.usefixtures("terminal")
def test_a_slow_command_shows_a_bar_on_stderr_and_ids_on_stdout() -> None:
    answer = from_lines({"args": {}, "id": "a"}, {"args": {}, "id": "b"})
    assert answer.ids == ["a", "b"]
    assert "enqueuing" in answer.err


def test_a_fast_command_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "enqueuing" not in from_lines({"args": {}}).err


def test_a_delay_is_a_duration_or_a_time() -> None:
    now = datetime.now()  # noqa: DTZ005 - as a user at this terminal writes it
    times = [moment.isoformat() for moment in (now + timedelta(minutes=15), datetime.now(UTC) + timedelta(minutes=15))]
    for given in ("15m", "900", *times):
        found = show(call("enqueue", "audit", "--queue", "slow", "--delay", given).ids[0])
        enqueued, due = (datetime.fromisoformat(found[name]) for name in ("enqueued_at", "due_at"))
        assert timedelta(minutes=14) < due - enqueued <= timedelta(minutes=15)
    passed = call("enqueue", "audit", "--queue", "slow", "--delay", "2020-01-01T00:00Z", "--id", "passed")
    assert (passed.code, show("passed")["state"]) == (0, "queued")


async def test_a_task_that_no_live_worker_has_is_warned_of(settings: Settings) -> None:
    former, present = App("shop", settings=settings), App("shop", settings=settings)

    @former.task(name="report")
    async def report(ctx: Context) -> None: ...

    @present.task(name="monthly_report")
    async def monthly_report(ctx: Context) -> None: ...

    async def is_published(name: str) -> bool:
        catalog = await read_catalog(present.producer.gateway, present.producer.namespace)
        return name in {task.name for task in catalog.all_versions}

    async with former, present:
        async with running_worker(former):
            await wait_until(lambda: is_published("report"), "the former code is in the catalog")
            answer = await anyio.to_thread.run_sync(call, "enqueue", "report", "--queue", "shop")
            assert "no live worker" not in answer.err
        async with running_worker(present):
            await wait_until(lambda: is_published("monthly_report"), "the present code is in the catalog")
            answer = await anyio.to_thread.run_sync(call, "enqueue", "report", "--queue", "shop")
            lines = b'{"args": {}, "task": "report"}\n{"args": {}, "task": "monthly_report"}'
            many = await anyio.to_thread.run_sync(
                lambda: call("enqueue", "--queue", "shop", "--file", "-", stdin=lines)
            )
    for answered in (answer, many):
        assert answered.code == 0
        assert answered.err.count("no live worker of queue 'shop' has a task ") == 1
        assert "has a task 'report': the task waits for one" in answered.err
        assert "the workers there have: monthly_report" in answered.err


# priority


@pytest.fixture
async def ranked_app(settings: Settings) -> AsyncIterator[App]:
    """An app with tasks of several priorities, whose worker has published them, and has gone."""
    app = App("ranked", settings=settings)

    @app.task(priority="low")
    async def tidy(ctx: Context) -> None: ...

    @app.task(idle=True)
    async def index(ctx: Context) -> None: ...

    async def is_published() -> bool:
        return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)

    async with app:
        async with running_worker(app):
            await wait_until(is_published, "the tasks are in the catalog")
        yield app


@pytest.mark.parametrize("queue", [(), ("--queue", "ranked")])
async def test_a_task_has_the_priority_of_its_app_unless_the_command_line_names_one(
    ranked_app: App, queue: tuple[str, ...]
) -> None:
    def lane(*args: str) -> str:
        answer = call("enqueue", *args, *queue)
        assert answer.code == 0, answer.err
        return str(show(answer.ids[0])["lane"])

    def commands() -> None:
        assert lane("tidy") == "low"
        assert lane("tidy", "--priority", "high") == "high"
        assert lane("tidy", "--priority", "normal") == "normal"
        assert lane("tidy", "--idle") == "idle"
        assert lane("index") == "idle"
        assert lane("index", "--not-idle") == "normal"
        assert lane("index", "--priority", "low") == "low"
        lines = [
            {"args": {}},
            {"args": {}, "priority": "high"},
            {"args": {}, "idle": True},
            {"args": {}, "idle": False},
        ]
        many = from_lines(*lines, args=("tidy", *queue))
        assert [show(task_id)["lane"] for task_id in many.ids] == ["low", "high", "idle", "normal"]
        assert "priority" in call("task", "show", many.ids[0]).out

    await anyio.to_thread.run_sync(commands)
    by_name = await ranked_app.producer.enqueue("index")
    assert by_name.partition.lane == "idle"
    [many] = await ranked_app.producer.enqueue_many("tidy", [{}], priority="high")
    assert many.partition.lane == "high"


def test_a_wrong_priority_is_misuse_and_nothing_is_sent() -> None:
    for args in (("--priority", "urgent"), ("--priority", "high", "--idle")):
        answer = call("enqueue", "audit", "--queue", "default", *args)
        assert (answer.code, answer.out) == (2, ""), answer.err
    for line in ({"args": {}, "priority": "urgent"}, {"args": {}, "priority": "low", "idle": True}):
        answer = from_lines({"args": {}}, line)
        assert (answer.code, answer.out) == (2, "")
        assert "line 2" in answer.err
    assert queues() == []


# a limit of the queue's depth


def test_a_full_queue_is_one_sentence_and_exit_code_1() -> None:
    options = ("audit", "--queue", "default", "--max-depth", "1")
    assert call("enqueue", *options).code == 0
    answer = call("enqueue", *options)
    assert (answer.code, answer.ids) == (1, [])
    assert answer.err.startswith("perdure: queue 'default' is full: 1 task waits, and max_depth is 1; enqueue again")
    waited = call("enqueue", *options, "--when-full", "wait", "--wait-limit", "0.05")
    assert waited.code == 1
    assert "is full after 0.05 s" in waited.err


def test_the_lines_before_a_full_queue_are_stored() -> None:
    answer = from_lines(*({"args": {}} for _ in range(4)), args=("audit", "--queue", "default", "--max-depth", "3"))
    assert answer.code == 1
    assert len(answer.ids) == 3
    assert "at least 3 of 4 lines are stored; with --batch, the command could be repeated" in answer.err
    assert "max_depth is 3" in answer.err
    assert [queue["depth"] for queue in queues()] == [3]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--when-full", "wait"), "when_full and wait_limit must go with max_depth, got no max_depth"),
        (("--max-depth", "5", "--wait-limit", "5"), "wait_limit must go with when_full='wait'"),
        (("--max-depth", "0"), "--max-depth"),
        (("--when-full", "drop"), "--when-full"),
    ],
)
def test_a_wrong_limit_is_refused(options: tuple[str, ...], problem: str) -> None:
    answer = call("enqueue", "audit", "--queue", "default", *options)
    assert (answer.code, answer.ids) == (2, [])
    assert problem in answer.err
    assert queues() == []


async def test_the_limit_of_the_catalog_holds_on_the_command_line(settings: Settings) -> None:
    app = App("shop", settings=settings)
    app.queue(max_depth=2)

    @app.task
    async def pay(ctx: Context) -> None: ...

    async with app:
        await publish_entry(app.producer.gateway, app.producer.namespace, app.tasks.entry(app.name), 0)
        await pay.enqueue()
        assert (await anyio.to_thread.run_sync(call, "enqueue", "pay")).code == 0
        answer = await anyio.to_thread.run_sync(call, "enqueue", "pay")
    assert answer.code == 1
    assert "max_depth is 2" in answer.err
