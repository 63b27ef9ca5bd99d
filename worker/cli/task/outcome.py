"""`perdure task result`, `watch` and `cancel`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import typer

from ....queues.envelope import shown_data
from ....queues.errors import TaskOutcome
from ....queues.handle import TaskHandle
from ....queues.producer import Producer
from ....queues.records import Record, State
from ....queues.wording import counted
from ...job_runner import LIVE
from ...shown_events import progress_text
from ...shown_text import clean, clean_json, encode
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.errors import Failed, Misuse
from ..support.events_text import describe_event
from ..support.jobs import JobOptions, TaskFilterOptions, cancel_many, preview_tasks
from ..support.options import Assured, OneTaskId, in_duration
from ..support.output import AsJson, Styled, state_text, stdout, timestamp
from ..support.runner import Output, line

if TYPE_CHECKING:  # rich is imported where something is drawn
    from rich.console import RenderableType
    from rich.live import Live

    from ....queues.streams import StreamItem

_BAR: Final = 30
"""Characters of the progress bar."""

_REFRESH: Final = 1.0
"""Seconds between two reads of the record: no event says that a worker took the task."""


async def _live(handle: TaskHandle[Any]) -> None:
    from rich.live import Live

    console = stdout()
    with Live(_spinner(await handle.record()), console=console, transient=True, redirect_stdout=False) as live:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refresh, handle, live)
            async for event in handle.events():
                if event.type != "progress":  # the bar shows it
                    console.print(clean(describe_event(event)))
                live.update(_spinner(await handle.record()))
            tasks.cancel_scope.cancel()


async def _refresh(handle: TaskHandle[Any], live: Live) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        live.update(_spinner(await handle.record()))


def _spinner(record: Record) -> RenderableType:
    """Return the state of a task with a spinner, and a bar if its handler reports progress."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    details = f" in step {record.step}" if record.step else ""
    if record.worker and record.state is State.RUNNING:
        details += f" on {record.worker}"
    text = Text.assemble(clean(f"{record.task} {record.id} "), state_text(record.state), clean(details))
    spinner, progress = Spinner("dots", text), record.shown_progress()
    if progress is None:
        return spinner
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=progress.total, completed=progress.done, width=_BAR, pulse=progress.total is None),
        Text(clean(progress_text(progress.summary()))),
    )
    return Group(spinner, row)


def _shown(item: StreamItem) -> Styled:
    """Return an item of a stream as one line."""
    if item.kind == "end":
        text = f"{item.state}{f': {item.error_type}: {item.error}' if item.error else ''}"
        return Styled(f"{text} ({item.problem})" if item.problem else text, state_text(item.state or "").style)
    at = timestamp(item.at) if item.at else ""
    place = f"{at}  #{item.cursor}{f' {item.step}' if item.step else ''}"
    if item.kind == "cut_off":
        void = {"retried": f"items up to try {item.attempt}", "replayed": "all items", "lost": "items after this one"}
        return Styled(f"{place}  void: {void.get(item.reason or '', '')} ({item.reason})", "dim")
    if item.problem is not None:
        return Styled(f"{place}  (cannot be read: {item.problem})", "")
    if item.kind == "resumed":
        return Styled(f"{place}  resumed: {item.value}", "dim")
    value = item.value if isinstance(item.value, str) else encode(item.value)
    return Styled(f"{place}  {value!r}" if not value.isprintable() else f"{place}  {value}", "")


def _outcome(record: Record) -> Styled:
    text = f"{record.state} after {counted(record.attempts, 'attempt')}"
    text += f" and {counted(record.crashes, 'crash', 'crashes')}"
    if record.reason:
        text += f", {record.reason}"
    if record.error and record.state is State.DEAD:
        text += f": {record.error.get('error')}: {record.error.get('message')}"
    return Styled(text, state_text(record.state).style)


@connected_as_tenant
async def result(
    producer: Producer,
    task: TaskOptions,
    *,
    timeout: Annotated[float | None, in_duration("Time to wait. Default: no limit.")] = None,
    json: AsJson = False,
) -> Output:
    """Wait for a task, and print its result as JSON.

    If another task continues its work, this waits for that one. Exits with
    1 if the task is dead, cancelled, or not finished in time. With --json,
    prints the outcome as an object in any case.

    Example: perdure task result $(perdure enqueue audit --queue audit) --timeout 60
    """
    handle = await task.find(producer)
    stored = TaskHandle(handle.id, handle.partition, producer.gateway, producer.notifications, bytes.decode)
    record = await handle.record()
    ended = record.state.terminal and record.handed_to is None
    value: str | None = None
    failure: Exception | None = None
    try:
        value = clean_json(await stored.result(None if ended else timeout))
    except TaskOutcome as error:
        failure = error
    except TimeoutError as error:
        failure = Failed(str(error))
    return Output(await _outcome_of(handle) if json else None, value, failure=failure)


