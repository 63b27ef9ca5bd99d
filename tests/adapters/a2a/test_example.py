"""The A2A example, judged by a2a-lint, with an answer after a restart of the agent and a killed worker."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.support.processes import Process, WorkerProcesses, until, worker_processes

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "a2a_front.py"


@pytest.fixture
def workers(perdure: Any, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(f"{EXAMPLE}:app", tmp_path) as processes:
        yield processes


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def serve(workers: WorkerProcesses, port: int) -> Process:
    process = workers.start_command([sys.executable, str(EXAMPLE), str(port)])

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await until(answers, "the agent listens")
    return process


def send(port: int, text: str, **task: str) -> dict[str, Any]:
    """Send a message and return the task of the answer."""
    message = {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}], **task}
    return dict(request(port, "SendMessage", {"message": message})["task"])


def request(port: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    headers = {"Content-Type": "application/json", "A2A-Version": "1.0"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/", body, headers)) as response:
        answer = json.loads(response.read())
    assert "error" not in answer, answer
    return dict(answer["result"])


async def test_agent_passes_the_linter(workers: WorkerProcesses, port: int) -> None:
    workers.start()
    await serve(workers, port)
    program = Path(sys.executable).with_name("a2a-lint")
    command = [program, f"http://127.0.0.1:{port}", "--live"]
    done = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_answer_after_a_restart_of_agent_and_worker(workers: WorkerProcesses, port: int) -> None:
    worker, agent = workers.start(), await serve(workers, port)
    asked = send(port, "chairs")
    assert asked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    await workers.kill(worker)
    await workers.kill(agent)
    workers.start()
    await serve(workers, port)
    ended = send(port, "two", taskId=asked["id"], contextId=asked["contextId"])
    assert ended["status"]["state"] == "TASK_STATE_COMPLETED"
    assert ended["artifacts"][0]["parts"][0]["text"] == "ordered: two for chairs"
    assert request(port, "GetTask", {"id": asked["id"]})["status"]["state"] == "TASK_STATE_COMPLETED"
