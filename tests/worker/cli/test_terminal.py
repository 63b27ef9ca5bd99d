"""What commands print: a terminal never gets what it would interpret or hide, and files only their owner can read."""

from __future__ import annotations

import ast
import asyncio
import os
import pty
import stat
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure import Agent, AgentState, App, Context, Every, Identity, PlanStep, Retry, Settings
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse, EnvelopeTemplate, LimitUse
from perdure.queues.limits.definition import Limit, key_digest
from perdure.queues.limits.store import LimitStore, TakeRequest, token_member
from perdure.queues.schedules.call import ScheduledCall
from perdure.queues.schedules.definition import Rules
from perdure.queues.schedules.store import ScheduleDefinition, ScheduleStore
from perdure.worker import cli
from perdure.worker.cli import commands
from perdure.worker.cli.lazy import LazyCommand
from perdure.worker.shown_text import clean, clean_json

from tests.support.command_line import BOUND, COMMAND, Answer, call
from tests.support.workers import bounded, partition_of, redis_command, running_worker, work_off

SIGNS = "\x00\x07\x08\x0c\r\x1b\x7f\x80\x9b\xad\u061c\u180e\u200b\u200d\u200e\u2028\u202e\u2060\u2066\ufeff\U000e0041"
HOSTILE = f"begin{SIGNS}[2Jend"

PACKAGE = Path(cli.__file__).resolve().parent


@given(st.text())
def test_clean_text_has_no_character_that_acts(text: str) -> None:
    shown = clean(text)
    assert not set(shown) & set(SIGNS)
    assert shown == text or not text.isprintable() or not text.isascii()


@given(st.text() | st.lists(st.text()) | st.just(HOSTILE))
def test_clean_json_is_the_same_value(value: Any) -> None:
    for text in (orjson.dumps(value).decode(), orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()):
        assert orjson.loads(clean_json(text)) == value
        assert not set(clean_json(text)) & set(SIGNS)


class Noisy(Agent[AgentState]):
    identity = Identity(role=HOSTILE)

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="one", title=HOSTILE)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        await ctx.decide(HOSTILE, reasoning=HOSTILE, alternatives=[HOSTILE])
        await ctx.discover(HOSTILE, source=HOSTILE)
        await ctx.add_message("user", HOSTILE)
        await ctx.progress(1, 2, HOSTILE)
        return HOSTILE

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return HOSTILE


def make_app(settings: Settings) -> App:
    app = App("noisy", settings=settings)
    app.agent(Noisy)

    @app.task
    async def speak(ctx: Context, text: str) -> str:
        await ctx.artifacts.save("report.txt", HOSTILE)
        await ctx.memory.add(HOSTILE.replace("\x00", ""), tags=["loud"])
        await ctx.progress(1, 2, HOSTILE)
        return HOSTILE

    @app.task(retry=Retry(max_attempts=1))
    async def fails(ctx: Context, text: str) -> None:
        raise ValueError(HOSTILE)

    @app.task
    async def waits(ctx: Context, text: str) -> None:
        await ctx.ask("ada", HOSTILE)

    return app


async def take_loudly(app: App) -> None:
    """Let a task hold a limit whose key is hostile text."""
    limit = Limit("loud", total=2, by="who")
    store = LimitStore(app.producer.gateway, app.producer.namespace)
    await store.publish([limit], "noisy", starts=True)
    use = LimitUse("loud", key_digest("loud", [HOSTILE]))
    member = token_member(partition_of(app, "noisy"), "t1", "n")
    assert (await store.take([TakeRequest(member, [use], labels=[HOSTILE])])).answers[0].granted


async def schedule_loudly(app: App) -> None:
    """Add a schedule whose arguments are hostile text."""
    message = EnvelopeTemplate("speak", app=app.name).message(orjson.dumps({"text": HOSTILE}))
    call_of = ScheduledCall.of(message, "speak", "noisy")
    definition = ScheduleDefinition("loud", Every(3600), Rules(), call_of)
    await ScheduleStore(app.producer.gateway, app.producer.namespace).add(definition)


async def store_loudly(app: App) -> None:
    """Store an entry whose key and value are hostile text."""
    await app.store("loud").put(HOSTILE, HOSTILE)


async def charge_loudly(app: App) -> None:
    """Charge a budget whose key is hostile text."""
    use = BudgetUse("loud:" + "0" * 16, "loud", {"usd": 1}, label=HOSTILE)
    await BudgetStore(app.producer.gateway, app.producer.namespace).charge([use], "nonce", {"usd": 1})


async def tool(*args: str, stdin: bytes = b"") -> Answer:
    return await asyncio.to_thread(lambda: call(*args, stdin=stdin))


