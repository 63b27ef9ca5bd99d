"""Supervisor in this process: the command lines of its children, and its run."""

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
from .worker_process import ProbeOptions

__all__ = ["run_supervisor"]

_SUPERVISOR_OPTIONS: Final = ("processes", "isolated", "alert", "health_port", "health_host")
"""Options of the supervisor that are not passed to children."""

_ORDINARY_OPTIONS: Final = ("burst", "concurrency")
"""Options that are not passed to quarantine children: they run one task at a time, until they are stopped."""

_MOST_ISOLATED: Final = 16
"""Default limit of quarantine children: each is a process."""


def run_supervisor(
    context: typer.Context,
    place: ConnectionOptions,
    probe: ProbeOptions,
    *,
    processes: int,
    isolated: int | None,
    **options: Any,
) -> None:
    """Run a supervisor, and exit with its exit code.

    Args:
        options: Further fields of `SupervisorConfig`.
    """
    settings = load_settings(**place.overrides())
    configure_logging(settings.log_level, json=settings.log_json)
    quarantine_arguments = _arguments(context, (*_SUPERVISOR_OPTIONS, *_ORDINARY_OPTIONS))
    config = SupervisorConfig(
        {
            "worker": [*_PYTHON, *_arguments(context, _SUPERVISOR_OPTIONS)],
            "isolated": [*_PYTHON, "--concurrency", "1", *quarantine_arguments],
        },
        processes,
        isolated or max(2, min(_MOST_ISOLATED, processes * context.params["concurrency"])),
        **options,
    )
    supervisor = Supervisor(config)
    with probe.serving(supervisor.health):
        code = anyio.run(supervisor.run)
    if code:
        raise typer.Exit(code)


_PYTHON: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: the working directory is not on the import path, as for the installed program."""


def _arguments(context: typer.Context, without: Collection[str]) -> list[str]:
    """Return the arguments of this process without some of its options."""
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
