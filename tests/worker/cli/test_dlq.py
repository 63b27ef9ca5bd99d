"""`perdure dlq`: list, groups, show, replay, purge, export."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from perdure import App, Context, Retry, Settings, Worker
from perdure.deadletter.letters import DeadLetter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.worker import job_runner
from perdure.worker.cli import dlq

from tests.support.command_line import COMMAND, Answer, Running, call, process
from tests.support.workers import work_off

pytestmark = pytest.mark.integration


async def fail(ctx: Context, n: int = 0) -> int:
    await ctx.step("kept", lambda: 1)
    raise ValueError(f"no {n}")


async def other(ctx: Context) -> None:
    raise KeyError("x")


async def mended(ctx: Context, n: int = 0) -> int:
    return await ctx.step("kept", lambda: 100) + n


class Crew:
    """Runner of queued tasks; `mend` gives the task `fail` a handler that succeeds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._handler: Callable[..., Any] = fail

    def mend(self, handler: Callable[..., Any] = mended) -> None:
        self._handler = handler

    def work(self) -> None:
        anyio.run(self.run)

    async def run(self) -> None:
        app = App("test", settings=self._settings)
        app.task(name="fail", retry=Retry(max_attempts=1))(self._handler)
        app.task(retry=Retry(never=(KeyError,)), queue="second")(other)
        async with Worker(app) as worker:
            await worker.run(burst=True)


@pytest.fixture(autouse=True)
def crew(settings: Settings, environment: None) -> Crew:
    return Crew(settings)


def bury(crew: Crew, count: int, task: str = "fail", queue: str = "test") -> list[str]:
    """Return the dead letters, the oldest first."""
    lines = "".join(json.dumps({"args": {}}) + "\n" for _ in range(count))
    ids = call("enqueue", task, "--queue", queue, "--file", "-", stdin=lines.encode()).ids
    crew.work()
    return [letter["id"] for letter in dead() if letter["id"] in ids][::-1]


def dead(*args: str) -> list[Any]:
    found: list[Any] = call("dlq", "list", "--json", *args).json
    return found


def state(task_id: str) -> str:
    return str(call("task", "show", task_id, "--json").json["state"])


def test_list_shows_the_newest_first(crew: Crew) -> None:
    ids = bury(crew, 3)
    assert len(ids) == 3
    table = call("dlq", "list").out.splitlines()
    assert [line.split()[0] for line in table[-3:]] == ids[::-1]
    assert "attempts_exhausted" in table[-1]
    assert "ValueError: no 0" in table[-1]


