"""`perdure task state`, `fork` and `handoff`: past states of a task, forks from them, and the handoff document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import orjson
import typer

from ....queues.handle import TaskHandle
from ....queues.inspection.views import resumable_tasks
from ....queues.presence import list_workers
from ....queues.producer import Producer
from ....queues.records import State
from ....queues.wording import counted, iso_time, short
from ...agents.journal.archive import read_archived_step
from ...agents.journal.current_handoff import current_handoff, received_handoff
from ...agents.journal.forks import BadEdit, Point
from ...agents.journal.forks import fork as fork_task
from ...agents.journal.history import PastState, check_state, state_at
from ...agents.journal.json_patch import diff
from ...durable.journal.handoff.budget import HANDOFF_TOKENS, fitted, fitted_text
from ...durable.journal.step_record import VERSION
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.errors import Failed, Misuse, misuse_of
from ..support.options import AppOption, read_object, read_task_id
from ..support.output import Column, StderrText, note, timestamp
from ..support.runner import Listing, Output


@connected_as_tenant
async def state(
    producer: Producer,
    task: TaskOptions,
    *,
    at: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show the state after event N. Default: the latest.")
    ] = None,
    difference: Annotated[
        tuple[int, int] | None, typer.Option("--diff", metavar="N M", help="Show the changes from event N to event M.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="KEY", help="Show one step of the plan with its result, also an archived one."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the stored snapshot with the state computed from the log.")
    ] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip events that are missing or cannot be read.")
    ] = False,
) -> Output:
    """Show the state of a task after one of its events.

    Use it to find out what an agent knew when it decided something. 'perdure
    task events' shows the numbers of events as #N. The state of a function
    task has its decisions, discoveries and messages.

    Example: perdure task state 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --at 12

    Example: perdure task state 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --diff 12 40
    """
    if (at is not None) + (difference is not None) + (step is not None) + check > 1:
        raise Misuse("give only one of --at, --diff, --step and --check")
    if check and skip_unreadable:
        raise Misuse("--check needs all events: omit --skip-unreadable")
    handle = await task.find(producer)
    if check:
        return await _check(handle, producer)
    if step is not None:
        return await _step_of(handle, producer, step)
    if difference is not None:
        return await _compare(handle, producer, *difference, lenient=skip_unreadable)
    past = await state_at(producer.gateway, handle.partition, handle.id, at, lenient=skip_unreadable)
    _warn(past)
    fields: dict[str, str | None] = {"event": str(past.number), "agent": past.agent}
    for name, value in past.state.items():
        if value not in (None, "", [], {}) and (name != "archive" or any(value.values())):
            fields[name.replace("_", " ")] = _field(name, value)
    return Output({"id": handle.id, "event": past.number, "agent": past.agent, "state": past.state}, fields)


async def _check(handle: TaskHandle[Any], producer: Producer) -> Output:
    stored = await check_state(producer.gateway, handle.partition, handle.id)
    if stored is None:
        past = await state_at(producer.gateway, handle.partition, handle.id)
        found = f"task {handle.id} has no snapshot; its log of {past.number} events is consistent"
    else:
        found = f"task {handle.id}: the snapshot at event {stored.number} equals the state computed from the log"
    data = {"id": handle.id, "sound": True, "snapshot": None if stored is None else stored.number}
    return Output(data, notes=[found])


async def _step_of(handle: TaskHandle[Any], producer: Producer, key: str) -> Output:
    """Return a step from the archive, or else from the latest state."""
    found = await read_archived_step(producer.gateway, handle.partition, handle.id, key)
    archived = found is not None
    if found is None:
        latest = (await state_at(producer.gateway, handle.partition, handle.id)).state
        planned = next((one for one in latest["plan"] if one["key"] == key), None)
        if planned is None:
            raise Failed(f"task {handle.id} has no step {key!r}; 'perdure task state {handle.id}' lists its steps")
        found = {"step": planned} | ({"result": latest["results"][key]} if key in latest["results"] else {})
    fields = {name: found["step"].get(name) for name in ("key", "title", "status", "attempts", "error")}
    fields["result"] = _shown(found["result"]) if "result" in found else None
    return Output({"id": handle.id, "archived": archived, **found}, fields)


async def _compare(handle: TaskHandle[Any], producer: Producer, first: int, second: int, *, lenient: bool) -> Output:
    if min(first, second) < 0:
        raise Misuse(f"--diff must be two event numbers, 0 or more, got {first} {second}; 0 is before the first event")
    found = [
        await state_at(producer.gateway, handle.partition, handle.id, number, lenient=lenient)
        for number in (first, second)
    ]
    _warn(found[first < second])
    changes = diff(found[0].state, found[1].state)
    shown: list[str] = [_change_text(change) for change in changes]
    data = {"id": handle.id, "from": first, "to": second, "changes": changes}
    return Output(data, *(shown or [StderrText(f"nothing changed from event {first} to event {second}")]))


def _change_text(change: Mapping[str, Any]) -> str:
    value = "" if change["op"] == "remove" else f" {_shown(change['value'])}"
    return f"{change['op']:8}{change['path'] or '/'}{value}"


def _warn(past: PastState) -> None:
    for problem in past.skipped[:_MAX]:
        note(f"skipped: {problem}")
    if len(past.skipped) > _MAX:
        note(f"skipped: {len(past.skipped) - _MAX} more")


_MAX: Final = 5


def _shown(value: Any) -> str:
    return short(value if isinstance(value, str) else orjson.dumps(value).decode())


def _field(name: str, value: Any) -> str:
    describe = _ITEMS.get(name)
    if isinstance(value, list):
        return "\n".join(describe(one) if describe and isinstance(one, dict) else _shown(one) for one in value)
    if isinstance(value, Mapping) and name != "waiting_for":
        return "\n".join(f"{key}: {_shown(one)}" for key, one in value.items())
    return _shown(value)


def _step(step: Mapping[str, Any]) -> str:
    attempt = f", attempt {step['attempts']}" if step.get("attempts", 0) > 1 else ""
    error = f": {_shown(step['error'])}" if step.get("error") else ""
    return f"[{step.get('status')}{attempt}] {step.get('key')}: {_shown(step.get('title'))}{error}"


def _decision(one: Mapping[str, Any]) -> str:
    why = f", because {_shown(one['reasoning'])}" if one.get("reasoning") else ""
    return f"#{one.get('n')} {_shown(one.get('choice'))}{why}"


def _discovery(one: Mapping[str, Any]) -> str:
    return f"#{one.get('n')} {_shown(one.get('fact'))}" + (f" [{_shown(one['source'])}]" if one.get("source") else "")


def _message(one: Mapping[str, Any]) -> str:
    calls: Sequence[Any] = one.get("tool_calls") or ()
    requested = f" (calls {', '.join(str(call.get('name')) for call in calls)})" if calls else ""
    return f"{one.get('role')}: {_shown(one.get('content', ''))}{requested}"


_ITEMS: Final = {"plan": _step, "decisions": _decision, "discoveries": _discovery, "messages": _message}


_PAIR = re.compile(r"([^=\s{][^=]*)=(.*)", re.DOTALL)


def read_point(text: str) -> Point:
    """Return an event number as an integer, and an entry id or step key as text."""
    return int(text) if re.fullmatch("[0-9]{1,15}", str(text)) else str(text)


@connected_as_tenant
async def fork(
    producer: Producer,
    task: TaskOptions,
    *,
    at: Annotated[
        Any,
        typer.Option(
            metavar="N",
            parser=read_point,
            help="Fork after event N, or after the step with this key. Default: after the latest event.",
        ),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Change a value: NAME=VALUE or a JSON object. Repeatable."),
    ] = None,
    new_id: Annotated[
        str | None, typer.Option("--task-id", metavar="NEW", parser=read_task_id, help="Id of the new task.")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip events that are missing or cannot be read.")
    ] = False,
) -> Output:
    """Start a new task from an event of another task, and print its id.

    Use it to try another continuation. The new task has the same name,
    arguments and headers; an agent starts with the state after event N, a
    function with the steps recorded until then. The other task does not
    change. Repeated steps have new idempotency keys.

    --edit changes the state of an agent, or the arguments of a function. A
    value is JSON, or else text; a name may be a path: context.mood=calm.

    Example: perdure task fork 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --at 12 --edit 'goal=be brief'
    """
    handle = await task.find(producer)
    edits = _edits(edit or [])
    with misuse_of("--edit", BadEdit):
        forked = await fork_task(
            producer, handle.id, queue=handle.partition.queue, at=at, edit=edits, new_id=new_id, lenient=skip_unreadable
        )
    of = "" if forked.agent is None else f" of agent {forked.agent}"
    again = None
    if forked.within is not None:
        again = f"step {forked.within!r} was running at that event: it runs again, and may log its events again"
    return Output(
        {
            "id": forked.handle.id,
            "source": handle.id,
            "event": forked.event,
            "agent": forked.agent,
            "steps": forked.steps,
            "within": forked.within,
        },
        forked.handle.id,
        notes=[
            f"forked a new task{of} from event {forked.event} of task {handle.id}; recorded steps: {forked.steps}",
            again,
        ],
    )


def _edits(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        if pair := _PAIR.fullmatch(text):
            found[pair[1].strip()] = _value(pair[2])
            continue
        try:
            found |= read_object(text)
        except ValueError as error:
            raise Misuse(f"--edit must be NAME=VALUE or a JSON object, got {text!r}: {error}") from None
    return found


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


@connected_as_tenant
async def handoff(
    producer: Producer,
    task: TaskOptions,
    *,
    budget: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Greatest length in tokens (estimated).")
    ] = HANDOFF_TOKENS,
    received: Annotated[
        bool, typer.Option("--received", help="Print the document that this task received from its predecessor.")
    ] = False,
) -> Output:
    """Print the handoff document of a task as Markdown.

    Use it to continue a task yourself: it says what is in progress, decided,
    next and waited for. It is the document that the last run stored, or, if
    that is missing or outdated, one made from the event log.

    Example: perdure task handoff 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --budget 500
    """
    handle = await task.find(producer)
    problems: list[str] = []
    found = await (received_handoff if received else current_handoff)(producer, handle, problems)
    for problem in problems:
        note(f"{problem}; made one from the event log instead")
    if found is None:
        raise Failed(f"task {handle.id} has received no handoff document: it continues no other task")
    small = fitted(found, budget, form=lambda one: one.to_json().decode())
    return Output(small.model_dump(mode="json"), fitted_text(found, budget).rstrip())


@dataclass(slots=True)
class VersionUse:
    """Use of one version of a task's code.

    Attributes:
        workers: Workers that run it now.
        live: Tasks that have not ended and began with it.
        oldest: Time at which the oldest of these was enqueued, in milliseconds.
        dead: Dead letters that began with it.
    """

    task: str
    version: int
    workers: int = 0
    live: int = 0
    oldest: int | None = None
    dead: int = 0


@connected_as_tenant
async def versions(
    producer: Producer,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only the tasks of this name.")] = None,
    *,
    app: AppOption = None,
) -> Listing:
    """List the versions of code that tasks began with, and say which can go.

    Without NAME, tasks with no version other than 1 are left out. Reads the
    records of all tasks that have a checkpoint and have not succeeded, page by
    page.

    Example: perdure task versions report
    """
    uses = {task: used for task, used in (await _read(producer, app)).items() if _is_shown(used, task, name)}
    if name is not None and not uses:
        raise Failed(f"no live worker has task {name!r}, and no task of this name has a checkpoint to resume")
    listing = Listing(
        _COLUMNS,
        [use for used in uses.values() for use in used],
        empty=f"no task in namespace {producer.namespace.name!r} has a version other than 1",
        data=[_described(task, used) for task, used in uses.items()],
    )
    listing.parts += [text for task, used in uses.items() for text in advice(task, used)]
    return listing


_COLUMNS: Final[Sequence[Column[VersionUse]]] = (
    Column("task", lambda use: use.task, least=8),
    Column("version", lambda use: use.version, right=True),
    Column("workers", lambda use: use.workers, right=True),
    Column("live tasks", lambda use: use.live, right=True),
    Column("oldest", lambda use: timestamp(use.oldest) or ""),
    Column("dead letters", lambda use: use.dead, right=True),
)


def advice(task: str, uses: Sequence[VersionUse]) -> list[str]:
    """Return what keeps each version but the newest, in sentences, and which branches of the code can be deleted."""
    newest = max(use.version for use in uses)
    found, lowest = [], newest
    for use in uses:
        what = f"version {use.version} of {task!r}"
        if use.version == newest or not (use.live or use.dead or use.workers):
            continue
        lowest = min(lowest, use.version)
        if use.live:
            needs = counted(use.live, "task still needs", "tasks still need")
            found.append(f"{needs} {what}, the oldest since {timestamp(use.oldest) or 'an unknown time'}")
        if use.dead:
            letters = counted(use.dead, "dead letter")
            found.append(f"{letters} began with {what}: replay or purge them before its branch is deleted")
        if use.workers:
            runs = counted(use.workers, "worker still runs", "workers still run")
            found.append(f"{runs} {what}: new tasks may begin with it")
    if lowest == 2:
        found.append(f"the branch for version 1 of {task!r} can be deleted: no live task began with it")
    elif lowest > 2:
        which = f"versions below {lowest} of {task!r}"
        found.append(f"the branches for {which} can be deleted: no live task began with them")
    return found


def _described(task: str, uses: Sequence[VersionUse]) -> dict[str, object]:
    listed = [asdict(use) | {"oldest": iso_time(use.oldest)} for use in uses]
    for one in listed:
        del one["task"]
    return {"task": task, "versions": listed, "advice": advice(task, uses)}


def _is_shown(uses: Sequence[VersionUse], task: str, name: str | None) -> bool:
    return task == name if name is not None else any(use.version > 1 for use in uses)


async def _read(producer: Producer, app: str | None) -> Mapping[str, list[VersionUse]]:
    """Return the uses by task, each by version. app: only its workers and tasks."""
    found: dict[tuple[str, int], VersionUse] = {}

    def use_of(task: str, version: int) -> VersionUse:
        return found.setdefault((task, version), VersionUse(task, version))

    for (task, version), count in (await _running(producer, app)).items():
        use_of(task, version).workers = count
    known: set[str] = set()
    async for record, stored in resumable_tasks(producer.gateway, producer.namespace, VERSION):
        if record.problem is not None and record.id not in known:
            known.add(record.id)
            note(f"task {record.id} is left out: {record.problem}")
        if record.id in known or record.task is None or app not in (None, record.app):
            continue
        known.add(record.id)
        use = use_of(record.task, int(stored) if stored is not None and stored.isdigit() else 1)
        if record.state is State.DEAD:
            use.dead += 1
        elif not record.state.terminal:
            use.live += 1
            use.oldest = min(filter(None, (use.oldest, record.enqueued_at)), default=None)
    return _by_task(found.values())


async def _running(producer: Producer, app: str | None) -> Counter[tuple[str, int]]:
    """Return the number of workers by task and version."""
    listed = (await producer.catalog()).all_versions
    running: Counter[tuple[str, int]] = Counter()
    for worker in await list_workers(producer.gateway, producer.namespace):
        if not worker.presumed_dead and worker.runs(app):
            entry = (worker.app, worker.catalog)
            running.update((task.name, task.task_version) for task in listed if (task.app, task.version) == entry)
    return running


def _by_task(uses: Iterable[VersionUse]) -> dict[str, list[VersionUse]]:
    found: dict[str, list[VersionUse]] = {}
    for use in sorted(uses, key=lambda use: (use.task, use.version)):
        found.setdefault(use.task, []).append(use)
    return found
