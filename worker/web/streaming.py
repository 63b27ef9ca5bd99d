"""Event streams of tasks: one reader for each task in this process, which all clients of the task share.

A client first reads what is stored, page by page, at its own pace. Then it gets the frames of the reader from a queue
of its own, which is bounded. A client that empties its queue too slowly is dropped: its last frame, `slow`, says after
which event to continue. So the memory that clients use does not depend on how slow they are.

A reader starts with the first client of its task, at the end of what is stored, and ends with the last one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field
from pydantic_core import from_json, to_json

from ...queues.emitted_events import EventPlace, event_place
from ...queues.errors import DecryptionError, LargeValueLost, PerdureError, StreamTrimmed, TaskNotFound
from ...queues.event_log import TaskEvent, read_last_events
from ...queues.handle import TaskHandle
from ...queues.records import Record, State
from ...queues.streams import StreamItem
from ...queues.transport.gateway import Gateway
from ..log import logger
from .operation import Call, Frame, ResultModel
from .problems import Problem, problem_of

Include = Literal["emitted"]

MAX_FRAMES: Final = 500
MAX_BYTES: Final = 4 << 20
"""Frames, and bytes of their data, that wait for one client at most."""

MAX_RESULT: Final = 1 << 20
"""Bytes of a result in the last frame of a stream; a larger one is read by `GET /tasks/{task_id}/result`."""


class TaskEnd(ResultModel):
    """Data of the last frame of the events of a task."""

    id: str
    state: Literal["succeeded", "dead", "cancelled", "expired"]
    result: Any = Field(default=None, description="What the handler returned.")
    reason: str | None = Field(default=None, description="Reason of the dead letter.")
    error_type: str | None = Field(default=None, description="Class of what the handler raised.")
    error: str | None = Field(default=None, description="Text of what the handler raised.")
    handed_to: str | None = Field(default=None, description="Id of the task that continues it.")
    problem: str | None = Field(default=None, description="Why the result is not shown.")


class _Item(NamedTuple):
    """A frame in a queue. place: None for a frame that is not stored, such as progress."""

    frame: Frame
    place: EventPlace | None


class _Client:
    """Queue of one client.

    Attributes:
        overrun: Whether frames were lost since the last `reset`, since too many waited.
        end: Last frame; it waits behind all others, and is not bounded.
    """

    def __init__(self) -> None:
        self.overrun = False
        self.end: Frame | None = None
        self._items: deque[_Item] = deque()
        self._size = 0
        self._woken = asyncio.Event()

    def offer(self, item: _Item) -> None:
        """Put a frame into the queue. If it is full, all frames in it are dropped."""
        if not self.overrun:
            self._items.append(item)
            self._size += len(item.frame.data)
            if len(self._items) > MAX_FRAMES or (self._size > MAX_BYTES and len(self._items) > 1):
                self.reset()
                self.overrun = True
        self._woken.set()

    def finish(self, end: Frame) -> None:
        """Set the last frame."""
        self.end = end
        self._woken.set()

    def reset(self) -> None:
        """Empty the queue."""
        self._items.clear()
        self._size, self.overrun = 0, False

    async def next(self) -> _Item | None:
        """Wait for the next frame; return None if there is no further one: at the end, and if frames were lost."""
        while not self._items and not self.overrun and self.end is None:
            self._woken.clear()
            await self._woken.wait()
        if not self._items:
            return None
        item = self._items.popleft()
        self._size -= len(item.frame.data)
        return item


class _Reader:
    """The reader of the events of one task, and its clients.

    Attributes:
        started: Set when the position is known from which on clients get its frames.
        latest: The last frames that are not stored: progress and named values, by name.
    """

    def __init__(self, hub: EventHub, key: _Key, handle: TaskHandle[Any]) -> None:
        self.clients: set[_Client] = set()
        self.latest: dict[str, Frame] = {}
        self.started = asyncio.Event()
        self._hub, self._key, self._handle = hub, key, handle
        self._task = asyncio.create_task(self._run(), name=f"perdure events of {handle.id}")

    def join(self, client: _Client) -> None:
        """Send frames to a client from now on."""
        self.clients.add(client)

    def leave(self, client: _Client) -> None:
        """Send no more frames to a client. The last one ends the reader."""
        self.clients.discard(client)
        if not self.clients:
            self._hub.forget(self._key, self)
            self._task.cancel()

    async def _run(self) -> None:
        try:
            end = await self._follow()
        except PerdureError as error:
            end = error_frame(problem_of(error))
        except Exception as error:  # noqa: BLE001 - its text may hold data, so it goes to the log only
            logger.exception("could not read the events of task {}: {}", self._handle.id, type(error).__name__)
            end = error_frame(Problem(500, "server-error", "the server failed; its log says why", source="server"))
        self._hub.forget(self._key, self)
        for client in self.clients:
            client.finish(end)
        self.started.set()

    async def _follow(self) -> Frame:
        handle, include = self._handle, self._key.include
        position = await self._hub.end_of_log(handle, include)
        self.started.set()
        try:
            async with aclosing(handle.events(after=position, include=include)) as events:
                async for event in events:
                    stored = event.id != position
                    position = event.id
                    self._publish(event, stored=stored)
            return await end_frame(handle)
        except TaskNotFound:
            return _end(TaskEnd(id=handle.id, state="expired"))

    def _publish(self, event: TaskEvent, *, stored: bool) -> None:
        frame = event_frame(event)
        if not stored:
            name = event.data.get("name", "") if event.type == "value_set" and isinstance(event.data, dict) else ""
            self.latest[f"{event.type} {name}"] = frame
        item = _Item(frame, _place(event.id) if stored else None)
        for client in self.clients:
            client.offer(item)


class _Key(NamedTuple):
    namespace: str
    queue: str
    partition: int
    task_id: str
    include: Include | None


class EventHub:
    """The readers of this process, by task."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._readers: dict[_Key, _Reader] = {}

    @classmethod
    def of(cls, call: Call) -> EventHub:
        """Return the hub that all requests of a service share."""
        hub: EventHub | None = call.extras.get("event hub")
        if hub is None:
            hub = call.extras["event hub"] = cls(call.producer.gateway)
        return hub

    @property
    def readers(self) -> int:
        """Number of the readers."""
        return len(self._readers)

    def forget(self, key: _Key, reader: _Reader) -> None:
        """Let the next client of a task start a new reader."""
        if self._readers.get(key) is reader:
            del self._readers[key]

    async def end_of_log(self, handle: TaskHandle[Any], include: Include | None) -> str:
        """Return the id of an event behind which all events are still to come."""
        gateway = self._gateway
        if include is not None:  # items have no common last id, but their order is that of the time
            seconds, micros = await gateway.command("TIME")
            return f"{int(seconds) * 1000 + int(micros) // 1000}-0"
        last = await read_last_events(gateway, handle.partition, handle.id, 1)
        return last[0].id if last else "0-0"

    async def follow(
        self, handle: TaskHandle[Any], *, after: str = "0-0", include: Include | None = None
    ) -> AsyncGenerator[Frame]:
        """Yield the events of a task as frames, until it has ended.

        The last frame is `end`, `slow` for a client that reads too slowly, or `error`. Their ids, and those of frames
        that are not stored, continue the stream behind the last stored event.

        Args:
            after: Id of the event after which to start.
            include: See `TaskHandle.events`.
        """
        at = handle.partition
        key = _Key(at.namespace, at.queue, at.index, handle.id, include)
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = _Reader(self, key, handle)
        client = _Client()
        reader.join(client)
        try:
            await reader.started.wait()
            caught_up = False
            while not caught_up:
                client.reset()
                try:
                    async with aclosing(handle.events(follow=False, after=after, include=include)) as events:
                        async for event in events:
                            after = event.id
                            yield event_frame(event)
                except PerdureError as error:
                    yield error_frame(problem_of(error), after)
                    return
                caught_up = not client.overrun
            for frame in tuple(reader.latest.values()):
                yield frame._replace(id=after)
            place = _place(after)
            while (item := await client.next()) is not None:
                if item.place is None:
                    yield item.frame._replace(id=after)
                elif place is None or item.place > place:
                    place, after = item.place, item.frame.id
                    yield item.frame
            if client.overrun or client.end is None:
                yield _slow_frame(after)
            else:
                yield client.end._replace(id=after)
        finally:
            reader.leave(client)


