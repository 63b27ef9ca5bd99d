"""`perdure config`: settings that all workers of a namespace share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from ...queues.junk import shown_bytes
from ...queues.presence import list_workers
from ...queues.producer import Producer
from ...queues.shared_config import CHANGE, SHARED, SharedConfig, SharedName, load_config, set_config
from ...queues.wording import duration
from ..settings import Settings, load_settings
from .support.connection import connected
from .support.errors import Failed
from .support.options import parser, read_duration
from .support.output import note, table
from .support.runner import Output

app = typer.Typer(no_args_is_help=True, add_completion=False)

_REGISTRATIONS: Final = 6
"""Registrations after which each worker has read a change, or is presumed dead."""

_NAMES: Final[Mapping[str, SharedName]] = {name: name for name in SHARED}


@parser
def _read_name(text: str) -> str:
    if text not in _NAMES:
        raise ValueError(f"must be one of {', '.join(SHARED)}; got {text!r}")
    return text


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", parser=_read_name, help=f"One of {', '.join(SHARED)}.", show_default=False)
]


@app.callback()
def config() -> None:
    """Store the settings that all workers of a namespace must share.

    lease: time after which the tasks of a silent worker are claimed.
    result_ttl: time for which outcomes are kept, unless the task or the
    producer says otherwise.
    dead_letter_ttl: time for which dead letters are kept.

    Workers that disagree harm each other: one with a shorter lease claims
    tasks from workers that are alive. Nothing is stored until you do it.
    """


@app.command("set")
@connected
async def set_(
    producer: Producer,
    name: NameArgument,
    value: Annotated[
        float,
        typer.Argument(metavar="DURATION", parser=read_duration, help="Such as 30, 30s or 12h.", show_default=False),
    ],
) -> Output:
    """Store a setting for all workers of the namespace.

    A worker that starts uses it in place of its own, and logs a warning if
    its own was set to another value; with --strict, it does not start.
    Workers that run use it from their next registration on. A new lease is
    complete after two minutes: until then workers renew by the shorter and
    claim by the longer one, so that no worker loses its tasks.

    Example: perdure config set lease 30
    """
    load_settings(**{name: value})
    await _store(producer, _NAMES[name], value)
    return await _settings(producer)


@app.command()
@connected
async def unset(producer: Producer, name: NameArgument) -> Output:
    """Remove a stored setting: each worker uses its own again.

    Make sure first that all workers are given the same value.

    Example: perdure config unset lease
    """
    if not await _store(producer, _NAMES[name], None):
        raise Failed(f"{name} is not stored in namespace {producer.namespace.name!r}")
    return await _settings(producer)


@app.command()
@connected
async def show(producer: Producer) -> Output:
    """Show the stored settings beside those of this environment.

    Workers use the stored value; without one, each uses its own: from its
    environment, its arguments or its code, else the default.

    Example: perdure config show
    """
    return await _settings(producer)


async def _store(producer: Producer, name: SharedName, value: float | None) -> bool:
    """Store a setting, and give each registered worker several registrations to notice it."""
    workers = await list_workers(producer.gateway, producer.namespace)
    change = max(CHANGE, *(_REGISTRATIONS * worker.interval for worker in workers), 0.0)
    return await set_config(producer.gateway, producer.namespace, name, value, change=change)


async def _settings(producer: Producer) -> Output:
    stored, own = await load_config(producer.gateway, producer.namespace), load_settings()
    for name, value in stored.ignored.items():
        note(
            f"the stored {name} is ignored: it must be a time, got {shown_bytes(value)}; "
            f"remove it with 'perdure config unset {name}'"
        )
    rows = [
        (name, f"{stored.stored[name]:.15g} s" if name in stored.stored else "-", f"{getattr(own, name):.15g} s")
        for name in SHARED
    ]
    changing = f"the lease is being changed: complete in {duration(stored.changing)}" if stored.changing else None
    return Output(
        {name: _summary(name, stored, own) for name in SHARED},
        table(("setting", "stored#", "this environment#"), rows),
        notes=[changing],
    )


def _summary(name: SharedName, stored: SharedConfig, own: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"stored": stored.stored.get(name), "environment": getattr(own, name)}
    if name == "lease":
        found["complete_in"] = round(stored.changing, 1)
    return found
