"""Programs of examples/, run by real workers, some of which are killed; each trap that one of them had is here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from perdure import Producer, State, TaskHandle
from perdure.context import Finding, View
from perdure.worker.agents.journal.reducer import empty_state
from perdure.worker.durable.journal.event import Event
from perdure.worker.durable.journal.run_events import StepCompleted, ToolCalled, WaitStarted

from tests.support.command_line import BOUND, Running, call
from tests.support.paths import ROOT
from tests.support.workers import wait_until, work_off

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


def load(name: str) -> ModuleType:
    """Import a program, to call it in this process."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def complaint(order: str, task_id: str) -> AsyncIterator[TaskHandle[Any]]:
    async with Producer() as producer:
        arguments = {"order": order, "text": "it arrived broken"}
        yield await producer.enqueue("complaint", arguments, queue="complaints", task_id=task_id)


async def is_waiting(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.WAITING


async def test_a_worker_killed_in_a_tool_refunds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("LEDGER", str(ledger))
    monkeypatch.setenv("CONFIRMED_AFTER", "3600")
    async with complaint("A7", "case-1") as handle:
        with worker("approval_agent.py", tmp_path) as killed:
            await wait_until(lambda: is_waiting(handle), "the wait for finance")
            await handle.answer("refund", True, by="finance")
            await wait_until(anyio.Path(ledger).exists, "the refund")
            killed.process.kill()
        with worker("approval_agent.py", tmp_path):
            assert await handle.result(timeout=BOUND) == "Your refund: 30 euros."
    assert ledger.read_text() == "case-1:refund A7 30\n"


async def test_the_order_of_the_complaint_is_refunded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("CONFIRMED_AFTER", "0")
    with worker("approval_agent.py", tmp_path):
        async with complaint("B9", "case-2") as handle:
            await wait_until(lambda: is_waiting(handle), "the wait for finance")
            events = [event async for event in handle.events(follow=False)]
            assert any("Refund 120 euros for order B9?" in str(event.data) for event in events)
            await handle.answer("refund", True, by="finance")
            assert await handle.result(timeout=BOUND) == "Your refund: 120 euros."
        async with complaint("C1", "case-3") as handle:
            assert await handle.result(timeout=BOUND) == "Your refund: none, there is no order C1."
    assert (tmp_path / "ledger").read_text() == "case-2:refund B9 120\n"


@contextmanager
def web_service(name: str = "web_job.py") -> Iterator[str]:
    """The URL of the running example."""
    service = subprocess.Popen([sys.executable, EXAMPLES / name, "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        yield service.stdout.readline().strip()
    finally:
        service.terminate()
        service.communicate()


def test_a_web_service_shows_the_progress_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_PER_MONTH", "0.15")
    with web_service() as url:
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


def test_a_web_service_says_what_the_client_did_wrong() -> None:
    with web_service() as url:
        assert status(url, {"year": 2026, "id": "r1"}) == 202
        assert status(url, {"year": 2027, "id": "r1"}) == 409
        wrong: list[object] = [
            {"month": 1},
            {"year": "x"},
            {"year": 2026, "id": "a b"},
            {"year": 2026, "id": 1},
            [],
            None,
        ]
        assert [status(url, body) for body in wrong] == [400] * len(wrong)
        assert [status(url, body) for body in (b"", b"{", b"\xff")] == [400] * 3
        assert (status(f"{url}/a%20b"), status(f"{url}/none")) == (400, 404)


def test_a_web_service_without_redis_asks_its_clients_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://127.0.0.1:9")  # discard: nothing listens there
    with web_service() as url:
        assert status(url, {"year": 2026}) == 503
        assert status(f"{url}/r1") == 503


_NO_BODY = object()


def status(url: str, body: object = _NO_BODY) -> int:
    """The status of a POST with this body, or of a GET without one."""
    data = None if body is _NO_BODY else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, data, timeout=BOUND) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            assert "error" in json.load(error)
            return error.code


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


async def test_tenants_take_turns_through_a_killed_worker(tmp_path: Path) -> None:
    share = load("fair_share.py")
    wanted = {"acme": [f"text {number}" for number in range(40)], "small": ["one", "two", "three"]}
    with worker("fair_share.py", tmp_path) as killed:
        sharing = asyncio.create_task(share.share(wanted))

        async def is_used() -> bool:
            shown = await asyncio.to_thread(call, "limit", "show", "provider", "--json")
            return shown.code == 0 and shown.json["in_use"] > 0

        await wait_until(is_used, "tasks hold the limit")
        killed.process.kill()
    with worker("fair_share.py", tmp_path):
        seconds = await asyncio.wait_for(sharing, BOUND)
        assert seconds["small"] < seconds["acme"]
        async with Producer() as producer:
            handle = await producer.enqueue("translated", {"tenant": "acme", "text": "busy"}, queue="shares")
            assert await handle.result(timeout=BOUND) == "BUSY"
            retried = await handle.record()
            assert retried is not None
            assert retried.attempts == 2


def test_a_fan_out_of_a_thousand_counts_each_file_once(tmp_path: Path) -> None:
    for number in range(999):
        (tmp_path / f"{number}.md").write_text("lease and fence and lease\n")
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe")
    with worker("fan_out.py", tmp_path, "--concurrency", "1"):
        first = program("fan_out.py", str(tmp_path))
        again = program("fan_out.py", str(tmp_path))
    assert first == again == "1000 files: lease 1998, and 1998, fence 999\n"
    listed = call("task", "list", "--json", "--limit", "2000").json
    assert Counter(task["state"] for task in listed) == {"succeeded": 1000, "dead": 1}


def test_equal_files_and_files_that_are_named_twice_count_as_what_they_are(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "folder.md").mkdir(parents=True)
        (tmp_path / folder / "same.md").write_text("lease\n")
    (tmp_path / "a" / "link.md").symlink_to("same.md")
    with worker("fan_out.py", tmp_path):
        arguments = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b" / "same.md")]
        assert program("fan_out.py", *arguments) == "2 files: lease 2\n"


def test_all_words_of_a_file_are_counted(tmp_path: Path) -> None:
    words = [first + second for first in "abcdefghijkl" for second in "abcdefghijkl"]
    (tmp_path / "long.md").write_text(" ".join(words))
    assert load("fan_out.py").count(str(tmp_path / "long.md")) == dict.fromkeys(words, 1)


async def test_a_chat_does_not_ask_its_model_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn fails after the model has answered; its next attempt takes the answer from the record."""
    chat, asked = load("chat.py"), 0
    model, act = chat.model, chat.Chat.kind.act

    def counting(conversation: list[Any]) -> str:
        nonlocal asked
        asked += 1
        return str(model(conversation))

    async def failing_once(self: Any, ctx: Any, state: Any, step: Any) -> str:
        answer = await act(self, ctx, state, step)
        if ctx.attempt == 1:
            raise ConnectionError("after the answer")
        return str(answer)

    monkeypatch.setattr(chat, "model", counting)
    monkeypatch.setattr(chat.Chat.kind, "act", failing_once)
    async with chat.app:
        turn = await chat.app.session(chat.Chat, "ada").send("Hello")
        await work_off(chat.app)
        assert await turn.result(timeout=BOUND) == "You have said 1 things, the first was 'Hello'."
    assert asked == 1


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


def test_an_agent_that_goes_in_circles_is_stopped_by_a_check_of_its_own(tmp_path: Path) -> None:
    with worker("coherence_checks.py", tmp_path):
        printed = program("coherence_checks.py")
    assert "agent 'searcher' failed its coherence checks: going_in_circles: search {'obj': 'the invoice'}" in printed
    assert printed.endswith("followed each other 3 times\n")


def calls(*queries: str) -> list[ToolCalled]:
    return [ToolCalled(tool="search", arguments={"q": query}) for query in queries]


PLAN: dict[str, Any] = {"plan": [{"key": "a", "status": "done"}, {"key": "b", "status": "running"}], "current": "b"}


@pytest.mark.parametrize(
    ("check", "state", "events", "detail"),
    [
        ("reworded", {}, calls("1. Find it", "2. find  it", "find it #3", "FIND IT", "find it (7)"), "called 5 times"),
        ("reworded", {}, calls(*(f"page {number}" for number in range(9))), ""),
        ("going_in_circles", {}, calls(*"xyzabcabcabc"), "followed each other 3 times"),
        ("going_in_circles", {}, calls(*"abcabcab"), ""),
        ("going_in_circles", {}, calls(*"aaaaaa"), ""),
        ("changed_goal", {"goal": "x" * 90}, [], f"the goal is {'x' * 80!r}, but 'g' was enqueued"),
        ("contradictory_plan", {**PLAN, "results": {"a": 1}}, [], ""),
        ("contradictory_plan", PLAN, [], "step 'a' is done without a result"),
        ("contradictory_plan", {"results": {"z": 1}}, [], "the result 'z' has no step in the plan"),
        ("contradictory_plan", {"current": "z"}, [], "the current step 'z' is not in the plan"),
        ("long_conversation", {"messages": [{"content": "word " * 110_000}]}, [], "about 137,500 tokens"),
        ("long_conversation", {"messages": [{"content": "word " * 100_000}]}, [], ""),
        ("does_not_wait", {"waiting_for": {}}, [WaitStarted(), StepCompleted(step="a"), StepCompleted(step="b")], ""),
        (
            "does_not_wait",
            {"waiting_for": {"what": "message"}},
            [StepCompleted(step="a"), WaitStarted(), StepCompleted(step="b"), StepCompleted(step="c")],
            "2 steps were done while it waits",
        ),
    ],
)
def test_the_checks_find_agents_that_are_lost(
    check: str, state: dict[str, Any], events: list[Event], detail: str
) -> None:
    module = load("coherence_checks.py")
    assert {own.__name__ for own in module.CHECKS} >= {check}
    found = getattr(module, check)(View({**empty_state(), "goal": "g", **state}, "g", events=events))
    text = found.detail if isinstance(found, Finding) else found or ""
    assert detail in text if detail else text == ""


class Page:
    """A page that follows a turn of the chat, as its script does: it drops the words that a mark makes void."""

    def __init__(self, url: str) -> None:
        self.url, self.cursor = url, ""
        self.shown: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None

    def read(self, words: int = 1000) -> str:
        """Connect, and read so many further events or to the end; return the text."""
        request = urllib.request.Request(self.url, headers={"Last-Event-ID": self.cursor} if self.cursor else {})
        with urllib.request.urlopen(request, timeout=BOUND) as events:
            while words and self.end is None:
                field, _, value = events.readline().decode().strip().partition(": ")
                if field == "id":
                    self.cursor = value
                elif field == "data":
                    words -= 1
                    self.take(json.loads(value))
        return "".join(item["value"] for item in self.shown)

    def take(self, item: dict[str, Any]) -> None:
        if item["kind"] == "item":
            self.shown.append(item)
        elif item["kind"] == "end":
            self.end = item
        elif item["kind"] == "cut_off":
            assert item["reason"] == "retried"
            self.shown = [
                shown for shown in self.shown if shown["step"] != item["step"] or shown["attempt"] > item["attempt"]
            ]


def test_a_chat_streams_through_a_killed_worker_and_a_refreshed_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS_PER_WORD", "0.25")
    with web_service("chat_stream.py") as url:
        assert b"EventSource" in urllib.request.urlopen(url, timeout=BOUND).read()
        assert fetch(f"{url}turns") == 0
        request = urllib.request.Request(f"{url}turns", data=b"why", method="POST")
        assert json.load(urllib.request.urlopen(request, timeout=BOUND)) == 1
        page = Page(f"{url}turns/1")
        with worker("chat_stream.py", tmp_path) as killed:
            assert page.read(9).startswith("(why) Once upon a time")
            killed.process.kill()
        with worker("chat_stream.py", tmp_path):
            text = page.read()
            refreshed = Page(page.url)
            assert refreshed.read() == text
        story: str = load("chat_stream.py").STORY
        assert text == f"(why) {story} "
        assert page.end is not None
        assert (page.end["state"], page.end["result"]) == ("succeeded", text)
        assert max(item["attempt"] for item in page.shown) == 2, "the second try continued"
        assert len(page.shown) < len(story.split()), "its first item is the text that the first try had saved"


@pytest.mark.parametrize(
    "name",
    [
        *("approval.py", "approval_agent.py", "nightly_batch.py", "fan_out.py", "chat.py", "web_job.py"),
        *("chat_stream.py", "fair_share.py", "a2a_front.py", "ag_ui_front.py", "langgraph_agent.py"),
        "fastapi_agent.py",
    ],
)
def test_the_page_of_the_examples_has_their_lines(name: str) -> None:
    lines = len((EXAMPLES / name).read_text("utf-8").splitlines())
    assert f"[{name}]({name}) | {lines} |" in (EXAMPLES / "README.md").read_text("utf-8")
    longer = {"chat_stream.py": 130, "a2a_front.py": 140, "ag_ui_front.py": 105, "fastapi_agent.py": 150}
    assert lines <= longer.get(name, 90)  # these have a page, a card or a stream
