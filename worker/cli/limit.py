"""`perdure limit`: list and show limits, change them while they are in use, hold and release them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from ...queues.keys import check_name
from ...queues.limit_changes import InvalidSetting, LimitChanges, limit_not_found
from ...queues.limit_views import HoldingTask, LimitDetails, LimitStatus, WaitingKey, list_limits, show_limit
from ...queues.limits.control import SETTINGS, LimitNote, parse_hold
from ...queues.producer import Producer
from ...queues.wording import duration, iso_time
from .support.connection import connected, where
from .support.errors import Failed, Misuse
from .support.options import By, login, parser, read_task_id
from .support.output import Column, StderrText, Styled, Table, Time, Value, note
from .support.runner import LiveListing, Output

app = typer.Typer(no_args_is_help=True, add_completion=False)


@parser
def _read_name(text: str) -> str:
    return check_name("limit", text)


_read_length = parser(parse_hold)


Name = Annotated[str, typer.Argument(metavar="NAME", parser=_read_name, help="Name of the limit.", show_default=False)]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the change.", show_default=False)]


@app.callback()
def limit() -> None:
    """List and show limits; change, hold and release them while they are in use.

    A limit says how many tasks run at once, for each key and in total, and how
    fast they start. It is defined in code: app.limit("openai", total=20). What
    is set here holds for all workers of the namespace until it is reset, and
    leaves a line that 'perdure limit show' prints.
    """


@app.command("list")
@connected
async def list_(producer: Producer) -> LiveListing:
    """List limits: their numbers, what holds them, and what waits.

    Use it to see which limit is full. "in use" counts its tokens that tasks
    hold, of all keys; "waiting" counts tasks that wait for it. A * marks a
    number that an operator has set in place of the one of the code.

    Example: perdure limit list --watch
    """
    found = await list_limits(producer.gateway, producer.namespace)
    listing = LiveListing(_COLUMNS, found, empty=f"no worker has published a limit {where(producer)}")
    listing.parts += [StderrText(f"limit {status.name}: {status.problem}") for status in found if status.problem]
    return listing


@app.command()
@connected
async def show(
    producer: Producer,
    name: Name,
    *,
    most: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="Print at most N holders and waiting keys.")
    ] = 20,
) -> Output:
    """Show a limit: the tasks that hold it, the keys that wait, the last changes.

    Keys take turns: "waiting" has one row for each key that waits, the one that
    waits longest first. "changes" says who has set, held or released the
    limit, and when its breaker has opened and closed.

    Example: perdure limit show openai
    """
    details = await show_limit(producer.gateway, producer.namespace, name, most=most)
    if details is None:
        raise await limit_not_found(producer.gateway, producer.namespace, name)
    return _shown(details)


def _shown(details: LimitDetails) -> Output:
    status = details.status
    data = status.summary() | {
        "waiting_by_queue": dict(details.queues),
        "holders": [holder.summary() for holder in details.holders],
        "waiting_keys": [key.summary() for key in details.waiting],
        "changes": [_change(change) for change in details.notes],
    }
    queues = ", ".join(f"{count:,} in queue {queue}" for queue, count in sorted(details.queues.items()) if count)
    fields: dict[str, Value] = {
        "limit": status.name,
        "app": status.app or None,
        "total": _number(status, "total", status.total),
        "running": _number(status, "running", status.running),
        "by": status.by or None,
        "rate": _number(status, "rate", status.rate),
        "cost": _number(status, "cost", status.cost),
        "breaker": _breaker(status),
        "held": Time(status.held_until, more=": nothing starts until then") if status.held_until else None,
        "problem": status.problem or None,
        "in use": f"{status.in_use:,}",
        "waiting": f"{_waiting(status)} ({queues})" if queues else _waiting(status),
    }
    listed = (
        ("holders", Table(_HOLDERS, details.holders)),
        ("waiting", Table(_WAITING, details.waiting)),
        ("changes", Table(_CHANGES, details.notes)),
    )
    parts = [part for title, rows in listed if rows.rows for part in (f"\n{title}:", rows)]
    return Output(data, fields, *parts)


def _change(change: LimitNote) -> dict[str, Any]:
    return {"at": iso_time(change.at), "by": change.by, "what": change.what, "why": change.why}


def _breaker(status: LimitStatus) -> str | None:
    if status.breaker == "open":
        return status.state.removeprefix("breaker ") or "open"
    return status.breaker


@app.command("set")
@connected
async def set_(
    producer: Producer,
    name: Name,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SETTING=VALUE]...",
            help=f"Settings: {', '.join(SETTINGS)}. VALUE none: no such number; an empty one: as in the code.",
            show_default=False,
        ),
    ] = None,
    *,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the definition in the code.")] = False,
    by: By = None,
    why: Why = "",
) -> Output:
    """Change the numbers of a limit for all workers, at once.

    They replace those of the code until they are reset, also when workers
    restart with other code. A lower number takes nothing from tasks that
    run: the next one starts when few enough are left. total=0 lets nothing
    start. Prints what 'show' prints.

    Example: perdure limit set openai running=1 rate=100/m --why "a 429 each minute"
    """
    if reset == bool(settings):
        raise Misuse("give either settings, such as running=3 rate=100/m, or --reset")
    changes = _changes(producer, name, by)
    if reset:
        return _shown(await changes.reset(why))
    try:
        return _shown(await changes.set(_read_settings(settings or []), why, what=" ".join(["set", *(settings or [])])))
    except InvalidSetting as error:
        raise Misuse(str(error)) from None


def _read_settings(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        setting, equals, value = text.partition("=")
        if not equals:
            raise Misuse(f"a setting must be NAME=VALUE, such as running=3, got {text!r}")
        if setting in found:
            raise Misuse(f"{setting} must be given once, got it twice")
        found[setting] = value
    return found


@app.command()
@connected
async def hold(
    producer: Producer,
    name: Name,
    seconds: Annotated[
        float,
        typer.Argument(metavar="DURATION", parser=_read_length, help="Such as 30, 90s or 15m.", show_default=False),
    ],
    *,
    by: By = None,
    why: Why = "",
) -> Output:
    """Let no task of a limit start for some time, on any worker.

    An earlier time never shortens a hold; 'perdure limit release' ends it.
    Tasks that run are not touched. Prints what 'show' prints.

    Example: perdure limit hold openai 10m --why "maintenance of the provider"
    """
    return _shown(await _changes(producer, name, by).hold(seconds, why))


@app.command()
@connected
async def release(
    producer: Producer,
    name: Name,
    *,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="ID", parser=read_task_id, help="Take the limit from this task in place of that."
        ),
    ] = None,
    by: By = None,
    why: Why = "",
) -> Output:
    """End the hold of a limit and close its breaker, so that tasks start again.

    With --task, the limit is taken from one task, such as that of a frozen
    process: another one starts at once. If the task still runs, it may overlap
    with that one until its worker notices, which stops its run. Workers that
    die need no command: what they held expires. Prints what 'show' prints.

    Example: perdure limit release openai
    """
    changes = _changes(producer, name, by)
    if task is None:
        return _shown(await changes.release(why))
    if (details := await changes.release_task(task, why)) is None:
        raise Failed(f"task {task!r} does not hold limit {name!r}; 'perdure limit show {name}' lists what does")
    note(f"took {name} from task {task}; if it still runs, its worker stops it, or takes the limit again")
    return _shown(details)


def _changes(producer: Producer, name: str, by: str | None) -> LimitChanges:
    return LimitChanges(producer.gateway, producer.namespace, name, by=login() if by is None else by)


def _number(status: LimitStatus, name: str, value: object) -> str | None:
    """Return a number of a limit, marked if an operator has set it."""
    if value is None:
        return "none*" if set(SETTINGS[name]) & set(status.changed) else None
    return f"{value}*" if set(SETTINGS[name]) & set(status.changed) else str(value)


def _waiting(status: LimitStatus) -> str:
    return f"{status.waiting:,}+" if status.more else f"{status.waiting:,}"


def _state(status: LimitStatus) -> Styled | None:
    return Styled(status.state, "yellow") if status.state else None


_HOLDERS: Final[Sequence[Column[HoldingTask]]] = (
    Column("id", lambda holder: holder.task_id, least=36, fold=True),
    Column("key", lambda holder: holder.key or None, least=8),
    Column("queue", lambda holder: holder.queue, least=8),
    Column("expires in", lambda holder: duration(holder.seconds, whole=True), right=True),
)

_WAITING: Final[Sequence[Column[WaitingKey]]] = (
    Column("key", lambda key: key.label or None, least=8),
    Column("tasks", lambda key: f"{key.tasks:,}", right=True),
    Column("first", lambda key: key.task_id, least=36, fold=True),
    Column("queue", lambda key: key.queue, least=8),
    Column("since", lambda key: Time(key.since)),
)

_CHANGES: Final[Sequence[Column[LimitNote]]] = (
    Column("at", lambda change: Time(change.at)),
    Column("by", lambda change: change.by or None, least=6),
    Column("what", lambda change: change.what, least=12),
    Column("why", lambda change: change.why or None, least=8),
)

_COLUMNS: Final[Sequence[Column[LimitStatus]]] = (
    Column("limit", lambda status: status.name, least=8),
    Column("app", lambda status: status.app, wide=True),
    Column("total", lambda status: _number(status, "total", status.total), right=True),
    Column("running", lambda status: _number(status, "running", status.running), right=True),
    Column("by", lambda status: status.by or None, least=6),
    Column("rate", lambda status: _number(status, "rate", status.rate), right=True),
    Column("cost", lambda status: _number(status, "cost", status.cost), right=True),
    Column("in use", lambda status: status.in_use, right=True),
    Column("waiting", _waiting, right=True),
    Column("state", _state, least=8),
)
