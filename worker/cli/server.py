"""`perdure server`: start, stop and inspect the embedded server; prepare any server for producers."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ...queues.embedded.control import ServerStatus, start, status, stop
from ...queues.partitions.resharding import sync_route
from ...queues.producer import Producer
from ..settings import load_settings
from .support.connection import DataDir, connected
from .support.options import read_queue
from .support.output import StderrText, note
from .support.runner import Output, command

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def server() -> None:
    """Start, stop and inspect the embedded server, or prepare another one.

    The embedded server starts when a command needs it, and stops with the last process that
    uses it. Started with 'perdure server start', it runs until 'perdure
    server stop'.
    """


@app.command("start")
@command
def start_(*, data_dir: DataDir = None) -> Output:
    """Start the embedded server, and print its address.

    It runs until 'perdure server stop'. Use it to keep the server between
    commands.

    Example: perdure server start --data-dir ./perdure-data
    """
    directory = _directory(data_dir)
    found = start(directory)
    started = StderrText(f"started {found.version}, process {found.pid}, on unix://{found.socket}")
    return Output(_summary(directory, found), _address(directory), started)


@app.command("stop")
def stop_(
    *,
    force: Annotated[bool, typer.Option("--force", help="Stop it even if processes use it.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Stop the embedded server. Its data is kept.

    While other processes use it, this fails, except with --force.

    Example: perdure server stop
    """
    directory = _directory(data_dir)
    ran = status(directory).running
    stop(directory, force=force)
    note(f"stopped the server in {directory}" if ran else f"no server was running in {directory}")


@app.command("status")
@command
def status_(*, data_dir: DataDir = None) -> Output:
    """Show the state of the embedded server, without starting it.

    Example: perdure server status --json
    """
    directory = _directory(data_dir)
    found = status(directory)
    return Output(
        _summary(directory, found),
        {
            "address": _address(directory),
            "running": "yes" if found.running else "no",
            "runs until": "perdure server stop" if found.pinned else "the last user exits",
            "version": found.version,
            "process": found.pid,
            "users": found.users,
            "socket": f"unix://{found.socket}",
            "program": None if found.binary is None else str(found.binary),
            "memory": None if found.used_memory is None else f"{found.used_memory:,} bytes",
            "on disk": f"{found.aof_size:,} bytes",
        },
    )


class LaneOption(StrEnum):
    """Values of `--lane`."""

    HIGH = "high"
    LOW = "low"
    IDLE = "idle"


@app.command("prepare")
@connected
async def prepare(
    producer: Producer,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="[QUEUE]...", parser=read_queue, help="Queues to register.")
    ] = None,
    *,
    lane: Annotated[
        list[LaneOption] | None,
        typer.Option(help="Lane of these queues to register, where producers use options of priority. Repeatable."),
    ] = None,
) -> Output:
    """Load the scripts of this version into the server, and register queues.

    Workers do both when they start. Use it where producers with few rights
    start before the workers of their version, or of a new queue. Needs the
    rights of an operator.

    Example: perdure server prepare reports
    """
    names = queues or []
    loaded = await producer.gateway.load_scripts()
    for name in names:
        await sync_route(producer.gateway, producer.namespace, name, lanes=[one.value for one in lane or ()])
    registered = f", registered {', '.join(names)}" if names else ""
    return Output(
        {"server": producer.address.shown, "scripts": loaded, "queues": names},
        StderrText(f"loaded {loaded} scripts that {producer.address.shown} lacked{registered}"),
    )


def _directory(data_dir: Path | None) -> Path:
    return load_settings(data_dir=data_dir).data_folder.absolute()


def _address(directory: Path) -> str:
    return f"embedded:{directory}"


def _summary(directory: Path, found: ServerStatus) -> dict[str, Any]:
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(found).items()}
    return {"address": _address(directory)} | fields
