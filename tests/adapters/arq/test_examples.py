"""The examples of arq's documentation, from its source distribution: only import lines and addresses are changed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from perdure.integrations.arq import create_pool
from perdure.testing import PerdureFixture

from tests.adapters.support.processes import BOUND

_SOURCES = dict(item.split("=", 1) for item in os.environ["PERDURE_ADAPTER_SOURCES"].split(os.pathsep) if item)
EXAMPLES = Path(_SOURCES["arq"]) / "docs" / "examples"

pytestmark = pytest.mark.timeout(120)


class Site(BaseHTTPRequestHandler):
    """Answers with the number at the end of the path as its status, and 200 without one."""

    def do_GET(self) -> None:
        last = self.path.rpartition("/")[2]
        self.send_response(int(last) if last.isdigit() else 200)
        self.end_headers()
        self.wfile.write(b"a page")

    def log_message(self, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Example:
    """An example in a folder of its own."""

    def __init__(self, name: str, folder: Path, site: str = "") -> None:
        text = (EXAMPLES / f"{name}.py").read_text()
        text, self.imports = re.subn(
            r"^from arq(\.\w+)* import", "from perdure.integrations.arq import", text, flags=re.M
        )
        if site:
            text = re.sub(r"https://[\w.]+", site, text)
        self.name, self.folder = name, folder
        (folder / f"{name}.py").write_text(text)

    def command(self, *options: str) -> list[str]:
        return [str(Path(sys.executable).with_name("perdure")), *options]

    def enqueue(self) -> str:
        """Run the program itself; return what it printed."""
        done = subprocess.run(
            [sys.executable, f"{self.name}.py"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def work(self) -> str:
        """Run its worker until the queue is empty; return what jobs printed."""
        command = self.command("worker", "run", f"{self.name}:WorkerSettings", "--burst")
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=BOUND, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> subprocess.Popen[str]:
        command = self.command("worker", "run", f"{self.name}:WorkerSettings", "--no-supervisor")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, env=environment)

    def tasks(self) -> list[dict[str, Any]]:
        done = subprocess.run(self.command("task", "list", "--json"), capture_output=True, text=True, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found


@pytest.fixture
def example(
    perdure: PerdureFixture, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Example]:
    for name in [name for name in os.environ if name.startswith("PERDURE_ADAPTER_")]:
        monkeypatch.delenv(name)  # programs warn of a variable that is no setting
    return lambda name: Example(name, tmp_path, site)


def stop(worker: subprocess.Popen[str]) -> None:
    worker.send_signal(signal.SIGTERM)
    worker.wait(BOUND)
    if worker.stdout is not None:
        worker.stdout.close()


def until_tasks(example: Example, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the only task is as it must be."""
    ends = time.monotonic() + BOUND
    while time.monotonic() < ends:
        [task] = example.tasks()
        if holds(task):
            return task
        time.sleep(0.1)
    raise TimeoutError(str(example.tasks()))


def test_main_demo(example: Callable[[str], Example]) -> None:
    demo = example("main_demo")
    assert demo.enqueue() == ""
    printed = demo.work().splitlines()
    assert len(printed) == 3
    assert all(line.endswith(": a page...") for line in printed)
    assert sorted(task["state"] for task in demo.tasks()) == ["succeeded"] * 3


def test_job_ids(example: Callable[[str], Example]) -> None:
    ids = example("job_ids")
    printed = ids.enqueue().splitlines()
    assert re.fullmatch("<arq job [0-9a-f-]+>", printed[0])
    assert printed[0] != printed[1]
    assert printed[2:] == ["<arq job foobar>", "None", "<arq job my_job>"]
    ran = ids.work().splitlines()
    assert len(ran) == 4
    assert {"running the task with id foobar", "running the task with id my_job"} < {*ran}


def test_job_results(example: Callable[[str], Example]) -> None:
    results = example("job_results")
    worker = results.start()
    try:
        printed = results.enqueue().splitlines()
    finally:
        stop(worker)
    text = "\n".join(printed)
    assert re.search(r"function='the_task',\s+args=\(\),\s+kwargs={},", text)
    assert printed[-2].startswith("JobStatus.")
    assert printed[-1] == "42"


def test_job_abort(example: Callable[[str], Example]) -> None:
    abort = example("job_abort")
    worker = abort.start()
    try:
        abort.enqueue()
        assert [task["state"] for task in abort.tasks()] == ["cancelled"]
    finally:
        stop(worker)


def test_retry(example: Callable[[str], Example]) -> None:
    retry = example("retry")
    retry.enqueue()
    worker = retry.start()
    try:
        task = until_tasks(retry, lambda task: bool(task["state"] == "scheduled" and task["attempts"] == 1))
    finally:
        stop(worker)
    assert task["error"]["message"] == "retry in 5 s"


def test_deferred(example: Callable[[str], Example]) -> None:
    deferred = example("deferred")
    deferred.enqueue()
    worker = deferred.start()
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("this is the tasks, delay since enqueueing: 0:00:1")
    finally:
        stop(worker)
    due = sorted(task["due_at"] for task in deferred.tasks() if task["state"] == "scheduled")
    assert len(due) == 2
    assert due[1].startswith("2032-01-2")


def test_slow_job(example: Callable[[str], Example]) -> None:
    """A job that a signal cuts off runs again, as in the output of the documentation."""
    slow = example("slow_job")
    slow.enqueue()
    worker = slow.start()
    until_tasks(slow, lambda task: bool(task["state"] == "running"))
    worker.send_signal(signal.SIGINT)
    started = time.monotonic()
    worker.wait(BOUND)
    assert time.monotonic() - started < 4, "it waited for the job"
    stop(worker)
    assert [task["state"] for task in slow.tasks()] == ["queued"]
    slow.work()
    assert [task["state"] for task in slow.tasks()] == ["succeeded"]


def test_cron(example: Callable[[str], Example]) -> None:
    cron = example("cron")
    worker = cron.start()
    try:
        listed: list[dict[str, Any]] = []
        ends = time.monotonic() + BOUND
        while not listed and time.monotonic() < ends:
            done = subprocess.run(
                cron.command("schedule", "list", "--json"), capture_output=True, text=True, check=True
            )
            listed = json.loads(done.stdout)
        assert "12 9,12,18 * * *" in json.dumps(listed)
        subprocess.run(cron.command("schedule", "run", "cron.run_regularly"), check=True, capture_output=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "run foo job at 9.12am, 12.12pm and 6.12pm\n"
    finally:
        stop(worker)


async def test_sync_job(example: Callable[[str], Example]) -> None:
    sync = example("sync_job")
    redis = await create_pool()
    job = await redis.enqueue_job("the_task", 0.01)
    assert job is not None
    sync.work()
    assert await job.result(timeout=BOUND) is None
    assert [task["state"] for task in sync.tasks()] == ["succeeded"]
    await redis.aclose()


def test_custom_serialization_is_refused(example: Callable[[str], Example]) -> None:
    custom = example("custom_serialization_msgpack")
    program = [sys.executable, "custom_serialization_msgpack.py"]
    worker = custom.command("worker", "run", "custom_serialization_msgpack:WorkerSettings", "--no-supervisor")
    for command in (program, worker):
        done = subprocess.run(command, cwd=custom.folder, capture_output=True, text=True, timeout=BOUND, check=False)
        assert done.returncode != 0
        assert "job_serializer must be omitted" in done.stderr
        assert "Perdure stores arguments and results as JSON only" in done.stderr


def test_each_example_of_the_documentation_is_here() -> None:
    source = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'example("{path.stem}")' in source
