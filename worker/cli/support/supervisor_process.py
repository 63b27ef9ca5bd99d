"""Supervisor in this process: the command lines of its children, and its run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import anyio
import typer

from ...log import configure_process_log, logger
from ...runtime.children.child import WORKER_COMMAND, pass_metrics, pass_redis_url
from ...runtime.children.quarantine_pool import default_children
from ...runtime.service_manager import ServiceManager
from ...settings import DEFAULT_CONCURRENCY, load_settings
from ...supervise.config import SupervisorConfig
from ...supervise.source_files import SourceFiles
from ...supervise.supervisor import Supervisor
from .connection import ConnectionOptions
from .output import note
from .probe import ProbeOptions

_LEFT_OUT: Final = (
    *("processes", "no_supervisor", "isolated", "alert", "health_port", "health_host", "redis_url"),
    *("reload", "reload_dir", "reload_include"),
)
"""Options that are not on the command lines of children: those of the supervisor, and the URL, which may be secret."""


def run_supervisor(
    context: typer.Context,
    place: ConnectionOptions,
    probe: ProbeOptions,
    *,
    processes: int,
    isolated: int | None,
    sources: SourceFiles | None = None,
    **options: Any,
) -> None:
    """Run a supervisor, and exit with its exit code.

    Args:
        sources: Files that are watched for changes.
        options: Further fields of `SupervisorConfig`.
    """
    settings = load_settings(**place.overrides())
    configure_process_log(settings.log_level, json=settings.log_json)
    if sources is not None:
        sources.check()
        folders = ", ".join(str(folder) for folder in sources.folders)
        logger.info("reload: watching {} in {}; for development only", ", ".join(sources.patterns), folders)
    config = supervisor_config(
        context, processes=processes, isolated=isolated, metrics=probe.metrics, sources=sources, **options
    )
    supervisor = Supervisor(config, ServiceManager.from_environment())
    with probe.serving(supervisor.health, supervisor.measurements):
        code = anyio.run(supervisor.run)
    if supervisor.failure:
        if settings.log_json:
            logger.error("{}", supervisor.failure)
        else:
            note(supervisor.failure)
    if code:
        raise typer.Exit(code)


def supervisor_config(
    context: typer.Context,
    *,
    processes: int,
    isolated: int | None,
    metrics: bool = False,
    sources: SourceFiles | None = None,
    **options: Any,
) -> SupervisorConfig:
    """Return the configuration for children that run this command. metrics: whether they count for their supervisor."""
    slots = processes * (context.params["concurrency"] or DEFAULT_CONCURRENCY)
    command = [*WORKER_COMMAND, *_arguments(context, _LEFT_OUT)]
    environment = pass_redis_url(context.params["redis_url"]) | pass_metrics(wanted=metrics)
    if sources is not None:  # byte code of a file that changes twice within a second could be that of the first change
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return SupervisorConfig(
        command, processes, isolated or default_children(slots), environment=environment, sources=sources, **options
    )


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
