"""`perdure task watch --stream`: items as text and as JSON, and the exit code."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, Settings, Worker, current_step

from tests.support.command_line import call

pytestmark = pytest.mark.integration


async def talk(ctx: Context, how: str) -> str:
    async def speak() -> None:
        await current_step().emit("hello\x1b[2J", to="tokens")
        await current_step().emit({"words": [1, 2]}, to="tokens")
        if current_step().attempt == 1:
            raise OSError("cut off")
        await current_step().emit("bye", to="tokens")

    await ctx.options(retry=Retry(max_attempts=2, base=0)).step("speak", speak)
    await ctx.emit({"atoms": 10**30}, to="large")
    if how == "fail":
        raise ValueError("no voice")
    return how


@pytest.fixture
def task(settings: Settings, environment: None) -> Any:
    """Function that runs a task to its end, and returns its id."""

    async def run(how: str) -> str:
        async with App("test", settings=settings) as app:
            app.task(retry=Retry(max_attempts=1))(talk)
            handle = await app.producer.enqueue("talk", {"how": how}, queue=app.name)
            async with Worker(app) as worker:
                await worker.run(burst=True)
            return handle.id

    return lambda how: anyio.run(run, how)


def test_items_are_lines_and_the_end_is_the_exit_code(task: Any) -> None:
    answer = call("task", "watch", task("well"), "--stream", "tokens")
    assert answer.code == 0, answer.err
    lines = [line.split("  ", 1)[-1] for line in answer.out.splitlines()]
    assert lines[1:] == [
        '#2 speak  {"words":[1,2]}',
        "#3 speak  void: items up to try 1 (retried)",
        lines[3],
        '#5 speak  {"words":[1,2]}',
        "#6 speak  bye",
        "succeeded",
    ]
    assert "\x1b" not in answer.out
    failed = call("task", "watch", task("fail"), "--stream", "tokens", "--last", "1")
    assert failed.code == 1
    assert failed.out.splitlines()[-1] == "dead: ValueError: no voice"
    assert "did not succeed: it is dead" in failed.err


def test_json_has_a_line_for_each_item_and_one_for_the_end(task: Any) -> None:
    answer = call("task", "watch", task("well"), "--stream", "tokens", "--after", "5", "--json")
    assert answer.code == 0
    item, end = answer.lines
    assert (item["kind"], item["cursor"], item["value"], item["step"], item["attempt"]) == (
        "item",
        "6",
        "bye",
        "speak",
        2,
    )
    assert (end["kind"], end["state"], end["result"]) == ("end", "succeeded", "well")
    answer = call("task", "watch", task("fail"), "--stream", "other", "--json")
    assert answer.code == 1
    assert [(line["kind"], line["error"]) for line in answer.lines] == [("end", "no voice")]


def test_integers_of_any_size_are_shown(task: Any) -> None:
    name = task("well")
    answer = call("task", "watch", name, "--stream", "large")
    assert (answer.code, answer.err) == (0, "")
    assert f'#1  {{"atoms":{10**30}}}' in answer.out
    answer = call("task", "watch", name, "--stream", "large", "--json")
    assert f'"value":{{"atoms":{10**30}}}' in answer.out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--last", "3"], "--after and --last are for the items of a stream: give --stream as well"),
        (["--stream", "tokens", "--after", "x"], "after must be the cursor of an item of the stream"),
        (["--stream", "a:b"], "name of a stream must be"),
    ],
)
def test_wrong_options_are_misuse(task: Any, options: list[str], problem: str) -> None:
    answer = call("task", "watch", task("well"), *options)
    assert answer.code == 2
    assert problem in answer.err
