"""The log of the library: quiet until it is configured, on stderr, as JSON, and through the standard library."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import loguru
import pytest
from perdure import App, Context, Settings, configure_logging, use_stdlib_logging
from perdure.worker import log
from perdure.worker.log import logger

from tests.support.command_line import call, process
from tests.support.workers import take_and_die, work_off


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Restore what the tests of this file configure for the whole process."""
    yield
    loguru.logger.remove()
    loguru.logger.add(sys.stderr, format="{level} {message}")
    loguru.logger.enable("perdure")
    stdlib = logging.getLogger("perdure")
    stdlib.handlers = [handler for handler in stdlib.handlers if not isinstance(handler, log._Receiver)]
    stdlib.setLevel(logging.NOTSET)
    log._process_fields.clear()


def failing_app(settings: Settings) -> App:
    app = App("log", redis_url=settings.redis_url, namespace=settings.namespace)

    @app.task
    async def fail(ctx: Context, text: str) -> None:
        async def act() -> None:
            ctx.log.info("in the step")

        await ctx.step("act", act)
        raise ValueError(text)

    return app


PROGRAM = """
import anyio
from perdure import App, Context, Retry, Worker
app = App("quiet", redis_url="embedded:{folder}")

@app.task(retry=Retry(max_attempts=1))
async def fail(ctx: Context) -> None:
    raise ValueError("wrong")

async def main() -> None:
    async with app:
        await fail.enqueue()
        async with Worker(app) as worker:
            await worker.run(burst=True)

{setup}
anyio.run(main)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("", ""),
        ("import perdure; perdure.configure_logging('ERROR')", "dead letter (attempts_exhausted): ValueError: wrong"),
        ("import loguru; loguru.logger.enable('perdure')", "dead letter (attempts_exhausted): ValueError: wrong"),
        ("import perdure; perdure.use_stdlib_logging()", "dead letter (attempts_exhausted): ValueError: wrong"),
    ],
    ids=["unasked", "configured", "by loguru", "by logging"],
)
def test_the_library_logs_only_if_the_program_asks_for_it(tmp_path: Path, setup: str, shown: str) -> None:
    program = PROGRAM.format(folder=tmp_path, setup=setup)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    if shown:
        assert shown in done.stderr
        assert done.stderr.count("dead letter") == 1
    else:
        assert done.stderr == ""


@pytest.mark.integration
async def test_records_of_the_standard_library_have_the_ids(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    use_stdlib_logging()
    use_stdlib_logging()  # a second call adds no second handler
    caplog.set_level(logging.INFO)
    app = failing_app(settings)
    app.configure(log_tasks=True)
    async with app:
        handle = await app.tasks["fail"].enqueue("wrong")
        await work_off(app)
    (inside,) = [record for record in caplog.records if record.message.startswith("in the step")]
    assert inside.message == f"in the step task=fail id={handle.id} step=act"
    assert {name: vars(inside)[name] for name in ("task", "id", "step")} == {
        "task": "fail",
        "id": handle.id,
        "step": "act",
    }
    (letter,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert letter.name.startswith("perdure.worker.")
    assert vars(letter)["id"] == handle.id
    assert letter.funcName == "_bury"


@pytest.mark.integration
async def test_runs_are_logged_only_if_the_setting_asks_for_it(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    use_stdlib_logging()
    caplog.set_level(logging.INFO, "perdure")
    for asked in (False, True):
        app = failing_app(settings)
        app.configure(log_tasks=asked)
        async with app:
            await app.tasks["fail"].options(max_attempts=1).enqueue("wrong")
            await work_off(app)
    lines = [(record.message.partition(" ")[0], vars(record)) for record in caplog.records]
    began, ended = [fields for word, fields in lines if word in ("started", "ended:")]
    assert began["attempt"] == ended["attempt"] == 1
    assert ended["message"].startswith("ended: dead ")
    assert ended["stop"] == "buried"


def test_each_event_is_one_flat_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("DEBUG", json=True)
    log.add_to_json(worker="host-1")
    bound = logger.bind(task="audit", id="7", step="list", level="of the caller", other=Path("/x"))
    bound.info("ready: {}", "a\nb")
    try:
        raise ValueError("wrong")
    except ValueError:
        bound.exception("failed")
        loguru.logger.exception("of the program")
    logging.getLogger("perdure.queues").warning("evicts %s", "keys")
    ready, failed, foreign, found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert ready.pop("time").endswith("+00:00")
    assert ready == {
        "level": "INFO",
        "message": "ready: a\\nb",
        "logger": "tests.worker.test_log",
        "worker": "host-1",
        "task": "audit",
        "id": "7",
        "step": "list",
        "other": "/x",
    }
    assert failed["message"].startswith("failed\nTraceback")
    assert failed["message"].endswith("ValueError: wrong")
    assert foreign["exception"].endswith("ValueError: wrong\n")
    assert (found["level"], found["message"], found["logger"]) == ("WARNING", "evicts keys", "perdure.queues")


def test_the_level_holds_for_what_the_standard_library_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("ERROR")
    logging.getLogger("perdure.queues").warning("evicts keys")
    logging.getLogger("perdure.queues").error("lost")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ERROR" in line
    assert line.endswith("lost")


APP = """
import asyncio, logging, sys, threading, warnings
from perdure import App, Context, Retry, SyncContext, use_stdlib_logging

app = App("logs")
log = logging.getLogger("shop.orders")
NOTICE = 25
{setup}

def in_step() -> None:
    log.info("in a step", extra={{"order": 7}})

