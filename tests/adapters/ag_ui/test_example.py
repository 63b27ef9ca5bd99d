"""The AG-UI example, judged by ag-ui-validate, with a worker that is killed in the middle of an answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.support.processes import WorkerProcesses, until, worker_processes

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ag_ui_front.py"


@pytest.fixture
def workers(perdure: Any, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(f"{EXAMPLE}:app", tmp_path) as processes:
        yield processes


async def serve(workers: WorkerProcesses) -> str:
    """Start the endpoint; return its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    workers.start_command([sys.executable, str(EXAMPLE), str(port)])

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await until(answers, "the endpoint listens")
    return f"http://127.0.0.1:{port}/"


def post(url: str, run: str) -> Any:
    body = (
        f'{{"threadId": "t", "runId": "{run}", "state": {{}}, "tools": [], "context": [], "forwardedProps": {{}}, '
        '"messages": [{"id": "m", "role": "user", "content": "Hello?"}]}'
    )
    return urllib.request.urlopen(urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"}))


def validate(capture: Path) -> None:
    program = Path(sys.executable).with_name("ag-ui-validate")
    done = subprocess.run([program, capture, "--fail-on", "warning"], check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("killed", [False, True])
async def test_stream_of_a_run_is_valid(workers: WorkerProcesses, tmp_path: Path, killed: bool) -> None:
    first = workers.start()
    response = post(await serve(workers), f"run{time.time_ns()}")
    capture = tmp_path / "run.sse"
    with capture.open("wb") as file:
        for line in response:
            file.write(line)
            if killed and b"killed " in line:
                await workers.kill(first)
                workers.start()
                killed = False
    text = capture.read_text()
    assert "RUN_FINISHED" in text
    validate(capture)
