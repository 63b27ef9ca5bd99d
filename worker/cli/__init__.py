"""The command line. This file imports nothing but typer: what a command needs is imported when it is called."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated, Any

import typer

from .lazy import LazyCommand, LazyGroup, load

__all__ = ["commands", "main"]

COMMANDS = (
    LazyCommand("demo", ".demo.command:demo", "Kill workers and replay a dead letter, on real files."),
    LazyCommand("worker", ".worker:app", "Run workers, and see who works."),
    LazyCommand("enqueue", ".enqueue:enqueue", "Put tasks on a queue."),
    LazyCommand("task", ".task:app", "See, wait for, watch and cancel tasks, and send them messages."),
    LazyCommand("queue", ".queue:app", "See queues in numbers."),
    LazyCommand("dlq", ".dlq:app", "See, replay, purge and export dead letters."),
    LazyCommand("artifacts", ".artifacts:app", "See what tasks have saved, and collect what nothing links."),
    LazyCommand("memory", ".memory:app", "What agents know beyond their tasks: add, search, list, forget."),
    LazyCommand("keys", ".encryption_keys:app", "Make keys of encryption, and see which are in use."),
    LazyCommand("server", ".server:app", "Start and stop the embedded server."),
    LazyCommand("bench", ".bench.command:bench", "Measure Perdure on your server, beside a raw client."),
)

# The base of all of typer's usage errors; typer exports this one alone.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class _Commands(LazyGroup):
    def invoke(self, ctx: Any) -> Any:
        with load(".support.errors:explained")():
            return super().invoke(ctx)


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
    """Tasks that survive, on Redis Streams.

    Producers put tasks on queues, workers run them step by step, and what
    is given up waits as a dead letter for its replay. Where no server is
    named (--redis-url or PERDURE_REDIS_URL), all share an embedded one.

    Example: perdure worker run tasks.py:app
    """


commands: Any = typer.main.get_command(cli)
for promise in COMMANDS:
    commands.add_command(promise)


def main(args: list[str] | None = None) -> None:
    """Run one command and leave with its exit code (see failures.py)."""
    _accept_interrupts()
    try:
        code = commands.main(args, prog_name="perdure", standalone_mode=False)
    except typer.Abort:
        code = 1
    except USAGE_ERROR as misuse:
        code = 2
        _explain(misuse)
    sys.exit(code)


def _accept_interrupts() -> None:
    """Restore Python's handler of SIGINT if the process was started with the signal ignored.

    A shell ignores SIGINT for a command in the background, and Python keeps that: a `kill -INT` would have no effect.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _explain(misuse: Any) -> None:
    """One line about a call that typer refused; where there is nothing to say, the help was shown instead."""
    message = misuse.format_message().strip().rstrip(".").replace("Value error, ", "")
    if message:
        where = misuse.ctx.command_path if misuse.ctx else "perdure"
        typer.echo(f"perdure: {' '.join(message.split())}; see '{where} --help'", err=True)