async def _outcome_of(handle: TaskHandle[Any]) -> dict[str, Any]:
    while (successor := await handle.successor()) is not None:
        handle = successor
    record = await handle.record()
    outcome = {"id": record.id, "state": record.state, "result": shown_data(record.shown_result())}
    return outcome | {"reason": record.reason, "error": record.error}


@connected_as_tenant
async def watch(
    producer: Producer,
    task: TaskOptions,
    *,
    stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print the items of this stream in place of events.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="With --stream: start after the item with this cursor.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --stream: of the stored items, only the last N.")
    ] = None,
    json: AsJson = False,
) -> AsyncIterator[Output]:
    """Print the events of a task as they happen, until it ends.

    With --stream, print what its handler emits into a stream. Exits with 0
    if the task succeeded, else with 1. With --json: one line per event or
    item, then one with the task, or with the end of the stream.

    Example: perdure task watch 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f

    Example: perdure task watch 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --stream tokens --last 20
    """
    if stream is None and (after is not None or last is not None):
        raise Misuse("--after and --last are for the items of a stream: give --stream as well")
    handle = await task.find(producer)
    if stream is not None:
        try:
            async for item in handle.stream(stream, after=after, last=last):
                yield Output([item.summary()], _shown(item), lines=True)
                if item.kind == "end" and item.state != "succeeded":
                    raise Failed(f"task {item.task_id} did not succeed: it is {item.state}")
        except ValueError as error:
            raise Misuse(str(error)) from error
        return
    if not json and stdout().is_terminal:
        await _live(handle)
    else:
        async for event in handle.events():
            yield line(event.summary(), describe_event(event))
    record = await handle.record()
    yield Output([record.summary() | {"result": shown_data(record.shown_result())}], _outcome(record), lines=True)
    if record.state is not State.SUCCEEDED:
        raise Failed(f"task {handle.id} did not succeed: it is {record.state}")


@connected_as_tenant
async def cancel(
    producer: Producer,
    task_id: OneTaskId = None,
    *,
    wanted: TaskFilterOptions,
    options: JobOptions,
    every: Annotated[bool, typer.Option("--all", help="Cancel all tasks that match the other options.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how many tasks would be cancelled, and change nothing.")
    ] = False,
    yes: Assured = False,
) -> AsyncIterator[Output]:
    """Cancel a task, or all tasks that match, and print the ids.

    A running task gets the request within milliseconds. Its handler is
    cancelled and may clean up for 4 s. Any other task is cancelled at once,
    or by a worker of its queue if this user may only request that.

    --all makes a job of the tasks that were enqueued before now. It asks for
    confirmation. Ctrl-C leaves the job to a worker: see 'perdure job'.

    Example: perdure task cancel 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f

    Example: perdure task cancel --all --task report --where tenant=acme --state queued --until 1h
    """
    if (task_id is None) is not every:
        raise Misuse("give either an ID, or --all, which options such as --queue, --task and --state can limit")
    if task_id is not None:
        if wanted != TaskFilterOptions(wanted.queue) or options != JobOptions() or dry_run:
            raise Misuse("an ID takes no option but --queue: leave the others out, or give --all in its place")
        yield await _cancel_one(await TaskOptions(task_id, wanted.queue).find(producer))
        return
    chosen = await wanted.filter(producer)
    if ended := sorted(state for state in chosen.states if state.terminal):
        raise Misuse(f"--state: a task that is {ended[0]} has ended; give one of {', '.join(sorted(LIVE))}")
    if dry_run:
        yield await preview_tasks(producer, wanted.queue, chosen, unstarted=False)
        return
    async for output in cancel_many(producer, "cancel", wanted.queue, chosen, options, yes=yes):
        yield output


async def _cancel_one(handle: TaskHandle[Any]) -> Output:
    state = await handle.cancel()
    data = {"id": handle.id, "state": state}
    if state.terminal and state is not State.CANCELLED:
        return Output(data, failure=Failed(f"could not cancel task {handle.id}: it is {state}"))
    requested = {
        State.CANCELLED: f"cancelled task {handle.id}",
        State.RUNNING: f"requested cancellation of running task {handle.id}",
    }.get(state, f"requested cancellation of {state} task {handle.id}: a worker of its queue cancels it")
    return Output(data, handle.id, notes=[requested])