async def follow_stream(
    handle: TaskHandle[Any], name: str, *, after: str | None = None, last: int | None = None
) -> AsyncGenerator[Frame]:
    """Yield the items of a stream of a task as frames, until the task has ended.

    A client reads pages at its own pace, which clients at the same place share: see queues/streams.py. One that is so
    slow that items are no longer kept gets a frame `trimmed`, which says from where to continue.
    """
    position = after or "0"
    try:
        async with aclosing(handle.stream(name, after=after, last=last)) as items:
            async for item in items:
                position = item.cursor
                yield stream_frame(item)
    except StreamTrimmed as error:
        yield Frame(error.after, "trimmed", _json({"after": error.after, "detail": str(error)}))
    except PerdureError as error:
        yield error_frame(problem_of(error), position)
    except ValueError as error:
        yield error_frame(Problem(422, "invalid-input", f"after: {error}"), position)


def stream_frame(item: StreamItem) -> Frame:
    """Return the frame of an item."""
    return Frame(item.cursor, item.kind, _json(item.summary()))


def event_frame(event: TaskEvent) -> Frame:
    """Return the frame of an event. What names its type may have been written by another program."""
    return Frame(event.id, event.type, _json(event.summary()))


def error_frame(problem: Problem, after: str = "0-0") -> Frame:
    """Return the last frame of a stream that cannot go on."""
    return Frame(after, "error", problem.view().model_dump_json().encode())


