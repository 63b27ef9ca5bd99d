"""The five programs of examples/, run by real workers, one of which is killed where the program says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import Producer, State

from tests.support.command_line import BOUND, Running, call
from tests.support.paths import ROOT
from tests.support.workers import wait_until

EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture(autouse=True)
def environment(redis_url: str, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the programs at the test's server, with a short lease."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_REDIS_URL", redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", namespace_name)
    monkeypatch.setenv("PERDURE_LEASE", "1")


def worker(name: str, folder: Path, *options: str) -> Running:
    return Running("worker", "run", f"{EXAMPLES / name}:app", "--no-supervisor", *options, cwd=folder)


def program(name: str, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_worker_killed_in_a_tool_refunds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("LEDGER", str(ledger))
    monkeypatch.setenv("CONFIRMED_AFTER", "3600")
    async with Producer() as producer:
        arguments = {"order": "A7", "text": "it arrived broken"}
        handle = await producer.enqueue("complaint", arguments, queue="complaints", task_id="case-1")

        async def waits() -> bool:
            return await handle.status() is State.WAITING

        with worker("approval_agent.py", tmp_path) as killed:
            await wait_until(waits, "the wait for finance")
            await handle.send("yes", sender="finance")
            await wait_until(anyio.Path(ledger).exists, "the refund")
            killed.process.kill()
        with worker("approval_agent.py", tmp_path):
            assert await handle.result(timeout=BOUND) == "Your refund: 30 euros."
    assert ledger.read_text() == "case-1:refund A7 30\n"


async def test_a_batch_resumes_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.log").write_text("started\nERROR full\n")
    (folder / "x.log").symlink_to("missing")
    async with Producer() as producer:
        handle = await producer.enqueue("nightly", {"folder": str(folder)}, queue="nightly")
        monkeypatch.setenv("SECONDS_PER_FILE", "0.2")

        async def half_done() -> bool:
            events = [event async for event in handle.events(follow=False)]
            return sum(event.type == "step_completed" for event in events) >= 5

        with worker("nightly_batch.py", tmp_path) as killed:
            await wait_until(half_done, "five steps")
            killed.process.kill()
        monkeypatch.setenv("SECONDS_PER_FILE", "0")
        with worker("nightly_batch.py", tmp_path):
            report = await handle.result(timeout=BOUND)
        events = [event async for event in handle.events(follow=False)]
    assert report == {"files": 11, "lines": 20, "errors": 10, "unreadable": [str(folder / "x.log")]}
    steps = [event.step for event in events if event.type == "step_completed"]
    assert len(steps) == len(set(steps)) == 11  # the list and ten files: none was recorded twice


def test_a_web_service_shows_the_progress_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_PER_MONTH", "0.15")
    service = subprocess.Popen([sys.executable, EXAMPLES / "web_job.py", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        url = service.stdout.readline().strip()
        assert fetch(url, {"month": 1}) == {"error": "'year'"}
        assert fetch(f"{url}/none") == {"error": "no such report"}
        assert fetch(url, {"year": 2026, "id": "r1"}) == fetch(url, {"year": 2026, "id": "r1"}) == {"id": "r1"}
        assert fetch(f"{url}/r1") == {"state": "queued"}
        with worker("web_job.py", tmp_path) as killed:
            shown = poll(f"{url}/r1", lambda shown: shown.get("done", 0) >= 3)
            assert (shown["state"], shown["total"]) == ("running", 12)
            killed.process.kill()
        with worker("web_job.py", tmp_path):
            shown = poll(f"{url}/r1", lambda shown: shown["state"] == "succeeded")
        assert shown["result"]["Dec"] == 202612
    finally:
        service.terminate()
        service.communicate()


def fetch(url: str, body: dict[str, object] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, data, timeout=BOUND) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def poll(url: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Fetch until something is true of the answer."""
    ends = time.monotonic() + BOUND
    shown: dict[str, Any] = fetch(url)
    while not done(shown):
        assert time.monotonic() < ends, shown
        time.sleep(0.05)
        shown = fetch(url)
    return shown


def test_a_fan_out_counts_each_file_once(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.md").write_text("lease and fence and lease\n" * (number + 1))
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe")
    with worker("fan_out.py", tmp_path):
        first = program("fan_out.py", str(tmp_path))
        (tmp_path / "5.md").write_text("lease\n")
        second = program("fan_out.py", str(tmp_path))
    assert first == "6 files: lease 30, and 30, fence 15\n"
    assert second == "7 files: lease 31, and 30, fence 15\n"
    listed = call("task", "list", "--json").json
    assert sorted(task["state"] for task in listed) == ["dead"] + ["succeeded"] * 6


def test_a_chat_remembers_what_was_said_before_its_worker_was_killed(tmp_path: Path) -> None:
    with worker("chat.py", tmp_path) as killed:
        first = program("chat.py", "ada", stdin="Hello\nWhat is a lease?\n")
        killed.process.kill()
    assert first.splitlines() == [
        "You have said 1 things, the first was 'Hello'.",
        "You have said 2 things, the first was 'Hello'.",
    ]
    with worker("chat.py", tmp_path):
        second = program("chat.py", "ada", stdin="And a fence?\n")
    assert second == "You have said 3 things, the first was 'Hello'.\n"
    listed = call("session", "list", "--json").json
    assert [(one["agent"], one["id"], one["turns"], one["status"]) for one in listed] == [("chat", "ada", 3, "idle")]


@pytest.mark.parametrize("name", ["approval_agent.py", "nightly_batch.py", "fan_out.py", "chat.py", "web_job.py"])
def test_the_page_of_the_examples_has_their_lines(name: str) -> None:
    lines = len((EXAMPLES / name).read_text("utf-8").splitlines())
    assert f"[{name}]({name}) | {lines} |" in (EXAMPLES / "README.md").read_text("utf-8")
    assert lines <= 80
