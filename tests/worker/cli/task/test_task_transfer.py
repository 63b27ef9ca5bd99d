"""`perdure task export` and `import`: a task continues on another deployment, and ends on its own."""

from __future__ import annotations

import hashlib
import json
import stat
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, Settings, State
from perdure.queues import Partition, TaskHandle
from perdure.queues.delivery.checkpoint import close_exported, read_mark
from perdure.queues.envelope import EnvelopeTemplate
from perdure.worker.memory import HybridStore, Memory, SqliteBackend, new_memory

from tests.support.command_line import Answer, call, process
from tests.support.key_leaks import check_for_leaks
from tests.support.programs import killed_imports
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import history, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration


def iso_day(at: int | None) -> str:
    """Return the day of a time in milliseconds, in UTC."""
    return datetime.fromtimestamp((at or 0) / 1000, UTC).date().isoformat()


class Ledger:
    """Calls of the handlers of both deployments."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.read: list[Any] = []


def make_app(settings: Settings, ledger: Ledger) -> App:
    app = App("test", settings=settings)

    @app.agent(name="builder")
    class Builder(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("draft", "review", "publish")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            ledger.steps.append(step.key)
            file = anyio.Path(ctx.workspace.path / "notes.txt")
            if step.key == "draft":
                await file.write_text("first notes")
                await ctx.artifacts.save("report.md", "# Report \u00e9\n")
            elif step.key == "review":
                found = await ctx.inbox(wait=3600, sender="editor")
                ledger.read += [message.content for message in found]
            else:
                ledger.read += [await ctx.artifacts.read("report.md"), await file.read_text()]
            return f"{step.key} is done"

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return len(state.results)

    @app.task(retry=Retry(max_attempts=1))
    async def failing(ctx: Context) -> str:
        ledger.steps.append("called")
        await ctx.step("kept", lambda: ledger.steps.append("kept"))
        if len(ledger.steps) < 3:
            raise ValueError("no")
        return "replayed"

    return app


async def find(app: App, task_id: str) -> TaskHandle[Any]:
    handle: TaskHandle[Any] | None = await app.producer.find(task_id)
    assert handle is not None
    return handle


async def run(app: App, task_id: str, until: State) -> None:
    async with app, running_worker(app):
        handle = await find(app, task_id)

        async def reached() -> bool:
            return await handle.status() is until

        await wait_until(reached, f"the task is {until}")


@pytest.fixture
def elsewhere(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """Settings of another deployment, without encryption and with its own artifacts."""
    name = f"{settings.namespace}b"
    yield settings.model_copy(update={"namespace": name, "artifacts": str(tmp_path / "there")})
    check_for_leaks(settings.redis_url, name)


@pytest.fixture
def here(settings: Settings, tmp_path: Path) -> Settings:
    return with_keys(settings.model_copy(update={"artifacts": str(tmp_path / "here")}), FIRST)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Function that runs a command against a deployment."""

    async def command(place: Settings, *args: str) -> Answer:
        monkeypatch.setenv("PERDURE_REDIS_URL", place.redis_url)
        monkeypatch.setenv("PERDURE_NAMESPACE", place.namespace)
        monkeypatch.setenv("PERDURE_ARTIFACTS", place.artifacts)
        monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", place.encryption_keys.get_secret_value())
        return await anyio.to_thread.run_sync(call, *args)

    return command