@app.task(retry=Retry(max_attempts=1))
async def work(ctx: Context) -> None:
    log.info("in the handler\\nsecond line")
    await ctx.step("buy", in_step)
    await asyncio.to_thread(log.warning, "in a thread")
    warnings.warn("the API is deprecated", UserWarning)
    log.log(NOTICE, "of a level of its own")
    log.warning("%d does not fit", "text")
    try:
        raise ValueError("of\\nthe app")
    except ValueError:
        log.exception("failed")

@app.task(retry=Retry(max_attempts=1))
def block(ctx: SyncContext) -> None:
    log.info("in the thread of a handler")
    ctx.step("pay", in_step)
    logging.getLogger("other").debug("below the level")

@app.task(retry=Retry(max_attempts=1))
async def ask(ctx: Context) -> None:
    {late}
    log.warning("while both are configured")
    ctx.log.warning("by the context")
"""


UNFIT = "TypeError: %d format: a real number is required, not str"


def worker_log(folder: Path, *options: str, setup: str = "", late: str = "pass") -> list[str]:
    """Return what a worker prints to stderr that runs one task of each kind."""
    (folder / "shop.py").write_text(APP.format(setup=setup, late=late))
    for name in ("work", "block", "ask"):
        assert call("enqueue", name, "--queue", "logs", "--id", name).code == 0
    done = process("worker", "run", "shop:app", "--burst", *options, cwd=folder)
    assert done.code == 0
    return done.err.splitlines()


@pytest.fixture
def of_the_test(monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    monkeypatch.setenv("PERDURE_LOG_JSON", "true")


@pytest.mark.integration
@pytest.mark.usefixtures("of_the_test")
@pytest.mark.parametrize("options", [("--no-supervisor",), ("--processes", "1")], ids=["plain", "supervised"])
def test_a_worker_logs_what_the_app_logs_with_the_standard_library(tmp_path: Path, options: tuple[str, ...]) -> None:
    events = [json.loads(line) for line in worker_log(tmp_path, *options)]
    found = [event for event in events if event["logger"] == "shop.orders"]
    shown = sorted((event["message"].partition("\n")[0], event["level"], event["id"]) for event in found)
    assert shown == [
        (f"%d does not fit (could not format: {UNFIT})", "WARNING", "work"),
        ("failed", "ERROR", "work"),
        ("in a step", "INFO", "block"),
        ("in a step", "INFO", "work"),
        ("in a thread", "WARNING", "work"),
        ("in the handler\\nsecond line", "INFO", "work"),
        ("in the thread of a handler", "INFO", "block"),
        ("of a level of its own", "Level 25", "work"),
        ("while both are configured", "WARNING", "ask"),
    ]
    steps = {(event["task"], event["step"], event["order"]) for event in found if event["message"] == "in a step"}
    assert steps == {("work", "buy", 7), ("block", "pay", 7)}
    (failed,) = [event for event in found if event["level"] == "ERROR"]
    assert failed["message"].startswith("failed\nTraceback (most recent call last):\n")
    assert failed["message"].endswith("\nValueError: of\nthe app")
    (warned,) = [event for event in events if event["logger"] == "py.warnings"]
    assert warned["message"].endswith("UserWarning: the API is deprecated")
    assert (warned["level"], warned["id"]) == ("WARNING", "work")


@pytest.mark.integration
@pytest.mark.usefixtures("of_the_test")
def test_the_level_of_the_worker_holds_for_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_LOG_LEVEL", "ERROR")
    assert [json.loads(line)["level"] for line in worker_log(tmp_path, "--no-supervisor")] == ["ERROR"]
    monkeypatch.setenv("PERDURE_LOG_LEVEL", "DEBUG")
    assert call("enqueue", "block", "--queue", "logs").code == 0
    done = process("worker", "run", "shop:app", "--burst", "--no-supervisor", cwd=tmp_path)
    assert "below the level" in [json.loads(line)["message"] for line in done.err.splitlines()]


@pytest.mark.integration
@pytest.mark.usefixtures("of_the_test")
def test_an_app_that_configures_logging_keeps_its_handlers(tmp_path: Path) -> None:
    setup = "logging.basicConfig(level=logging.INFO, format='own %(message)s', stream=sys.stderr)"
    lines = worker_log(tmp_path, "--no-supervisor", setup=setup)
    assert lines.count("own in a step") == 2
    assert not [line for line in lines if line.startswith("{") and json.loads(line)["logger"] == "shop.orders"]


@pytest.mark.integration
@pytest.mark.usefixtures("of_the_test")
@pytest.mark.parametrize("where", ["setup", "late"])
def test_a_worker_and_the_standard_library_do_not_pass_records_in_a_circle(tmp_path: Path, where: str) -> None:
    lines = worker_log(tmp_path, "--no-supervisor", **{where: "use_stdlib_logging()"})
    messages = [json.loads(line)["message"] for line in lines]
    assert messages.count("while both are configured") == 1
    assert messages.count("by the context") == 1


@pytest.mark.integration
async def test_the_tasks_of_a_lost_worker_have_some_lines_and_one_that_counts_the_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_LINES", 2)
    lines: list[tuple[str, str]] = []
    sink = loguru.logger.add(
        lambda message: lines.append((message.record["level"].name, message.record["message"])), level="DEBUG"
    )
    app = App("lost", settings=settings)

    @app.task
    async def brief(ctx: Context) -> None: ...

    try:
        async with app:
            for _ in range(40):
                await brief.enqueue()
            for _ in range(40):
                await take_and_die(app)
            await work_off(app)
    finally:
        loguru.logger.remove(sink)
    resumed = [level for level, text in lines if text.startswith("resumed after ")]
    (summary,) = [text for level, text in lines if level == "INFO" and " further tasks in " in text]
    shown = resumed.count("INFO")
    assert 2 <= shown < 40
    assert resumed.count("DEBUG") == 40 - shown
    assert summary.startswith(f"resumed {40 - shown} further tasks in ")
