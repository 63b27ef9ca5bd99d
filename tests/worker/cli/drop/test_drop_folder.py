"""`perdure drop`: files of a folder become tasks and messages once, whatever is in the folder, and whatever dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Settings, Unique
from perdure.queues import Unavailable
from perdure.queues.catalog import publish_entry
from perdure.queues.inspection.views import list_queues
from perdure.queues.sessions.record import SessionAddress, read_history
from perdure.queues.transport.gateway import Gateway
from perdure.queues.transport.scripts import Script
from perdure.worker.cli.drop.folder import FileOutcome, Rest, TakenFile
from perdure.worker.cli.drop.intake import DropFolder
from perdure.worker.cli.drop.tasks import TaskIntake
from perdure.worker.workspace.shared_workspace import SharedWorkspace

from tests.support.command_line import Running, call
from tests.support.servers import RedisServer
from tests.support.servers.nodes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]

AUDIT = {"task": "audit", "args": {"root": "src"}}
HALF = '{"task": "audit", "args": {"roo'


class Assistant(Agent[AgentState]):
    """Answers messages."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None: ...

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "yes"


class Killed(BaseException):
    """The process dies here."""


def unused(name: str) -> SharedWorkspace:
    raise AssertionError(name)


class Drop:
    """A drop folder, and what was said and reported of its files."""

    def __init__(self, root: Path, app: App) -> None:
        self.root, self.app = root, app
        self.notes: list[str] = []
        self.reports: list[FileOutcome] = []
        self.stop = False
        self.folder = self.started()

    def started(self, rest: float = 0) -> DropFolder:
        """Return what a new command has. rest: seconds for which a file must rest."""
        return DropFolder(
            self.root, self.app.producer, self.notes.append, self.reports.append, lambda: self.stop, unused, Rest(rest)
        )

    def put(self, path: str, *content: Any) -> Path:
        """Write a file of texts, or of objects, one per line."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in content))
        return file

    async def look(self) -> list[FileOutcome]:
        """Look once; return the reports of this look."""
        del self.reports[:]
        await self.folder.look()
        return list(self.reports)

    def files(self) -> list[str]:
        """Return the paths of all files."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir())

    async def tasks(self, queue: str = "audits") -> int:
        """Return the number of tasks that wait in a queue."""
        producer = self.app.producer
        found = {stats.queue: stats for stats in await list_queues(producer.gateway, producer.namespace)}
        return found[queue].depth + found[queue].due if queue in found else 0


@pytest.fixture
async def drop(app: App, tmp_path: Path) -> Drop:
    """A drop folder for an app whose worker has published its tasks."""
    define(app)
    await publish(app)
    return Drop(tmp_path, app)


def define(app: App) -> None:
    """Define the tasks of an app, and its agent."""

    @app.task(queue="audits")
    async def audit(ctx: Context, root: str) -> None: ...

    @app.task(queue="orders", unique=Unique("while_queued", by="order"))
    async def pay(ctx: Context, order: int) -> None: ...

    app.agent(queue="talks")(Assistant)


async def publish(app: App) -> None:
    await publish_entry(app.producer.gateway, app.producer.namespace, app.tasks.entry(app.name), 0)


async def test_a_file_is_a_task_and_is_kept(drop: Drop) -> None:
    drop.put("audits/a.json", json.dumps({**AUDIT, "tags": ["drop"], "delay": 60}, indent=2))
    [report] = await drop.look()
    assert report.data["outcome"] == "enqueued"
    assert drop.files() == ["audits/processed/a.json"]
    handle = await drop.app.producer.find(str(report.id), "audits")
    assert handle is not None
    record = await handle.record()
    assert (record.task, record.state, record.tags) == ("audit", "scheduled", ("drop",))
    assert await drop.look() == []


async def test_a_file_of_lines_is_a_batch(drop: Drop) -> None:
    drop.put("audits/a.jsonl", *[AUDIT] * 3, {**AUDIT, "id": "own"})
    [report] = await drop.look()
    assert (report.data["tasks"], report.data["existed"]) == (4, 0)
    for task_id in (f"{report.id}-1", f"{report.id}-3", "own"):
        assert await drop.app.producer.find(task_id, "audits") is not None
    assert await drop.tasks() == 4


