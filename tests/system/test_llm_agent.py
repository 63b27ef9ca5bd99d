"""examples/llm_agent.py against a local server: streams are parsed, and kills repeat no answer and no tool call."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import anyio
import anyio.to_thread
import perdure
import pytest
from perdure import Producer, Settings, TaskFailed

from tests.support.command_line import process
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import worker_processes
from tests.support.servers.local_model import LocalModel, Messages, Reply
from tests.support.workers import BOUND, bounded, work_off

PROGRAM = PROGRAMS / "llm_replica.py"
EXAMPLE = ROOT / "examples" / "llm_agent.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_agent_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalModel]:
    """A local model whose script the test sets."""
    async with LocalModel(lambda messages: Reply("Yes.")).serving() as server:
        monkeypatch.setenv("LLM_URL", server.url)
        monkeypatch.setenv("LLM_MODEL", "local")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


# the endpoint

HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_streamed_answer_is_joined(
    example: ModuleType, server: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_KEY", "key-of-a-test")
    calls = [("read_file", '{"path": "é.txt"}'), ("list_files", "{}")]
    server.script = lambda messages: Reply("Let me see whether …", calls)
    answer = await anyio.to_thread.run_sync(example.complete, HELLO, example.TOOLS.values())
    assert answer.message.content == "Let me see whether …"
    assert [(call.name, call.arguments) for call in answer.message.tool_calls] == [
        ("read_file", {"path": "é.txt"}),
        ("list_files", {}),
    ]
    assert (answer.tokens_in, answer.tokens_out) == (100, 7)
    assert server.headers[0]["authorization"] == "Bearer key-of-a-test"
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    described = server.bodies[0]["tools"][1]["function"]
    assert described["name"] == "read_file"
    assert described["parameters"]["required"] == ["path"]


async def test_an_answer_without_streaming_is_read(example: ModuleType, server: LocalModel) -> None:
    server.script = lambda messages: Reply("Yes.", [("list_files", "{}")], whole=True)
    answer = await anyio.to_thread.run_sync(example.complete, HELLO)
    assert answer.message.content == "Yes."
    assert answer.message.tool_calls[0].name == "list_files"


@pytest.mark.parametrize(
    ("reply", "error", "reported"),
    [
        (Reply("A long answer", cut=3), "EndpointUnavailable", "cut off"),
        (Reply(""), "EndpointUnavailable", "answer is empty"),
        (Reply("busy", status=503), "EndpointUnavailable", "503 .*busy"),
        (Reply("slow down", status=429), "EndpointUnavailable", "429"),
        (Reply("no such model", status=404), "RequestRejected", "404 .*no such model"),
        (Reply("who are you", status=401), "RequestRejected", "401"),
    ],
)
async def test_errors_are_retryable_or_final(
    example: ModuleType, server: LocalModel, reply: Reply, error: str, reported: str
) -> None:
    server.script = lambda messages: reply
    with pytest.raises(getattr(example, error), match=reported):
        await anyio.to_thread.run_sync(example.complete, HELLO)


def test_a_missing_or_unconfigured_endpoint_raises(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(example.RequestRejected, match=r"LLM_URL=http.* LLM_MODEL="):
        example.complete(HELLO)
    monkeypatch.setenv("LLM_URL", "http://127.0.0.1:9/v1")  # discard: nothing listens there
    monkeypatch.setenv("LLM_MODEL", "local")
    with pytest.raises(example.EndpointUnavailable, match=r"127\.0\.0\.1:9"):
        example.complete(HELLO)


def test_server_sent_events_are_parsed(example: ModuleType) -> None:
    lines = b": ping\r\n\r\nevent: x\ndata: one\ndata:two\n\n\n\ndata: three\r\n\r\ndata: has no end\n"
    assert list(example.server_sent(lines.splitlines(keepends=True))) == ["one\ntwo", "three"]


def test_calls_without_index_and_errors_in_the_stream(example: ModuleType) -> None:
    delta = {"tool_calls": [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]}
    stream = [json.dumps({"choices": [{"delta": delta, "finish_reason": "tool_calls"}]})]
    assert [call.id for call in example.collect(stream).message.tool_calls] == ["a", "b"]
    with pytest.raises(example.EndpointUnavailable, match="overloaded"):
        example.collect(['{"error": {"message": "overloaded"}}'])


def test_tools_stay_in_their_folder(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "in" / "a.txt").write_text("Leases pass.\n")
    folder = str(tmp_path / "in")
    assert example.with_error_text(example.read_file)(folder, "../secret") == "error: '../secret' is outside the folder"
    assert example.with_error_text(example.read_file)(folder, "none").startswith("error: ")
    assert example.search_files(folder, "leases") == "a.txt:1: Leases pass."
    assert example.list_files(folder, "*.txt") == "a.txt"


def test_names_of_the_example_are_not_those_of_perdure(example: ModuleType) -> None:
    assert not [name for name in perdure.__all__ if getattr(example, name, None) not in (None, getattr(perdure, name))]
    assert not re.findall(r"PERDURE_\w+", EXAMPLE.read_text("utf-8"))


@pytest.mark.integration
@pytest.mark.processes
async def test_a_question_that_used_all_its_calls_can_be_given_more(
    example: ModuleType, server: LocalModel, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", str(settings.redis_url))
    monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)
    server.script = lambda messages: Reply(calls=[("list_files", "{}")]) if len(server.asked) < 3 else Reply("Three.")
    async with example.app:
        handle = await example.ask.enqueue("How many calls?", max_calls=2)
        await work_off(example.app)
        with pytest.raises(TaskFailed, match="no answer after 2 calls"):
            await handle.result(timeout=BOUND)
        more = json.dumps({"question": "How many calls?", "max_calls": 3})
        command = ("dlq", "replay", handle.id, "--edit-args", more)
        replayed = await anyio.to_thread.run_sync(process, *command)
        assert replayed.code == 0, replayed.err
        await work_off(example.app)
        assert await handle.result(timeout=BOUND) == "Three."
    assert len(server.asked) == 3  # the two recorded answers were not paid for again


# kills

READS = 15


def last_turn(messages: Messages) -> str:
    """Return the text of the last message before the brief, which a prompt after a resume ends with."""
    texts = [one["content"] or "" for one in messages]
    return next(text for text in reversed(texts) if not text.startswith("# Brief"))


def says(words: str) -> Callable[[Messages], bool]:
    """Return a predicate for requests whose last turn contains these words."""
    return lambda messages: words in last_turn(messages)


def chain(messages: Messages) -> Reply:
    """Act as a model that follows the files from one to the next, notes one, and answers at the end."""
    last = last_turn(messages)
    if "Summarize the work so far" in last:
        return Reply("The files are a chain; the first says alpha.")
    if "omega" in last:
        first = "alpha" if any("alpha" in (one["content"] or "") for one in messages) else "forgotten"
        return Reply(f"From {first} to omega.")
    if "an odd one" in last:
        return Reply(calls=[("read_file", '{"path": '), ("none", "{}"), ("read_file", '{"path": "07.txt"}')])
    if found := re.findall(r"next: (\S+)", last):
        note = [("write_note", '{"text": "the second"}')] if found[-1] == "03.txt" else []
        return Reply("On.", [*note, ("read_file", json.dumps({"path": found[-1]}))])
    return Reply(calls=[("read_file", '{"path": "01.txt"}')])


@pytest.mark.integration
@pytest.mark.processes
async def test_three_kills_repeat_no_answer_and_no_tool_call(
    server: LocalModel, settings: Settings, tmp_path: Path
) -> None:
    """Three kills: before the first byte of an answer, between a call and its result, in the middle of a stream (after
    the oldest messages were summarized). The answer equals that of an undisturbed run.
    """
    server.script = chain
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(1, READS + 1):
        words = {1: "alpha", 6: "an odd one", READS: "omega"}.get(number, "")
        proceed = f"next: {number + 1:02}.txt" if number < READS else ""
        (folder / f"{number:02}.txt").write_text(f"{words} {'filler ' * 180}\n{words} {proceed}\n")
    held = (folder / "09.txt").read_text()
    (folder / "09.txt").unlink()
    os.mkfifo(folder / "09.txt")
    before_a_byte = server.hold(says("next: 05.txt"))
    in_the_stream = server.hold(says(f"next: {READS:02}.txt"), after=4)
    environment = {
        "LLM_URL": server.url,
        "LLM_MODEL": "local",
        "LLM_WINDOW": "4000",
        "NO_PROXY": "127.0.0.1",
    }
    short = settings.model_copy(update={"lease": 0.5})
    with worker_processes(short, tmp_path, PROGRAM, environment) as workers:
        async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
            handle = await producer.enqueue(
                "ask", {"question": "From what to what?", "folder": str(folder)}, queue="llm_agent"
            )
            # One after the other: no slow worker loses its lease to another one that lives.
            first = workers.start()
            await bounded(before_a_byte.reached.wait())
            first.kill()
            second = workers.start()
            pipe = await opened_by_a_reader(folder / "09.txt")
            (folder / "09.txt").unlink()  # the next one reads a file; this one waits next
            (folder / "09.txt").write_text(held)
            second.kill()
            os.close(pipe)
            third = workers.start()
            await bounded(in_the_stream.reached.wait())
            third.kill()
            workers.start()
            assert await handle.result(timeout=BOUND) == "From alpha to omega."
            events = [event async for event in handle.events(follow=False)]
        tools = Counter(line.key for line in workers.lines("end"))
        started = Counter(line.key for line in workers.lines("begin"))
    assert server.problems == []
    answered = Counter(json.dumps(messages) for messages in server.answered)
    assert set(answered.values()) == {1}, "an answer was paid for twice"
    assert len(server.asked) == len(server.answered) + 2  # those that were cut off were asked again
    assert set(tools.values()) == {1}, "a tool acted twice"
    assert sum(started.values()) == sum(tools.values()) + 1  # the one that was cut off began again
    reported = Counter(event.type for event in events)
    assert reported["tool_called"] == len(tools) == READS + 1
    assert reported["compacted"] == sum(says("Summarize the work so far")(messages) for messages in server.asked) >= 1
    assert reported["repaired"] == 0
    numbers = [event.number for event in events if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    compacted = next(event for event in events if event.type == "compacted")
    said = [event.number for event in events if event.type == "message_added"]
    assert compacted.data["first"] == said[0]
    assert compacted.data["last"] == said[compacted.data["messages"] - 1]
    assert len(list((folder / "notes").iterdir())) == 1


async def opened_by_a_reader(pipe: Path) -> int:
    """Wait for a reader of a named pipe and return the write end; the reader blocks until it is closed."""
    with anyio.fail_after(BOUND):
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO
                await anyio.sleep(0.01)
