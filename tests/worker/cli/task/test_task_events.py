"""`perdure task events`: one log or many, filters, follow, statistics, unreadable events."""

from __future__ import annotations

import re
import threading
from typing import Any

import anyio
import orjson
import pytest
from perdure import App, Context, Retry, Settings, Worker
from perdure.queues import TaskEvent
from perdure.queues.event_log import walk_events
from perdure.worker.cli.support.events_text import describe_event
from perdure.worker.durable.journal.chat import ToolCall

from tests.support.command_line import Answer, call, process
from tests.support.workers import redis_command

pytestmark = pytest.mark.integration


def rate(text: str) -> int:
    return len(text)


async def look(ctx: Context, question: str) -> str:
    """Log one event of each type."""
    await ctx.add_message("user", f"{question}?\x1b[2J\nnow")
    await ctx.add_message("assistant", "let me see", tool_calls=[ToolCall(id="c1", name="find")])
    found: str = await ctx.options(reasoning="to know", call="c1").tool("find", lambda words: words.upper(), question)
    await ctx.tool("rate", rate, found)
    await ctx.discover(found, source="the archive")
    await ctx.decide("stop", reasoning="enough", alternatives=["go on", "ask"])
    await ctx.step("last", lambda: None)
    return found


async def stumble(ctx: Context) -> None:
    await ctx.step("first", lambda: 1)
    await ctx.tool("find", lambda: 1 // 0)


TYPES = ["message_added", "message_added", "tool_called", "tool_called", "discovered", "decided", "step_completed"]


@pytest.fixture
def run(settings: Settings, environment: None) -> Any:
    """Function that enqueues tasks of these names, runs them and returns their ids."""

    async def work(*names: str) -> list[str]:
        async with App("test", settings=settings) as app:
            app.task(look)
            app.task(retry=Retry(max_attempts=1))(stumble)
            args = {"look": {"question": "why"}, "stumble": {}}
            ids = [(await app.producer.enqueue(name, args[name], queue=app.name)).id for name in names]
            async with Worker(app) as worker:
                await worker.run(burst=True)
            return ids

    return lambda *names: anyio.run(work, *names)


def types(answer: Answer) -> list[str]:
    assert answer.code == 0, answer.err
    return [line["type"] for line in answer.lines]


def add(settings: Settings, task_id: str, *entries: dict[str, str]) -> None:
    """Append raw entries to a task's log."""

    async def write() -> None:
        async with App("test", settings=settings) as app:
            log = app.producer.namespace.partition("test").log(task_id)
            for entry in entries:
                await redis_command(app, "XADD", log, "*", *[part for pair in entry.items() for part in pair])

    anyio.run(write)


def test_events_read_as_sentences_without_control_characters(run: Any) -> None:
    (task_id,) = run("look")
    lines = call("task", "events", task_id).out.splitlines()
    reported = [re.sub("ms=[0-9]+", "ms=N", line.split("  ", 1)[1]) for line in lines]
    assert reported == [
        "#1 message_added user: why?\\x1b[2J now",
        "#2 message_added assistant: let me see (calls find)",
        "#3 tool_called find(words=why) -> WHY, because to know",
        "#4 tool_called rate(text=WHY) -> 3",
        "#5 discovered WHY [the archive]",
        "#6 decided stop, because enough; left open: go on, ask",
        "step_completed last attempt=1 ms=N",
    ]


def test_an_event_within_a_step_names_the_step() -> None:
    called = TaskEvent("5-0", 5, "tool_called", "read/find#2", {"tool": "find", "result": 1}, 4)
    decided = TaskEvent("5-1", 5, "decided", "read", {"choice": "stop"}, 5)
    reported = [describe_event(event).split("  ", 1)[1] for event in (called, decided)]
    assert reported == ["#4 tool_called in read: find() -> 1", "#5 decided in read: stop"]


def test_a_replaced_plan_is_marked_in_the_list_of_events() -> None:
    plans = [{"steps": [{"key": "read"}]}, {"steps": [{"key": "sum up"}], "why": "too long", "again": True}]
    events = [TaskEvent(f"{n}-0", n, "planned", None, plan, n) for n, plan in enumerate(plans, 1)]
    reported = [describe_event(event).split("  ", 1)[1] for event in events]
    assert reported == ["#1 planned read", "#2 planned again: sum up, because too long"]


def test_filters_of_one_log(run: Any) -> None:
    (task_id,) = run("look")

    def found(*options: str) -> list[str]:
        return types(call("task", "events", task_id, "--json", *options))

    assert found() == TYPES
    assert found("--type", "decided", "--type", "discovered") == ["discovered", "decided"]
    assert found("--tool", "rate") == ["tool_called"]
    assert found("--step", "last") == ["step_completed"]
    assert found("--limit", "2") == TYPES[:2]
    assert found("--last", "2") == TYPES[-2:]
    assert found("--last", "1", "--type", "message_added") == ["message_added"]
    assert found("--since", "1h") == TYPES
    assert found("--since", "2100-01-01") == []
    assert found("--last", "2", "--follow") == TYPES[-2:]
    assert call("task", "events", task_id, "--type", "nope").err == f"perdure: no matching events of task {task_id}\n"
    assert "no matching events in namespace" in call("task", "events", "--type", "nope").err
    assert call("task", "events", task_id, "--type", "nope", "--json").err == ""


def test_contradictory_options_are_refused(run: Any) -> None:
    for options in (
        ("x", "--last", "1", "--limit", "1"),
        ("x", "--stats", "--follow"),
        ("x", "--task", "add"),
        ("x", "--state", "queued"),
        ("--follow",),
        ("--since", "yesterday"),
    ):
        answer = call("task", "events", *options)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), options
    assert "no task nothing in any queue" in call("task", "events", "nothing").err
    assert "no queue 'nowhere'" in call("task", "events", "--queue", "nowhere").err


