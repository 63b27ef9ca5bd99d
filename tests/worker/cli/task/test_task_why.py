"""`perdure task why` and the explanation in `perdure task show`: one task in each state."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from perdure import App, Context, Retry, Settings
from perdure.queues import Namespace, Producer, State, list_tasks
from perdure.worker.cli.task.outcome import _spinner
from rich.console import Console

from tests.support.command_line import BOUND, Running, call
from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks."""

    async def run() -> None:
        app = App("test", settings=settings)

        def fetch(reason: str) -> None:
            raise ValueError(reason)

        @app.task(retry=Retry(max_attempts=2, base=600))
        async def fails(ctx: Context) -> None:
            await ctx.step("before", list)
            await ctx.step("fetch", fetch, "no such file")

        @app.task(retry=Retry(max_attempts=1))
        async def dies(ctx: Context) -> None:
            await ctx.step("fetch", fetch, "no such file")

        @app.task
        async def asks(ctx: Context) -> None:
            await ctx.ask("finance", "over 1000")

        @app.task
        async def reports(ctx: Context) -> None:
            await ctx.progress(3, 4, "pages")

        @app.task
        async def adds(ctx: Context, a: int = 1) -> int:
            return a

        async def is_idle() -> bool:
            tasks = list_tasks(app.producer.gateway, app.producer.namespace, states=[State.QUEUED, State.RUNNING])
            return not [one async for one in tasks]

        async with app, running_worker(app):
            await wait_until(is_idle, "no task is queued or running")

    return lambda: anyio.run(run)


@pytest.fixture(autouse=True)
def place(work: Any) -> None:
    """Set the connection options in the environment."""


def enqueue(name: str, *options: str) -> str:
    return call("enqueue", name, "--queue", "test", *options).ids[0]


def why(task_id: str) -> dict[str, Any]:
    """Return the explanation, and check that its text is that of `task show`."""
    found: dict[str, Any] = call("task", "why", task_id, "--json").json
    lines = call("task", "why", task_id).out.splitlines()
    assert len(lines) == (1 if found["remedy"] is None else 2)
    shown = call("task", "show", task_id, "--json").json
    assert (shown["state"], shown["explanation"]["cause"]) == (found["state"], found["cause"])
    assert "\nwhy " in call("task", "show", task_id).out
    return found


def test_a_queued_task_says_that_no_worker_serves_its_queue() -> None:
    found = why(enqueue("adds"))
    assert found["sentence"] == "it is queued, and no worker serves queue 'test'"
    assert found["remedy"] == "start a worker: perdure worker run APP --queues test"
    assert found["since"] is not None


def test_a_task_that_another_program_took_out_of_the_queue_says_so(settings: Settings) -> None:
    queued, delayed = enqueue("adds"), enqueue("adds", "--delay", "7200")
    partition = Namespace(settings.namespace).partition("test")
    with redis.Redis.from_url(settings.redis_url) as client:
        client.xtrim(partition.ready, maxlen=0, approximate=False)
        client.delete(partition.due)
    found = why(queued)
    assert found["sentence"] == (
        "its message is gone from the stream: another program has deleted it; a worker puts it back, but no worker "
        "serves queue 'test'"
    )
    assert found["task"] == "adds"
    assert why(delayed)["sentence"].startswith(
        "it is scheduled, but gone from the due set: another program has removed"
    )
    assert call("task", "show", queued, "--json").json["args"] == {}
    for task_id in (queued, delayed):
        assert "cancelled" in call("task", "cancel", task_id).out + call("task", "show", task_id).out


def test_a_task_that_failed_says_when_its_next_attempt_starts(work: Any) -> None:
    task_id = enqueue("fails")
    work()
    found = why(task_id)
    assert (found["state"], found["cause"], found["failed_step"]) == ("scheduled", "retry", "fetch")
    assert (
        "attempt 1 of 2 failed in step 'fetch' with ValueError: no such file; attempt 2 starts in" in found["sentence"]
    )
    assert (found["attempts"], found["max_attempts"], found["steps"]) == (1, 2, 1)
    shown = call("task", "show", task_id).out
    assert "\nfailed step  fetch" in shown
    assert "\nattempts     1 of 2" in shown


