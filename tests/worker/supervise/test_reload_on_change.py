"""`worker run --reload`: which files are watched, and what the supervisor does when one changes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.memory import MemoryObjectSendStream
from perdure.queues import ConfigurationError
from perdure.queues.supervisors import count_crash
from perdure.worker.log import logger
from perdure.worker.supervise.source_files import SourceFiles

from tests.support.command_line import call
from tests.support.workers import BOUND
from tests.worker.supervise.test_supervisor import Harness, harness, producer_of_settings, until_logged

__all__ = ["harness", "producer_of_settings"]

PYTHON = ("*.py",)


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    logger.enable("perdure")
    handler = logger.add(lambda line: lines.append(str(line)), format="{level} {message}")
    yield lines
    logger.remove(handler)
    logger.disable("perdure")


@dataclass(frozen=True, slots=True)
class Edits(SourceFiles):
    """Source files that change when the test says so."""

    streams: list[MemoryObjectSendStream[list[Path]]] = field(default_factory=list)

    async def changes(self) -> AsyncIterator[list[Path]]:
        send, receive = anyio.create_memory_object_stream[list[Path]](10)
        self.streams.append(send)
        with send, receive:
            async for paths in receive:
                yield paths

    def make(self, *paths: str) -> None:
        self.streams[-1].send_nowait([Path(path) for path in paths])


@pytest.fixture
def edits() -> Edits:
    return Edits((), PYTHON)


@pytest.mark.integration
@pytest.mark.processes
async def test_a_change_replaces_all_workers_and_keeps_no_spare(harness: Harness, edits: Edits, log: list[str]) -> None:
    await harness.start_without_waiting(2, sources=edits)
    await harness.until_ready(2)
    edits.make("/elsewhere/tasks.py", "/elsewhere/texts.py")
    for old in harness.ready()[:2]:
        await harness.until_received(old, "stop")
    await until_logged(log, "all workers replaced")
    assert "INFO changed: /elsewhere/tasks.py and 1 other file\n" in log
    assert len(harness.ready()) == harness.started() == 4


@pytest.mark.integration
@pytest.mark.processes
async def test_an_old_worker_that_finishes_its_step_delays_no_later_change(harness: Harness, edits: Edits) -> None:
    (harness.folder / "stubborn").touch()
    await harness.start_without_waiting(1, sources=edits)
    await harness.until_ready(1)
    edits.make("tasks.py")
    await harness.until_ready(2)
    edits.make("tasks.py")
    await harness.until_ready(3)
    for pid in harness.ready():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.integration
@pytest.mark.processes
async def test_an_app_that_is_broken_at_the_start_is_tried_again_after_each_change(
    harness: Harness, edits: Edits, log: list[str]
) -> None:
    harness.order_new_children("exit 2")
    supervisor = await harness.start_without_waiting(1, sources=edits)
    await until_logged(log, "a change of a source file starts one")
    log.clear()
    edits.make("tasks.py")
    await until_logged(log, "a change of a source file starts one")
    assert harness.started() == 2
    harness.order_new_children(None)
    edits.make("tasks.py")
    await harness.until_ready(1)
    assert not harness.running[-1].done()
    supervisor.stop()
    assert await harness.exit_code() == 0


@pytest.mark.integration
@pytest.mark.processes
async def test_a_supervisor_that_waits_for_a_change_can_be_stopped(
    harness: Harness, edits: Edits, log: list[str]
) -> None:
    harness.order_new_children("exit 2")
    supervisor = await harness.start_without_waiting(1, sources=edits)
    await until_logged(log, "a change of a source file starts one")
    supervisor.stop()
    assert await harness.exit_code() == 0


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("order", ["exit 1", "kill SIGKILL"])
async def test_a_start_that_no_change_of_the_code_mends_ends_the_supervisor(
    harness: Harness, edits: Edits, order: str
) -> None:
    harness.order_new_children(order)
    await harness.start_without_waiting(1, sources=edits)
    assert await harness.exit_code() not in (0, 2)


@pytest.mark.integration
@pytest.mark.processes
async def test_a_change_ends_the_delay_after_a_crash(harness: Harness, edits: Edits) -> None:
    harness.set_app_info(restart_delays=[1000.0])
    await harness.start_without_waiting(1, sources=edits)
    os.kill(await harness.until_ready(1), signal.SIGKILL)
    await harness.until_counted(1)
    edits.make("tasks.py")
    await harness.until_ready(2)


@pytest.mark.integration
@pytest.mark.processes
async def test_a_change_lifts_the_pause_after_too_many_crashes(harness: Harness, edits: Edits, log: list[str]) -> None:
    await harness.start_without_waiting(1, sources=edits)
    await harness.until_ready(1)
    supervisor = (await harness.info()).name
    await count_crash(
        harness.producer.gateway, harness.producer.namespace, supervisor, "w", why="it crashes", threshold=0, window=60
    )
    await until_logged(log, f"supervisor {supervisor} paused")
    os.kill(harness.ready()[0], signal.SIGKILL)
    edits.make("tasks.py")
    await harness.until_ready(2)
    await until_logged(log, f"supervisor {supervisor} resumed")


async def test_changes_are_those_of_matching_files_outside_of_environments(tmp_path: Path) -> None:
    files = SourceFiles([tmp_path], ("*.py", "*.md"))
    for folder in ("shop", ".venv", "__pycache__"):
        (tmp_path / folder).mkdir()
    changes = files.changes()
    found: list[Path] = []
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                async for paths in changes:
                    found.extend(paths)
                    if tmp_path / "shop" / "prompt.md" in found:
                        tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            while True:  # the watch begins at some moment from now on
                for name in ("shop/notes.txt", ".venv/a.py", "__pycache__/b.py", "shop/orders.py", "shop/prompt.md"):
                    (tmp_path / name).write_text(str(anyio.current_time()))
                await anyio.sleep(0.05)
    assert set(found) == {tmp_path / "shop" / "orders.py", tmp_path / "shop" / "prompt.md"}


def test_watching_needs_its_package_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="--reload-dir must be a folder, got /nowhere"):
        SourceFiles([tmp_path, Path("/nowhere")], PYTHON).check()
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    monkeypatch.setattr("perdure.worker.supervise.source_files.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"--reload needs the package watchfiles: pip install 'perdure\["):
        SourceFiles([tmp_path], PYTHON).check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reload", "--burst"], "--reload is for development: omit --burst"),
        (["--reload", "--no-supervisor"], "--reload is for development: omit --no-supervisor"),
        (["--reload", "--alert", "true"], "--reload is for development: omit --alert"),
        (["--reload-dir", "."], "--reload-dir needs --reload"),
        (["--reload-include", "*.md"], "--reload-include needs --reload"),
        (["--reload", "--reload-dir", "/nowhere"], "--reload-dir must be a folder, got /nowhere"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], said: str) -> None:
    answer = call("worker", "run", "tasks:app", *options)
    assert (answer.code, answer.err) == (2, f"perdure: {said}\n")


@pytest.mark.parametrize(
    ("application", "options", "folders"),
    [
        ("tasks:app", [], ["."]),
        ("shop/tasks.py:app", [], ["."]),
        ("/srv/shop/tasks.py:app", [], [".", "/srv/shop"]),
        ("tasks:app", ["--reload-dir", "src", "--reload-dir", "src/texts"], ["src"]),
    ],
)
def test_the_working_directory_and_the_folder_of_the_app_are_watched(
    application: str, options: list[str], folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[Any] = []
    monkeypatch.setattr(
        "perdure.worker.cli.support.supervisor_process.run_supervisor",
        lambda *_, sources, **__: given.append(sources),
    )
    assert call("worker", "run", application, "--reload", *options, "--reload-include", "*.md").code == 0
    assert given == [SourceFiles([tmp_path / folder for folder in folders], ("*.py", "*.md"))]