async def test_the_same_content_in_another_file_is_another_task(drop: Drop) -> None:
    for name in ("a.json", "b.json"):
        os.utime(drop.put(f"audits/{name}", AUDIT), ns=(5, 5))
    assert [report.data["outcome"] for report in await drop.look()] == ["enqueued", "enqueued"]
    again = drop.put("audits/a.json", AUDIT)
    os.utime(again, ns=(0, 0))
    [report] = await drop.look()
    assert await drop.tasks() == 3
    assert drop.files() == [
        "audits/processed/a-" + str(report.id).removeprefix("drop-")[:12] + ".json",
        "audits/processed/a.json",
        "audits/processed/b.json",
    ]


async def test_the_id_of_the_object_decides(drop: Drop) -> None:
    drop.put("audits/a.json", {**AUDIT, "id": "audit-src"})
    drop.put("audits/b.json", {**AUDIT, "id": "audit-src"})
    drop.put("audits/c.json", {"task": "audit", "args": {"root": "lib"}, "id": "audit-src"})
    outcomes = [report.data["outcome"] for report in await drop.look()]
    assert outcomes == ["enqueued", "existed", "rejected"]
    assert await drop.tasks() == 1
    assert "task audit-src exists already with other arguments (root)" in reason(drop, "audits", "c.json")


def reason(drop: Drop, queue: str, name: str) -> str:
    assert f"{queue}/rejected/{name}" in drop.files()
    return (drop.root / queue / "rejected" / f"{name}.error.txt").read_text()


async def test_lines_with_the_ids_of_other_tasks_are_named_and_the_others_are_stored(drop: Drop) -> None:
    await drop.app.producer.enqueue("audit", {"root": "other"}, queue="audits", task_id="own")
    drop.put("audits/a.jsonl", AUDIT, {**AUDIT, "id": "own"}, AUDIT)
    [report] = await drop.look()
    assert report.data["outcome"] == "rejected"
    assert "1 line of 3 have ids of other tasks (own); the other lines are stored" in reason(drop, "audits", "a.jsonl")
    assert await drop.tasks() == 3


@pytest.mark.parametrize(
    ("queue", "name", "content", "problem"),
    [
        (
            "audits",
            "half.json",
            HALF,
            "not JSON: EOF while parsing a string at line 1 column 31; if it was not complete",
        ),
        ("audits", "half.jsonl", json.dumps(AUDIT) + "\n" + HALF, "nothing was sent, 1 of 2 lines are invalid"),
        ("audits", "empty.json", "", "not JSON: EOF while parsing a value"),
        ("audits", "empty.jsonl", "\n", "it has no lines"),
        ("audits", "list.json", "[1]", "must be a JSON object"),
        ("audits", "latin.json", '{"task": "\udce9"}', "not JSON"),
        ("audits", "more.json", json.dumps({**AUDIT, "tsk": 1}), "tsk"),
        ("audits", "nothing.json", '{"args": {}}', "task is missing\n"),
        (
            "audits",
            "typo.json",
            '{"task": "audt", "args": {}}',
            "could not find task 'audt': no worker has published it",
        ),
        ("audits", "arguments.json", '{"task": "audit", "args": {"rot": 1}}', '"root" is a required property'),
        ("audits", "queue.json", json.dumps({**AUDIT, "queue": "other"}), "queue must be 'audits' here, got 'other'"),
        ("audits", "delay.json", json.dumps({**AUDIT, "delay": -1}), "delay"),
        ("audits", "key.json", json.dumps({**AUDIT, "id": "a b"}), "a b"),
        ("orders", "key.json", '{"task": "pay", "args": {"order": "x"}}', "order: the value is not of type"),
        ("audit", "a.json", json.dumps(AUDIT), "no queue 'audit' in namespace"),
    ],
)
async def test_an_invalid_file_is_rejected_with_its_error(
    drop: Drop, queue: str, name: str, content: str, problem: str
) -> None:
    file = drop.put(f"{queue}/{name}")
    file.write_bytes(content.encode(errors="surrogateescape"))
    [report] = await drop.look()
    assert report.id is None
    assert problem in reason(drop, queue, name)
    assert drop.files() == [f"{queue}/rejected/{name}", f"{queue}/rejected/{name}.error.txt"]
    assert await drop.look() == []
    assert await drop.tasks(queue) == 0