def test_events_of_all_tasks_and_of_some(run: Any) -> None:
    good, bad, other = run("look", "stumble", "look")
    every = call("task", "events", "--json").lines
    assert {line["task_id"] for line in every} == {good, bad, other}
    assert [line["type"] for line in every if line["task_id"] == bad] == ["step_completed", "step_failed", "buried"]
    for options, ids in (
        (("--state", "dead"), {bad}),
        (("--task", "look"), {good, other}),
        (("--queue", "test", "--type", "buried"), {bad}),
    ):
        assert {line["task_id"] for line in call("task", "events", "--json", *options).lines} == ids
    latest = call("task", "events", "--json", "--last", "3").lines
    assert [line["id"] for line in latest] == sorted((line["id"] for line in every), key=place)[-3:]
    assert bad in call("task", "events", "--type", "buried").out
    assert len(call("task", "events", "--json", "--limit", "4").lines) == 4


def test_statistics_read_only_tasks_with_events_since_then(
    run: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        call("enqueue", "later", "--queue", "test", "--delay", "60", "--id", f"quiet{number}")
    add(settings, "quiet0", {"type": "decided", "data": "{}"})
    last = call("task", "events", "--stats", "--json").json
    assert (last["tasks"], last["types"]) == (1, {"decided": 1})
    (task_id,) = run("look")
    read: list[str] = []

    def walk(gateway: Any, partition: Any, task_id: str, *, after: str) -> Any:
        read.append(task_id)
        return walk_events(gateway, partition, task_id, after=after)

    monkeypatch.setattr("perdure.worker.cli.task.events.walk_events", walk)
    since = call("task", "show", task_id, "--json").json["enqueued_at"]
    found = call("task", "events", "--queue", "test", "--since", since, "--stats", "--json").json
    assert (found["tasks"], found["events"], read) == (1, len(TYPES), [task_id])
    assert call("task", "events", "--state", "scheduled", "--stats", "--json").json["tasks"] == 1
    assert call("task", "events", "--task", "look", "--stats", "--json").json["tasks"] == 1


def place(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


def test_statistics_have_tools_failures_and_decisions(run: Any) -> None:
    good, bad = run("look", "stumble")
    found = call("task", "events", "--stats", "--json").json
    assert (found["tasks"], found["events"], found["types"]["message_added"]) == (2, 10, 2)
    assert found["tools"] == [
        {"tool": "find", "calls": 2, "failures": 1},
        {"tool": "rate", "calls": 1, "failures": 0},
    ]
    assert (found["failed_last"]["type"], found["failed_last"]["task_id"]) == ("buried", bad)
    assert (found["failed_step"]["step"], found["failed_step"]["data"]["error"]) == ("find", "ZeroDivisionError")
    assert found["failed_steps"] == {"find": 1}
    assert [one["data"]["choice"] for one in found["decisions"]] == ["stop"]
    shown = call("task", "events", good, "--stats").out
    assert ["find", "1", "0"] in [line.split() for line in shown.splitlines()]
    assert "decided stop" in shown
    assert "failed" not in shown.splitlines()[0]
    assert "step_failed in step find" in call("task", "events", bad, "--stats").out


def test_an_unreadable_event_does_not_hide_others(run: Any, settings: Settings) -> None:
    (task_id,) = run("look")
    deep = "[" * 300 + "]" * 300
    add(
        settings,
        task_id,
        {"type": "decided", "n": "9", "data": "{"},
        {"type": "decided", "n": "9" * 5000, "data": "{}"},
        {"type": "later", "data": deep},
        {"type": "bare"},
        {"type": "\x1b[2J", "step": "a\nb", "data": "[1]"},
        {"type": "decided", "n": "10", "data": orjson.dumps({"choice": "end"}).decode()},
        {"type": "decided", "n": "11", "data": orjson.dumps({"v": 9, "choice": "other"}).decode()},
    )
    answer = call("task", "events", task_id)
    reported = [line.split("  ", 1)[1] for line in answer.out.splitlines()[len(TYPES) :]]
    assert reported[0].startswith("#9 decided (cannot be read: not JSON: ")
    assert reported[1].startswith("decided (cannot be read: number must be decimal digits, got ")
    assert reported[2].startswith("later (cannot be read: not JSON: ")
    assert reported[3].startswith("bare (cannot be read: unknown event type 'bare': a later version wrote it)")
    assert reported[4].startswith("\\x1b[2J a b (cannot be read: its data must be a JSON object")
    assert reported[5] == "#10 decided end"
    assert reported[6].startswith("#11 decided (cannot be read: it has version 9; ")
    assert reported[6].endswith(" choice=other")
    lines = call("task", "events", task_id, "--json").lines
    assert len(lines) == len(TYPES) + 7
    assert ["problem" in line for line in lines[-2:]] == [False, True]
    assert "cannot be read  6" in call("task", "events", task_id, "--stats").out


def test_a_log_longer_than_a_page_is_printed_in_full(run: Any, settings: Settings) -> None:
    (task_id,) = run("look")
    add(settings, task_id, *({"type": "extra", "data": f'{{"n":{n}}}'} for n in range(450)))
    found = call("task", "events", task_id, "--json").lines
    assert [line["data"]["n"] for line in found[len(TYPES) :]] == list(range(450))
    last = call("task", "events", task_id, "--json", "--last", "430", "--type", "extra").lines
    assert [line["data"]["n"] for line in last] == list(range(20, 450))
    assert len(call("task", "events", task_id, "--json", "--follow").lines) == len(TYPES) + 450


def test_follow_waits_for_the_outcome(run: Any) -> None:
    task_id = call("enqueue", "look", "--queue", "test", "--args", '{"question": "how"}').ids[0]
    answers: list[Answer] = []
    command = ("task", "events", task_id, "--follow", "--type", "decided", "--json")
    following = threading.Thread(target=lambda: answers.append(process(*command)))
    following.start()
    run()
    following.join()
    assert types(answers[0]) == ["decided"]
