"""`perdure task artifact` and `perdure artifacts`."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from perdure import App, Context, Settings, Worker
from perdure.queues import Namespace

from tests.support.command_line import call, process

pytestmark = pytest.mark.integration

REPORT = hashlib.sha256(b"# Found\n").hexdigest()


async def report(ctx: Context) -> None:
    await ctx.artifacts.save("report.md", "# Found\n")
    await ctx.artifacts.save("data.bin", bytes(range(128)) * 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def task_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: None) -> str:
    """Id of a task with two artifacts."""
    monkeypatch.setenv("PERDURE_ARTIFACTS", str(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = call("enqueue", "report", "--queue", "test").ids[0]

    async def run() -> None:
        app = App("test")
        app.task(report)
        async with Worker(app) as worker:
            await worker.run(burst=True)

    anyio.run(run)
    return found


def the_object(folder: Path) -> Path:
    return next(folder.glob(f"*/{REPORT[:2]}/{REPORT[2:]}"))


def test_task_show_lists_artifacts(task_id: str) -> None:
    shown = call("task", "show", task_id).out
    assert f"report.md  8 B  {REPORT}" in shown
    assert "data.bin  2.6 kB" in shown
    listed = call("task", "artifact", task_id, "--json").json
    assert listed == call("task", "show", task_id, "--json").json["artifacts"]
    assert listed[0] == {"name": "report.md", "size": 8, "media_type": "text/markdown", "hash": REPORT}
    for command in (("task", "artifact", task_id), ("artifacts", "list")):
        out = call(*command).out
        assert REPORT in out
        assert "text/markdown" in out
    lines = call("artifacts", "list", "--json").lines
    assert {(one["task"], one["name"]) for one in lines} == {(task_id, "report.md"), (task_id, "data.bin")}
    assert "raise --limit" in call("artifacts", "list", "--limit", "1").err


def test_an_artifact_is_fetched(task_id: str) -> None:
    assert call("task", "artifact", task_id, "report.md").out == "report.md\n"
    assert Path("report.md").read_bytes() == b"# Found\n"
    assert process("task", "artifact", task_id, "data.bin", "--output", "-").out.startswith("\x00\x01")
    again = call("task", "artifact", task_id, "report.md")
    assert (again.code, again.out) == (1, "")
    assert "file 'report.md' exists already" in again.err
    Path("other").write_text("former", "utf-8")
    assert call("task", "artifact", task_id, "report.md", "-o", "other").code == 0
    assert Path("other").read_bytes() == b"# Found\n"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("nothing",), 1, "has no artifact 'nothing'; its artifacts: 'report.md', 'data.bin'"),
        (("report.md", "-o", "."), 2, "--output must be a file, got the folder '.': give 'report.md'"),
        (("report.md", "-o", "no/such/folder"), 1, "to 'no/such/folder'"),
        (("-o", "x"), 2, "--output needs a NAME"),
        (("report.md", "--json"), 2, "--json is for the list"),
    ],
)
def test_contradictory_arguments_are_refused(task_id: str, args: tuple[str, ...], code: int, said: str) -> None:
    answer = call("task", "artifact", task_id, *args)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err


def test_a_damaged_artifact_is_not_written(task_id: str, folder: Path) -> None:
    kept = the_object(folder)
    kept.unlink()
    kept.write_bytes(b"# Forged")
    Path("report.md").write_text("former", "utf-8")
    for target, run in (("report.md", call), ("-", process)):
        answer = run("task", "artifact", task_id, "report.md", "-o", target)
        assert (answer.code, answer.out) == (1, "")
        assert f"artifact 'report.md' of task {task_id} is damaged: object {REPORT}" in answer.err
    assert Path("report.md").read_text("utf-8") == "former"
    assert kept.read_bytes() == b"# Forged"


def test_gc_deletes_nothing_if_links_cannot_be_read(
    task_id: str, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = f"{{{settings.namespace}:test:0}}:steps:{task_id}"

    async def break_link() -> None:
        async with App("test") as app:
            await app.producer.gateway.command("HSET", steps, "s:#artifact:report.md", b"{")

    anyio.run(break_link)
    answer = call("artifacts", "gc", "--grace", "0")
    assert (answer.code, answer.out) == (1, "")
    assert f"could not read the link of task {task_id} to artifact 'report.md'" in answer.err
    assert the_object(folder).exists()
    shown = call("task", "show", task_id)  # everything else of the task can be seen
    assert (shown.code, "succeeded" in shown.out) == (0, True)
    assert "artifact 'report.md': Invalid JSON" in shown.err


@pytest.mark.parametrize("grace", ["1 week", "-1", "h", "1e3"])
def test_an_invalid_grace_is_refused(task_id: str, grace: str) -> None:
    answer = call("artifacts", "gc", "--grace", grace)
    assert answer.code == 2
    assert "must be a number of seconds" in answer.err


def test_gc_prints_json(task_id: str, folder: Path) -> None:
    kept = the_object(folder)
    orphan = kept.parent / ("0" * 62)
    orphan.write_bytes(b"12345")
    reported: Any = call("artifacts", "gc", "--grace", "0s", "--json").json
    assert (reported["count"], reported["size"], reported["dry_run"]) == (1, 5, False)
    assert [one["hash"] for one in reported["orphans"]] == [REPORT[:2] + "0" * 62]
    assert [orphan.exists(), kept.exists()] == [False, True]


@pytest.mark.timeout(60)
def test_a_link_that_leaves_the_store_is_refused_and_hides_no_other(
    task_id: str, settings: Settings, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("another user's file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    steps, field = Namespace(settings.namespace).partition("test").steps(task_id), "s:#artifact:report.md"
    seen = set()
    with redis.Redis.from_url(settings.redis_url) as client:
        link = json.loads(client.hget(steps, field) or b"")
        for path in (secret, pipe, Path("/dev/zero"), tmp_path / "missing"):
            digest = "../" * 14 + str(path).lstrip("/")
            client.hset(steps, field, json.dumps(link | {"hash": digest, "size": 100_000}))
            fetched = call("task", "artifact", task_id, "report.md", "-o", "out")
            assert fetched.code == 1
            seen.add(fetched.err)
            assert "data.bin" in call("task", "artifact", task_id).out
            assert "data.bin" in call("artifacts", "list").out
            assert "data.bin" in call("task", "show", task_id).out
    assert len(seen) == 1, "the message tells nothing of what is at the path"
    assert "hash: String should match" in seen.pop()
    assert os.listdir() == []  # noqa: PTH208


def test_the_name_in_a_link_is_no_path(task_id: str, settings: Settings) -> None:
    steps = Namespace(settings.namespace).partition("test").steps(task_id)
    with redis.Redis.from_url(settings.redis_url) as client:
        link = json.loads(client.hget(steps, "s:#artifact:report.md") or b"")
        client.hset(steps, "s:#artifact:../out", json.dumps(link | {"name": "../out"}))
    assert call("task", "artifact", task_id, "../out").code == 1
    assert not Path("../out").exists()
