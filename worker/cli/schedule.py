"""`perdure schedule`: list and show schedules, add and change them, fire them by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

import orjson
import typer

from ...queues.durations import PointInTime
from ...queues.handle import TaskHandle
from ...queues.lanes import Lane, check_lane
from ...queues.producer import Producer
from ...queues.schedules.changes import InvalidSchedule, ScheduleChange, ScheduleChanges
from ...queues.schedules.definition import check_schedule_name, last_times, task_id_of
from ...queues.schedules.firing import planned_messages
from ...queues.schedules.store import ScheduleStore, StoredSchedule
from ...queues.schedules.views import ScheduleStatus
from ...queues.wording import duration, iso_time
from ..defined_secrets import defined_secrets
from .enqueue import PriorityOption
from .support.connection import connected, where
from .support.errors import Misuse, misuse_of
from .support.options import By, in_duration, login, parser, read_app, read_object, read_time
from .support.output import Column, StderrText, Styled, Table, Time, Value, note, state_text, timestamp
from .support.runner import LiveListing, Output, line

app = typer.Typer(no_args_is_help=True, add_completion=False)

MAX_BACKFILL: Final = 1_000
"""Largest number of planned times of one backfill."""


class MissedOption(StrEnum):
    """Values of `--missed`."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


_read_name = parser(check_schedule_name)

Name = Annotated[
    str, typer.Argument(metavar="NAME", parser=_read_name, help="Name of the schedule.", show_default=False)
]
CronText = Annotated[
    str | None,
    typer.Option("--cron", metavar="EXPRESSION", help="Cron expression of five fields, or six with seconds first."),
]
Zone = Annotated[
    str | None, typer.Option("--tz", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin. Default: UTC.")
]
Interval = Annotated[float | None, in_duration("Interval, such as 90s or 6h, in place of --cron.", positive=True)]
Arguments = Annotated[
    str | None, typer.Option("--args", metavar="JSON", help="Arguments of the task: a JSON object.", show_default=False)
]
Jitter = Annotated[float | None, in_duration("Largest delay of a firing, less than the time between two.")]
MissedRuns = Annotated[
    MissedOption | None,
    typer.Option("--missed", help="What is fired for times that passed while no worker ran.", show_default="once"),
]
Expires = Annotated[
    float | None, in_duration("Time after which a task that has not started becomes a dead letter.", positive=True)
]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the pause.", show_default=False)]


@app.callback()
def schedule() -> None:
    """List schedules; add, change, pause and fire them.

    A schedule enqueues a task at planned times. Schedules of the code are
    published by its workers; others are added here. Any worker of the
    namespace fires them, each planned time once.
    """


@app.command("list")
@connected
async def list_(producer: Producer) -> LiveListing:
    """List schedules, with their last and next runs.

    Use it to see what was fired, and whether something is paused. "last task"
    is the id of the last task that was enqueued; 'perdure task show ID' says
    what became of it. A * marks what an operator has set in place of the code.

    Example: perdure schedule list
    """
    secrets = await defined_secrets(producer)
    found = [ScheduleStatus.of(stored, secrets) for stored in await _store(producer).read_all()]
    listing = LiveListing(_COLUMNS, found, empty=f"there is no schedule {where(producer)}")
    listing.parts += [StderrText(status.problem) for status in found if status.problem]
    return listing


@app.command()
@connected
async def show(
    producer: Producer,
    name: Name,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Print the next N planned times.")] = 5,
) -> Output:
    """Show a schedule: its definition, its last runs and its next ones.

    Each run has its task: of the last ones with its state, of the next ones
    with the id that it will have.

    Example: perdure schedule show nightly
    """
    changes = ScheduleChanges(producer)
    stored = await changes.read(name)
    status = ScheduleStatus.of(stored, await defined_secrets(producer))
    states = await changes.states(status.runs)
    coming = [] if status.next is None else list(islice(stored.when.times(status.next - 1), limit))
    data = status.summary()
    data["runs"] = [{**run, "state": state} for run, state in zip(data["runs"], states, strict=True)]
    data["coming"] = [{"planned": iso_time(planned), "task_id": task_id_of(name, planned)} for planned in coming]
    runs = [
        _Run(run.planned, run.task_id, state or "expired", run.how)
        for run, state in zip(status.runs, states, strict=True)
    ]
    runs = [*(_Run(planned, task_id_of(name, planned)) for planned in reversed(coming)), *runs]
    return Output(data, *_shown(status).parts, "" if runs else None, Table(_RUN_COLUMNS, runs) if runs else None)


class _Run(NamedTuple):
    """A run of a schedule. planned: in milliseconds. state: of its task; None before the run."""

    planned: int
    task_id: str
    state: str | None = None
    how: str = "planned"


@app.command()
@connected
async def add(
    producer: Producer,
    name: Name,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.", show_default=False)],
    *,
    cron: CronText = None,
    tz: Zone = None,
    every: Interval = None,
    args: Arguments = None,
    of_app: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", parser=read_app, help="App that has the task, if several have one."),
    ] = None,
    jitter: Jitter = None,
    missed: MissedRuns = None,
    expires: Expires = None,
    priority: Annotated[PriorityOption | None, typer.Option("--priority", help="Priority of the tasks.")] = None,
) -> Output:
    """Add a schedule that no code defines.

    The task must be in the catalog that workers publish, and the arguments
    must fit it. Prints the schedule.

    Example: perdure schedule add nightly report --cron "0 2 * * *" --tz Europe/Berlin --args '{"days": 1}'
    """
    lane = None if priority is None else check_lane(priority.value, None)
    with _misuse():
        change = _change(cron, tz, every, args, jitter, missed, expires, lane)
        stored = await ScheduleChanges(producer).add(name, task, change, app=of_app)
    return await _status(producer, stored)


