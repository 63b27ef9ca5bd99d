"""Command line: the program `perdure`.

    new.py                  new: the files of a new app
    worker.py               worker run, list, health, drain, resume
    enqueue.py              enqueue: one task, or a file of tasks
    drop/                   drop: a folder whose files become tasks and messages
    task/                   perdure task
    queue.py                queue list, junk, metrics, partitions, purge; task catalog
    queue_pause.py          queue pause, resume
    limit.py                limit list, show, set, hold, release
    job.py                  job list, show, watch, run, abort, remove
    schedule.py             schedule list, show, add, edit, remove, pause, resume, run, backfill
    queue_metrics.py        the Prometheus metrics
    top.py                  top: queues, workers and running tasks on a live screen
    dlq.py                  dlq list, show, replay, purge, export
    session.py              session list, show, send, export, forget
    artifacts.py            artifacts list, gc
    memory/                 perdure memory
    identity.py             identity show, set, log
    encryption_keys.py      keys generate, list
    config.py               config set, unset, show
    server.py               server start, stop, status, prepare
    web.py                  web run, token
    dashboard.py            perdure dashboard
    mcp.py                  perdure mcp
    lazy.py                 import of a command when it is called
    doctor.py               perdure doctor
    backup.py               perdure backup, restore, migrate
    bench.py, demo.py       perdure bench, perdure demo
    docs.py                 perdure docs
    support/                the runner of the commands, and options, connection, output and errors that they share

This module imports nothing but typer, so `perdure --help` and completion stay fast; a command is imported when it is
called. A command is a function that returns its output: rows, a document or lines. support/runner.py prints it, and
makes the options `--json`, `--wide` and `--watch` by the type of the result.

Ids go to stdout, messages to stderr. Exit codes are in support/errors.py.
Help texts are imperative sentences with a full stop: what the command does, when to use it, and an example that works.
"""

from __future__ import annotations

import atexit
import gc
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .lazy import LazyCommand, LazyGroup, load

COMMANDS = (
    LazyCommand("new", ".new:new", "Create an app, its tests and its Dockerfile."),
    LazyCommand("demo", ".demo:demo", "Kill workers and replay a dead letter, on real files."),
    LazyCommand("worker", ".worker:app", "Run workers, list and drain them, and check their health."),
    LazyCommand("enqueue", ".enqueue:enqueue", "Enqueue one task, or a file of tasks."),
    LazyCommand("drop", ".drop.command:drop", "Make tasks of the files that programs put into a folder."),
    LazyCommand("task", ".task.commands:app", "List, show, watch, cancel and fork tasks."),
    LazyCommand("queue", ".queue:app", "List, pause and purge queues; junk, metrics, partitions."),
    LazyCommand("limit", ".limit:app", "List, show, change, hold and release limits."),
    LazyCommand("budget", ".budget:app", "List, show, raise and reset budgets."),
    LazyCommand("job", ".job:app", "List, watch, continue and abort jobs over many tasks."),
    LazyCommand("schedule", ".schedule:app", "List, add, change, pause and fire schedules."),
    LazyCommand("top", ".top:top", "Show queues, workers and running tasks live."),
    LazyCommand("dlq", ".dlq:app", "List, group, show, replay, purge and export dead letters."),
    LazyCommand("session", ".session:app", "List sessions of agents, talk in them, export and forget them."),
    LazyCommand("store", ".store:app", "List, show and delete entries of the key-value store."),
    LazyCommand("artifacts", ".artifacts:app", "List artifacts, and delete unlinked ones."),
    LazyCommand("memory", ".memory.commands:app", "Manage the long-term memories of agents."),
    LazyCommand("identity", ".identity:app", "Show and change the identity of agents."),
    LazyCommand("keys", ".encryption_keys:app", "Generate encryption keys, and list those in use."),
    LazyCommand("config", ".config:app", "Store the settings that all workers must share."),
    LazyCommand("server", ".server:app", "Start, stop and inspect the embedded server, or prepare another."),
    LazyCommand("web", ".web:app", "Serve the HTTP API, and make tokens for its users."),
    LazyCommand("dashboard", ".dashboard:dashboard", "Serve the dashboard."),
    LazyCommand("mcp", ".mcp:mcp", "Serve tasks as tools for MCP clients."),
    LazyCommand("doctor", ".doctor:doctor", "Find what is wrong with a deployment, and what to do."),
    LazyCommand("verify", ".verify:verify", "Crash a task at each of its writes, and compare."),
    LazyCommand("backup", ".backup:backup", "Write the data of a namespace to a file."),
    LazyCommand("restore", ".backup:restore", "Write a backup into a namespace without data."),
    LazyCommand("migrate", ".backup:migrate", "Migrate the data of a namespace to this release."),
    LazyCommand("bench", ".bench:bench", "Measure Perdure on your server."),
    LazyCommand("docs", ".docs:docs", "Read and search the documentation offline."),
)

# The base class of typer's usage errors, which typer itself does not export.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class _Commands(LazyGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, USAGE_ERROR):  # a help text, for one, needs no explanation
            raise
        except Exception:  # any error gets its explanation, whose module is imported only then
            with load(".support.errors:explained")():
                raise


cli = typer.Typer(name="perdure", cls=_Commands, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {load('importlib.metadata:version')('perdure')}")
        raise typer.Exit


@cli.callback()
def perdure(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run durable tasks and AI agents on Redis Streams.

    Producers enqueue tasks, workers run them step by step, and a task that
    keeps failing becomes a dead letter, which you can replay. Without
    --redis-url or PERDURE_REDIS_URL, all commands use an embedded server.
    'perdure docs' has the documentation.

    Example: perdure worker run tasks.py:app
    """


commands: Any = typer.main.get_command(cli)
for command in COMMANDS:
    commands.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Run one command and exit with its exit code (see support/errors.py)."""
    _accept_interrupts()
    atexit.register(gc.freeze)  # else the interpreter searches all modules for garbage before it ends
    logging.getLogger("perdure").addHandler(logging.NullHandler())  # `worker run` shows what is logged
    try:
        code = commands.main(args, prog_name="perdure", standalone_mode=False)
    except typer.Abort:
        code = 1
    except USAGE_ERROR as error:
        code = 2
        _explain(error, sys.argv[1:] if args is None else args)
    sys.exit(code)


def _accept_interrupts() -> None:
    """Restore Python's handler of SIGINT if the process was started with the signal ignored.

    A shell starts a background command with SIGINT ignored, and Python keeps that: `kill -INT` would have no effect.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _explain(error: Any, arguments: Sequence[str]) -> None:
    """Print a usage error as one line. It has no message if typer printed the help instead."""
    message = error.format_message().strip().rstrip(".").replace("Value error, ", "")
    if message:
        where = error.ctx.command_path if error.ctx else _named(arguments)
        end = "" if message.endswith("?") else ";"
        clean = load("..shown_text:clean")
        typer.echo(clean(f"perdure: {' '.join(message.split())}{end} see '{where} --help'"), err=True)


def _named(arguments: Sequence[str]) -> str:
    """Return the command that the arguments name, for an error of their parser, which does not say it."""
    path, command = "perdure", commands
    for name in arguments:
        found = getattr(command, "commands", {}).get(name)
        if found is None:
            break
        path, command = f"{path} {name}", found.fetch() if isinstance(found, LazyCommand) else found
    return path
