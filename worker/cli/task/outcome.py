"""`perdure task result`, `watch` and `cancel`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio

from ....queues.envelope import shown_data
from ....queues.errors import TaskOutcome
from ....queues.handle import TaskHandle
from ....queues.producer import Producer
from ....queues.records import Record, State
from ....queues.wording import counted
from ..support.connection import TaskOptions, connected
from ..support.errors import Failed
from ..support.events_text import describe_event, progress_text
from ..support.options import in_duration
from ..support.output import AsJson, Styled, state_text, stdout
from ..support.runner import Output, line
from ..support.terminal import clean, clean_json

if TYPE_CHECKING:  # rich is imported where something is drawn
    from rich.console import RenderableType
    from rich.live import Live

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


def _outcome(record: Record) -> Styled:
    text = f"{record.state} after {counted(record.attempts, 'attempt')}"
    text += f" and {counted(record.crashes, 'crash', 'crashes')}"
    if record.reason:
        text += f", {record.reason}"
    if record.error and record.state is State.DEAD:
        text += f": {record.error.get('error')}: {record.error.get('message')}"
    return Styled(text, state_text(record.state).style)


@connected
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


@connected
async def watch(producer: Producer, task: TaskOptions, *, json: AsJson = False) -> AsyncIterator[Output]:
    """Print the events of a task as they happen, until it ends.

    Exits with 0 if the task succeeded, else with 1. With --json: one line
    per event, then one with the task.

    Example: perdure task watch 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    if not json and stdout().is_terminal:
        await _live(handle)
    else:
        async for event in handle.events():
            yield line(event.summary(), describe_event(event))
    record = await handle.record()
    yield Output([record.summary() | {"result": shown_data(record.shown_result())}], _outcome(record), lines=True)
    if record.state is not State.SUCCEEDED:
        raise Failed(f"task {handle.id} did not succeed: it is {record.state}")


@connected
async def cancel(producer: Producer, task: TaskOptions) -> Output:
    """Cancel a task, and print its id.

    A running task gets the request within milliseconds. Its handler is
    cancelled and may clean up for 4 s. Any other task is cancelled at once,
    or by a worker of its queue if this user may only request that.

    Example: perdure task cancel 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    """
    handle = await task.find(producer)
    state = await handle.cancel()
    data = {"id": handle.id, "state": state}
    if state.terminal and state is not State.CANCELLED:
        return Output(data, failure=Failed(f"could not cancel task {handle.id}: it is {state}"))
    requested = {
        State.CANCELLED: f"cancelled task {handle.id}",
        State.RUNNING: f"requested cancellation of running task {handle.id}",
    }.get(state, f"requested cancellation of {state} task {handle.id}: a worker of its queue cancels it")
    return Output(data, handle.id, notes=[requested])