def test_a_delayed_task_says_when_it_is_due() -> None:
    found = why(enqueue("adds", "--delay", "7200"))
    assert (found["state"], found["cause"]) == ("scheduled", "delay")
    assert "it was enqueued with a delay; it is due in" in found["sentence"]
    assert found["since"] == call("task", "show", found["id"], "--json").json["enqueued_at"]


def test_a_parked_task_says_what_it_waits_for(work: Any) -> None:
    task_id = enqueue("asks")
    work()
    found = why(task_id)
    assert (found["state"], found["cause"], found["waits_on"]) == ("waiting", "answer", "finance")
    assert found["sentence"].startswith("it has been waiting for an answer to 'question' by finance since ")
    assert "(over 1000)" in found["sentence"]
    assert found["remedy"] == f"answer: perdure task answer {task_id} question JSON"
    assert [one["id"] for one in call("task", "list", "--state", "waiting", "--json").json] == [task_id]


def test_ended_tasks_say_how_they_ended(work: Any) -> None:
    done, dead, cancelled = enqueue("adds"), enqueue("dies"), enqueue("adds")
    call("task", "cancel", cancelled)
    work()
    assert why(done)["sentence"].startswith("it succeeded ")
    assert why(cancelled)["sentence"].startswith("it was cancelled ")
    found = why(dead)
    assert (found["cause"], found["failed_step"]) == ("dead", "fetch")
    assert found["sentence"].startswith("it has been a dead letter since ")
    assert " (attempts_exhausted): ValueError: " in found["sentence"]
    assert f"perdure dlq replay {dead}" in found["remedy"]
    letter = call("dlq", "show", dead)
    assert f"perdure dlq replay {dead}" in letter.out
    assert call("dlq", "show", dead, "--json").json["remedy"] == found["remedy"]


def test_an_unknown_id_says_how_old_it_is() -> None:
    answer = call("task", "why", "01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f")
    assert (answer.code, answer.out) == (1, "")
    assert "its id was made on 2025-07-15" in answer.err


TASKS = """
import time
from perdure import App, Context

app = App("test")

@app.task
async def hangs(ctx: Context) -> None:
    await ctx.step("download", time.sleep, 600)
"""


@pytest.mark.processes
def test_a_killed_worker_is_named_with_the_step_and_the_time_of_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_LEASE", "3")
    monkeypatch.setenv("PERDURE_HEARTBEAT", "0.5")
    (tmp_path / "tasks.py").write_text(TASKS)
    task_id = enqueue("hangs")
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=tmp_path) as worker:
        running = until(task_id, lambda found: found["step"] == "download")
        assert running["cause"] == "running"
        assert "in step 'download' for" in running["sentence"]
        worker.send(signal.SIGKILL)
    lost = until(task_id, lambda found: found["cause"] == "worker_lost")
    assert ", but its worker was last heard of" in lost["sentence"]
    assert "no other worker serves queue 'test'" in lost["sentence"]
    name = f"worker {running['worker']} (process {worker.process.pid} on"
    assert f"it is running in step 'download' on {name}" in lost["sentence"]


def until(task_id: str, wanted: Any) -> Any:
    """Return the explanation of a task as soon as it is as wanted."""
    ends = time.monotonic() + BOUND
    while True:
        found = call("task", "why", task_id, "--json").json
        if wanted(found):
            return found
        assert time.monotonic() < ends, json.dumps(found)
        time.sleep(0.1)


def test_watch_prints_progress(work: Any) -> None:
    task_id = enqueue("reports")
    work()
    answer = call("task", "watch", task_id)
    assert "progress 3 of 4 (75%): pages" in answer.out
    (event,) = [line for line in call("task", "watch", task_id, "--json").lines if line.get("type") == "progress"]
    assert (event["data"]["done"], event["data"]["total"], event["data"]["note"]) == (3, 4, "pages")
    assert "3 of 4 (75%): pages, " in call("task", "show", task_id).out


def test_a_terminal_shows_a_bar_for_progress(work: Any, settings: Settings) -> None:
    task_id = enqueue("reports")
    work()

    async def drawn() -> str:
        async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
            handle = await producer.find(task_id)
            assert handle is not None
            console = Console(file=io.StringIO(), force_terminal=True, width=80)
            console.print(_spinner(await handle.record()))
            return str(console.file.getvalue())  # type: ignore[attr-defined]

    found = anyio.run(drawn)
    assert "━" in found
    assert "3 of 4 (75%): pages" in found