def test_list_names_an_error_without_its_module(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(crew, 1, "other", "second")
    read = list_letters

    async def qualified(*args: Any, **options: Any) -> AsyncIterator[DeadLetter]:
        async for letter in read(*args, **options):
            yield replace(letter, error=f"shop.orders.{letter.error}")

    monkeypatch.setattr(dlq, "list_letters", qualified)
    assert " KeyError: 'x'" in call("dlq", "list").out


def test_groups_have_the_letters_of_one_cause(crew: Crew) -> None:
    lines = "".join(json.dumps({"args": {"n": n}}) + "\n" for n in (7, 8, 19)).encode()
    numbered = call("enqueue", "fail", "--queue", "test", "--file", "-", stdin=lines).ids
    [single] = bury(crew, 1, "other", "second")
    large, small = call("dlq", "groups", "--json").json
    assert (large["count"], large["task"], large["error"]) == (3, "fail", "ValueError")
    assert large["newest"] in numbered
    assert (small["count"], small["newest"], small["queues"]) == (1, single, ["second"])
    table = call("dlq", "groups", "--limit", "1")
    assert table.out.splitlines()[-1].split()[:4] == [large["group"], "3", "fail", "attempts_exhausted"]
    assert "2 groups match: raise --limit to see more than 1" in table.err
    assert {letter["id"] for letter in dead("--group", large["group"][:6])} == set(numbered)
    assert call("dlq", "show", single, "--json").json["group"] == small["group"]
    crew.mend()
    assert set(call("dlq", "replay", "--all", "--group", large["group"].upper()).ids) == set(numbered)
    assert [group["group"] for group in call("dlq", "groups", "--json").json] == [small["group"]]


def test_a_group_that_is_none_is_misuse() -> None:
    answer = call("dlq", "list", "--group", "xyz1")
    assert answer.code == 2
    assert "must be 4 to 10 hexadecimal digits, which 'perdure dlq groups' prints; got 'xyz1'" in " ".join(
        answer.err.replace("│", " ").split()
    )
    assert "no matching dead letters" in call("dlq", "groups").err


def test_list_searches_arguments_traceback_and_tags_without_secrets(crew: Crew) -> None:
    options = ("--queue", "test", "--secret", "n")
    hidden = call("enqueue", "fail", "--args", '{"n": 777555}', *options, "--tag", "night").out.strip()
    seen = call("enqueue", "fail", "--args", '{"n": 888555}', "--queue", "test").out.strip()
    crew.work()

    def ids(text: str) -> set[str]:
        return {letter["id"] for letter in dead("--search", text)}

    assert ids("888555") == {seen}
    assert ids("777555") == set()
    assert ids("NIGHT") == ids("night") == {hidden}
    assert ids("line ") == ids("raise ValueError") == {hidden, seen}
    arguments = {letter["id"]: letter["args"] for letter in dead()}
    assert "777555" not in json.dumps(arguments[hidden])
    assert ids("no such text") == set()


def test_list_narrows_by_queue_reason_and_task(crew: Crew) -> None:
    [first], [second] = bury(crew, 1), bury(crew, 1, "other", "second")

    def ids(*args: str) -> list[str]:
        return [letter["id"] for letter in dead(*args)]

    assert ids("--queue", "second") == ids("--reason", "not_retryable") == ids("--task", "other") == [second]
    assert ids("--queue", "test") == [first]
    assert ids("--task", "other", "--reason", "timeout") == []


def test_list_narrows_by_key_tag_time_and_text(crew: Crew) -> None:
    plain, keyed = [
        call("enqueue", "fail", "--queue", "test", *options).out.strip()
        for options in ((), ("--key", "customer-7", "--tag", "eu", "--tag", "night"))
    ]
    crew.work()

    def ids(*args: str) -> list[str]:
        return [letter["id"] for letter in dead(*args)]

    assert ids("--key", "customer-7") == ids("--tag", "eu") == ids("--tag", "eu", "--tag", "night") == [keyed]
    assert ids("--key", "customer-8") == ids("--tag", "eu", "--tag", "us") == ids("--error", "other") == []
    for every in (("--since", "1h", "--error", "no 0"), ("--error", "VALUEERROR"), ()):
        assert set(ids(*every)) == {keyed, plain}  # they were buried at the same time
    assert ids("--until", "1h") == ids("--since", "2100-01-01") == []
    (letter,) = dead("--tag", "eu")
    assert (letter["key"], letter["tags"]) == ("customer-7", ["eu", "night"])
    assert call("dlq", "replay", "--all", "--tag", "eu").ids == [keyed]
    assert call("dlq", "purge", "--all", "--yes", "--since", "1h").ids == [plain]


def test_list_reports_that_there_are_more_than_the_limit(crew: Crew) -> None:
    bury(crew, 3)
    answer = call("dlq", "list", "--limit", "2", "--json")
    assert len(answer.json) == 2
    assert "more than 2 " in answer.err


def test_show_has_everything(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    shown = call("dlq", "show", task_id).out
    for text in (task_id, "fail", "test", "attempts_exhausted", "ValueError: no 0", "test-"):
        assert text in shown
    assert re.search(r"^attempts +1 *\ncrashes +0 *$", shown, re.MULTILINE)
    assert "steps kept  kept" in shown
    assert "Traceback (most recent call last)" in shown
    found = call("dlq", "show", task_id, "--json").json
    assert (found["id"], found["steps"], found["error"]) == (task_id, ["kept"], "ValueError")
    assert "raise ValueError" in found["traceback"]


def test_show_of_an_unreadable_message_has_its_raw_fields(crew: Crew, redis_url: str, namespace_name: str) -> None:
    bury(crew, 1)
    redis.Redis.from_url(redis_url).xadd(f"{{{namespace_name}:test:0}}:ready", {"env": "broken", "x": b"\xff"})
    crew.work()
    [letter] = dead("--reason", "unreadable")
    assert letter["raw"] == {"env": "broken", "x": "base64:/w=="}
    assert "raw env" in call("dlq", "show", letter["id"]).out


def test_control_characters_are_printed_as_escapes(crew: Crew, redis_url: str, namespace_name: str) -> None:
    """Escapes apply to names and values of tables; JSON keeps the characters, escaped as JSON."""
    hostile: dict[Any, Any] = {"\x1b[2J": "a\x9b2J\u202eb\x7f"}
    redis.Redis.from_url(redis_url).xadd(f"{{{namespace_name}:test:0}}:ready", hostile)
    crew.work()
    [letter] = dead()
    assert letter["raw"] == hostile
    for command in (("list", "--json"), ("show", letter["id"]), ("show", letter["id"], "--json"), ("export",)):
        shown = call("dlq", *command).out
        assert shown.isascii() or not set(shown) & set("\x1b\x9b\u202e\x7f")
        assert "u202e" in shown


def test_deeply_nested_arguments_are_printed_as_text(crew: Crew, redis_url: str, namespace_name: str) -> None:
    deep = "[" * 600 + "]" * 600
    message: dict[Any, Any] = {"env": '{"v":1,"id":"deep","task":"fail"}', "args": deep}
    redis.Redis.from_url(redis_url).xadd(f"{{{namespace_name}:test:0}}:ready", message)
    crew.work()
    assert dead()[0]["args"] == deep
    assert call("dlq", "export").lines[0]["args"] == deep
    assert call("task", "show", "deep", "--json").json["args"] == deep


@pytest.mark.parametrize("command", [("show", "nothing"), ("replay", "nothing"), ("purge", "nothing")], ids=" ".join)
def test_a_missing_dead_letter_is_refused(command: tuple[str, ...]) -> None:
    answer = call("dlq", *command)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("perdure: no dead letter nothing in namespace")
    assert answer.err.count("\n") == 1


def test_replay_puts_a_task_back_with_its_checkpoint(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    assert call("dlq", "replay", task_id) == Answer(0, f"{task_id}\n", "perdure: replayed: 1\n")
    assert (dead(), state(task_id)) == ([], "queued")
    crew.mend()
    crew.work()
    assert call("task", "result", task_id).out == "1\n"  # the recorded step, not a new one


async def retried(ctx: Context) -> int:
    try:
        return await ctx.step("flaky", flaky)
    except ConnectionError:
        await ctx.step("note", lambda: 0)
        raise


tries: list[str] = []


async def flaky() -> int:
    tries.append("flaky")
    if len(tries) == 1:
        raise ConnectionError("flaky")
    return len(tries)


def test_rerun_failed_calls_the_steps_that_failed(crew: Crew) -> None:
    tries.clear()
    crew.mend(retried)
    [task_id] = bury(crew, 1)
    call("dlq", "replay", task_id)
    crew.work()
    assert (tries, state(task_id)) == (["flaky"], "dead")
    assert call("dlq", "replay", task_id, "--rerun-failed").out == f"{task_id}\n"
    crew.work()
    assert call("task", "result", task_id).out == "2\n"
    assert "of 1 steps: flaky" in call("task", "events", task_id).out


def test_fresh_replays_without_the_checkpoint(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    call("dlq", "replay", task_id, "--fresh")
    crew.mend()
    crew.work()
    assert call("task", "result", task_id).out == "100\n"


def test_edited_arguments_replace_the_old_ones(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    call("dlq", "replay", task_id, "--edit-args", '{"n": 5}')
    crew.mend()
    crew.work()
    assert call("task", "result", task_id).out == "6\n"


async def approved(ctx: Context, amount: int) -> int:
    answer = await ctx.ask("ada", f"refund {amount}?")
    raise ValueError(f"the bank is closed for {amount} ({answer})")


def test_edited_arguments_of_a_task_with_answers_warn_of_them(crew: Crew, settings: Settings) -> None:
    async def run() -> str:
        app = App("test", settings=settings)
        asks = app.task(retry=Retry(max_attempts=1))(approved)
        async with app:
            handle = await asks.enqueue(50)
            for content in ("yes", None):
                await work_off(app)
                if content is not None:
                    await handle.answer("question", content, by="ada")
            return handle.id

    task_id = anyio.run(run)
    tried = call("dlq", "replay", task_id, "--edit-args", '{"amount": 5000}', "--dry-run")
    replayed = call("dlq", "replay", task_id, "--edit-args", '{"amount": 5000}')
    for answer in (tried, replayed):
        assert f'perdure: warning: task {task_id} has recorded "yes" to "ada","refund 50?"\n' in answer.err
        assert answer.out == f"{task_id}\n"
    anyio.run(run_again, settings)
    assert "StepMismatch" in call("dlq", "list").out
    for how in (["--fresh", "--edit-args", "{}"], []):
        assert "recorded" not in call("dlq", "replay", task_id, *how, "--dry-run").err


async def run_again(settings: Settings) -> None:
    app = App("test", settings=settings)
    app.task(retry=Retry(max_attempts=1))(approved)
    async with app:
        await work_off(app)


@pytest.mark.parametrize("text", ["[]", "{", '"a"', "NaN"])
def test_edited_arguments_must_be_a_json_object(crew: Crew, text: str) -> None:
    [task_id] = bury(crew, 1)
    answer = call("dlq", "replay", task_id, "--edit-args", text)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("perdure: --edit-args: ")
    assert state(task_id) == "dead"


def test_edited_arguments_have_the_payload_limit(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    [task_id] = bury(crew, 1)
    monkeypatch.setenv("PERDURE_PAYLOAD_LIMIT", "1024")
    answer = call("dlq", "replay", task_id, "--edit-args", json.dumps({"n": "x" * 2000}))
    assert (answer.code, answer.out, state(task_id)) == (2, "", "dead")
    assert "--edit-args must have at most 1,024 bytes (PERDURE_PAYLOAD_LIMIT), got 2,009; " in answer.err
    assert "'perdure task fork ID --edit NAME=VALUE'" in answer.err
    answer = call("task", "fork", task_id, "--edit", f"n={'x' * 2000}")
    assert state(answer.ids[0]) == "queued"
    assert answer.err.endswith(f"of task {task_id}; recorded steps: 1\n")


def test_all_are_replayed_the_oldest_first(crew: Crew) -> None:
    ids = bury(crew, 4)
    answer = call("dlq", "replay", "--all")
    assert answer.ids == ids
    assert answer.err == "perdure: replayed: 4\n"
    assert dead() == []


def test_all_can_be_limited_by_reason_task_or_queue(crew: Crew) -> None:
    [first], [second] = bury(crew, 1), bury(crew, 1, "other", "second")
    for narrow in (("--reason", "not_retryable"), ("--task", "other"), ("--queue", "second")):
        assert call("dlq", "replay", "--all", "--dry-run", *narrow).ids == [second]
    assert call("dlq", "replay", "--all", "--reason", "not_retryable").ids == [second]
    assert [letter["id"] for letter in dead()] == [first]


def test_a_task_that_dies_again_during_a_replay_is_replayed_once(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = bury(crew, 2)

    async def replay_and_work(gateway: Any, letter: DeadLetter, how: Replay) -> bool:
        done = await replay(gateway, letter, how)
        await crew.run()
        return done

    monkeypatch.setattr("perdure.deadletter.letters.PAGE", 1)
    monkeypatch.setattr(job_runner, "PAGE", 1)
    monkeypatch.setattr(job_runner, "replay", replay_and_work)
    assert call("dlq", "replay", "--all").ids == ids
    assert {letter["id"] for letter in dead()} == set(ids)


def test_a_dry_run_lists_the_selection_and_changes_nothing(crew: Crew) -> None:
    ids = bury(crew, 2)
    answer = call("dlq", "replay", "--all", "--dry-run", "--fresh")
    assert answer == Answer(
        0,
        "".join(f"{task_id}\n" for task_id in ids),
        "perdure: would be replayed: 2 (2 attempts_exhausted); nothing was changed\n",
    )
    assert len(dead()) == 2
    assert call("dlq", "replay", ids[0], "--dry-run").ids == [ids[0]]


def test_one_unknown_id_prevents_the_whole_replay(crew: Crew) -> None:
    ids = bury(crew, 2)
    answer = call("dlq", "replay", ids[0], "wrong", ids[1])
    assert (answer.code, answer.out) == (1, "")
    assert "no dead letter wrong in" in answer.err
    assert "nothing was changed" in answer.err
    assert len(dead()) == 2


def test_an_id_given_twice_is_replayed_once(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    assert call("dlq", "replay", task_id, task_id) == Answer(0, f"{task_id}\n", "perdure: replayed: 1\n")


def test_letters_replayed_by_another_command_are_reported_with_exit_code_1(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bury(crew, 2)

    async def race(gateway: Any, letters: Any, how: Replay) -> Any:
        async for letter in letters:
            if letter.id == ids[0]:
                await replay(gateway, letter, how)
            yield letter, await replay(gateway, letter, how)

    monkeypatch.setattr(dlq, "replay_all", race)
    answer = call("dlq", "replay", *ids)
    assert (answer.code, answer.ids) == (1, [ids[1]])
    assert f"1 had been replayed or purged by another command: {ids[0]}" in answer.err


@pytest.mark.parametrize(("rate", "wanted"), [("5", 5.0), ("5/s", 5.0), ("0.5 /s", 0.5)])
def test_the_rate_limits_replays_per_second(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, rate: str, wanted: float
) -> None:
    [task_id] = bury(crew, 1)

    rates: list[float] = []

    async def note(gateway: Any, letters: Any, how: Any) -> Any:
        rates.append(how.rate)
        async for letter in letters:
            yield letter, True

    monkeypatch.setattr(dlq, "replay_all", note)
    assert call("dlq", "replay", task_id, "--rate", rate).code == 0
    assert rates == [wanted]


@pytest.mark.parametrize("rate", ["0", "-1", "5/m", "fast", "nan", ""])
def test_an_invalid_rate_is_refused(rate: str) -> None:
    answer = call("dlq", "replay", "--all", "--rate", rate)
    assert answer.code == 2
    assert f"got {rate!r}" in answer.err


@pytest.mark.parametrize("command", ["replay", "purge"])
def test_ids_and_all_exclude_each_other(command: str) -> None:
    for args, said in (
        ((), "give IDs, or --all"),
        (("--reason", "timeout"), "give IDs, or --all"),
        (("some-id", "--all"), "give either IDs"),
        (("some-id", "--task", "x"), "give either IDs"),
    ):
        answer = call("dlq", command, *args)
        assert (answer.code, answer.out) == (2, "")
        assert said in answer.err


def test_purge_deletes_letter_record_and_checkpoint(crew: Crew) -> None:
    ids = bury(crew, 2)
    assert call("dlq", "purge", ids[0]) == Answer(0, f"{ids[0]}\n", "perdure: purged: 1\n")
    assert [letter["id"] for letter in dead()] == [ids[1]]
    assert call("task", "show", ids[0]).code == 1


def test_purge_of_all_is_refused_without_a_terminal_or_yes(crew: Crew) -> None:
    bury(crew, 2)
    answer = call("dlq", "purge", "--all")
    assert (answer.code, answer.out) == (2, "")
    assert "add --yes" in answer.err
    assert len(dead()) == 2


@pytest.mark.parametrize(("said", "code", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 2), (b"\n", 1, 2), (b"", 1, 2)])
def test_purge_of_all_follows_the_answer(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, said: bytes, code: int, left: int
) -> None:
    bury(crew, 2)
    monkeypatch.setattr("perdure.worker.cli.support.options.is_terminal", lambda: True)
    answer = call("dlq", "purge", "--all", stdin=said)
    assert "Permanently delete all 2 dead letters" in answer.err
    assert (answer.code, len(dead()), len(answer.ids)) == (code, left, 2 - left)


def test_purge_of_all_with_yes_asks_no_question(crew: Crew) -> None:
    ids = bury(crew, 2)
    assert call("dlq", "purge", "--all", "--yes") == Answer(0, "".join(f"{i}\n" for i in ids), "perdure: purged: 2\n")


def test_purge_of_all_can_be_limited(crew: Crew) -> None:
    [first], [second] = bury(crew, 1), bury(crew, 1, "other", "second")
    assert call("dlq", "purge", "--all", "--yes", "--task", "other").ids == [second]
    assert [letter["id"] for letter in dead()] == [first]


def test_outcomes_as_json_lines(crew: Crew) -> None:
    [task_id] = bury(crew, 1)
    wanted = {"id": task_id, "outcome": "would be replayed", "reason": "attempts_exhausted", "task": "fail"}
    assert call("dlq", "replay", "--all", "--dry-run", "--json").lines == [wanted]
    done = {"id": task_id, "outcome": "replayed", "task": "fail", "queue": "test"}
    assert call("dlq", "replay", "--all", "--json").lines == [done]


def test_export_writes_json_lines_the_oldest_first(crew: Crew, tmp_path: Path) -> None:
    ids = bury(crew, 2)
    answer = call("dlq", "export")
    assert [letter["id"] for letter in answer.lines] == ids
    assert answer.err == "perdure: dead letters exported: 2\n"
    path = tmp_path / "letters.jsonl"
    assert call("dlq", "export", "-o", str(path)).out == ""
    assert [json.loads(line) for line in path.read_text().splitlines()] == answer.lines
    assert len(dead()) == 2


def test_export_to_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    answer = call("dlq", "export", "-o", str(tmp_path / "none" / "x"))
    assert answer.code == 1
    assert answer.err.startswith("perdure: could not write ")
    assert answer.err.count("\n") == 1


def test_an_export_ends_quietly_when_its_reader_closes_the_pipe(crew: Crew) -> None:
    bury(crew, 1)
    with subprocess.Popen([*COMMAND, "dlq", "export"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as exporting:
        assert exporting.stdout is not None
        assert exporting.stderr is not None
        exporting.stdout.close()
        said = exporting.stderr.read().decode()
    assert "Traceback" not in said


def test_a_replay_of_nothing_succeeds(crew: Crew) -> None:
    assert process("dlq", "replay", "--all") == Answer(0, "", "perdure: replayed: 0\n")
    assert "no matching dead letters" in call("dlq", "list").err


# interruptions


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("every", [False, True], ids=["by ids", "as a job"])
def test_an_interrupted_replay_says_what_it_did_and_how_to_go_on(
    crew: Crew, tmp_path: Path, number: int, code: int, every: bool
) -> None:
    ids = bury(crew, 4)
    chosen = ["--all", "--job", "night"] if every else ids
    with Running("dlq", "replay", *chosen, "--rate", "0.01", cwd=tmp_path) as replaying:
        assert replaying.line() == ids[0]
        replaying.send(number)
        answer = replaying.wait()
    assert (answer.code, answer.out) == (code, "")
    if every:
        first, second = answer.err.splitlines()
        assert first == "perdure: interrupted: replayed by this command: 1"
        assert second.startswith("perdure: job night: ")
        assert "perdure job run night" in second
    else:
        assert answer.err == (
            "perdure: interrupted: replaying stopped after 1 of 4; the ids that are printed are replayed, the others "
            "are still dead letters\n"
        )
    assert [letter["id"] for letter in dead()] == ids[:0:-1]
