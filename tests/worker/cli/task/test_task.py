"""`perdure task` and `perdure queue list`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from perdure import App, Context, Retry, Settings, Worker
from perdure.queues.keys import GROUP
from perdure.worker.cli.task import commands

from tests.support.command_line import Answer, call, process

pytestmark = pytest.mark.integration


async def add(ctx: Context, a: int, b: int) -> int:
    return await ctx.step("sum", lambda: a + b)


async def fail(ctx: Context) -> None:
    await ctx.step("before", lambda: 1)
    raise ValueError("no \x1b[31mgood")


async def echo(ctx: Context, value: Any) -> Any:
    return value


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks."""

    async def run() -> None:
        app = App("test", settings=settings)
        for handler in (add, echo):
            app.task(handler)
        app.task(retry=Retry(max_attempts=1))(fail)
        async with Worker(app) as worker:
            await worker.run(burst=True)

    return lambda: anyio.run(run)


@pytest.fixture(autouse=True)
def place(work: Any) -> None:
    """Set the connection options in the environment."""


ADD = ("add", "--args", '{"a": 1, "b": 2}')


def enqueue(*args: str) -> str:
    return call("enqueue", "--queue", "test", *args).ids[0]


def test_show_prints_the_whole_record(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    waiting = call("task", "show", task_id).out
    work()
    done = call("task", "show", task_id).out
    assert "queued" in waiting
    for text in (task_id, "add", "succeeded", '{"a":1,"b":2}', "it succeeded", "result"):
        assert text in done
    found = call("task", "show", task_id, "--json").json
    assert (found["state"], found["result"], found["args"]) == ("succeeded", 3, {"a": 1, "b": 2})


def test_show_counts_the_crashes_of_the_present_message_in_each_format(settings: Settings) -> None:
    """The record counts them with the outcome."""
    call("enqueue", "add", "--queue", "test", "--id", "x")
    stream = f"{{{settings.namespace}:test:0}}:ready"
    with redis.Redis.from_url(settings.redis_url) as client:
        client.xgroup_create(stream, GROUP, "0")
        ((_, ((entry, _),)),) = client.xreadgroup(GROUP, "a", {stream: ">"})
        for worker in ("b", "c"):
            client.xclaim(stream, GROUP, worker, 0, [entry])
    shown = call("task", "show", "x").out
    (line,) = [line for line in shown.splitlines() if line.split()[0] == "crashes"]
    assert line.split()[1:] == ["2"]
    found = call("task", "show", "x", "--json").json
    assert (found["crashes"], found["explanation"]["crashes"]) == (2, 2)


def test_show_of_a_dead_task_has_its_error_and_traceback(work: Any) -> None:
    task_id = enqueue("fail")
    work()
    shown = call("task", "show", task_id).out
    assert "ValueError: no \\x1b[31mgood" in shown
    assert "Traceback (most recent call last)" in shown
    assert "\x1b[31mgood" not in shown


@pytest.mark.parametrize("command", ["show", "result", "watch", "cancel", "events"])
def test_a_missing_task_is_refused(command: str) -> None:
    answer = call("task", command, "nothing")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("perdure: no task nothing in any queue of namespace")
    assert answer.err.count("\n") == 1


ON_ONE_TASK = {
    "show": (),
    "why": (),
    "result": ("--timeout", "0"),
    "watch": (),
    "cancel": (),
    "events": (),
    "state": (),
    "handoff": (),
    "inbox": (),
    "answer": ("approval", "true"),
    "waiting": (),
    "values": (),
    "update": ("speed", "2"),
    "send": ("hello",),
    "correct": ("--continue",),
    "dismiss": ("1",),
    "resolve": ("pay", "--run-again"),
    "compact": (),
    "fork": (),
    "export": ("--output", "x.jsonl"),
    "artifact": (),
}
"""Commands that take the id of one task, with what else they need."""


def test_each_command_on_one_task_is_in_the_table() -> None:
    usages = {name: call("task", name, "--help").out.splitlines()[1] for name in commands._COMMANDS}
    assert {name for name, usage in usages.items() if "ID" in usage} == ON_ONE_TASK.keys()


@pytest.mark.parametrize("command", ON_ONE_TASK)
def test_an_id_of_two_queues_is_refused_with_their_names(command: str) -> None:
    for queue in ("mail", "test"):
        call("enqueue", "add", "--queue", queue, "--id", "x")
    answer = call("task", command, "x", *ON_ONE_TASK[command])
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "perdure: id 'x' must name one task, but queues 'mail' and 'test' have one each; choose with --queue\n"
    )
    for queue in ("mail", "test"):
        shown = call("task", "show", "x", "--queue", queue, "--json").json
        assert (shown["queue"], shown["state"]) == (queue, "queued")
        assert call("task", "inbox", "x", "--queue", queue).out == ""