async def test_a_file_that_is_too_large_is_rejected(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.worker.cli.drop.folder.MAX_LINE", 20)
    drop.put("audits/a.json", AUDIT)
    drop.put("agents/assistant/ada/a.txt", "x" * 21)
    assert [report.data["outcome"] for report in await drop.look()] == ["rejected", "rejected"]
    assert reason(drop, "audits", "a.json") == "it has more than 20 bytes\n"


async def test_a_task_of_another_queue_may_wait_in_a_queue_that_exists(drop: Drop) -> None:
    await drop.app.producer.enqueue("audit", {"root": "x"}, queue="spare")
    drop.put("spare/a.json", AUDIT)
    [report] = await drop.look()
    assert report.data["outcome"] == "enqueued"


async def test_unique_tasks_are_unique(drop: Drop) -> None:
    drop.put("orders/a.json", {"task": "pay", "args": {"order": 1}})
    drop.put("orders/b.jsonl", *({"task": "pay", "args": {"order": order}} for order in (1, 2)))
    first, second = await drop.look()
    assert first.data["outcome"] == "enqueued"
    assert (second.data["tasks"], second.data["existed"]) == (2, 1)
    drop.put("orders/c.json", {"task": "pay", "args": {"order": 1}})
    [third] = await drop.look()
    assert (third.data["outcome"], third.id) == ("existed", first.id)


async def test_files_that_are_no_files_are_left_and_named_once(
    drop: Drop, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.json").write_text(json.dumps(AUDIT))
    drop.put("audits/.hidden.json", AUDIT)
    drop.put("audits/new.json.tmp", AUDIT)
    drop.put("audits/new.json.part", AUDIT)
    drop.put("audits/table.csv", "1,2\n")
    drop.put("a.json", AUDIT)
    (drop.root / "audits" / "link.json").symlink_to(outside / "secret.json")
    (drop.root / "orders").symlink_to(outside)
    os.mkfifo(drop.root / "audits" / "pipe.json")
    (drop.root / "audits" / "folder.json").mkdir()
    (drop.root / "two words").mkdir()
    before = drop.files()
    for _ in range(3):
        assert await drop.look() == []
    assert drop.files() == before
    assert await drop.tasks() == 0
    assert sorted(text.partition(": ")[0] for text in drop.notes) == [
        "a.json",
        "audits/folder.json",
        "audits/link.json",
        "audits/pipe.json",
        "audits/table.csv",
        "orders",
        "two words",
    ]
    assert "audits/link.json: it is left there: it must be a regular file, and is a symbolic link" in drop.notes


@pytest.mark.parametrize("name", ["processed", ".taken"])
async def test_no_move_follows_a_link(drop: Drop, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    drop.put("audits/a.json", AUDIT)
    (drop.root / "audits" / name).symlink_to(outside)
    await drop.look()
    assert list(outside.iterdir()) == []
    assert drop.folder.waiting == 1 or drop.notes


async def test_a_file_that_cannot_be_read_is_left(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    drop.put("audits/a.json", AUDIT)
    drop.put("audits/b.json", AUDIT)
    opening = os.open

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("a.json"):
            raise PermissionError(13, "Permission denied")
        return opening(path, *args, **options)

    monkeypatch.setattr("os.open", refused)
    for _ in range(2):
        await drop.look()
    assert drop.files() == ["audits/a.json", "audits/processed/b.json"]
    assert drop.notes.count("audits/a.json: it is left there, it could not be taken: Permission denied") == 1
    monkeypatch.undo()
    [report] = await drop.look()
    assert report.data["outcome"] == "enqueued"


async def test_a_file_is_left_until_it_rests(drop: Drop) -> None:
    clock = [0.0]
    monkey = pytest.MonkeyPatch()
    monkey.setattr("perdure.worker.cli.drop.folder.RUNTIME", type("Clock", (), {"monotonic": lambda: clock[0]}))
    with monkey.context():
        drop.folder = drop.started(rest=1.0)
        file = drop.put("audits/a.json", HALF)
        assert await drop.look() == []
        clock[0] = 0.9
        assert await drop.look() == []
        with file.open("a") as more:
            more.write('t": "src"}}')
        clock[0] = 1.8
        assert await drop.look() == []
        assert drop.folder.rest.restless == 1
        clock[0] = 3.0
        [report] = await drop.look()
    monkey.undo()
    assert report.data["outcome"] == "enqueued"


async def test_files_wait_for_the_first_worker(app: App, tmp_path: Path) -> None:
    drop = Drop(tmp_path, app)
    drop.put("audits/a.json", AUDIT)
    drop.put("agents/assistant/ada/a.txt", "hello")
    for _ in range(2):
        assert await drop.look() == []
    assert len([text for text in drop.notes if "no worker has published its tasks yet" in text]) == 2
    assert drop.folder.waiting == 2
    define(app)
    await publish(app)
    assert [report.data["outcome"] for report in await drop.look()] == ["sent", "enqueued"]


async def test_a_message_of_a_session(drop: Drop) -> None:
    drop.put("agents/assistant/ada/1.txt", "Where is my parcel?\n")
    drop.put("agents/assistant/ada/2.json", {"text": "And now?", "sender": "shop", "id": "m2"})
    drop.put("agents/assistant/ada/3.json", {"text": "And now?", "sender": "shop", "id": "m2"})
    first, second, third = await drop.look()
    assert [one.data["turn"] for one in (first, second, third)] == [1, 2, 2]
    assert (first.data["outcome"], first.data["agent"], first.data["session"]) == ("sent", "assistant", "ada")
    producer = drop.app.producer
    address = SessionAddress.of(producer.namespace, "assistant", "ada")
    found = [message async for message in read_history(producer.gateway, address)]
    assert [(message.content, message.sender) for message in found] == [
        ("Where is my parcel?", ""),
        ("And now?", "shop"),
    ]
    assert drop.files() == [f"agents/assistant/ada/processed/{name}" for name in ("1.txt", "2.json", "3.json")]


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("assistent/ada/a.txt", "hello", "could not find task 'assistent'"),
        ("assistant/ada/a.json", '{"txt": "hello"}', "text"),
        ("assistant/ada/a.json", HALF, "not JSON"),
        ("assistant/ada/a.txt", "\udce9", "it must be UTF-8"),
        ("assistant/ada/a.json", '{"text": "x", "inputs": {"no": 1}}', "'no' was unexpected"),
    ],
)
async def test_an_invalid_message_is_rejected(drop: Drop, path: str, content: str, problem: str) -> None:
    file = drop.put(f"agents/{path}")
    file.write_bytes(content.encode(errors="surrogateescape"))
    [report] = await drop.look()
    assert report.data["outcome"] == "rejected"
    folder, _, name = path.rpartition("/")
    assert problem in reason(drop, f"agents/{folder}", name)


async def test_files_beside_the_folders_of_sessions_are_left(drop: Drop) -> None:
    drop.put("agents/ada/hello.txt", "hello")
    drop.put("agents/hello.txt", "hello")
    drop.put("agents/assistant/a\tb/hello.txt", "hello")
    assert await drop.look() == []
    inside = "files belong into DIR/agents/AGENT/SESSION/"
    assert f"agents/ada/hello.txt: it is left there: {inside}" in drop.notes
    assert f"agents/hello.txt: it is left there: {inside}" in drop.notes
    assert len(drop.notes) == 3


async def test_a_full_queue_keeps_the_files_and_their_order(drop: Drop) -> None:
    drop.app.queue("audits", max_depth=2)
    await publish(drop.app)
    drop.put("audits/1.jsonl", *[AUDIT] * 3)
    drop.put("audits/2.json", AUDIT)
    drop.put("orders/1.json", {"task": "pay", "args": {"order": 1}})
    [report] = await drop.look()
    assert report.data["file"] == "orders/1.json"
    assert drop.files() == ["audits/.taken/1.jsonl", "audits/2.json", "orders/processed/1.json"]
    assert [text for text in drop.notes if "audits/1.jsonl: it waits: queue 'audits' is full" in text]
    assert await drop.tasks() == 2
    digest = hashlib_of(drop.root / "audits/.taken/1.jsonl", "audits/1.jsonl")
    for number in (1, 2):
        handle = await drop.app.producer.find(f"drop-{digest}-{number}", "audits")
        assert handle is not None
        await handle.cancel()
    assert [report.data["file"] for report in await drop.look()] == ["audits/1.jsonl", "audits/2.json"]
    assert await drop.tasks() == 2


def hashlib_of(file: Path, path: str) -> str:
    """Return the digest of a file by its documented parts."""
    state = file.stat()
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    what = f"{state.st_size} {state.st_mtime_ns} {content} {path}"
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


Act = Callable[..., Any]


class Killer:
    """Ends the process before or after its n-th act: a change of the folder, or a script that Redis runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        """Points that the process passes before it dies."""
        for name in ("rename", "mkdir"):
            monkeypatch.setattr(f"os.{name}", self._between(getattr(os, name)))
        run = Gateway.run

        async def run_script(*args: Any, **options: Any) -> Any:
            self.pass_point()
            answer = await run(*args, **options)
            self.pass_point()
            return answer

        monkeypatch.setattr(Gateway, "run", run_script)

    def pass_point(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def _between(self, act: Act) -> Act:
        def acting(*args: Any, **options: Any) -> Any:
            self.pass_point()
            done = act(*args, **options)
            self.pass_point()
            return done

        return acting


async def test_a_command_that_dies_anywhere_leaves_one_task(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies at each point between two acts; the next command does the rest, and nothing twice."""
    killer, point, done, tasks = Killer(monkeypatch), 0, False, 0
    killer.left = -1
    while not done:
        drop.put("audits/a.json", AUDIT, "\n" * point)
        drop.put("audits/b.jsonl", AUDIT, AUDIT, "\n" * point)
        drop.put("audits/c.json", HALF, "\n" * point)
        drop.put("agents/assistant/ada/d.txt", f"message {point}")
        drop.folder = drop.started()
        killer.left = point
        try:
            await drop.look()
            done = True
        except Killed:
            killer.left = -1
            drop.folder = drop.started()
            await drop.look()
        killer.left = -1
        point, tasks = point + 1, tasks + 3
        left = [file for file in drop.files() if "processed/" not in file and "rejected/" not in file]
        assert left == []
        assert await drop.tasks() == tasks, f"killed at point {point - 1}"
    assert point > 20
    rejected = [file for file in drop.files() if "/rejected/" in file and file.endswith(".json")]
    assert len(rejected) == point
    assert all((drop.root / f"{file}.error.txt").read_text().startswith("not JSON") for file in rejected)
    producer = drop.app.producer
    address = SessionAddress.of(producer.namespace, "assistant", "ada")
    found = [message.content async for message in read_history(producer.gateway, address)]
    assert found == [f"message {number}" for number in range(point)]


async def test_files_wait_while_redis_is_away(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    drop.put("audits/a.json", AUDIT)
    run = Gateway.run

    async def lose_reply(gateway: Gateway, script: Script, *args: Any) -> Any:
        answer = await run(gateway, script, *args)
        if script.name == "enqueue":
            raise Unavailable("the connection broke")
        return answer

    monkeypatch.setattr(Gateway, "run", lose_reply)
    with pytest.raises(Unavailable):
        await drop.look()
    monkeypatch.undo()
    assert drop.files() == ["audits/.taken/a.json"]
    [report] = await drop.look()
    assert report.data["outcome"] == "existed"
    assert await drop.tasks() == 1


async def test_two_commands_take_a_file_once(drop: Drop) -> None:
    """On file systems without locks, nothing keeps the second command away."""
    other = drop.started()
    drop.put("audits/a.json", AUDIT)
    drop.put("audits/b.jsonl", AUDIT, AUDIT)
    await asyncio.gather(drop.folder.look(), other.look())
    assert await drop.tasks() == 3
    assert drop.files() == ["audits/processed/a.json", "audits/processed/b.jsonl"]


async def test_a_request_to_stop_ends_a_look_after_the_file_in_hand(drop: Drop) -> None:
    drop.put("audits/a.json", AUDIT)
    drop.put("audits/b.json", AUDIT)

    def stop(report: FileOutcome) -> None:
        drop.stop = True

    drop.folder.report = stop
    await drop.look()
    assert drop.files() == ["audits/b.json", "audits/processed/a.json"]


async def test_an_error_of_one_file_keeps_no_other_waiting(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    drop.put("audits/a.json", AUDIT)
    drop.put("audits/b.json", {**AUDIT, "id": "sound"})
    enqueue = TaskIntake.enqueue

    async def fails(self: TaskIntake, file: TakenFile, queue: str) -> Any:
        if file.name == "a.json":
            raise RuntimeError("a defect")
        return await enqueue(self, file, queue)

    monkeypatch.setattr(TaskIntake, "enqueue", fails)
    [report] = await drop.look()
    assert report.id == "sound"
    assert "audits/a.json: it waits, because of an unexpected error: RuntimeError: a defect" in drop.notes
    monkeypatch.undo()
    assert [one.data["outcome"] for one in await drop.look()] == ["enqueued"]


async def test_a_file_that_is_written_to_while_it_is_read_waits(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    drop.put("audits/a.json", AUDIT)
    check = TakenFile.check_unchanged

    def grow(file: TakenFile) -> None:
        with (drop.root / "audits/.taken/a.json").open("a") as more:
            more.write(" ")
        check(file)

    monkeypatch.setattr(TakenFile, "check_unchanged", grow)
    assert await drop.look() == []
    assert drop.folder.rest.restless == 1
    monkeypatch.undo()
    [report] = await drop.look()
    assert report.data["outcome"] == "enqueued"


def test_one_command_works_on_a_folder(app_files: Path) -> None:
    """The command as a process: ids on stdout, messages on stderr, a signal, and the lock."""
    (app_files / "audits").mkdir()
    with Running("drop", str(app_files), "--poll", "0.1", cwd=app_files.parent) as running:
        file = app_files / "audits" / "a.json.part"
        file.write_text(json.dumps({**AUDIT, "id": "first"}))
        file.rename(app_files / "audits" / "a.json")
        line = running.line()
        assert line == "first", running.wait().err
        second = call("drop", str(app_files), "--once")
        assert (second.code, second.out) == (1, "")
        assert f"another perdure drop works on {app_files}: end it first" in second.err
        running.send(signal.SIGTERM)
        answer = running.wait()
    assert answer.code == 0, answer.err
    assert "audits/a.json: task first enqueued on queue audits" in answer.err
    (app_files / "audits" / "b.jsonl").write_text("\n".join(json.dumps(AUDIT) for _ in range(3)))
    (app_files / "audits" / "c.json").write_text(HALF)
    answer = call("drop", str(app_files), "--once", "--json")
    assert answer.code == 0
    assert [(one["file"], one["outcome"]) for one in answer.lines] == [
        ("audits/b.jsonl", "enqueued"),
        ("audits/c.json", "rejected"),
    ]


def test_files_wait_for_a_server_that_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_program: Path
) -> None:
    server = RedisServer(server_program)
    monkeypatch.setenv("PERDURE_REDIS_URL", server.url)
    (tmp_path / "drop" / "audits").mkdir(parents=True)
    (tmp_path / "drop" / "audits" / "a.json").write_text(json.dumps({**AUDIT, "id": "first"}))
    try:
        with Running("drop", str(tmp_path / "drop"), "--poll", "0.1", cwd=tmp_path) as running:
            wait_for(lambda: "files wait" in (tmp_path / "stderr").read_text(), "it says that Redis is away")
            server.start()
            anyio.run(prepare, Settings(redis_url=server.url))
            assert running.line() == "first"
            running.send(signal.SIGINT)
            answer = running.wait()
    finally:
        server.stop()
    assert answer.code == 0
    assert answer.err.count("files wait") == 1


async def prepare(settings: Settings) -> None:
    """Publish the tasks of an app, as its worker does, and load the scripts."""
    async with App("audits", settings=settings) as app:
        define(app)
        await publish(app)


@pytest.fixture
def app_files(settings: Settings, tmp_path: Path) -> Path:
    """A drop folder of an app whose worker has published its tasks."""

    anyio.run(prepare, settings)
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    answer = call("drop", str(tmp_path / "missing"))
    assert answer.code == 2
    assert "DIR must be a folder" in answer.err


def test_once_fails_while_redis_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(gateway: Gateway) -> None:
        raise Unavailable("cannot reach Redis")

    monkeypatch.setattr(Gateway, "open", fails)
    answer = call("drop", str(tmp_path), "--once")
    assert (answer.code, answer.err) == (1, "perdure: cannot reach Redis\n")