@app.command()
@connected
async def edit(
    producer: Producer,
    name: Name,
    *,
    cron: CronText = None,
    tz: Zone = None,
    every: Interval = None,
    args: Arguments = None,
    jitter: Jitter = None,
    missed: MissedRuns = None,
    expires: Expires = None,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the definition.")] = False,
) -> Output:
    """Change a schedule, of the code or not.

    What is set here replaces the definition until --reset, also when workers
    start with other code. After a change of its times, the schedule fires
    from now on. Prints the schedule.

    Example: perdure schedule edit nightly --cron "30 3 * * *" --tz Europe/Berlin
    """
    given = (cron, tz, every, args, jitter, missed, expires)
    if reset == any(option is not None for option in given):
        raise Misuse("give what is to change, such as --cron, or --reset")
    changes = ScheduleChanges(producer)
    if reset:
        await changes.read(name)
        return await _status(producer, await _store(producer).edit(name, reset=True))
    with _misuse():
        return await _status(producer, await changes.edit(name, _change(*given)))


@app.command()
@connected
async def remove(producer: Producer, name: Name) -> None:
    """Remove a schedule that was added by 'perdure schedule add'.

    A schedule of the code is removed there: its workers would publish it
    again. Tasks that were enqueued stay.

    Example: perdure schedule remove nightly
    """
    await ScheduleChanges(producer).read(name)
    await _store(producer).remove(name)
    note(f"removed schedule {name}")


@app.command()
@connected
async def pause(producer: Producer, name: Name, *, by: By = None, why: Why = "") -> Output:
    """Let a schedule fire nothing until it is resumed, also after a deploy.

    Prints the schedule.

    Example: perdure schedule pause nightly --why "the database is being moved"
    """
    await ScheduleChanges(producer).read(name)
    return await _status(producer, await _store(producer).pause(name, by=login() if by is None else by, why=why))


@app.command()
@connected
async def resume(producer: Producer, name: Name) -> Output:
    """Let a paused schedule fire from now on.

    Planned times of the pause are left out; 'perdure schedule backfill'
    enqueues them. If Redis' clock was set back, so that the last firing lies
    in the future, this begins the planned times again from now on.

    Example: perdure schedule resume nightly
    """
    await ScheduleChanges(producer).read(name)
    return await _status(producer, await _store(producer).resume(name))


@app.command()
@connected
async def run(producer: Producer, name: Name) -> AsyncIterator[Output]:
    """Enqueue the task of a schedule now, also of a paused one, and print its id.

    The planned times stay as they are.

    Example: perdure schedule run nightly
    """
    handle = await ScheduleChanges(producer).run_now(name)
    yield line({"id": handle.id, "existed": handle.existed}, handle.id)