@pytest.mark.parametrize("command", ON_ONE_TASK)
def test_a_queue_chooses_between_tasks_of_one_id(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for queue in ("mail", "test"):
        call("enqueue", "add", "--queue", queue, "--id", "x")
    assert call("task", "cancel", "x", "--queue", "test") == Answer(0, "x\n", "perdure: cancelled task x\n")
    answer = call("task", command, "x", "--queue", "test", *ON_ONE_TASK[command])
    assert "must name one task" not in answer.err
    assert "no task x" not in answer.err
    assert call("task", "show", "x", "--queue", "mail", "--json").json["state"] == "queued"
    assert call("task", "inbox", "x", "--queue", "mail").out == ""


def test_a_task_of_another_queue_is_not_found() -> None:
    call("enqueue", "add", "--queue", "mail", "--id", "x")
    answer = call("task", "cancel", "x", "--queue", "test")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("perdure: no task x in queue 'test' of namespace")


def test_result_is_json_on_stdout(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    work()
    assert call("task", "result", task_id) == Answer(0, "3\n", "")


def test_a_result_is_printed_as_it_is_stored(work: Any) -> None:
    task_id = enqueue("echo", "--args", '{"value": {"b": 123456789012345678901234567890, "a": "\\u00e4"}}')
    work()
    assert call("task", "result", task_id).out == '{"b":123456789012345678901234567890,"a":"ä"}\n'


def test_a_stored_result_needs_no_timeout(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    work()
    assert call("task", "result", task_id, "--timeout", "0").out == "3\n"


def test_result_waits_for_the_outcome(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(process("task", "result", task_id, "--timeout", "20")))
    waiting.start()
    work()
    waiting.join()
    assert answers == [Answer(0, "3\n", "")]


def test_result_of_a_dead_task_is_its_error_on_stderr(work: Any) -> None:
    task_id = enqueue("fail")
    work()
    answer = call("task", "result", task_id)
    assert (answer.code, answer.out) == (1, "")
    assert f"task {task_id} is a dead letter (attempts_exhausted): ValueError: no \\x1b[31mgood" in answer.err
    assert "perdure dlq replay" in answer.err
    assert answer.err.count("\n") == 1


def test_result_fails_after_the_timeout() -> None:
    task_id = enqueue(*ADD)
    answer = call("task", "result", task_id, "--timeout", "0.05")
    assert (answer.code, answer.out) == (1, "")
    expected = (
        f"perdure: task {task_id} (add) did not end within 0.05 s: it is queued, and no worker serves queue 'test'"
    )
    assert answer.err.startswith(expected)


def test_result_of_a_cancelled_task() -> None:
    task_id = enqueue(*ADD)
    call("task", "cancel", task_id)
    answer = call("task", "result", task_id)
    assert answer == Answer(1, "", f"perdure: task {task_id} was cancelled\n")


def test_result_prints_any_outcome_as_json(work: Any) -> None:
    dead, done, waits = enqueue("fail"), enqueue("add", "--args", '{"a": 1, "b": 2}'), enqueue(*ADD, "--delay", "99")
    work()
    answer = call("task", "result", dead, "--json")
    assert (answer.code, answer.json["state"], answer.json["reason"]) == (1, "dead", "attempts_exhausted")
    assert answer.json["error"]["error"] == "ValueError"
    assert call("task", "result", done, "--json").json == {
        "id": done,
        "state": "succeeded",
        "result": 3,
        "reason": None,
        "error": None,
    }
    answer = call("task", "result", waits, "--json", "--timeout", "0.01")
    assert (answer.code, answer.json["state"]) == (1, "scheduled")


def test_cancel_prints_the_id_and_the_outcome() -> None:
    task_id = enqueue(*ADD)
    assert call("task", "cancel", task_id) == Answer(0, f"{task_id}\n", f"perdure: cancelled task {task_id}\n")
    assert call("task", "show", task_id, "--json").json["state"] == "cancelled"


def test_cancel_of_a_finished_task_is_refused(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    work()
    answer = call("task", "cancel", task_id)
    assert answer == Answer(1, "", f"perdure: could not cancel task {task_id}: it is succeeded\n")


def test_cancel_prints_json() -> None:
    task_id = enqueue(*ADD)
    assert call("task", "cancel", task_id, "--json").json == {"id": task_id, "state": "cancelled"}


def test_events_are_printed_the_oldest_first(work: Any) -> None:
    task_id = enqueue("fail")
    work()
    reported = call("task", "events", task_id).out.splitlines()
    assert ["step_completed before" in reported[0], "buried error=ValueError" in reported[1]] == [True, True]
    assert "traceback" not in reported[1].lower()
    assert [event["type"] for event in call("task", "events", task_id, "--json").lines] == ["step_completed", "buried"]


def test_events_without_follow_end_while_the_task_waits() -> None:
    task_id = enqueue(*ADD)
    assert call("task", "events", task_id) == Answer(0, "", f"perdure: no matching events of task {task_id}\n")


def test_watch_prints_the_events_and_the_outcome(work: Any) -> None:
    good, bad = enqueue("add", "--args", '{"a": 1, "b": 2}'), enqueue("fail")
    work()
    watched = call("task", "watch", good)
    assert (watched.code, watched.err) == (0, "")
    events = watched.out.splitlines()
    assert "step_completed sum" in events[0]
    assert events[1] == "succeeded after 1 attempt and 0 crashes"
    watched = call("task", "watch", bad)
    assert (watched.code, watched.err) == (1, f"perdure: task {bad} did not succeed: it is dead\n")
    assert "dead after 1 attempt and 0 crashes, attempts_exhausted: ValueError: no \\x1b[31mgood" in watched.out


def test_watch_waits_for_the_outcome(work: Any) -> None:
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    answers: list[Answer] = []
    watching = threading.Thread(target=lambda: answers.append(process("task", "watch", task_id, "--json")))
    watching.start()
    work()
    watching.join()
    [answer] = answers
    assert answer.code == 0
    assert [line.get("type", line.get("state")) for line in answer.lines] == ["step_completed", "succeeded"]
    assert answer.lines[-1]["result"] == 3


def test_watch_on_a_terminal_shows_the_current_step(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    task_id = enqueue("add", "--args", '{"a": 1, "b": 2}')
    work()
    watched = call("task", "watch", task_id)
    assert watched.code == 0
    assert f"add {task_id}" in watched.out
    assert "step_completed sum" in watched.out


def test_list_shows_tasks_of_every_state_the_newest_first(work: Any) -> None:
    dead = enqueue("fail")
    work()
    waiting = enqueue(*ADD)
    later = enqueue(*ADD, "--delay", "60", "--queue", "other")
    found = call("task", "list", "--json").json
    assert [task["id"] for task in found] == [later, waiting, dead]
    table = call("task", "list", "--wide").out
    for text in (dead, waiting, later, "attempts_exhausted", "scheduled", "queued", "other"):
        assert text in table


def test_list_narrows_by_queue_state_and_name(work: Any) -> None:
    dead = enqueue("fail")
    work()
    waiting = enqueue(*ADD)
    later = enqueue(*ADD, "--delay", "60", "--queue", "other")

    def listed(*args: str) -> set[str]:
        return {task["id"] for task in call("task", "list", "--json", *args).json}

    assert listed("--queue", "other") == {later}
    assert listed("--state", "dead") == {dead}
    assert listed("--state", "dead", "--state", "queued") == {dead, waiting}
    assert listed("--task", "add") == {waiting, later}
    assert listed("--task", "add", "--state", "dead") == set()


def test_list_narrows_by_key_and_tag(work: Any) -> None:
    keyed, tagged = enqueue(*ADD, "--key", "customer-9"), enqueue(*ADD, "--tag", "nightly", "--tag", "eu")
    enqueue(*ADD)

    def listed(*args: str) -> set[str]:
        return {task["id"] for task in call("task", "list", "--json", *args).json}

    assert listed("--key", "customer-9") == {keyed}
    assert listed("--tag", "nightly") == listed("--tag", "eu", "--tag", "nightly") == {tagged}
    assert listed("--tag", "us") == set()
    assert "tags" in call("task", "show", tagged).out
    assert call("task", "show", keyed, "--json").json["key"] == "customer-9"


def test_list_continues_after_the_limit_with_a_cursor() -> None:
    for _ in range(3):
        enqueue(*ADD)
    answer = call("task", "list", "--limit", "2", "--json")
    assert len(answer.json) == 2
    cursor = answer.err.split()[-1]
    rest = call("task", "list", "--limit", "2", "--json", "--cursor", cursor)
    assert len({task["id"] for task in answer.json + rest.json}) == 3
    assert rest.err == ""
    assert call("task", "list", "--limit", "3").err == ""
    refused = call("task", "list", "--cursor", "x")
    assert (refused.code, refused.out) == (2, "")
    assert "--cursor: cursor must be one that an earlier page of the same list ended with" in refused.err


def test_list_reads_on_until_a_task_matches_or_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_READ", "_CHUNK"):
        monkeypatch.setattr(f"perdure.queues.inspection.timeline.{name}", 2)
    oldest = enqueue(*ADD, "--tag", "rare")
    for _ in range(6):
        enqueue(*ADD)
    found = call("task", "list", "--tag", "rare", "--json")
    assert ([task["id"] for task in found.json], found.err) == ([oldest], "")
    assert "no matching tasks in namespace" in call("task", "list", "--tag", "none").err
    monkeypatch.setattr("perdure.worker.cli.task.listing._PATIENCE", 0.0)
    lines = call("task", "list", "--tag", "rare").err.splitlines()
    assert lines[0] == "perdure: no matching tasks among the first 2 yet; reading on"
    monkeypatch.setattr("perdure.worker.cli.task.listing._SEARCH", 0.0)
    bounded = call("task", "list", "--tag", "rare")
    assert bounded.out == ""
    assert "no matching tasks among the first 2; there may be more tasks: continue with --cursor" in bounded.err


def test_list_narrows_by_time_and_error(work: Any) -> None:
    dead = enqueue("fail")
    work()
    waiting = enqueue(*ADD)
    at = call("task", "show", waiting, "--json").json["enqueued_at"]

    def listed(*args: str) -> list[str]:
        return [task["id"] for task in call("task", "list", "--json", *args).json]

    assert listed("--since", "1h") == [waiting, dead]
    assert listed("--until", "1h") == []
    assert listed("--since", at) == [waiting]
    assert listed("--until", at, "--error", "ATTEMPTS_exhausted") == [dead]
    assert listed("--error", "no such text") == []
    refused = call("task", "list", "--since", "yesterday")
    assert refused.code == 2
    assert "must be a time before now, such as 90s" in refused.err


def test_an_empty_list_is_a_message_on_stderr() -> None:
    answer = call("task", "list")
    assert (answer.code, answer.out) == (0, "")
    assert "no matching tasks" in answer.err
    assert call("task", "list", "--json").json == []


def test_an_unknown_queue_is_refused_with_the_existing_ones() -> None:
    enqueue(*ADD, "--queue", "real")
    answer = call("task", "list", "--queue", "raal")
    assert answer.code == 1
    assert "no queue 'raal'" in answer.err
    assert "existing queues: real" in answer.err


def test_a_table_is_not_cut_without_a_terminal() -> None:
    task_id = enqueue("n" * 200)
    assert "n" * 200 in call("task", "list").out
    assert "n" * 200 in call("task", "show", task_id).out


def test_queue_list_prints_the_numbers_of_each_queue(work: Any) -> None:
    enqueue("fail")
    work()
    enqueue(*ADD)
    enqueue(*ADD, "--delay", "60")
    [stats] = call("queue", "list", "--json").json
    assert (stats["queue"], stats["depth"], stats["in_flight"], stats["due"], stats["dead"]) == ("test", 1, 0, 1, 1)
    assert stats["oldest_age"] >= 0
    row = call("queue", "list").out.splitlines()[-1].split()
    assert row[:6] == ["test", "1", "0", "1", "1", "0"]


def test_no_queues_is_a_message_on_stderr() -> None:
    answer = call("queue", "list")
    assert (answer.code, answer.out) == (0, "")
    assert "no queues" in answer.err


def test_the_output_of_json_commands_is_nothing_but_json() -> None:
    enqueue(*ADD)
    commands: dict[str, type] = {"task": list, "queue": list, "worker": dict, "dlq": list}
    for command, kind in commands.items():
        answer = call(command, "list", "--json")
        assert isinstance(answer.json, kind)
        assert (answer.code, answer.err) == (0, "")
