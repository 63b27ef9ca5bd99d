"""Running a supervisor: how its children are called, and what is wrong with options that only it has."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, Final

import anyio
import typer

from ...log import configure_logging
from ...settings import load_settings
from ...supervise import Supervisor, SupervisorConfig
from .connection import ConnectionOptions
from .worker_process import ProbePlace

__all__ = ["run_supervisor"]

_OWN: Final = ("processes", "isolated", "alert", "health_port", "health_host")
"""Options of the supervisor, which children are not given."""

_OF_ORDINARY: Final = ("burst", "concurrency")
"""Options that isolated children are not given either: they run one task at a time, until they are stopped."""


_ISOLATED: Final = 16
"""Isolated children at most, unless told otherwise: each is a process, and each suspect is to go on at once."""


def run_supervisor(
    context: typer.Context,
    place: ConnectionOptions,
    probe: ProbePlace,
    *,
    processes: int,
    isolated: int | None,
    **how: Any,
) -> None:
    """Supervise; ends with the supervisor's exit code. how: see `Plan`."""
    settings = load_settings(**place.overrides())
    configure_logging(settings.log_level, json=settings.log_json)
    plan = SupervisorConfig(
        {
            "worker": [*_PYTHON, *_arguments(context, _OWN)],
            "isolated": [*_PYTHON, "--concurrency", "1", *_arguments(context, (*_OWN, *_OF_ORDINARY))],
        },
        processes,
        isolated or max(2, min(_ISOLATED, processes * context.params["concurrency"])),
        **how,
    )
    supervisor = Supervisor(plan)
    with probe.serving(supervisor.health):
        code = anyio.run(supervisor.run)
    if code:
        raise typer.Exit(code)


_PYTHON: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: as for the installed program, the working directory is not searched before what is installed."""


def _arguments(context: typer.Context, without: Collection[str]) -> list[str]:
    """The command line of this process, as it was given, without some of its options."""
    arguments: list[str] = []
    options: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in without or source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif isinstance(value, bool):
            options.append(parameter.opts[0])
        else:
            options += (parameter.opts[0], str(value))
    return [*options, "--", *arguments]
