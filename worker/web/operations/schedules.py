"""Schedules: their last and next runs, changes, pauses, and runs by hand."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import to_json

from ....queues.durations import parse_duration
from ....queues.schedules.changes import InvalidSchedule, ScheduleChange, ScheduleChanges
from ....queues.schedules.definition import check_schedule_name, task_id_of
from ....queues.schedules.store import ScheduleStore, StoredSchedule
from ....queues.schedules.views import ScheduleStatus
from ....queues.security.secret_arguments import SecretPaths
from ....queues.wording import iso_time
from ...defined_secrets import defined_secrets
from ..operation import Call, Inputs, ResultModel, TaskNameText, operation
from ..paging import PageInputs, page_of
from ..problems import invalid_field
from ..users import Role

ScheduleText = Annotated[str, AfterValidator(check_schedule_name), Field(description="Name of the schedule.")]

Seconds = Annotated[str | float, AfterValidator(parse_duration)]
Interval = Annotated[str | float, AfterValidator(lambda given: parse_duration(given, positive=True))]


class SchedulePauseView(ResultModel):
    """A pause of a schedule."""

    by: str | None = None
    why: str | None = None


class NextRunView(ResultModel):
    """A planned run of a schedule. task_id: the id that its task will have."""

    planned: str | None
    task_id: str | None


class ScheduledRunView(ResultModel):
    """A run of a schedule."""

    planned: str | None
    at: str | None = Field(description="Time at which it was fired.")
    task_id: str
    queue: str
    how: str = Field(description="`fired`, `unique` if another task had the unique key, or `by hand`.")
    state: str | None = Field(None, description="State of its task; null if its record has expired, or was not read.")


class ScheduleView(ResultModel):
    """A schedule as the code defines it, or as operators have set it in place of that."""

    name: str
    owner: str = Field(description="`code` or `operator`.")
    app: str | None
    task: str
    queue: str
    when: str = Field(description="Its times in words.")
    missed: str | None = Field(description="What is fired for times that passed while no worker ran.")
    jitter: float | None = Field(description="Largest delay of a firing in seconds.")
    expires: float | None = Field(description="Seconds within which a task must have started.")
    arguments: Any = Field(description="Arguments of the task; secret values are masked.")
    edited: list[str] = Field(description="Parts that operators have set in place of the code.")
    state: str = Field(description="`active`, or why it does not fire.")
    paused: SchedulePauseView | None
    next: NextRunView | None = Field(description="The next planned run; null if it does not fire.")
    runs: list[ScheduledRunView] = Field(description="The last runs, the newest first.")
    problem: str | None = Field(description="What could not be read.")
    revision: str = Field(description="Digest of the definition; a change that names it replaces no other one.")

    @classmethod
    def of(cls, stored: StoredSchedule, secrets: dict[str, SecretPaths]) -> ScheduleView:
        """Return the view of a schedule. secrets: secret arguments by the name of the task."""
        status = ScheduleStatus.of(stored, secrets)
        paused = None
        if status.paused is not None:  # any JSON, if another program wrote it
            paused = {name: str(status.paused[name]) for name in ("by", "why") if status.paused.get(name)}
        return cls.model_validate(status.summary() | {"paused": paused})


class SchedulePage(ResultModel):
    """A page of schedules by name."""

    items: list[ScheduleView]
    next: str | None = Field(description="Cursor of the next page; null for the last one.")
    read: int = Field(description="Schedules that were read.")
    of: int = Field(description="Schedules that there are.")


class ScheduleDetailsView(ResultModel):
    """A schedule with the states of its last tasks, and its next runs."""

    schedule: ScheduleView
    coming: list[NextRunView] = Field(description="The next planned runs; none while it does not fire.")


@operation("GET", "/schedules", roles=[Role.VIEWER])
async def list_schedules(call: Call, given: PageInputs) -> SchedulePage:
    """List schedules by name, with their last and next runs."""
    found = await _store(call).read_all()
    items, following = page_of(found, lambda stored: stored.name, given)
    secrets = await defined_secrets(call.producer)
    views = [ScheduleView.of(stored, secrets) for stored in items]
    return SchedulePage(items=views, next=following, read=len(found), of=len(found))


class ShowSchedule(Inputs):
    """Inputs of a shown schedule."""

    schedule: ScheduleText
    coming: int = Field(5, ge=0, le=1000, description="Number of planned runs to return.")


@operation("GET", "/schedules/{schedule}", roles=[Role.VIEWER])
async def show_schedule(call: Call, given: ShowSchedule) -> ScheduleDetailsView:
    """Show a schedule: its last runs with the states of their tasks, and its next ones."""
    return await _details(call, await ScheduleChanges(call.producer).read(given.schedule), given.coming)


async def _details(call: Call, stored: StoredSchedule, coming: int = 5) -> ScheduleDetailsView:
    status = ScheduleStatus.of(stored)
    view = ScheduleView.of(stored, await defined_secrets(call.producer))
    states = await ScheduleChanges(call.producer).states(status.runs)
    runs = [run.model_copy(update={"state": state}) for run, state in zip(view.runs, states, strict=True)]
    times = [] if status.next is None or not status.when else islice(stored.when.times(status.next - 1), coming)
    following = [NextRunView(planned=iso_time(planned), task_id=task_id_of(stored.name, planned)) for planned in times]
    return ScheduleDetailsView(schedule=view.model_copy(update={"runs": runs}), coming=following)


_CRON = "Cron expression of five fields, or six with seconds first."
_TZ = "Time zone of the cron expression, such as `Europe/Berlin`; by default UTC."
_EVERY = "Interval in seconds, or a text such as `90s` or `6h`, in place of a cron expression."
_JITTER = "Largest delay of a firing in seconds, or a text such as `5m`; less than the time between two."
_MISSED = "What is fired for times that passed while no worker ran: nothing, one task, or one for each."
_REVISION = "Revision that was read: a schedule that was changed since then stays as it is."
_EXPIRES = "Time after which a task that has not started becomes a dead letter, in seconds, or a text such as `2h`."


class AddSchedule(Inputs):
    """Inputs of a new schedule."""

    name: ScheduleText
    task: TaskNameText
    app: str | None = Field(None, max_length=64, description="App that has the task, if several have one.")
    cron: str | None = Field(None, max_length=200, description=_CRON)
    tz: str | None = Field(None, max_length=100, description=_TZ)
    every: Interval | None = Field(None, description=_EVERY)
    arguments: dict[str, Any] = Field({}, description="Arguments of the task.")
    jitter: Seconds | None = Field(None, description=_JITTER)
    missed: Literal["skip", "once", "all"] | None = Field(None, description=_MISSED)
    expires: Interval | None = Field(None, description=_EXPIRES)
    priority: Literal["high", "normal", "low"] | None = Field(None, description="Priority of the tasks.")


@operation("POST", "/schedules", roles=[Role.OPERATOR], changes=True, status=201)
async def add_schedule(call: Call, given: AddSchedule) -> ScheduleDetailsView:
    """Add a schedule that no code defines.

    The task must be in the catalog that workers publish, and the arguments must fit it.
    """
    change = ScheduleChange(
        given.cron,
        given.tz,
        _number(given.every),
        to_json(given.arguments, inf_nan_mode="strings"),
        given.missed,
        _number(given.jitter),
        _number(given.expires),
        given.priority,
    )
    try:
        stored = await ScheduleChanges(call.producer).add(given.name, given.task, change, app=given.app)
    except InvalidSchedule as error:
        raise invalid_field(error.field, str(error)) from None
    return await _details(call, stored)


class EditSchedule(Inputs):
    """Inputs of a change of a schedule. What is left out stays as it is."""

    schedule: ScheduleText
    cron: str | None = Field(None, max_length=200, description=_CRON)
    tz: str | None = Field(None, max_length=100, description=_TZ)
    every: Interval | None = Field(None, description=_EVERY)
    arguments: dict[str, Any] | None = Field(
        None, description="All arguments of the task. A masked value stands for the stored one."
    )
    jitter: Seconds | None = Field(None, description=_JITTER)
    missed: Literal["skip", "once", "all"] | None = Field(None, description=_MISSED)
    expires: Interval | None = Field(None, description=_EXPIRES)
    revision: str | None = Field(
        None,
        max_length=100,
        description=_REVISION,
    )


@operation("PATCH", "/schedules/{schedule}", roles=[Role.OPERATOR], changes=True)
async def edit_schedule(call: Call, given: EditSchedule) -> ScheduleDetailsView:
    """Change a schedule, of the code or not.

    What is set replaces the definition until it is reset, also when workers start with other code. After a change of
    its times, the schedule fires from now on.
    """
    arguments = None if given.arguments is None else to_json(given.arguments, inf_nan_mode="strings")
    change = ScheduleChange(
        given.cron,
        given.tz,
        _number(given.every),
        arguments,
        given.missed,
        _number(given.jitter),
        _number(given.expires),
    )
    if change == ScheduleChange():
        raise invalid_field("cron", "give what is to change, such as cron, every or arguments")
    try:
        stored = await ScheduleChanges(call.producer).edit(given.schedule, change, revision=given.revision)
    except InvalidSchedule as error:
        raise invalid_field(error.field, str(error)) from None
    return await _details(call, stored)


def _number(given: str | float | None) -> float | None:
    return None if given is None else float(given)


class OneSchedule(Inputs):
    """A schedule by its name."""

    schedule: ScheduleText


class ResetSchedule(OneSchedule):
    """Inputs of the return of a schedule to its definition."""

    revision: str | None = Field(
        None,
        max_length=100,
        description=_REVISION,
    )


@operation("POST", "/schedules/{schedule}/reset", roles=[Role.OPERATOR], changes=True)
async def reset_schedule(call: Call, given: ResetSchedule) -> ScheduleDetailsView:
    """Return a schedule to its definition."""
    await ScheduleChanges(call.producer).read(given.schedule)
    return await _details(call, await _store(call).edit(given.schedule, reset=True, revision=given.revision))


class PauseSchedule(OneSchedule):
    """Inputs of the pause of a schedule."""

    why: str = Field("", max_length=2000, description="Reason, kept with the pause.")


@operation("POST", "/schedules/{schedule}/pause", roles=[Role.OPERATOR], changes=True)
async def pause_schedule(call: Call, given: PauseSchedule) -> ScheduleDetailsView:
    """Let a schedule fire nothing until it is resumed, also after a deploy."""
    await ScheduleChanges(call.producer).read(given.schedule)
    return await _details(call, await _store(call).pause(given.schedule, by=call.user.name, why=given.why))


@operation("POST", "/schedules/{schedule}/resume", roles=[Role.OPERATOR], changes=True)
async def resume_schedule(call: Call, given: OneSchedule) -> ScheduleDetailsView:
    """Let a paused schedule fire from now on.

    Planned times of the pause are left out. If the clock of Redis was set back, so that the last firing lies in the
    future, this begins the planned times again from now on.
    """
    await ScheduleChanges(call.producer).read(given.schedule)
    return await _details(call, await _store(call).resume(given.schedule))


class RunView(ResultModel):
    """The task of a run by hand."""

    id: str
    existed: bool = Field(description="Whether a task of the same unique key was there already.")


@operation("POST", "/schedules/{schedule}/run", roles=[Role.OPERATOR], changes=True, status=201)
async def run_schedule(call: Call, given: OneSchedule) -> RunView:
    """Enqueue the task of a schedule now, also of a paused one.

    The planned times stay as they are.
    """
    handle = await ScheduleChanges(call.producer).run_now(given.schedule)
    return RunView(id=handle.id, existed=bool(handle.existed))


@operation("DELETE", "/schedules/{schedule}", roles=[Role.OPERATOR], changes=True, status=204)
async def remove_schedule(call: Call, given: OneSchedule) -> None:
    """Remove a schedule that an operator has added. Tasks that were enqueued stay.

    A schedule of the code is removed there: its workers would publish it again.
    """
    await ScheduleChanges(call.producer).read(given.schedule)
    await _store(call).remove(given.schedule)


def _store(call: Call) -> ScheduleStore:
    return ScheduleStore(call.producer.gateway, call.producer.namespace)