def resealed(lines: list[bytes]) -> bytes:
    """Return the lines with a last line that fits them."""
    body = b"".join(lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return body + json.dumps(end).encode() + b"\n"


async def test_an_agent_continues_and_finishes_on_another_deployment(
    here: Settings, elsewhere: Settings, tmp_path: Path, at: Any
) -> None:
    ledger = Ledger()
    app = make_app(here, ledger)
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test")
    await run(app, "a", State.WAITING)
    async with app:
        await (await find(app, "a")).send("later", sender="other")  # wakes the task once a worker comes
    file = tmp_path / "agent.jsonl"
    assert "it may run at both places" in (await at(here, "task", "export", "a", "-o", str(file), "--keep")).err
    file.unlink()
    done = await at(here, "task", "export", "a", "--output", str(file))
    assert (done.code, "the task is cancelled here" in done.err) == (0, True), done.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"first notes" in file.read_bytes()  # in clear
    again = await at(here, "task", "export", "a", "-o", str(tmp_path / "again"))
    assert (again.code, "the task has ended: there was nothing to cancel" in again.err) == (0, True)
    async with app:
        handle = await find(app, "a")
        assert await handle.status() is State.CANCELLED
        assert (await history(handle))[-1].type == "exported"

    there = make_app(elsewhere, ledger)
    whole = file.read_bytes().splitlines(keepends=True)
    for end in range(1, len(whole)):
        (tmp_path / "part").write_bytes(b"".join(whole[:end]))
        cut = await at(elsewhere, "task", "import", str(tmp_path / "part"))
        assert (cut.code, f"truncated after line {end}" in cut.err) == (1, True), cut.err

    def event(fields: str) -> bytes:
        return f'{{"kind":"event","id":"9999999999999-1","fields":{fields}}}\n'.encode()

    for data, problem in [
        (whole[0].replace(b'"version":1', b'"version":2'), "line 1: the file has version 2; this version of Perdure"),
        (b"", "the file is empty"),
        (b'{"kind":"note"}\n', "line 1: the file is not one that"),
        (b"".join([whole[0], whole[1].replace(b"build it", b"burn it"), *whole[2:]]), "lines before it were changed"),
        (resealed([*whole[:2], b'{"kind":"dream"}\n']), "line 3: kind 'dream' is unknown"),
        (resealed([*whole[:2], b'{"kind":"checkpoint","name":"z:a","text":""}\n']), "line 3: checkpoint field 'z:a'"),
        (resealed([whole[0], whole[0]]), "line 2: a line of kind 'header' cannot be here"),
        (resealed([*whole[:-1], event("{}")]), "fields.type: an event must have one"),
        (resealed([*whole[:-1], event('{"type":"x","n":"abc"}')]), "fields.n: it must be a number from 1 to"),
        (b"".join(whole)[:-20], f"line {len(whole)} is damaged"),
        (b"".join([*whole, b"\n"]), "nothing may follow the last line"),
        (resealed([one.replace(b"# Report", b"# Repork") for one in whole[:-1]]), "are not those that were exported"),
    ]:
        (tmp_path / "part").write_bytes(data)
        bad = await at(elsewhere, "task", "import", str(tmp_path / "part"))
        assert (bad.code, problem in bad.err) == (1, True), bad.err
    async with there:
        assert await there.producer.find("a") is None
    assert not [*(tmp_path / "there").rglob("*.*")]

    found = await at(elsewhere, "task", "import", str(file), "--json")
    assert found.code == 0, found.err
    assert (found.json["id"], found.json["task"], found.json["artifacts"]) == ("a", "builder", 3)
    twice = await at(elsewhere, "task", "import", str(file))
    assert (twice.code, "task a exists already; nothing was stored" in twice.err) == (1, True)
    assert "--id" in twice.err
    await run(there, "a", State.WAITING)
    async with there:
        moved = await find(there, "a")
        assert [one.content for one in await moved.pending_messages()] == ["later"]
        await moved.send("go", sender="editor")
    await run(there, "a", State.SUCCEEDED)
    assert ledger.steps.count("draft") == 1
    assert ledger.steps[-1] == "publish"
    assert ledger.read == ["go", "# Report \u00e9\n".encode(), "first notes"]
    async with there:
        numbers = [event.number for event in await history(await find(there, "a")) if event.number is not None]
    assert numbers == [*range(1, len(numbers) + 1)]


async def test_a_dead_letter_is_imported_as_replayed(
    here: Settings, elsewhere: Settings, tmp_path: Path, at: Any
) -> None:
    ledger = Ledger()
    app = make_app(elsewhere, ledger)
    async with app:
        handle = await app.producer.enqueue("failing", task_id="f", queue="test")
        await handle.send("more", sender="editor")
    await run(app, "f", State.DEAD)
    file = str(tmp_path / "task.jsonl")
    assert (await at(elsewhere, "task", "show", "f")).code == 0
    piped = await anyio.to_thread.run_sync(process, "task", "export", "f")
    assert (piped.code, "was not cancelled here" in piped.err) == (0, True), piped.err
    assert [line["kind"] for line in piped.lines][-1] == "end"
    assert (await at(elsewhere, "task", "export", "f", "-o", file)).code == 0
    async with app:
        assert await (await find(app, "f")).status() is State.CANCELLED
    assert "no matching dead letters" in (await at(elsewhere, "dlq", "list")).err
    target = make_app(here, ledger)
    assert (await at(here, "task", "import", file, "--id", "g")).out == "g\n"
    await run(target, "g", State.SUCCEEDED)
    assert ledger.steps == ["called", "kept", "called"]
    await check_killed_imports(file)
    async with target:
        assert [one.content for one in await (await find(target, "f")).pending_messages()] == ["more"]
    await run(target, "f", State.SUCCEEDED)
    assert ledger.steps == ["called", "kept", "called", "called"]


async def check_killed_imports(file: str) -> None:
    """Check that an import that is killed after any of its writes stores the task whole or not at all.

    The next one finds no task until one has stored it. What the others have uploaded expires, which a fixture checks.
    """
    command = [sys.executable, killed_imports.__file__, file]
    done = await anyio.run_process(command, check=False)
    codes = [int(code) for code in done.stdout.split()]
    writes = ("checkpoint", "log", "inbox", "task")
    assert codes == [*(-9 for _ in writes), killed_imports.FOUND], done.stderr.decode()


async def test_a_task_that_changed_is_not_closed(here: Settings) -> None:
    app = make_app(here, Ledger())
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test")
    await run(app, "a", State.WAITING)
    async with app:
        handle = await find(app, "a")
        mark = await read_mark(app.producer.gateway, handle.partition, "a")
        await handle.send("news", sender="other")
        gateway = app.producer.gateway
        assert not await close_exported(gateway, handle.partition, "a", mark, event=b"{}", retention=60)
        assert await handle.status() is State.WAITING
        mark = await read_mark(gateway, handle.partition, "a")
        assert await close_exported(gateway, handle.partition, "a", mark, event=b"{}", retention=60)
        assert await handle.status() is State.CANCELLED
        assert not await close_exported(gateway, handle.partition, "a", mark, event=b"{}", retention=60)


async def test_a_parent_or_a_child_is_not_exported(here: Settings, tmp_path: Path, at: Any) -> None:
    """Notices of children stay on this deployment."""
    app = make_app(here, Ledger())
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test")
    await run(app, "a", State.WAITING)
    async with app:
        handle = await find(app, "a")
        gateway, partition = app.producer.gateway, handle.partition
        record, file = partition.record("a"), str(tmp_path / "a.jsonl")
        await gateway.command("HSET", record, "watchers", "[]")
        refused = await at(here, "task", "export", "a", "-o", file)
        assert (refused.code, "another task waits for its end" in refused.err) == (1, True), refused.err
        mark = await read_mark(gateway, partition, "a")
        assert not await close_exported(gateway, partition, "a", mark, event=b"{}", retention=60)
        await gateway.command("HDEL", record, "watchers")
        await gateway.command("HSET", record, "joins", "1")
        await gateway.command("ZADD", partition.joins, 1, "a:g")
        refused = await at(here, "task", "export", "a", "-o", file)
        assert (refused.code, "while it waits for children" in refused.err) == (1, True), refused.err
        await gateway.command("DEL", partition.joins)
        assert await close_exported(gateway, partition, "a", mark, event=b"{}", retention=60)


def make_remembering_app(settings: Settings) -> App:
    app = App("test", settings=settings)

    @app.agent(name="helper")
    class Helper(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            await ctx.memory.add("The release is frozen on Fridays", source="handbook", type="rule")
            await ctx.memory.profile("user:7")
            return [PlanStep(key=key, title=key) for key in ("look", "wait")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            if step.key == "wait":
                await ctx.inbox(wait=3600, sender="editor")
                return "waited"

            async def look() -> str:
                return (await ctx.memory.search("the colour of the house"))[0].memory.text

            found = await ctx.step("look", look)
            await ContextBuilder(window=4000, memory=True).build(ctx, state)
            return found

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return len(await ctx.memory.search("release frozen"))

    return app


def files(folder: Path, pattern: str) -> list[Path]:
    return [*folder.glob(pattern)]


def stored(place: Path) -> HybridStore:
    return HybridStore(SqliteBackend(place))


async def test_the_memories_that_a_task_cites_are_moved_with_it(
    here: Settings, elsewhere: Settings, tmp_path: Path, at: Any
) -> None:
    source, target = tmp_path / "here.sqlite3", tmp_path / "there.sqlite3"
    async with stored(source) as store:
        await store.add(new_memory("The house has the colour green", source="letter"), owner="helper")
        await store.add(new_memory("The house has the colour blue", source="visit"), owner="helper")
        await store.add(new_memory("Speaks Danish", subject="user:7"), owner="helper")
        await store.add(new_memory("A plan for the garden"), owner="helper")  # for the goal: in the prompt
        await store.add(new_memory("Nothing of this kind was asked for"), owner="helper")
    app = make_remembering_app(here.model_copy(update={"memory": str(source)}))
    async with app:
        await app.producer.enqueue("helper", {"goal": "plan the garden"}, task_id="h", queue="test")
    await run(app, "h", State.WAITING)
    file = tmp_path / "agent.jsonl"

    unknown = str(tmp_path / "missing.sqlite3")
    left = await at(here, "task", "export", "h", "-o", str(file), "--keep", "--memory", unknown)
    assert (left.code, "5 of 5 memories that the task cites are not in the file" in left.err) == (0, True), left.err
    assert "--memory PLACE" in left.err
    file.unlink()
    skipped = await at(here, "task", "export", "h", "-o", str(file), "--keep", "--no-memories")
    assert "because of --no-memories" in skipped.err
    file.unlink()
    done = await at(here, "task", "export", "h", "-o", str(file), "--memory", str(source))
    assert (done.code, "5 memories" in done.err) == (0, True), done.err
    kept = [
        json.loads(line["text"]) for line in map(json.loads, file.read_bytes().splitlines()) if line["kind"] == "memory"
    ]
    cited = [
        "A plan for the garden",
        "Speaks Danish",
        "The house has the colour blue",
        "The house has the colour green",
    ]
    assert sorted(one["text"] for one in kept) == [*cited, "The release is frozen on Fridays"]

    whole = file.read_bytes().splitlines(keepends=True)[:-1]
    damaged = resealed([one.replace(rb"\"owner\":\"helper\"", rb"\"owner\":7") for one in whole])
    (tmp_path / "damaged").write_bytes(damaged)
    bad = await at(elsewhere, "task", "import", str(tmp_path / "damaged"), "--memory", str(target))
    assert (bad.code, "the memory is not valid: owner" in bad.err) == (1, True), bad.err
    assert not files(tmp_path, "there.sqlite3*")

    newer = next(one for one in kept if one["text"] == "Speaks Danish") | {"text": "Speaks Danish and Dutch"}
    async with stored(target) as store:
        await store.restore([Memory.model_validate(newer)])
    found = await at(elsewhere, "task", "import", str(file), "--memory", str(target), "--json")
    assert (found.code, found.json["memories"], found.json["new_memories"]) == (0, 5, 4), found.err
    again = await at(elsewhere, "task", "import", str(file), "--memory", str(target), "--id", "h2", "--json")
    assert (again.code, again.json["new_memories"]) == (0, 0), again.err
    none = await at(elsewhere, "task", "import", str(file), "--memory", unknown, "--id", "h3", "--no-memories")
    assert none.code == 0, none.err
    assert not files(tmp_path, "missing*")
    async with stored(target) as store:
        there = {one.id: one.model_dump(mode="json") async for one in store.export()}
    assert there == {one["id"]: one for one in kept} | {newer["id"]: newer}
    moved = make_remembering_app(elsewhere.model_copy(update={"memory": str(target)}))
    async with moved:
        await (await find(moved, "h")).send("go", sender="editor")
    await run(moved, "h", State.SUCCEEDED)
    async with moved:
        assert await (await find(moved, "h")).result(5) == 1


async def test_an_export_of_a_task_that_changes_meanwhile_is_refused(
    here: Settings, tmp_path: Path, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(here, Ledger())
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test")
    await run(app, "a", State.WAITING)

    async def changes(_gateway: Any, partition: Partition, task_id: str, *_: Any) -> int:
        async with app:
            await (await find(app, task_id)).send("news", sender="other")
        return 0

    monkeypatch.setattr("perdure.worker.transfer.export._write_artifacts", changes)
    refused = await at(here, "task", "export", "a", "-o", str(tmp_path / "agent.jsonl"))
    assert (refused.code, "task a changed while it was exported" in refused.err) == (1, True), refused.err
    assert not files(tmp_path, "agent.jsonl")
    async with app:
        assert await (await find(app, "a")).status() is not State.CANCELLED


async def test_values_move_with_the_task(here: Settings, elsewhere: Settings, tmp_path: Path, at: Any) -> None:
    app, file = make_app(here, Ledger()), str(tmp_path / "a.jsonl")
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test")
        await (await find(app, "a")).update("speed", {"now": 2}, by="ada")
    await run(app, "a", State.WAITING)
    assert (await at(here, "task", "export", "a", "-o", file)).code == 0
    imported = await at(elsewhere, "task", "import", file)
    assert imported.code == 0, imported.err
    async with make_app(elsewhere, Ledger()) as there:
        handle = await find(there, imported.ids[0])
        assert await handle.values() == {"speed": {"now": 2}}
        assert (await handle.update("speed", 3)).task_id == handle.id
        await handle.cancel()


async def test_a_task_whose_value_changed_is_not_closed(here: Settings) -> None:
    app = make_app(here, Ledger())
    async with app:
        await app.producer.enqueue("builder", {"goal": "build it"}, task_id="a", queue="test", delay=3600)
        handle, gateway = await find(app, "a"), app.producer.gateway
        mark = await read_mark(gateway, handle.partition, "a")
        await handle.update("speed", 1)
        assert not await close_exported(gateway, handle.partition, "a", mark, event=b"{}", retention=60)
        await handle.cancel()


async def test_a_task_that_has_not_started_moves(here: Settings, elsewhere: Settings, tmp_path: Path, at: Any) -> None:
    """One is queued, one waits for its limit, and one keeps the time until which it is scheduled."""
    app, there, file = App("test", settings=here), App("test", settings=elsewhere), tmp_path / "task.jsonl"
    for one in (app, there):
        slow = one.limit("slow", rate="1/d")

        @one.task(limits=[slow], name="limited")
        async def limited(_ctx: Context, n: int) -> int:
            return n

        @one.task(name="plain")
        async def plain(_ctx: Context, n: int) -> int:
            return n

    async with app:
        await app.producer.enqueue("plain", {"n": 1}, task_id="queued", queue="test")
        due = await app.producer.enqueue("plain", {"n": 2}, task_id="later", queue="test", delay=3600)
        due_at = (await due.record()).due_at
        await app.tasks["limited"].options(task_id="limited").enqueue(3)
        assert await (await find(app, "limited")).status() is State.LIMITED
    for name, state in (("queued", State.QUEUED), ("later", State.SCHEDULED), ("limited", State.QUEUED)):
        file.unlink(missing_ok=True)
        done = await at(here, "task", "export", name, "-o", str(file))
        assert (done.code, "the task is cancelled here" in done.err) == (0, True), done.err
        async with app:
            assert await (await find(app, name)).status() is State.CANCELLED
        assert (await at(elsewhere, "task", "import", str(file))).out == f"{name}\n"
        async with there:
            moved = await find(there, name)
            assert await moved.status() is state
            assert (await moved.record()).due_at == (due_at if name == "later" else None)
    async with there:
        await (await find(there, "later")).cancel()
        await work_off(there)
        assert [await (await find(there, name)).result(5) for name in ("queued", "limited")] == [1, 3]
    async with app:
        await work_off(app)


def make_ending_app(settings: Settings) -> App:
    app = App("test", settings=settings)

    @app.task(retry=Retry(max_attempts=1))
    async def ending(ctx: Context, how: str) -> str:
        await ctx.artifacts.save("report.md", how.encode())
        await ctx.step("kept", lambda: how)
        if how == "dead":
            raise ValueError("no")
        return how * (400_000 if how == "large" else 1)

    return app


async def end(app: App) -> None:
    """Let a task end in each state; `large` has a result that is stored in chunks."""
    async with app:
        await app.producer.enqueue("ending", {"how": "dead"}, task_id="cancelled", queue="test", delay=3600)
        await (await find(app, "cancelled")).cancel()
        for how in ("done", "large", "dead"):
            await app.producer.enqueue("ending", {"how": how}, task_id=how, queue="test")
        await work_off(app)


async def test_a_task_that_has_ended_is_imported_for_reading(
    here: Settings, elsewhere: Settings, tmp_path: Path, at: Any
) -> None:
    app, there = make_ending_app(here), make_ending_app(elsewhere)
    await end(app)
    for name in ("done", "large", "cancelled"):
        file = str(tmp_path / name)
        done = await at(here, "task", "export", name, "-o", file)
        assert (done.code, "the task has ended: there was nothing to cancel" in done.err) == (0, True), done.err
        imported = await at(elsewhere, "task", "import", file)
        assert (imported.out, "is kept here for reading" in imported.err) == (f"{name}\n", True), imported.err
        again = await at(elsewhere, "task", "import", file)
        assert (again.code, f"task {name} exists already; nothing was stored" in again.err) == (1, True)
    async with app, there:
        for name in ("done", "large"):
            assert await (await find(there, name)).result(5) == name * (400_000 if name == "large" else 1)
        assert await (await find(there, "cancelled")).status() is State.CANCELLED
        for name in ("done", "cancelled"):
            found, source = await find(there, name), await find(app, name)
            copy, record = await found.record(), await source.record()
            same = {"state", "task", "attempts", "enqueued_at", "finished_at", "ran_ms", "worker", "result", "error"}
            assert {key: value for key, value in copy.summary().items() if key in same} == {
                key: value for key, value in record.summary().items() if key in same
            }
            assert [event.type for event in await history(found)] == [event.type for event in await history(source)]
            assert 0 < await there.producer.gateway.command("PTTL", found.partition.record(name)) <= 86_400_000
        await work_off(there)
    listed = await at(elsewhere, "task", "artifact", "done")
    assert "report.md" in listed.out, listed.err


async def test_ended_tasks_are_archived_each_in_a_file(
    here: Settings, elsewhere: Settings, tmp_path: Path, at: Any
) -> None:
    app, there, archive = make_ending_app(here), make_ending_app(elsewhere), tmp_path / "archive"
    await end(app)
    async with app:
        await app.producer.enqueue("ending", {"how": "x"}, task_id="live", queue="test", delay=3600)
        day = iso_day((await (await find(app, "done")).record()).finished_at)
    nothing = await at(here, "task", "export", "--older", "1h", "-o", str(archive))
    assert (nothing.code, nothing.out, "tasks archived in" in nothing.err) == (0, "", True), nothing.err
    for args, problem in [
        (("--older", "0"), "give their folder with -o"),
        (("done", "--older", "0", "-o", "x"), "give either an ID, or --older"),
        (("--older", "0", "-o", "x", "--keep"), "--keep is for a task that continues"),
        (("--older", "0", "-o", "x", "--state", "queued"), "--state queued: with --older it must be"),
        (("done", "--state", "dead"), "--state and --task are for --older"),
        ((), "give the ID of a task, or --older"),
    ]:
        misused = await at(here, "task", "export", *args)
        assert (misused.code, problem in misused.err) == (2, True), misused.err
    only = await at(here, "task", "export", "--older", "0", "--state", "dead", "-o", str(archive))
    assert (only.code, only.out.split()) == (0, [str(archive / day / "dead.jsonl")]), only.err
    async with app:  # another program has damaged a task
        damaged = await find(app, "large")
        record = damaged.partition.record("large")
        [kept] = await app.producer.gateway.command("HMGET", record, "result")
        await app.producer.gateway.command("HSET", record, "result", "damaged")
    part = await at(here, "task", "export", "--older", "0", "-o", str(archive))
    assert (part.code, "task large was not archived" in part.err, "1 tasks could not" in part.err) == (1, True, True)
    assert sorted(files(archive, "*/*")) == [archive / day / f"{one}.jsonl" for one in ("cancelled", "dead", "done")]
    async with app:
        await app.producer.gateway.command("HSET", record, "result", kept)
    whole = await at(here, "task", "export", "--older", "0s", "-o", str(archive))
    assert (whole.code, whole.out.split()) == (0, [str(archive / day / "large.jsonl")]), whole.err
    assert "archived before: 3" in whole.err
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(archive, "*/*")} == {0o600}
    old = await at(here, "task", "export", "--older", "7d", "-o", str(archive))
    assert "no succeeded task can be that old: it is deleted 1.0 days after its end" in old.err
    assert "no dead task" not in old.err
    async with app:  # it stays, and another task takes an id
        assert await (await find(app, "dead")).status() is State.DEAD
        await app.producer.enqueue_fresh(
            EnvelopeTemplate("ending").message(b'{"how": "again"}', task_id="done"), queue="test"
        )
        await work_off(app)
        await (await find(app, "live")).cancel()
    again = await at(here, "task", "export", "--older", "0", "--state", "succeeded", "-o", str(archive))
    assert len(again.out.split()) == 1, again.err
    assert "done~test-" in again.out

    assert (await at(elsewhere, "task", "import", str(archive / day / "dead.jsonl"))).out == "dead\n"
    async with there:
        letter = await find(there, "dead")
        record_there = await letter.record()
        assert (record_there.state, record_there.reason) == (State.DEAD, "attempts_exhausted")
        assert record_there.error is not None
        assert record_there.error["message"] == "no"
    listed = await at(elsewhere, "dlq", "list", "--json")
    assert [(one["id"], one["message"]) for one in listed.json] == [("dead", "no")]
    assert (await at(elsewhere, "dlq", "replay", "dead")).code == 0
    async with there:
        await work_off(there)
        events = [event.type for event in await history(await find(there, "dead"))]
        assert (events.count("step_completed"), events.count("buried")) == (1, 2)