def _slow_frame(after: str) -> Frame:
    detail = "too many events waited for this client; continue after the last one that it has"
    return Frame(after, "slow", _json({"after": after, "detail": detail}))


async def end_frame(handle: TaskHandle[Any]) -> Frame:
    """Return the last frame of a task that has ended. Raises `TaskNotFound`."""
    record = await handle.record()
    if record.state is not State.SUCCEEDED:
        evidence = record.error or {}
        return _end(
            TaskEnd(
                id=record.id,
                state="cancelled" if record.state is State.CANCELLED else "dead",
                reason=record.reason,
                error_type=_text(evidence.get("error")),
                error=_text(evidence.get("message")),
            )
        )
    result, problem = await _result(handle, record)
    return _end(TaskEnd(id=record.id, state="succeeded", result=result, handed_to=record.handed_to, problem=problem))


async def _result(handle: TaskHandle[Any], record: Record) -> tuple[Any, str | None]:
    """Return the result of a task, or why it is not shown."""
    if record.handed_to is not None:
        return None, None
    try:
        data = await handle.read_result()
        if len(data) > MAX_RESULT:
            return None, f"the result has {len(data):,} bytes: read it by GET /tasks/{record.id}/result"
        return from_json(data), None
    except (DecryptionError, LargeValueLost, ValueError) as error:
        return None, str(error)


def _end(end: TaskEnd) -> Frame:
    return Frame("0-0", "end", end.model_dump_json().encode())


def _place(event_id: str) -> EventPlace | None:
    """Return the place of an event; None for an item of a stream whose name another program wrote."""
    try:
        return event_place(event_id)
    except ValueError:
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _json(data: Any) -> bytes:
    return to_json(data, inf_nan_mode="strings")
