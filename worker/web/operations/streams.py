"""Events and streams of tasks as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ....queues.emitted_events import event_place
from ....queues.stream_items import stream_names
from ....queues.streams import stream_query
from ..operation import Call, EventStream, ResultModel, header_input, operation
from ..problems import refused_as
from ..streaming import EventHub, follow_stream
from ..users import Role
from .tasks import OneTask

_LAST_EVENT_ID = "Id of the last frame that the client has; browsers send it when they connect again."


class FollowInputs(OneTask):
    """A task, and where its events start."""

    after: str | None = Field(
        None, max_length=200, description="Id of the event after which to start. Default: the first."
    )
    include: Literal["emitted"] | None = Field(
        None, description="`emitted`: the items of all streams of the task too, in the order of time."
    )
    last_event_id: str | None = header_input("Last-Event-ID", None, _LAST_EVENT_ID, max_length=200)


@operation("GET", "/tasks/{task_id}/events", roles=[Role.VIEWER, Role.PRODUCER])
async def follow_events(call: Call, given: FollowInputs) -> EventStream:
    """Follow the events of a task as server-sent events, until it has ended.

    Each frame has the type of the event, its id, and JSON data with the same fields as in the log. New progress
    (`progress`) and changes of named values (`value_set`) are frames too. The id continues the stream behind the frame:
    send it as `Last-Event-ID`, or as `after`; browsers do so by themselves.

    The last frame is `end` with the state and the result or the error of the task; or `slow` for a client that reads
    too slowly, which then continues after the frame's id; or `error` with a problem document. A comment each 15 seconds
    keeps the connection open.
    """
    after = given.last_event_id or given.after or "0-0"
    with refused_as("after"):
        if event_place(after).stream and given.include is None:
            raise ValueError(f"must be the id of an event, got that of an item {after!r}: give include=emitted")
    handle = await call.find(given.task_id, given.queue)
    return EventStream(EventHub.of(call).follow(handle, after=after, include=given.include))


class StreamInputs(OneTask):
    """A stream of a task, and where it starts."""

    stream: str = Field(max_length=64, description="Name of the stream; `output` unless the handler names one.")
    after: str | None = Field(None, max_length=200, description="Cursor of the item after which to start.")
    last: int | None = Field(None, ge=0, le=10_000, description="Of the items that are stored, only the last so many.")
    last_event_id: str | None = header_input("Last-Event-ID", None, _LAST_EVENT_ID, max_length=200)


@operation("GET", "/tasks/{task_id}/streams/{stream}", roles=[Role.VIEWER, Role.PRODUCER])
async def follow_task_stream(call: Call, given: StreamInputs) -> EventStream:
    """Follow a stream of a task, that is what its handler emits (`ctx.emit`), as server-sent events.

    Frames are `item`, `cut_off` (a mark that makes the items of a repeated step void), `resumed`, and at last `end`
    with the state and the result or the error. If another task continues it, its stream follows. Items that are not
    kept any more end the stream with `trimmed`, whose id says from where to continue.
    """
    after = given.last_event_id or given.after
    last = None if given.last_event_id else given.last
    with refused_as("after"):
        stream_query(given.stream, Any, after, last)
    handle = await call.find(given.task_id, given.queue)
    return EventStream(follow_stream(handle, given.stream, after=after, last=last))


class StreamNames(ResultModel):
    """The streams of a task."""

    items: Sequence[str]


@operation("GET", "/tasks/{task_id}/streams", roles=[Role.VIEWER, Role.PRODUCER])
async def list_task_streams(call: Call, given: OneTask) -> StreamNames:
    """List the names of the streams that the handler of a task has emitted items into."""
    handle = await call.find(given.task_id, given.queue)
    names = await call.producer.gateway.command("HGET", handle.partition.record(handle.id), "streams")
    return StreamNames(items=stream_names(names))