@app.command()
@connected
async def backfill(
    producer: Producer,
    name: Name,
    *,
    since: Annotated[
        PointInTime,
        typer.Option("--since", metavar="TIME", parser=read_time, help="First time: 2h or 7d ago, or an ISO time."),
    ],
    until: Annotated[
        PointInTime | None,
        typer.Option("--until", metavar="TIME", parser=read_time, help="Last time. Default: now.", show_default=False),
    ] = None,
) -> AsyncIterator[Output]:
    """Enqueue a task for each planned time of a period that has passed, and print the ids.

    The ids are those of the planned times: a task that is still known is left
    alone, so the command may be repeated. At most 1,000 times.

    Example: perdure schedule backfill nightly --since 2026-11-01T00:00Z --until 2026-11-07T00:00Z
    """
    read = await ScheduleChanges(producer).read(name)
    start, end = since.at(read.now), read.now if until is None else until.at(read.now)
    if not start <= end <= read.now:
        raise Misuse("--since must be before --until, and neither in the future by Redis' clock")
    times = last_times(read.when, start - 1, end, MAX_BACKFILL + 1)
    if len(times) > MAX_BACKFILL:
        raise Misuse(f"the period has more than {MAX_BACKFILL:,} planned times; give a shorter one")
    for message in planned_messages(name, read.call, times):
        same: Any = lambda *_: True  # noqa: E731 - the id stands for the planned time, whatever was set since
        handle: TaskHandle[Any] = await producer.send_one(
            message, queue=read.call.queue, unique=read.call.rule, same=same
        )
        yield line({"id": handle.id, "existed": handle.existed}, handle.id)


def _store(producer: Producer) -> ScheduleStore:
    return ScheduleStore(producer.gateway, producer.namespace)


def _change(
    cron: str | None,
    tz: str | None,
    every: float | None,
    args: str | None,
    jitter: float | None,
    missed: MissedOption | None,
    expires: float | None,
    lane: Lane | None = None,
) -> ScheduleChange:
    with misuse_of("--args"):
        arguments = None if args is None else orjson.dumps(read_object(args))
    how = None if missed is None else missed.value
    return ScheduleChange(cron, tz, every, arguments, how, jitter, expires, lane)


@contextmanager
def _misuse() -> Iterator[None]:
    try:
        yield
    except InvalidSchedule as error:
        raise Misuse(str(error)) from None


async def _status(producer: Producer, stored: StoredSchedule) -> Output:
    return _shown(ScheduleStatus.of(stored, await defined_secrets(producer)))


def _shown(status: ScheduleStatus) -> Output:
    last = status.runs[0] if status.runs else None
    paused = status.paused or {}
    fields: dict[str, Value] = {
        "schedule": status.name,
        "times": _starred(status, "when", status.when),
        "task": status.task,
        "queue": status.queue,
        "arguments": _starred(status, "call", orjson.dumps(status.arguments).decode()),
        "missed": _starred(status, "rules", status.missed),
        "jitter": duration(status.jitter) if status.jitter else None,
        "expires": duration(status.expires) if status.expires else None,
        "owner": f"code of app {status.app}" if status.owner == "code" else "operators",
        "state": status.state or None,
        "paused by": " ".join(filter(None, (str(paused.get("by") or ""), str(paused.get("why") or "")))) or None,
        "last": None if last is None else Time(last.planned, more=f": task {last.task_id}"),
        "next": None if status.next is None else Time(status.next, more=f": task {status.next_task}"),
        "problem": status.problem or None,
    }
    return Output(status.summary(), fields)


def _starred(status: ScheduleStatus, part: str, text: str | None) -> str | None:
    return f"{text}*" if part in status.edited else text


_COLUMNS: Final[Sequence[Column[ScheduleStatus]]] = (
    Column("schedule", lambda status: status.name, least=8),
    Column("times", lambda status: _starred(status, "when", status.when), least=9),
    Column("task", lambda status: status.task, least=6),
    Column("queue", lambda status: status.queue, wide=True),
    Column("app", lambda status: status.app or None, wide=True),
    Column("owner", lambda status: status.owner, wide=True),
    Column("missed", lambda status: status.missed, wide=True),
    Column("last", lambda status: Time(status.runs[0].planned) if status.runs else None),
    Column("last task", lambda status: status.runs[0].task_id if status.runs else None, least=12, fold=True),
    Column("next", lambda status: Time(status.next) if status.next else None),
    Column("state", lambda status: Styled(status.state, "yellow") if status.state else None, least=8),
)

_RUN_COLUMNS: Final[Sequence[Column[_Run]]] = (
    Column("planned", lambda run: timestamp(run.planned), least=23),
    Column("when", lambda run: Time(run.planned)),
    Column("task", lambda run: run.task_id, least=12, fold=True),
    Column("state", lambda run: None if run.state is None else state_text(run.state)),
    Column("how", lambda run: run.how, wide=True),
)