@pytest.fixture
def place(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    for name, value in (("REDIS_URL", settings.redis_url), ("NAMESPACE", settings.namespace)):
        monkeypatch.setenv(f"PERDURE_{name}", value)
    monkeypatch.setenv("PERDURE_DATA_DIR", str(settings.data_dir))
    monkeypatch.chdir(tmp_path)
    return settings


def leaves(command: Any, path: str = "") -> Iterator[str]:
    command = command.fetch() if isinstance(command, LazyCommand) else command
    if not hasattr(command, "commands"):
        yield path
        return
    for name, below in command.commands.items():
        yield from leaves(below, f"{path} {name}".strip())


QUIET = {
    "demo": "its report has names of files of this host only",
    "bench": "it prints figures",
    "docs": "it prints pages of the package",
    "doctor": "what it quotes of keys and names goes through the tables of the other commands",
    "verify": "it prints names and values of the app that its own argument names",
    "backup": "it prints its own argument, and names of queues",
    "restore": "it prints its own argument",
    "migrate": "it prints its own texts",
    "new": "it prints the paths that its own argument names",
    "worker run": "it prints a log, see test_log",
    "server start": "it prints the path of its own option",
    "server stop": "it prints nothing of tasks",
    "server status": "it prints figures of the server",
    "server prepare": "it prints its own arguments",
    "web run": "it prints a log",
    "dashboard": "it prints a log",
    "mcp": "it speaks JSON to a program, or prints a log",
    "web token": "it prints its own argument, and a token",
    "keys generate": "it prints a key",
    "keys list": "it prints ids of keys",
    "config set": "it prints its own arguments",
    "config unset": "it prints its own arguments",
    "config show": "it prints numbers",
    "queue metrics": "it prints figures, by names that cannot be hostile",
    "queue partitions": "it prints figures",
    "memory reembed": "it prints figures, and needs an embedder",
    "worker resume": "it prints names of supervisors",
    "worker health": "it prints names of workers",
    "worker drain": "it prints its own arguments",
}
"""Commands that print nothing of what tasks hold."""


@pytest.mark.integration
async def test_no_command_prints_what_a_terminal_interprets(place: Settings, tmp_path: Path) -> None:
    seen: set[str] = set()

    async def check(*args: str, said: bool = True, stdin: bytes = b"") -> Answer:
        answer = await tool(*args, stdin=stdin)
        for text in (answer.out, answer.err):
            assert not set(text) & set(SIGNS), (args, text)
        assert "Traceback" not in answer.err.partition("ValueError")[0], (args, answer.err)
        if said:
            assert "begin" in answer.out + answer.err, (args, answer)
        seen.update(name for name in leaves(commands) if f"{' '.join(args)} ".startswith(f"{name} "))
        return answer

    async with make_app(place) as app:
        await redis_command(app, "XADD", partition_of(app, "noisy").junk, "*", "key", HOSTILE, "item", HOSTILE)
        await redis_command(app, "PEXPIRE", partition_of(app, "noisy").junk, 60_000)
        marked: dict[str, Any] = {"headers": {"x": HOSTILE}, "key": HOSTILE, "tags": [HOSTILE]}
        ok = await app.producer.enqueue("speak", {"text": HOSTILE}, queue="noisy", **marked)
        bad = await app.producer.enqueue("fails", {"text": HOSTILE}, queue="noisy", **marked)
        asks = await app.producer.enqueue("waits", {"text": HOSTILE}, queue="noisy", **marked)
        agent = await app.producer.enqueue("noisy", {"goal": HOSTILE}, queue="noisy")
        await work_off(app)
        await app.session(Noisy, "ada").send(HOSTILE, sender="bob")
        await work_off(app)
        await app.session(Noisy, "ada").send(HOSTILE)
        await take_loudly(app)
        for json in ((), ("--json",)):
            for task in (ok, bad, asks, agent):
                await check("task", "show", task.id, *json)
                await check("task", "events", task.id, *json, said=False)
                await check("task", "why", task.id, *json, said=False)
            for name in ("result", "watch"):
                await check("task", name, ok.id, *json, said=name == "result")
                await check("task", name, bad.id, *json)
            await check("task", "list", *json, said=bool(json))
            await check("task", "list", "--error", HOSTILE, *json, said=False)
            await check("task", "catalog", *json, said=False)
            await check("task", "versions", *json, said=False)
            await check("task", "state", agent.id, *json)
            await check("task", "handoff", agent.id, *json)
            await check("task", "artifact", ok.id, *json, said=False)
            await check("task", "send", asks.id, HOSTILE, "--from", "bob", *json, said=False)
            await check("task", "inbox", asks.id, *json)
            await check("task", "waiting", asks.id, *json)
            hostile = (orjson.dumps(HOSTILE).decode(), "--by", HOSTILE)
            await check("task", "update", asks.id, "speed", *hostile, *json)
            await check("task", "values", asks.id, *json)
            await check(
                "task",
                "answer",
                asks.id,
                "question",
                orjson.dumps(HOSTILE).decode(),
                "--by",
                HOSTILE,
                *json,
                said=False,
            )
            await check("task", "correct", asks.id, f"x={HOSTILE}", *json, said=False)
            await check("task", "resolve", asks.id, HOSTILE, "--run-again", *json, said=False)
            await check("task", "dismiss", asks.id, HOSTILE, *json, said=False)
            await check("task", "compact", agent.id, *json, said=False)
            await check("task", "fork", agent.id, *json, said=False)
            await check("dlq", "list", *json)
            await check("dlq", "groups", *json)
            await check("dlq", "show", bad.id, *json)
            await check("dlq", "purge", "--error", HOSTILE, *json, said=False)
            await check("session", "list", *json, said=False)
            await check("session", "show", "noisy", "ada", *json)
            await check("session", "send", "noisy", "ada", HOSTILE, "--no-wait", *json, said=False)
            await check("session", "correct", "noisy", "ada", f"x={HOSTILE}", *json, said=False)
            await check("identity", "show", "noisy", *json, said=False)
            await check("identity", "set", "noisy", "-", "--why", HOSTILE, "--by", HOSTILE, *json, said=False,
                        stdin=orjson.dumps({"role": HOSTILE}))  # fmt: skip
            await check("identity", "show", "noisy", *json)
            await check("identity", "log", "noisy", *json)
            await check("memory", "list", *json)
            await check("memory", "search", "begin", *json)
            await check("memory", "add", HOSTILE, *json, said=False)
            await check("memory", "prune", "--keep", "9", *json, said=False)
            await check("memory", "forget", HOSTILE, *json)
            await check("artifacts", "list", *json, said=False)
            await check("artifacts", "gc", *json, said=False)
            await check("queue", "list", *json, said=False)
            await check("queue", "junk", *json)
            await check("worker", "list", *json, said=False)
            await check("limit", "list", *json, said=False)
            for act in (("set", "loud", "total=3"), ("hold", "loud", "1"), ("release", "loud")):
                await check("limit", *act, "--why", HOSTILE, "--by", HOSTILE, *json)
            await check("limit", "show", "loud", *json)
            await charge_loudly(app)
            await check("queue", "purge", "noisy", "--task", HOSTILE, "--yes", *json, said=False)
            loud_job = (
                "--why",
                HOSTILE,
                "--by",
                HOSTILE,
                "--error",
                HOSTILE,
                "--key",
                "none",
                "--job",
                "loud",
                "--detach",
            )
            await check("dlq", "replay", "--all", *loud_job, *json, said=bool(json))
            await check("job", "list", *json)
            await check("job", "show", "loud", *json)
            await check("job", "run", "loud", *json, said=False)
            await check("job", "watch", "loud", *json, said=bool(json))
            await check("job", "abort", "loud", *json, said=False)
            await check("job", "remove", "loud", *json, said=False)
            await store_loudly(app)
            await check("store", "list", *json, said=False)
            await check("store", "list", "loud", *json)
            await check("store", "show", "loud", HOSTILE, *json)
            await check("store", "delete", "loud", HOSTILE, "--yes")
            await check("budget", "list", *json, said=bool(json))
            await check("budget", "show", "loud", *json)
            await check("budget", "raise", "loud", "--usd", "1", "--by", HOSTILE, *json)
            await check("budget", "reset", "loud", "--by", HOSTILE, "--yes", *json)
            held = ("--where", f"text={HOSTILE}")
            await check("queue", "pause", *held, "--why", HOSTILE, "--by", HOSTILE, *json)
            await check("queue", "list", *json, said=False)
            await check("queue", "resume", *held, *json)
            await schedule_loudly(app)
            await check("schedule", "list", *json, said=bool(json))
            await check("schedule", "show", "loud", *json)
            loudly = ("--args", orjson.dumps({"text": HOSTILE}).decode())
            await check("schedule", "edit", "loud", *loudly, *json)
            await check("schedule", "pause", "loud", "--why", HOSTILE, *json)
            await check("schedule", "resume", "loud", *json)
            await check("schedule", "run", "loud", *json, said=False)
            since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
            await check("schedule", "backfill", "loud", "--since", since, *json, said=False)
            await check("schedule", "remove", "loud", said=False)
            await check("schedule", "add", "loud", "speak", "--every", "1h", *loudly, *json)
            await check("schedule", "remove", "loud", said=False)
            await check("top", *json, said=False)
            await check(
                "enqueue",
                "speak",
                "--queue",
                "noisy",
                "--args",
                orjson.dumps({"text": HOSTILE}).decode(),
                *json,
                said=False,
            )
            taken = tmp_path / "drop" / "noisy" / ".taken"
            taken.mkdir(parents=True, exist_ok=True)
            (taken / f"{HOSTILE.replace(chr(0), '')[:20]}.json").write_bytes(orjson.dumps({HOSTILE: 1}))
            await check("drop", str(tmp_path / "drop"), "--once", *json)
        await check("dlq", "export")
        await check("session", "export", "noisy", "ada")
        await check("memory", "export")
        await check("task", "import", "missing", said=False)
        await check("dlq", "replay", bad.id, said=False)
        await check("session", "forget", "noisy", "ada", "--yes", said=False)
        await check("task", "cancel", asks.id, said=False)
        await check("task", "show", HOSTILE)  # an error that quotes its argument
        exported = await tool("task", "export", "nothing")
        assert not set(exported.err) & set(SIGNS)
    assert set(leaves(commands)) - seen - QUIET.keys() == {"task export"}  # a file of bytes; see the next test


@pytest.mark.integration
async def test_bytes_are_exact_in_a_pipe_and_clean_on_a_terminal(place: Settings) -> None:
    async with make_app(place) as app:
        ok = await app.producer.enqueue("speak", {"text": HOSTILE}, queue="noisy")
        asks = await app.producer.enqueue("waits", {"text": HOSTILE}, queue="noisy")
        await work_off(app)
        for args in (("task", "artifact", ok.id, "report.txt", "-o", "-"), ("task", "export", asks.id, "--keep")):
            piped = await asyncio.to_thread(in_pipe, *args)
            assert piped.returncode == 0, piped.stderr
            assert ("\u202e".encode() in piped.stdout) and (b"\x9b" in piped.stdout)
            shown = await asyncio.to_thread(on_terminal, *args)
            assert not set(shown.replace("\r\n", "\n")) & set(SIGNS)
            assert "begin" in shown
        result = await tool("task", "result", ok.id)
        assert orjson.loads(result.out) == HOSTILE  # escaped, and the same value


def in_pipe(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *args], capture_output=True, timeout=BOUND, check=False)


