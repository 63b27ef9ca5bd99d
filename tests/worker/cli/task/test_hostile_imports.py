"""`perdure task import` of files that no export wrote: one sentence with line and field, and nothing is stored."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Settings
from perdure.queues import PayloadTooLarge
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.errors import ArtifactError, TransferError
from perdure.worker.transfer.export import export_task
from perdure.worker.transfer.import_ import import_task

from tests.support.command_line import call
from tests.support.workers import work_off

pytestmark = pytest.mark.integration

Lines = list[dict[str, Any]]
Hostile = Callable[[Lines], object]


def packed(lines: Lines) -> bytes:
    """Return a file with a last line that fits the others."""
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return body + json.dumps(end).encode() + b"\n"


@pytest.fixture
def app(settings: Settings, tmp_path: Path) -> App:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / "running")}
    app = App("test", settings=settings.model_copy(update=places))

    @app.task
    async def waiting(ctx: Context, text: str = "") -> None:
        await ctx.artifacts.save("report.md", b"\x00\x01")
        (ctx.workspace.path / "a.txt").write_text("a")
        await ctx.step("first", lambda: None)
        await ctx.inbox(wait=600, sender="editor")

    return app


@pytest.fixture
async def lines(app: App) -> AsyncIterator[Lines]:
    """The lines of an exported task but the last."""
    async with app:
        handle = await app.producer.enqueue("waiting", {"text": "x"}, queue="test")
        await handle.send("hello", sender="ada")
        await work_off(app)
        store = await artifact_store(app.producer.gateway, app.settings)
        file = io.BytesIO()
        await export_task(app.producer, handle, store, file)
        await handle.cancel()
        yield [json.loads(line) for line in file.getvalue().splitlines()][:-1]


def header(**changed: Any) -> Hostile:
    return lambda lines: lines[0].update(changed)


def envelope(**changed: Any) -> Hostile:
    return lambda lines: lines[0]["envelope"].update(changed)


def first(lines: Lines, kind: str, name: str = "") -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == kind and name in line.get("name", ""))


def line(kind: str, named: str = "", /, **changed: Any) -> Hostile:
    return lambda lines: first(lines, kind, named).update(changed)


def json_of(kind: str, name: str, /, **changed: Any) -> Hostile:
    """Change the JSON that a line has as its text."""

    def change(lines: Lines) -> None:
        found = first(lines, kind, name)
        found["text"] = json.dumps(json.loads(found["text"]) | changed)

    return change


def event(type_: str, /, **changed: Any) -> Hostile:
    def change(lines: Lines) -> None:
        found = next(line for line in lines if line.get("fields", {}).get("type") == type_)
        found["text"] = json.dumps(json.loads(found["text"]) | changed)

    return change


def added(**fields: Any) -> Hostile:
    """Add a line before the first event."""
    return lambda lines: lines.insert(next(at for at, line in enumerate(lines) if line["kind"] == "event"), fields)


OUTSIDE = "../" * 14 + "etc/hostname"

CASES = {
    "queue with braces": (header(queue="x}{y"), r"line 1: queue: queue must be 1 to 64"),
    "queue with a path": (header(queue="../a:b"), r"line 1: queue: queue must be"),
    "queue of a number": (header(queue=5), r"line 1: queue: "),
    "no queue": (lambda lines: lines[0].pop("queue"), r"line 1: queue: Field required"),
    "events true": (header(events=True), r"line 1: events: "),
    "events negative": (header(events=-1), r"line 1: events: "),
    "events huge": (header(events=10**18), r"line 1: events: "),
    "entries text": (header(entries="5"), r"line 1: entries: "),
    "data format text": (header(data_format="9"), r"line 1: data_format: "),
    "data format list": (header(data_format=[1]), r"line 1: data_format: "),
    "data format later": (header(data_format=99), r"line 1: data_format: .*update Perdure"),
    "state list": (header(state=["dead"]), r"line 1: state: "),
    "state running": (header(state="running"), r"line 1: state: "),
    "id with a slash": (header(id="a/b"), r"line 1: id: task id must be"),
    "version list": (header(version=[1]), r"line 1: version: it must be a number"),
    "envelope list": (header(envelope=[]), r"line 1: envelope: "),
    "envelope of another task": (envelope(task="other"), r"line 1: envelope: it belongs to another task"),
    "timeout": (envelope(options={"timeout": 1e11}), r"line 1: envelope: .*options\.timeout"),
    "timeout text": (envelope(options={"timeout": "x"}), r"line 1: envelope: .*options\.timeout"),
    "max_attempts": (envelope(options={"max_attempts": -5}), r"line 1: envelope: .*options\.max_attempts"),
    "options list": (envelope(options=[1]), r"line 1: envelope: .*options"),
    "headers nested": (envelope(headers={"a": {"b": 1}}), r"line 1: envelope: .*headers"),
    "tags": (envelope(tags=["x"] * 100), r"line 1: envelope: .*tags"),
    "headers of 2 MB": (envelope(headers={"a": "b" * 2_000_000}), r"size of the task's envelope is 2,\d+,\d+ bytes"),
    "arguments list": (line("arguments", text="[1]"), r"line 2: text: arguments must be a JSON object"),
    "arguments no JSON": (line("arguments", text="{"), r"line 2: "),
    "arguments deep": (line("arguments", text="[" * 100_000), r"line 2: "),
    "arguments number": (line("arguments", text=5), r"line 2: text: it must be a text"),
    "arguments nothing": (lambda lines: lines[1].pop("text"), r"line 2: base64: it is missing"),
    "arguments base64": (lambda lines: lines.__setitem__(1, {"kind": "arguments", "base64": "\u00e9"}), "base64"),
    "kind missing": (lambda lines: lines[2].pop("kind"), r"line 3: kind None is unknown"),
    "kind list": (lambda lines: lines[2].update(kind=["x"]), r"line 3: kind "),
    "kind long": (lambda lines: lines[2].update(kind="x" * 10**6), r"line 3: kind .{0,310}$"),
    "checkpoint name": (line("checkpoint", name=5), r"line \d+: name: "),
    "checkpoint unknown": (line("checkpoint", name="x:y"), r"line \d+: checkpoint field 'x:y' is unknown"),
    "artifact path": (json_of("checkpoint", "s:#artifact:", hash=OUTSIDE), r"line \d+: .*hash: String should match"),
    "artifact size": (json_of("checkpoint", "s:#artifact:", size=-1), r"line \d+: .*size: "),
    "artifact name": (json_of("checkpoint", "s:#artifact:", name="../x"), r"line \d+: .*another artifact"),
    "manifest path": (json_of("checkpoint", "#workspace", hash=OUTSIDE), r"line \d+: .*hash: String should match"),
    "manifest in an event": (event("workspace_saved", manifest=OUTSIDE), r"line \d+: .*hash: String should match"),
    "mark": (
        added(kind="checkpoint", name="s:#unsaved", text='{"folder":"../../x","host":"h","step":null,"why":""}'),
        r"line \d+: .*is not the name of its folder",
    ),
    "mark of junk": (added(kind="checkpoint", name="s:#unsaved", text="5"), r"line \d+: could not read which files"),
    "inbox name": (line("inbox", name="../x"), r"line \d+: field '../x' of the inbox"),
    "inbox number": (line("inbox", "sent", text="inf"), r"line \d+: field .sent. of the inbox"),
    "event id": (line("event", id="5"), r"line \d+: id: "),
    "event id long": (line("event", id="9" * 10**5 + "-1"), r"line \d+: id: .{0,310}$"),
    "event fields": (line("event", fields=[1]), r"line \d+: fields: "),
    "event n": (line("event", fields={"type": "x", "n": "abc"}), r"line \d+: "),
    "event n huge": (line("event", fields={"type": "x", "n": "9" * 5_000}), r"line \d+: "),
    "event n beyond": (line("event", fields={"type": "x", "n": "999999"}), r"line \d+: fields\.n: "),
    "object hash": (line("artifact", hash=OUTSIDE), r"line \d+: hash: String should match"),
    "object size": (line("artifact", size=-1), r"line \d+: size: "),
    "object size text": (line("artifact", size="5"), r"line \d+: size: "),
    "object size true": (line("artifact", size=True), r"line \d+: size: "),
    "object size huge": (line("artifact", size=10**12), r"line \d+: size: an artifact has 1,000,000,000,000 bytes"),
    "object other": (line("artifact", hash="0" * 64), r"line \d+: the bytes of artifact 0+ are not those"),
    "memory": (lambda lines: lines.append({"kind": "memory", "text": '{"id":5}'}), r"line \d+: the memory is not"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_hostile_file_is_refused_with_its_line_and_field(app: App, lines: Lines, case: str) -> None:
    change, problem = CASES[case]
    change(lines)
    store = await artifact_store(app.producer.gateway, app.settings)
    with pytest.raises((TransferError, PayloadTooLarge), match=problem) as raised:
        await import_task(app.producer, store, io.BytesIO(packed(lines)), new_id="imported")
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 500
    assert await app.producer.find("imported") is None


async def test_the_file_as_it_is_is_imported(app: App, lines: Lines) -> None:
    store = await artifact_store(app.producer.gateway, app.settings)
    found = await import_task(app.producer, store, io.BytesIO(packed(lines)), new_id="imported")
    assert (found.handle.id, found.artifacts) == ("imported", 3)
    await found.handle.cancel()


async def test_a_file_that_changes_while_it_is_read_is_refused(app: App, lines: Lines) -> None:
    """Its lines are checked first, and read again to be stored."""
    at = next(number for number, line in enumerate(lines) if line["kind"] == "chunk")
    changed = [*lines[:at], {"kind": "chunk", "base64": 5}, *lines[at + 1 :]]

    class Changing(io.BytesIO):
        def seek(self, place: int, whence: int = 0) -> int:
            self.__init__(packed(changed))  # type: ignore[misc]
            return super().seek(place, whence)

    store = await artifact_store(app.producer.gateway, app.settings)
    with pytest.raises((TransferError, ArtifactError), match=r"line \d+: base64: it is not valid"):
        await import_task(app.producer, store, Changing(packed(lines)), new_id="imported")
    assert await app.producer.find("imported") is None


OTHERS = [b"", b"[" * 200_000, b"\x00\xff\n", b'{"format":"perdure-task","version":1}\n', b"5\n"]


@pytest.mark.parametrize("data", OTHERS)
def test_a_file_of_something_else_ends_with_one_sentence(settings: Settings, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(data)
    place = ("--redis-url", settings.redis_url, "--namespace", settings.namespace)
    refused = call("task", "import", str(file), *place)
    assert refused.code == 1
    assert refused.err.startswith("perdure: ")
    assert refused.err.count("\n") == 1
