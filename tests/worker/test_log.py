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

from tests.support.workers import work_off


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
