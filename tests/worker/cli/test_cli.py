"""Command line as a whole: imports, help, errors, exit codes, completion."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from perdure.queues import Unavailable
from perdure.worker.cli import COMMANDS, commands
from perdure.worker.cli.lazy import LazyCommand
from perdure.worker.cli.support.errors import explained

from tests.support.command_line import BOUND, COMMAND, Running, call, process
from tests.support.servers import BUNDLED, RedisServer, find_program


def test_the_command_table_imports_only_typer() -> None:
    code = """
import sys
from perdure.worker.cli import commands
heavy = {"redis", "pydantic", "anyio", "loguru", "rich"} & set(sys.modules)
own = {name for name in sys.modules if name.startswith("perdure.")}
print(sorted(heavy), sorted(own - {"perdure.worker", "perdure.worker.cli", "perdure.worker.cli.lazy"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[] []"


def test_a_supervisor_imports_neither_an_app_nor_tables() -> None:
    code = """
import sys
from perdure.worker.cli.lazy import load
load(".worker:app"), load(".support.supervisor_process:run_supervisor")
rooms = ("app", "agent", "durable", "journal", "memory")
print(sorted({"rich", *(f"perdure.worker.{name}" for name in rooms)} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_help_text_imports_no_tables_and_that_of_a_group_no_client() -> None:
    code = """
import contextlib, io, sys
from perdure.worker.cli import COMMANDS, commands, main
from perdure.worker.cli.lazy import LazyCommand
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main(["task", "--help"])
assert "Cancel a task" in shown.getvalue()
print(sorted({"redis", "loguru", "perdure.queues"} & set(sys.modules)))
for name in [name for name in sys.modules if name.startswith("rich")]:  # typer's own
    del sys.modules[name]
below = list(COMMANDS)
while below:
    found = below.pop()
    if isinstance(found, LazyCommand):
        found = found.fetch()
    below += getattr(found, "commands", {}).values()
print("perdure.worker.cli.task.listing" in sys.modules, sorted(name for name in sys.modules if name.startswith("rich")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split("\n") == ["[]", "True []", ""]


def test_help_lists_every_command_with_its_purpose() -> None:
    answer = call("--help")
    assert answer.code == 0
    for command in COMMANDS:
        assert str(command.name) in answer.out
        assert str(command.help) in " ".join(answer.out.split())


def test_version() -> None:
    assert call("--version").out.startswith("perdure 0.")


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    command = command.fetch() if isinstance(command, LazyCommand) else command
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        if name != "demo":  # its own tests look after it
            yield from leaves(below, (*path, name))


LEAVES = dict(leaves(commands))


def test_the_commands_are_these() -> None:
    assert {" ".join(path) for path in LEAVES} == {
        "new",
        "top",
        "worker run",
        "worker health",
        "worker list",
        "worker resume",
        "worker drain",
        "enqueue",
        *(f"task {name}" for name in ("list", "show", "result", "watch", "cancel", "events")),
        *(
            f"task {name}"
            for name in (
                "send",
                "answer",
                "waiting",
                "inbox",
                "values",
                "update",
                "artifact",
                "state",
                "fork",
                "handoff",
                "catalog",
                "why",
                "versions",
                "compact",
            )
        ),
        *(f"task {name}" for name in ("correct", "resolve", "dismiss", "export", "import")),
        *(f"session {name}" for name in ("list", "show", "send", "correct", "export", "forget")),
        *(f"store {name}" for name in ("list", "show", "delete")),
        *(f"identity {name}" for name in ("show", "set", "log")),
        *(f"artifacts {name}" for name in ("list", "gc")),
        *(f"config {name}" for name in ("set", "unset", "show")),
        *(f"queue {name}" for name in ("list", "junk", "metrics", "partitions", "pause", "resume", "purge")),
        *(f"limit {name}" for name in ("list", "show", "set", "hold", "release")),
        *(f"budget {name}" for name in ("list", "show", "raise", "reset")),
        *(
            f"schedule {name}"
            for name in ("list", "show", "add", "edit", "remove", "pause", "resume", "run", "backfill")
        ),
        *(f"job {name}" for name in ("list", "show", "watch", "run", "abort", "remove")),
        *(f"dlq {name}" for name in ("list", "groups", "show", "replay", "purge", "export")),
        *(f"memory {name}" for name in ("add", "search", "list", "forget", "export", "prune", "reembed")),
        *(f"keys {name}" for name in ("generate", "list")),
        *(f"server {name}" for name in ("start", "stop", "status", "prepare")),
        *(f"web {name}" for name in ("run", "token")),
        "drop",
        "bench",
        "docs",
        "doctor",
        "verify",
        *("backup", "restore", "migrate"),
        "dashboard",
        "mcp",
    }


def test_the_demo_is_a_lazy_command() -> None:
    assert next(command.target for command in COMMANDS if command.name == "demo") == ".demo:demo"


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_of_every_command_has_an_example_of_it(path: tuple[str, ...]) -> None:
    answer = call(*path, "--help")
    assert answer.code == 0
    assert "Example: " in answer.out
    assert f"perdure {' '.join(path)}" in answer.out.partition("Example: ")[2]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_the_same_connection_options(path: tuple[str, ...]) -> None:
    options = {option for parameter in LEAVES[path].params for option in parameter.opts}
    if path[0] in {"keys", "new", "docs", "verify"} or path == ("web", "token"):
        return  # they are of no server
    if path[0] == "memory":  # needs no server
        assert {"--memory", "--data-dir"} <= options
        return
    embedded = path[0] == "server" and path[1] != "prepare"
    wanted = {"--data-dir"} if embedded else {"--redis-url", "--namespace", "--data-dir"}
    assert wanted <= options


def test_every_command_that_prints_data_prints_json() -> None:
    without = {path for path, command in LEAVES.items() if "--json" not in {o for p in command.params for o in p.opts}}
    assert without == {
        ("new",),  # prints paths
        ("worker", "run"),
        ("web", "run"),
        ("dashboard",),
        ("mcp",),
        ("dlq", "export"),  # is JSON already
        ("memory", "export"),
        ("session", "export"),
        ("task", "export"),
        ("session", "forget"),
        ("store", "delete"),
        ("schedule", "remove"),
        ("keys", "generate"),  # is one word
        ("queue", "metrics"),  # is text of Prometheus'
        ("server", "stop"),
    }


@pytest.mark.parametrize("group", ["worker", "task", "queue", "dlq", "memory", "keys", "server"])
def test_a_group_without_a_command_shows_its_help_and_ends_with_2(group: str) -> None:
    answer = call(group)
    assert (answer.code, answer.err) == (2, "")
    assert f"perdure {group} [OPTIONS] COMMAND" in answer.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nothing",), "No such command 'nothing'"),
        (("--nothing",), "No such option: --nothing"),
        (("tsk", "list"), "Did you mean 'task'?"),
        (("task", "lst"), "Did you mean 'list'? see 'perdure task --help'"),
        (("task", "show"), "Missing argument 'ID'"),
        (("task", "list", "--tag"), "Option '--tag' requires an argument; see 'perdure task list --help'"),
        (("task", "list", "--limit", "0"), "'--limit'"),
        (("worker", "run", "tasks:app", "--concurrency", "0"), "'--concurrency'"),
        (("task", "list", "--state", "gone"), "'gone' is not one of 'queued', 'scheduled', 'waiting'"),
        (("dlq", "list", "--reason", "bad"), "must be one of 'attempts_exhausted', 'not_retryable'"),
        (("task", "list", "--queue", "a b"), "queue must be 1 to 64 letters"),
        (("task", "show", "a/b"), "must be a task id: at most 128 letters"),
        (("task", "result", "x", "--timeout", "soon"), "must be a number of seconds, 0 or more; got 'soon'"),
        (("queue", "list", "--redis-url", "localhost"), "address must be a URL, got 'localhost'; known are redis://"),
        (("queue", "list", "--redis-url", "http://x"), "unknown scheme 'http'"),
        (("queue", "list", "--redis-url", "redis://x/a"), "the database must be a number"),
        (("queue", "list", "--namespace", "a b"), "namespace must be 1 to 64 letters"),
        (("queue", "list", "--redis-url", "redis://x", "--data-dir", "d"), "give one of them"),
    ],
    ids=" ".join,
)
def test_misuse_is_one_line_on_stderr_and_ends_with_2(args: tuple[str, ...], said: str) -> None:
    answer = call(*args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert answer.err.startswith("perdure: ")
    assert answer.err.count("\n") == 1


def test_an_error_is_one_line_on_the_stderr_of_a_process_and_its_code_is_the_exit_code() -> None:
    answer = process("queue", "list", "--redis-url", "localhost")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("perdure: address must be a URL, got 'localhost'")
    assert answer.err.count("\n") == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unavailable_server_is_reported_with_the_remedy() -> None:
    port = free_port()
    answer = call("queue", "list", "--redis-url", f"redis://:secret@127.0.0.1:{port}/0")
    assert (answer.code, answer.out) == (1, "")
    assert f"perdure: cannot reach Redis at redis://:***@127.0.0.1:{port}/0" in answer.err
    assert "--redis-url" in answer.err
    assert "secret" not in answer.err
    assert answer.err.startswith("perdure: warning: all users of this machine can read the password in --redis-url")
    assert answer.err.count("\n") == 2


@pytest.mark.integration
def test_a_wrong_password_is_refused_and_never_shown() -> None:
    program = find_program(BUNDLED)
    if program is None:
        pytest.skip("no bundled redis-server here")
    port = free_port()
    server = RedisServer(program, options=("--port", str(port), "--requirepass", "right", "--save", ""))
    server.start(password="right")
    try:
        answer = call("queue", "list", "--redis-url", f"redis://user:mistaken@127.0.0.1:{port}")
    finally:
        server.stop()
    assert (answer.code, answer.out) == (1, "")
    assert f"redis://user:***@127.0.0.1:{port} refused the credentials" in answer.err
    assert "check the user and the password" in answer.err
    assert "mistaken" not in answer.err
    assert answer.err.count("\n") == 2  # the first one warns of the password


@pytest.mark.integration
@pytest.mark.processes
def test_ctrl_c_ends_a_command_with_130_and_no_traceback(redis_url: str, namespace_name: str, tmp_path: Path) -> None:
    place = ("--redis-url", redis_url, "--namespace", namespace_name)
    task_id = call("enqueue", "wait", "--queue", "default", *place).ids[0]
    with Running("task", "events", task_id, "--follow", *place, cwd=tmp_path) as following:
        _until_subscribed(redis_url)  # there is no event to wait for: no worker runs the task
        following.send(signal.SIGINT)
        answer = following.wait()
    call("task", "cancel", task_id, *place)
    assert (answer.code, answer.err) == (130, "")


def _until_subscribed(url: str) -> None:
    probe = """
import sys, time, redis
client = redis.Redis.from_url(sys.argv[1])
while not client.pubsub_channels():
    time.sleep(0.02)
"""
    subprocess.run([sys.executable, "-c", probe, url], check=True, timeout=BOUND)


def test_an_unexpected_error_keeps_its_traceback() -> None:
    with patch("perdure.worker.cli.server.status", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        call("server", "status")


def test_an_exception_group_of_one_is_reported_as_that_error() -> None:
    group = ExceptionGroup("unhandled", [ExceptionGroup("inner", [Unavailable("gone.")])])
    with pytest.raises(typer.Exit) as ending, explained():
        raise group
    assert ending.value.exit_code == 1


def test_an_exception_group_of_several_errors_keeps_its_traceback() -> None:
    with pytest.raises(ExceptionGroup), explained():
        raise ExceptionGroup("unhandled", [Unavailable("gone"), ZeroDivisionError()])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("perdure ", {"worker", "enqueue", "task", "dlq"}),
        ("perdure task ", {"show", "watch"}),
        ("perdure dlq r", {"replay"}),
    ],
)
def test_completion_offers_commands_at_every_level(
    words: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_PERDURE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert wanted <= set(call().ids)


def test_the_completion_script_calls_perdure() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@"; exit', "bash", *COMMAND, "--show-completion"],  # typer asks for the shell that calls it
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert "_PERDURE_COMPLETE=complete_bash" in done.stdout
