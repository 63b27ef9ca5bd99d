"""Limits: what holds them, what waits, and changes while they are in use."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated

from pydantic import AfterValidator, Field

from ....queues import limit_views
from ....queues.keys import check_name
from ....queues.limit_changes import SHOWN, InvalidSetting, LimitChanges, limit_not_found
from ....queues.limit_views import HoldingTask, LimitDetails, LimitStatus, WaitingKey
from ....queues.limits.control import SETTINGS, LimitNote, parse_hold
from ....queues.wording import iso_time
from ..operation import Call, Inputs, ResultModel, TaskIdText, operation
from ..paging import PageInputs, page_of
from ..problems import Problem, invalid_field
from ..users import Role

LimitText = Annotated[
    str, AfterValidator(lambda text: check_name("limit", text)), Field(description="Name of the limit.")
]

Why = Annotated[str, Field(max_length=2000, description="Reason, kept with the change.")]


class LimitNumbers(ResultModel):
    """A limit in numbers: those of the code, or what operators have set in their place."""

    name: str
    app: str
    total: int | None = Field(description="Tasks of all keys at once; null for no such number.")
    running: int | None = Field(description="Tasks of each key at once.")
    by: str | None = Field(description="Arguments that make its key; null for no keys.")
    rate: str | None = Field(description="Starts in a period, such as `500/m`.")
    cost: str | None = Field(description="Costs in a period, such as `90,000/m`.")
    changed: list[str] = Field(description="Numbers that operators have set in place of the code, by stored name.")
    in_use: int = Field(description="Tokens that tasks hold, of all keys.")
    waiting: int = Field(description="Tasks that wait for it.")
    waiting_more: bool = Field(description="Whether not all waiting tasks were counted.")
    state: str = Field(description="The hold or the breaker that stops all starts, in words; empty for neither.")
    held_until: str | None = Field(description="Time until which nothing starts.")
    breaker: str | None = Field(description="`closed`, `open` or `half-open`; null without a breaker.")
    open_until: str | None = Field(description="Time until which the breaker is open.")
    revision: int = Field(description="Number of the last change; a change that names it replaces no other one.")
    problem: str = Field(description="What is wrong with it; empty for nothing.")

    @classmethod
    def of(cls, status: LimitStatus) -> LimitNumbers:
        """Return the view of a limit."""
        return cls.model_validate(status.summary() | {"state": status.state, "problem": status.problem})


class LimitPage(ResultModel):
    """A page of limits by name."""

    items: list[LimitNumbers]
    next: str | None = Field(description="Cursor of the next page; null for the last one.")
    read: int = Field(description="Limits that were read.")
    of: int = Field(description="Limits that there are.")


class HolderView(ResultModel):
    """A task that holds a limit."""

    task_id: str
    queue: str
    partition: int
    key: str = Field(description="Text of its key, or the digest if that is not known; empty without keys.")
    seconds: float = Field(description="Seconds until its token expires unless it is renewed.")

    @classmethod
    def of(cls, holder: HoldingTask) -> HolderView:
        """Return the view of a holder."""
        return cls(**holder.summary())


class WaitingKeyView(ResultModel):
    """Tasks that wait for their turn under one key."""

    queue: str
    key: str = Field(description="Text of the key, or the digest if that is not known; empty without keys.")
    tasks: int
    first: str = Field(description="Id of the task that waits longest.")
    since: str | None

    @classmethod
    def of(cls, key: WaitingKey) -> WaitingKeyView:
        """Return the view of a waiting key."""
        return cls(queue=key.queue, key=key.label, tasks=key.tasks, first=key.task_id, since=iso_time(key.since))


class LimitNoteView(ResultModel):
    """A change of a limit."""

    at: str | None
    by: str = Field(description="Who made it; empty if that is not known, as for a breaker.")
    what: str
    why: str

    @classmethod
    def of(cls, note: LimitNote) -> LimitNoteView:
        """Return the view of a note."""
        return cls(at=iso_time(note.at), by=note.by, what=note.what, why=note.why)


class LimitDetailsView(ResultModel):
    """A limit with what holds it, what waits for it, and its last changes."""

    limit: LimitNumbers
    holders: list[HolderView] = Field(description="The first tasks that hold it, by the time at which they expire.")
    waiting: list[WaitingKeyView] = Field(description="The first keys that wait, the one that waits longest first.")
    waiting_by_queue: dict[str, int]
    changes: list[LimitNoteView] = Field(description="The last changes, the newest first.")

    @classmethod
    def of(cls, details: LimitDetails) -> LimitDetailsView:
        """Return the view of a limit."""
        return cls(
            limit=LimitNumbers.of(details.status),
            holders=[HolderView.of(holder) for holder in details.holders],
            waiting=[WaitingKeyView.of(key) for key in details.waiting],
            waiting_by_queue=dict(details.queues),
            changes=[LimitNoteView.of(note) for note in details.notes],
        )


@operation("GET", "/limits", roles=[Role.VIEWER])
async def list_limits(call: Call, given: PageInputs) -> LimitPage:
    """List limits by name, with what holds them and what waits."""
    found = await limit_views.list_limits(call.producer.gateway, call.producer.namespace)
    items, following = page_of(found, lambda status: status.name, given)
    return LimitPage(items=[LimitNumbers.of(one) for one in items], next=following, read=len(found), of=len(found))


class ShowLimit(Inputs):
    """Inputs of a shown limit."""

    limit: LimitText
    most: int = Field(SHOWN, ge=1, le=10_000, description="Most holders and waiting keys.")


@operation("GET", "/limits/{limit}", roles=[Role.VIEWER])
async def show_limit(call: Call, given: ShowLimit) -> LimitDetailsView:
    """Show a limit with the tasks that hold it, the keys that wait, and the last changes."""
    place = (call.producer.gateway, call.producer.namespace)
    details = await limit_views.show_limit(*place, given.limit, most=given.most)
    if details is None:
        raise await limit_not_found(*place, given.limit)
    return LimitDetailsView.of(details)


class SetLimit(Inputs):
    """Inputs of a change of a limit."""

    limit: LimitText
    settings: dict[str, str | int | float] = Field(
        min_length=1,
        description=f"Values by setting: {', '.join(SETTINGS)}. `none` is no such number, an empty text returns to the "
        "one of the code.",
    )
    revision: int | None = Field(
        None, ge=0, description="Revision that was read: a limit that was changed since then is left as it is."
    )
    why: Why = ""


@operation("PATCH", "/limits/{limit}", roles=[Role.OPERATOR], changes=True)
async def set_limit(call: Call, given: SetLimit) -> LimitDetailsView:
    """Change numbers of a limit for all workers, at once.

    They replace those of the code until they are reset, also when workers restart with other code. A lower number takes
    nothing from tasks that run. `total: 0` lets nothing start.
    """
    settings = {name: str(value) for name, value in given.settings.items()}
    return await _changed(_changes(call, given.limit).set(settings, given.why, revision=given.revision))


class ResetLimit(Inputs):
    """Inputs of the return of a limit to its definition."""

    limit: LimitText
    revision: int | None = Field(
        None, ge=0, description="Revision that was read: a limit that was changed since then is left as it is."
    )
    why: Why = ""


@operation("POST", "/limits/{limit}/reset", roles=[Role.OPERATOR], changes=True)
async def reset_limit(call: Call, given: ResetLimit) -> LimitDetailsView:
    """Return a limit to its definition in the code."""
    return await _changed(_changes(call, given.limit).reset(given.why, revision=given.revision))


class HoldLimit(Inputs):
    """Inputs of a hold of a limit."""

    limit: LimitText
    seconds: Annotated[str | float, AfterValidator(parse_hold)] = Field(
        description="Length of the hold in seconds, or a text such as `90s`, `15m`, `2h`."
    )
    why: Why = ""


@operation("POST", "/limits/{limit}/hold", roles=[Role.OPERATOR], changes=True)
async def hold_limit(call: Call, given: HoldLimit) -> LimitDetailsView:
    """Let no task of a limit start for some time, on any worker.

    An earlier end never shortens a hold. Tasks that run are not touched.
    """
    return await _changed(_changes(call, given.limit).hold(float(given.seconds), given.why))


class ReleaseLimit(Inputs):
    """Inputs of the release of a limit."""

    limit: LimitText
    why: Why = ""


@operation("POST", "/limits/{limit}/release", roles=[Role.OPERATOR], changes=True)
async def release_limit(call: Call, given: ReleaseLimit) -> LimitDetailsView:
    """End the hold of a limit and close its breaker, so that tasks start again."""
    return await _changed(_changes(call, given.limit).release(given.why))


class ReleaseHolder(Inputs):
    """Inputs of the release of one holder of a limit."""

    limit: LimitText
    task_id: TaskIdText
    why: Why = ""


@operation("POST", "/limits/{limit}/holders/{task_id}/release", roles=[Role.OPERATOR], changes=True)
async def release_holder(call: Call, given: ReleaseHolder) -> LimitDetailsView:
    """Take a limit from one task, such as that of a frozen process, so that another one starts at once.

    If the task still runs, its worker stops its run at the next renewal, unless there is room for it.
    """
    details = await _changes(call, given.limit).release_task(given.task_id, given.why)
    if details is None:
        detail = f"task {given.task_id!r} does not hold limit {given.limit!r}: it has ended, or has released it"
        raise Problem(404, "holder-not-found", detail)
    return LimitDetailsView.of(details)


def _changes(call: Call, name: str) -> LimitChanges:
    return LimitChanges(call.producer.gateway, call.producer.namespace, name, by=call.user.name)


async def _changed(change: Awaitable[LimitDetails]) -> LimitDetailsView:
    try:
        return LimitDetailsView.of(await change)
    except InvalidSetting as error:
        where = f"settings.{error.setting}" if error.setting else "settings"
        raise invalid_field(where, f"{error.problem}{error.hint}") from None