def on_terminal(*args: str) -> str:
    """Return what a command prints on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *args], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL) as command:
        os.close(theirs)
        found = bytearray()
        try:
            while data := os.read(ours, 65536):
                found += data
        except OSError:  # the terminal has no other end any more
            pass
        assert command.wait(BOUND) == 0
    os.close(ours)
    return found.decode()


@pytest.mark.integration
async def test_files_that_commands_write_are_for_their_owner_only(place: Settings, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with make_app(place) as app:
            ok = await app.producer.enqueue("speak", {"text": "x"}, queue="noisy")
            await app.producer.enqueue("fails", {"text": "x"}, queue="noisy")
            asks = await app.producer.enqueue("waits", {"text": "x"}, queue="noisy")
            await work_off(app)
            async with running_worker(app):
                await bounded((await app.session(Noisy, "ada").send("x")).result())
            (tmp_path / "letters").write_text("old, and readable by all")
            (tmp_path / "letters").chmod(0o644)
            victim = tmp_path / "victim"
            (tmp_path / "session").symlink_to(victim)
            for args in (
                ("dlq", "export", "-o", "letters"),
                ("memory", "export", "-o", "memories"),
                ("session", "export", "noisy", "ada", "-o", "session"),
                ("task", "export", asks.id, "--keep", "-o", "task"),
                ("task", "artifact", ok.id, "report.txt"),
                ("task", "artifact", ok.id, "report.txt", "-o", "artifact"),
                ("keys", "generate", "-o", "key"),
            ):
                assert (await tool(*args)).code == 0, args
            assert place.data_dir is not None
            modes = private_modes(tmp_path, place.data_dir)
    finally:
        os.umask(before)
    assert {"letters", "memories", "session", "task", "report.txt", "artifact", "key", "memory.sqlite3"} <= {
        Path(file).name for file in modes
    }
    assert {file: mode for file, mode in modes.items() if mode not in ("0o600", "0o400")} == {}
    assert not victim.exists()
    assert orjson.loads((tmp_path / "letters").read_text())["task"] == "fails"


def private_modes(*folders: Path) -> dict[str, str]:
    """Return the modes of all files in some folders."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {str(file): oct(stat.S_IMODE(file.stat().st_mode)) for file in files}


def test_commands_print_through_the_module_of_the_output() -> None:
    """A call that prints around it could forget to escape."""
    allowed = {"output.py", "terminal.py"}
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or file.name in allowed:
                continue
            name = ast.unparse(node.func)
            if name in {"print", "typer.echo", "typer.secho", "typer.confirm", "typer.prompt", "Console"} or name in {
                "sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write",
            }:  # fmt: skip
                found.append(f"{file.relative_to(PACKAGE)}: {name} {type(node.args[0]).__name__}")
    assert sorted(found) == ["__init__.py: typer.echo Call", "__init__.py: typer.echo JoinedStr"]  # errors, escaped
