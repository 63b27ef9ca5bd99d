"""`perdure task send` and `perdure task inbox`."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings

from tests.support.command_line import call
from tests.support.workers import work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks; the task waits for a message from ada, then for a message."""

    async def run() -> None:
        app = App("test", settings=settings)

        @app.task
        async def ships(ctx: Context) -> list[Any]:
            (answer,) = await ctx.inbox(sender="ada", why="Ship it?", wait=math.inf)
            messages = await ctx.inbox(wait=3600)
            return [answer.content, [one.content for one in messages]]

        @app.task
        async def fails(ctx: Context) -> None:
            raise ValueError

        @app.task
        async def reads_nothing(ctx: Context) -> None:
            pass

        async with app:
            await work_off(app)

    return lambda: anyio.run(run)


def test_a_wait_is_shown_and_can_be_answered(work: Any) -> None:
    task_id = call("enqueue", "ships", "--queue", "test").ids[0]
    work()
    shown = call("task", "show", task_id)
    assert "for a message from ada since 20" in shown.out
    assert "ago): Ship it?" in shown.out
    assert "\ndue" not in shown.out, "it waits without a limit"
    assert call("task", "show", task_id, "--json").json["waits"] == "message"
    assert "waiting for message" in call("task", "list").out
    sent = call("task", "send", task_id, "yes", "--from", "ada")
    assert (sent.code, sent.ids) == (0, [task_id])
    (first,) = [one["number"] for one in call("task", "inbox", task_id, "--json").lines]
    assert sent.err == (
        f"perdure: sent message {first} from 'ada' to task {task_id}; no worker serves queue 'test' now; "
        "start one: perdure worker run APP --queues test\n"
    )
    assert "1 unread" in call("task", "show", task_id).out
    work()
    assert "for a message since 20" in call("task", "show", task_id).out
    reported = call("task", "send", task_id, "--data", '{"n": 1}', "--from", "bob", "--id", "own", "--json").json
    second = reported["number"]
    assert reported == {"id": task_id, "number": second, "state": "waiting"}
    assert second > first
    assert call("task", "send", task_id, "--data", '{"n": 1}', "--id", "own", "--json").json["number"] == second
    work()
    assert call("task", "result", task_id).out == '["yes",[{"n":1}]]\n'
    reported = call("task", "events", task_id).out
    assert "waiting for message from ada: Ship it?" in reported
    assert f"received message {first} from ada: yes" in reported
    assert f'received message {second} from bob: {{"n":1}}' in reported
    refused = call("task", "send", task_id, "too late")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"perdure: task {task_id} reads no more messages: it is succeeded\n"


@pytest.mark.usefixtures("work")
def test_a_message_of_another_sender_says_for_whom_the_task_waits(work: Any) -> None:
    task_id = call("enqueue", "ships", "--queue", "test").ids[0]
    work()
    other = call("task", "send", task_id, "yes", "--from", "bob", "--json")
    assert other.json["waits_on"] == "ada"
    assert "the task waits for a message from 'ada', and this one is not what it waits for" in other.err
    assert "to answer it, send with --from ada" in other.err
    said = call("task", "why", task_id).out
    assert "a message has come, but not from ada, and no worker serves queue 'test'" in " ".join(said.split())
    answered = call("task", "send", task_id, "yes", "--from", "ada", "--json")
    assert "waits_on" not in answered.json
    assert "--from" not in answered.err
    said = call("task", "why", task_id, "--json").json
    assert said["cause"] == "no_worker"
    assert said["remedy"] == "start a worker: perdure worker run APP --queues test"
    assert "; the message is there, and no worker serves queue 'test'" in said["sentence"]
    assert "without one it continues" not in said["sentence"]
    work()  # the message of another sender is the next one that it reads
    assert call("task", "result", task_id).json == ["yes", ["yes"]]


def test_a_dead_letter_gets_messages_for_its_replay(work: Any) -> None:
    task_id = call("enqueue", "fails", "--queue", "test").ids[0]
    work()
    sent = call("task", "send", task_id, "yes", "--from", "ada")
    assert (sent.code, sent.ids) == (0, [task_id])
    assert sent.err.endswith("; it is a dead letter and reads the message after a replay\n")


@pytest.mark.usefixtures("environment")
def test_messages_that_a_task_left_unread_are_shown(work: Any) -> None:
    task_id = call("enqueue", "reads_nothing", "--queue", "test").ids[0]
    call("task", "send", task_id, "stop", "--from", "ada")
    assert "1 unread" in call("task", "show", task_id).out
    work()
    assert f"1 left unread at the end, see perdure task inbox {task_id}" in call("task", "show", task_id).out
    assert [one["content"] for one in call("task", "inbox", task_id, "--json").lines] == ["stop"]
    assert "left_unread" in call("task", "events", task_id).out


def test_unread_messages_are_listed_and_removed() -> None:
    task_id = call("enqueue", "ships", "--queue", "test", "--delay", "60").ids[0]
    empty = call("task", "inbox", task_id)
    assert (empty.out, empty.err) == ("", f"perdure: no unread messages in the inbox of task {task_id}\n")
    call("task", "send", task_id, "-", "--from", "x", stdin=b"first\n")
    call("task", "send", task_id, "--data", "[2]", "--from", "y")
    found = call("task", "inbox", task_id, "--json").lines
    assert [(one["sender"], one["content"]) for one in found] == [("x", "first"), ("y", [2])]
    number = str(found[0]["number"])
    table = call("task", "inbox", task_id).out.splitlines()
    assert table[0].split() == ["number", "sent", "from", "content"]
    assert [line.split()[-2:] for line in table[2:]] == [["x", "first"], ["y", "[2]"]]
    assert call("task", "inbox", task_id, "--drop", number).code == 0
    again = call("task", "inbox", task_id, "--drop", number)
    assert (again.code, again.err.startswith(f"perdure: no message {number} in the inbox")) == (1, True)


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give either a TEXT or --data JSON"),
        (("yes", "--data", "1"), "give either a TEXT or --data JSON"),
        (("--data", "{"), "--data: not JSON"),
    ],
)
def test_invalid_messages_are_refused(args: tuple[str, ...], said: str) -> None:
    answer = call("task", "send", "nothing", *args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


@pytest.mark.usefixtures("work")
def test_a_missing_task_is_refused() -> None:
    for args in (("send", "nothing", "hello"), ("inbox", "nothing")):
        answer = call("task", *args)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith("perdure: no task nothing in any queue of namespace")
