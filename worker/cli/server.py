"""`perdure server`: the embedded server, for those who want it to stay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...queues.embedded import ServerStatus, start, status, stop
from ..settings import load_settings
from .support.connection import DataDir
from .support.output import AsJson, note, print_data, print_fields, print_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def server() -> None:
    """Start and stop the embedded server.

    It starts by itself where a command needs it, and ends with the last
    process that uses it; started here, it stays until it is stopped.
    """


@app.command("start")
def start_(*, data_dir: DataDir = None, json: AsJson = False) -> None:
    """Start the embedded server, and keep it until it is stopped; prints its address.

    Example: perdure server start --data-dir ./perdure-data
    """
    directory = _directory(data_dir)
    found = start(directory)
    if json:
        print_json(_summary(directory, found))
    else:
        print_data(_address(directory))
        note(f"the server is Redis {found.version}, process {found.pid}, on unix://{found.socket}")


@app.command("stop")
def stop_(
    *,
    force: Annotated[bool, typer.Option("--force", help="Also while others use it.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Stop the embedded server; its data stay. Refused while others use it, unless --force.

    Example: perdure server stop
    """
    directory = _directory(data_dir)
    ran = status(directory).running
    stop(directory, force=force)
    note(f"the server in {directory} {'has stopped' if ran else 'did not run'}")


@app.command("status")
def status_(*, data_dir: DataDir = None, json: AsJson = False) -> None:
    """Show the embedded server; starts nothing.

    Example: perdure server status --json
    """
    directory = _directory(data_dir)
    found = status(directory)
    if json:
        print_json(_summary(directory, found))
        return
    print_fields(
        {
            "address": _address(directory),
            "running": "yes" if found.running else "no",
            "stays": "until it is stopped" if found.pinned else "while somebody uses it",
            "version": found.version,
            "process": None if found.pid is None else str(found.pid),
            "users": None if found.users is None else str(found.users),
            "socket": f"unix://{found.socket}",
            "program": None if found.binary is None else str(found.binary),
            "memory": None if found.used_memory is None else f"{found.used_memory:,} bytes",
            "on disk": f"{found.aof_size:,} bytes",
        }
    )


def _directory(data_dir: Path | None) -> Path:
    return load_settings(data_dir=data_dir).data_folder.absolute()


def _address(directory: Path) -> str:
    return f"embedded:{directory}"


def _summary(directory: Path, found: ServerStatus) -> dict[str, object]:
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(found).items()}
    return {"address": _address(directory)} | facts
