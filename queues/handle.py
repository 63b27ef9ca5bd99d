"""The handle of a task: status, result, events, messages, cancellation.

Cancellation of a task, at once or by a request to the workers.

A user of Redis that may not remove tasks from a queue, such as a producer, adds a request to the due set of the
task's partition, where a worker finds it at once and cancels the task in its place. The request names the life of the
task that the caller has read: one that arrives late does not cancel a task that was replayed, or enqueued again under
its id, since.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args

import anyio
import orjson
from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema, from_json, to_json

from .delivery.due_set import CANCEL_REQUEST
from .derived_tasks import MAX_HAND_OFFS, confirm_successor
from .doubts import Decision, Doubt, Resolution, read_doubts, resolve_step
from .durations import Moment, seconds_until
from .envelope import DEFAULT_PAYLOAD_LIMIT, check_task_id, is_task_id, is_turn_id, readable_envelope
from .errors import (
    DecryptionError,
    HandOffRefused,
    QueueError,
    Refused,
    TamperedData,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    Unavailable,
)
from .event_log import TaskEvent, dismiss_finding, read_events
from .inbox import InboxMessage, Sent, read_inbox, send_correction, send_message
from .inspection.views import find_task
from .junk import report_once, shown_bytes
from .keys import GROUP, RESERVED, Namespace, Partition
from .open_joins import awaited_joins, stop_join
from .partitions.route import registered_retention
from .pubsub import LOST, TaskNotifications
from .records import Progress, Record, State, read_record
from .runtime import RUNTIME
from .security.encryption import RESULT, RESULT_CHUNKS
from .shared_config import read_seconds
from .transport.backoff import retry_while_unavailable
from .transport.clients import is_denied
from .transport.gateway import Gateway
from .transport.large_values import LargeValue, read_large
from .transport.scripts import queue_script
from .transport.threadsafe_calls import blocking, iterate_blocking
from .unique import free_marker

if TYPE_CHECKING:
    from .emitted_events import MergedEvents
    from .explanation.sentences import Explanation
    from .security.approvers import ApproverKey
    from .streams import StreamItem
    from .values import NamedValue, ValueReceipt
    from .waits import AnswerReceipt, OpenWait

R = TypeVar("R")
T = TypeVar("T")

_SERVED: ContextVar[Collection[str]] = ContextVar("perdure_served_queues", default=())
"""Queues of the worker in whose task the caller runs; empty outside of tasks."""

_OPENER: ContextVar[Callable[..., TaskHandle[Any]] | None] = ContextVar("perdure_handle_opener", default=None)
"""Makes handles from their JSON form in the tasks of a worker; None outside of tasks."""

_PARKING: ContextVar[Callable[[TaskHandle[Any], Moment | None], Coroutine[Any, Any, Any] | None] | None] = ContextVar(
    "perdure_parking", default=None
)
"""Returns a wait for a task's result that parks the caller's run; None where the caller waits in memory."""

_OPEN: Final[Any] = object()
"""Default of a result that is not given: None is a result."""

DEFAULT_RESULT_TTL: Final = 86_400.0
"""Seconds for which the record of an ended task is kept."""

_FIRST_READ: Final = 1.0
"""Seconds that the first read may take, so that a timeout of 0 means one read."""

_PROGRESS: Final = b"progress"
"""Notification of new progress."""

_VALUE_NEWS: Final = frozenset({b"value", LOST})
"""Notifications after which a follower reads the named values."""

_PAGE: Final = 200
"""Events that are read at once."""

_POLL_INTERVAL: Final = 30.0
"""Seconds after which a waiter reads the record without a notification."""


@asynccontextmanager
async def serving(
    queues: Collection[str],
    opener: Callable[..., TaskHandle[Any]],
    parking: Callable[[TaskHandle[Any], Moment | None], Coroutine[Any, Any, Any] | None],
) -> AsyncIterator[None]:
    """Know, in all asyncio tasks that are started in the block, that their worker serves these queues.

    opener: makes a handle from task id, partition and decoder. parking: see `_PARKING`.
    """
    served, opens, parks = _SERVED.set(queues), _OPENER.set(opener), _PARKING.set(parking)
    try:
        yield
    finally:
        _PARKING.reset(parks)
        _OPENER.reset(opens)
        _SERVED.reset(served)


def is_served_here(queue: str) -> bool:
    """Return whether the caller is a task of a worker that serves a queue."""
    return queue in _SERVED.get()


def place_of(handle: TaskHandle[Any]) -> dict[str, Any]:
    """Return the JSON form of a handle: id, namespace, queue and partition of its task."""
    at = handle.partition
    return {"id": handle.id, "namespace": at.namespace, "queue": at.queue, "partition": at.index}


def _open_handle(decode: Callable[[bytes], Any], place: Mapping[str, Any]) -> TaskHandle[Any]:
    """Return a handle from its JSON form. Raises `ValueError` outside of a running task."""
    if (opener := _OPENER.get()) is None:
        raise ValueError(
            f"a TaskHandle can be read from JSON only in a task that a worker runs: elsewhere, read its id and call "
            f"find({place['id']!r}) of an app or a producer"
        )
    return opener(place["id"], Namespace(place["namespace"]).partition(place["queue"], place["partition"]), decode)


class TaskHandle(Generic[R]):
    """A task, by its id, from any process. existed: whether its enqueue found this task, by its id or its unique key.

    Each asynchronous call has a synchronous one with the suffix `_sync`, which blocks the calling thread. It runs on
    the event loop where the handle was made, and raises `EventLoopError` if the caller runs on that loop itself.
    """

    def __init__(
        self,
        task_id: str,
        partition: Partition,
        gateway: Gateway,
        notifications: TaskNotifications,
        decode: Callable[[bytes], R] = from_json,
        *,
        retention: float = DEFAULT_RESULT_TTL,
        payload_limit: int = DEFAULT_PAYLOAD_LIMIT,
        existed: bool = False,
    ) -> None:
        self.id = task_id
        self.existed = existed
        self.partition = partition
        self._gateway = gateway
        self._notifications = notifications
        self.decode = decode
        self._retention = retention
        self._followed = 0
        self._asked: float | None = None  # the timeout of the call that followed
        self._payload_limit = payload_limit

    def __repr__(self) -> str:
        return f"TaskHandle({self.id!r}, queue={self.partition.queue!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether both are handles of the same task."""
        return isinstance(other, TaskHandle) and (self.id, self.partition) == (other.id, other.partition)

    def __hash__(self) -> int:
        return hash((self.id, self.partition))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of handles in results and arguments: id and place of the task, see `place_of`."""
        [declared] = get_args(source) or (Any,)
        adapter = None if declared is Any or isinstance(declared, TypeVar) else TypeAdapter(declared)
        decode: Callable[[bytes], Any] = from_json if adapter is None else adapter.validate_json
        fields = ("id", "namespace", "queue")
        form = core_schema.typed_dict_schema(
            {name: core_schema.typed_dict_field(core_schema.str_schema()) for name in fields}
            | {"partition": core_schema.typed_dict_field(core_schema.int_schema(ge=0))}
        )
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(partial(_open_handle, decode), form),
            python_schema=core_schema.union_schema(
                [
                    core_schema.is_instance_schema(cls),
                    core_schema.no_info_after_validator_function(partial(_open_handle, decode), form),
                ]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(place_of, return_schema=form),
        )

    async def record(self) -> Record:
        """Return the record. Raises `TaskNotFound` if there is no record, or not any more."""
        record = await read_record(self._gateway, self.partition, self.id)
        if record is None:
            raise TaskNotFound(self.id, self._where)
        return record

    async def progress(self) -> Progress | None:
        """Return the progress that the handler has reported last, None if it has not.

        Raises `TaskNotFound`, `DecryptionError`.
        """
        return (await self.record()).progress()

    async def explain(self) -> Explanation:
        """Return why the task is in its state, and what happens next. Raises `TaskNotFound`."""
        from .explanation import explain_task

        explained = await explain_task(self._gateway, self.partition, self.id)
        if explained is None:
            raise TaskNotFound(self.id, self._where)
        return explained

    @property
    def _where(self) -> str:
        return f"queue {self.partition.queue!r} on {self._gateway.address.shown}"

    async def status(self) -> State:
        """Return the current state."""
        return (await self.record()).state

    async def result(self, timeout: Moment | None = None) -> R:
        """Wait for the result and return it. If the task has a successor, return that one's result.

        Waits for a notification. Retries while Redis is unavailable, and for 30 s while it refuses the password, which
        may be rotated meanwhile. In a handler outside its steps, the call is recorded once, like a step, and the
        handler's task is parked meanwhile.

        Args:
            timeout: Seconds or a timedelta to wait, or a datetime until which to wait; None for ever.

        Raises:
            TimeoutError: The timeout has passed; the message explains the state of the task.
            TaskFailed: The task is a dead letter.
            TaskCancelled: The task was cancelled.
            TaskNotFound: There is no record.
            DecryptionError: The result is encrypted, and the key is missing.
            LargeValueLost: A part of a large result is missing.
            Refused: Redis refuses the user or password for longer.
        """
        parking = _PARKING.get()
        if parking is not None and (waiting := parking(self, timeout)) is not None:
            awaited: R = await waiting
            return awaited
        return self.decode(await self.read_result(timeout))

    async def read_result(self, timeout: Moment | None = None) -> bytes:
        """Wait for the result in memory, and return it as JSON. See `result`."""
        started = RUNTIME.monotonic()
        timeout = None if timeout is None else seconds_until(timeout, "timeout")
        try:
            with anyio.fail_after(None if timeout is None else max(timeout, _FIRST_READ)):
                record = await retry_while_unavailable(self.record)
            if not record.state.terminal:
                if is_served_here(self.partition.queue):
                    self._warn_of_deadlock()
                with anyio.fail_after(None if timeout is None else timeout - (RUNTIME.monotonic() - started)):
                    record = await self._wait()
        except TimeoutError:
            raise TimeoutError(await self._explain_wait(self._asked or timeout or 0.0)) from None
        if record.handed_to is not None and self._is_continued(record):
            left = None if timeout is None else max(0.0, timeout - (RUNTIME.monotonic() - started))
            return await (await self._next(record.handed_to, self._asked or timeout)).read_result(left)
        return await self._outcome(record)

    def _is_continued(self, record: Record) -> bool:
        """Return whether a successor has the result. Where encryption is required, the encrypted result says which.

        Raises `DecryptionError`.
        """
        cipher = record.cipher
        if cipher.accepts_plain:
            return True
        if record.state is not State.SUCCEEDED:
            return False
        if cipher.decrypt(RESULT, record.result or b"") != orjson.dumps(record.handed_to):
            raise TamperedData(f"the successor of task {self.id}")
        return True

    def _warn_of_deadlock(self) -> None:
        warnings.warn(
            f"a task waits for the result of task {self.id} on queue {self.partition.queue!r}, which its own worker "
            "serves: if every slot waits like this, no worker runs the awaited tasks; return without the result, or "
            "continue in the other task with ctx.continue_as",
            RuntimeWarning,
            stacklevel=4,
        )

    async def _explain_wait(self, timeout: float) -> str:
        """Return that the task has no result yet, why, and which server was asked."""
        name, why = "", "Redis does not answer"
        with anyio.move_on_after(_FIRST_READ):
            try:
                explained = await self.explain()
                name, why = f" ({explained.task})", explained.sentence
            except QueueError as error:
                why = str(error)
        return f"task {self.id}{name} did not end within {timeout:g} s: {why}; server: {self._gateway.address.shown}"

    async def successor(self) -> TaskHandle[R] | None:
        """Return the task that continues this one, or None. Raises `TaskNotFound`."""
        record = await self.record()
        return None if record.handed_to is None else await self._next(record.handed_to)

    async def _next(self, task_id: str, asked: float | None = None) -> TaskHandle[R]:
        if self._followed > MAX_HAND_OFFS or task_id == self.id:
            raise HandOffRefused(f"could not follow task {self.id} to {task_id}: a circle, or too many successors")
        namespace = Namespace(self.partition.namespace)
        found = await retry_while_unavailable(lambda: find_task(self._gateway, namespace, task_id))
        if found is None:
            where = f"namespace {namespace.name!r} on {self._gateway.address.shown}"
            raise TaskNotFound(task_id, f"{where}, as successor of task {self.id}")
        following = TaskHandle(
            task_id,
            found,
            self._gateway,
            self._notifications,
            self.decode,
            retention=self._retention,
            payload_limit=self._payload_limit,
        )
        following._followed, following._asked = self._followed + 1, asked
        return following

    async def _wait(self) -> Record:
        async with self._subscription() as notifications:
            while True:
                record = await retry_while_unavailable(self.record)
                if record.state.terminal:
                    return record
                with anyio.move_on_after(_POLL_INTERVAL):
                    while await notifications.get() == _PROGRESS:
                        pass

    @asynccontextmanager
    async def _subscription(self) -> AsyncIterator[asyncio.Queue[bytes]]:
        """Subscribe to the task's notifications. Retries until Redis is available."""
        channel = self.partition.record(self.id)
        async with AsyncExitStack() as stack:
            yield await retry_while_unavailable(lambda: stack.enter_async_context(self._notifications.listen(channel)))

    async def _outcome(self, record: Record) -> bytes:
        if record.state is State.CANCELLED:
            raise TaskCancelled(self.id, replaced_by=record.replaced_by, dropped=record.dropped)
        if record.state is State.DEAD:
            raise TaskFailed(self.id, record.reason or "unknown", dict(record.error or {}))
        if record.result is None and record.cipher.accepts_plain:
            return b"null"
        data = record.cipher.decrypt(RESULT, record.result or b"")
        if (value := LargeValue.decode(data)) is not None:
            key, what = self.partition.record(self.id), f"the result of task {self.id}"
            decrypt = partial(record.cipher.decrypt, RESULT_CHUNKS)
            data = await read_large(self._gateway, key, "result", "", value, decrypt, what)
        return data

    async def cancel(self) -> State:
        """Cancel the task: at once if no worker runs it, else as soon as its worker gets the request.

        The worker is notified, and cancels the handler, which may clean up for a few seconds. Its further steps are
        refused, and the task ends as cancelled, whatever the handler returns or raises. If the notification is lost,
        the worker sees the request at the next step or lease renewal. A handler that has returned by then succeeds.

        A task that has a clean-up task (`@app.task(on_end=...)`) and does not run is due at once: a worker cancels it.

        A user of Redis that may not remove tasks from a queue, such as a producer, requests it: a worker of the queue
        then cancels the task in its place.

        Returns:
            The state after the request: `cancelled`, `running` (the worker gets the request), an earlier terminal
            state, or if a worker must cancel the task, the state that it has until then.

        Raises:
            TaskNotFound: There is no record.
        """
        return await cancel_task(self._gateway, self.partition, self.id, retention=self._retention)

    async def send(self, content: Any, *, sender: str = "", message_id: str | None = None) -> Sent:
        """Send a message to the task's inbox. `waits_on` of what is returned: it waits for another sender.

        Args:
            content: JSON data.
            sender: Name of the sender.
            message_id: A message that is sent again under the same id is stored once.

        Raises:
            TaskNotFound: There is no such task.
            TaskEnded: The task has ended.
            InboxFull: The inbox is full.
            PayloadTooLarge: The message is too large.
            TypeError: The content is not JSON.
        """
        return await send_message(
            self._gateway,
            self.partition,
            self.id,
            content,
            sender=sender,
            message_id=message_id,
            limit=self._payload_limit,
            hint=True,
        )

    async def answer(
        self,
        wait: str,
        value: Any,
        *,
        by: str = "",
        answer_id: str | None = None,
        shows: str | None = None,
        approver: ApproverKey | Path | str | None = None,
    ) -> AnswerReceipt:
        """Answer a wait of the task (`ctx.wait_for`, `ctx.ask`), and wake it.

        By name, the open wait of that name gets the answer. If none of that name was opened yet, it is kept for the
        first, and `early` of what is returned is true. Otherwise it is refused: it reaches no other question.

        Args:
            wait: Name of the wait, or its id such as `approval#2`; `approval#1` is the first of its name.
            value: JSON data or a model, checked by the JSON schema of the wait.
            by: Name of the sender. An answer of an approver has the name of the key, one from a task's handler the id
                of that task.
            answer_id: An answer that is sent again under the same id is stored once.
            approver: Private key that signs the answer, or its file. Default: that of PERDURE_APPROVER_KEY_FILE.
            shows: `shows` of the open wait, as `waits` returned it when its content was shown to the sender: a wait
                that shows something else now refuses the answer. Without it the answer is for what the wait shows now.

        Raises:
            WaitNotFound: The task has no open wait of this id, or several of this name.
            AnswerRefused: The wait takes no answer: it has one, was closed, has timed out, or shows something else;
                or its own task answers it.
            ApproverNeeded: An approver must sign the answer, and the caller has no key of one who may.
            InvalidAnswer: The value does not fit the schema of the wait.
            TaskNotFound, TaskEnded: There is no such task, or it has ended.
            NoKey, PayloadTooLarge: See there.
            TypeError: The value is not JSON.
            ValueError: A task names another sender than itself.
        """
        from .waits import answer_wait

        options: dict[str, Any] = {"by": by, "answer_id": answer_id, "limit": self._payload_limit, "shows": shows}
        return await answer_wait(self._gateway, self.partition, self.id, wait, value, approver=approver, **options)

    async def waits(self) -> list[OpenWait]:
        """Return the open waits of the task for answers, the oldest first."""
        from .waits import read_live_waits

        return (await read_live_waits(self._gateway, self.partition, self.id)).open

    async def values(self) -> dict[str, Any]:
        """Return the named values of the task (`ctx.values`), or of its last successor.

        Raises:
            TaskNotFound: There is no such task.
            DecryptionError: This process cannot decrypt one of them.
            UnreadableRecord: Another program has changed one of them.
        """
        from .values import read_task_values

        found = await read_task_values(self._gateway, self.partition, self.id, strict=True)
        return {value.name: value.value for value in found}

    async def update(self, name: str, value: Any, *, by: str = "") -> ValueReceipt:
        """Set a named value of the task, which its handler reads with `ctx.values.get(name)`. The later change counts.

        Args:
            name: 1 to 64 letters, digits, `.`, `_` or `-`. A task has at most 64 values.
            value: JSON data or a model, at most 64 KiB.
            by: Name of the person or program.

        Raises:
            TaskNotFound, TaskEnded: There is no such task, or it has succeeded or was cancelled.
            ValueRefused: The value is too large, or one too many.
            NoKey: See there.
            TypeError: The value is not JSON.
            ValueError: The name is not valid.
        """
        from .values import update_value

        return await update_value(self._gateway, self.partition, self.id, name, value, by=by)

    async def correct(
        self, changes: Mapping[str, Any], *, by: str = "", message_id: str | None = None, confirm: bool = False
    ) -> Sent:
        """Correct the state of an agent: it applies the changes before its next step, all or none.

        The event `corrected` or `correction_refused` says which. A task that waits for a message is woken; a dead
        letter applies them after its replay. A task that is not an agent ignores them.

        Args:
            changes: JSON data by the path of a field, such as `context.city`, or by its JSON pointer.
            by: Name of the person.
            message_id: A correction that is sent again under the same id is stored once.
            confirm: Confirm that an agent with `on_resume="ask"` may continue, also without changes.

        Raises as `send`, and `ValueError` without changes.
        """
        options: dict[str, Any] = {"sender": by, "message_id": message_id, "limit": self._payload_limit}
        return await send_correction(self._gateway, self.partition, self.id, changes, confirm=confirm, **options)

    async def dismiss(self, event: int) -> None:
        """Dismiss the coherence finding that has this event, and equal ones from now on. Raises `ValueError`."""
        await dismiss_finding(self._gateway, self.partition, self.id, event)

    async def doubts(self) -> list[Doubt]:
        """Return the risky steps that were cut off, and may have acted; none while a worker runs the task.

        Raises `TaskNotFound`.
        """
        if await self.status() is State.RUNNING:
            return []
        return await read_doubts(self._gateway, self.partition, self.id)

    async def resolve_step(
        self, step: str, *, result: Any = _OPEN, failed: str | None = None, run_again: bool = False, by: str = ""
    ) -> State:
        """Decide about a risky step that was cut off: the next run takes the decision in place of calling the step.

        Exactly one of `result`, `failed` and `run_again` must be given. A later decision replaces this one until a run
        has read it. A dead letter stays one: replay it then.

        Args:
            step: Key of the step, as the error `StepInDoubt` names it.
            result: The step returns this value, JSON data that fits the type that its function declares.
            failed: The step raises `StepResolvedAsFailed` with this text.
            run_again: The step is called again.
            by: Name of the person, for the event log.

        Returns:
            The state of the task.

        Raises:
            CannotResolve: The step is not in doubt, a worker runs the task, or it has ended.
            TaskNotFound, PayloadTooLarge, DecryptionError
            TypeError: The result has no JSON form.
            ValueError: None or several of the three are given.
        """
        if (result is not _OPEN) + (failed is not None) + (run_again is True) != 1 or failed == "":
            raise ValueError("resolve_step needs exactly one of result=, failed= (a text) and run_again=True")
        decision: Decision = "run_again" if run_again else "result" if failed is None else "failed"
        text = failed or ""
        if decision == "result":
            try:
                text = to_json(result, inf_nan_mode="strings").decode()
            except PydanticSerializationError as error:
                raise TypeError(f"result must be JSON data, got {type(result).__name__}: {error}") from None
        found = Resolution(decision, text, by)
        return await resolve_step(self._gateway, self.partition, self.id, step, found, limit=self._payload_limit)

    async def pending_messages(self) -> list[InboxMessage]:
        """Return the messages in the task's inbox that it has not used yet, in order. They stay there."""
        return [message async for message in read_inbox(self._gateway, self.partition, self.id)]

    def stream(
        self, name: str = "output", *, type: Any = Any, after: str | int | None = None, last: int | None = None
    ) -> AsyncGenerator[StreamItem]:
        """Follow a stream of the task, that is what its handler emits (`ctx.emit`), until the task has ended.

        Yields items, marks that make items of a repeated step void (`StreamItem.voids`), and at last an item of the
        kind `end`, whatever ends the task. Waits for a task that is queued, parked, or being retried. If the task has
        a successor, its stream of this name follows.

        Args:
            name: Name of the stream.
            type: Type of the items, such as a model; a value that does not fit it is a `problem` of its item.
            after: Cursor of the item after which to start. Default: the oldest one that is kept.
            last: Of the items that are stored already, only the last so many; those of the newest successor.

        Raises:
            ValueError: An argument is not valid, or the cursor is of another task.
            TaskNotFound: There is no record.
            StreamTrimmed: Items after the cursor are not kept any more; so are those that a slow reader has not read.
            Refused: Redis refuses the user or password for longer.
        """
        from .streams import read_stream, stream_query

        return read_stream(self, self._gateway, self._notifications, stream_query(name, type, after, last))

    def events(
        self, *, follow: bool = True, after: str = "0-0", include: Literal["emitted"] | None = None
    ) -> AsyncGenerator[TaskEvent]:
        """Yield the task's events, oldest first; with `follow`, until the task has ended.

        With `follow`, each new progress that the handler reports is an event `progress`, and each change of a named
        value an event `value_set` with name, value and sender. The log does not have these. The first are those that
        there are; of changes in quick succession, the last one is seen.

        Args:
            after: Id of the event after which to start.
            include: With `"emitted"`, the items of all streams of the task are events of this type, in the order of
                time. Their data has `stream`, `kind` and `cursor`, and the `value` of an item.

        Raises:
            ValueError: `include` is anything else, or `after` is no id of an event.
        """
        if include is None:
            return self._events(None, after, follow=follow)
        if include != "emitted":
            raise ValueError(f"include must be 'emitted' or None, got {include!r}")
        from .emitted_events import MergedEvents

        merged = MergedEvents(self._gateway, self.partition, self.id, after)
        return self._events(merged, after, follow=follow)

    async def _events(self, merged: MergedEvents | None, after: str, *, follow: bool) -> AsyncGenerator[TaskEvent]:
        read = partial(read_events, self._gateway, self.partition, self.id, limit=_PAGE)

        async def read_page() -> tuple[list[TaskEvent], bool]:
            if merged is not None:
                return await merged.read()
            page = await read(after=after)
            return page, len(page) == _PAGE

        changed, more = asyncio.Event(), True
        reported: int | None = None
        record: Record | None = None
        news, values_read = {LOST}, 0

        def notice(channel: bytes, message: bytes) -> None:
            news.add(message)
            changed.set()

        async with AsyncExitStack() as stack:

            async def subscribe(*channels: str) -> None:
                watched = self._notifications.watch(channels, notice)
                await stack.enter_async_context(watched)

            if follow:
                await retry_while_unavailable(partial(subscribe, self.partition.record(self.id)))
            known: set[str] = set()
            while True:
                changed.clear()
                seen = news.copy()
                news.clear()
                if follow:
                    record = await retry_while_unavailable(self.record)
                more = True
                while more:
                    page, more = await (retry_while_unavailable(read_page) if follow else read_page())
                    for event in page:
                        after = event.id
                        yield event
                    if follow and merged is not None and (added := merged.streams - known):
                        await retry_while_unavailable(partial(subscribe, *added))
                        known |= added
                        more = True  # since the read before the subscription
                if record is None:
                    return
                if record.reported_at != reported and (progress := record.shown_progress()) is not None:
                    reported = record.reported_at
                    yield TaskEvent(after, progress.at, "progress", None, progress.summary(), task_id=self.id)
                if record.state.terminal or not seen.isdisjoint(_VALUE_NEWS):
                    values_read, values = await self._changed_values(values_read)
                    for value in values:
                        data = {"name": value.name, "value": value.value, "by": value.by}
                        yield TaskEvent(
                            after, value.at, "value_set", None, data, problem=value.problem, task_id=self.id
                        )
                if record.state.terminal:
                    return
                with anyio.move_on_after(_POLL_INTERVAL):
                    await changed.wait()
                if not news:
                    news.add(LOST)

    async def _changed_values(self, after: int) -> tuple[int, list[NamedValue]]:
        from .values import read_changes

        read = partial(read_changes, self._gateway, self.partition, self.id, after=after)
        return await retry_while_unavailable(read)

    # synchronous calls

    def _run(self, call: Callable[[TaskHandle[R]], Coroutine[Any, Any, T]], instead: str) -> T:
        return self._gateway.sync_caller.call(lambda: call(self), f"await handle.{instead}")

    record_sync = blocking(record, _run)
    status_sync = blocking(status, _run)
    read_result_sync = blocking(read_result, _run)
    explain_sync = blocking(explain, _run)
    progress_sync = blocking(progress, _run)
    result_sync = blocking(result, _run)
    successor_sync = blocking(successor, _run)
    cancel_sync = blocking(cancel, _run)
    send_sync = blocking(send, _run)
    answer_sync = blocking(answer, _run)
    waits_sync = blocking(waits, _run)
    values_sync = blocking(values, _run)
    update_sync = blocking(update, _run)
    correct_sync = blocking(correct, _run)
    dismiss_sync = blocking(dismiss, _run)
    doubts_sync = blocking(doubts, _run)
    resolve_step_sync = blocking(resolve_step, _run)
    pending_messages_sync = blocking(pending_messages, _run)

    def events_sync(
        self, *, follow: bool = True, after: str = "0-0", include: Literal["emitted"] | None = None
    ) -> Iterator[TaskEvent]:
        """See `events`."""
        events = self.events(follow=follow, after=after, include=include)
        return iterate_blocking(events, self._gateway.sync_caller, "handle.events()")

    def stream_sync(
        self, name: str = "output", *, type: Any = Any, after: str | int | None = None, last: int | None = None
    ) -> Iterator[StreamItem]:
        """See `stream`."""
        items = self.stream(name, type=type, after=after, last=last)
        return iterate_blocking(items, self._gateway.sync_caller, "handle.stream(...)")


_CANCEL: Final = queue_script("cancel")
CANCEL: Final = _CANCEL.name
"""Name of the script in `gateway.denied`, if the user may not cancel tasks itself."""

_READ: Final = ("at", "entry", "token", "replays")
_LIFE: Final = 3
"""Fields of a request after the id that say which life of the task is meant; see `_life`."""


class Replacement(NamedTuple):
    """Why a task is cancelled: another one of its unique key or limit has replaced it, or a limit has no room for it.

    by: id of that task. unstarted: whether a task that a worker has started is left alone. limit: name of the limit.
    """

    by: str
    unstarted: bool = False
    limit: str = ""

    def fields(self) -> list[bytes]:
        """Return the further fields of a request."""
        return [self.by.encode(), b"1" if self.unstarted else b""]

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Replacement | None:
        """Return what the further fields of a request say; None without any. Raises `ValueError`."""
        if not fields:
            return None
        by, unstarted = fields
        return cls(check_task_id(by.decode("ascii")), unstarted == b"1")


class TaskScope(NamedTuple):
    """Scope of a job that cancels: compared with the task at the moment of the act.

    states: any of them; empty for all. until: latest time of enqueueing in milliseconds, None for any. unstarted:
    whether a task that a worker has started is left alone.
    """

    states: frozenset[State]
    until: int | None = None
    unstarted: bool = False

    def fields(self) -> list[bytes]:
        """Return the arguments of the script."""
        return [",".join(sorted(self.states)).encode(), b"" if self.until is None else b"%d" % self.until]


async def cancel_within(
    gateway: Gateway, partition: Partition, task_id: str, only: TaskScope, *, retention: float
) -> bytes:
    """Cancel a task if it is within a scope, else leave it alone; return the answer of the script (see cancel.lua).

    Raises `Refused` if the user may not cancel tasks itself.
    """
    return await _cancel(gateway, partition, task_id, retention, only=only)


async def cancel_task(
    gateway: Gateway, partition: Partition, task_id: str, *, retention: float, replacement: Replacement | None = None
) -> State:
    """Cancel a task, and end its turn if it is one of a session. See `TaskHandle.cancel`.

    If the caller dies in between, another call, or the session sweeper, ends the turn.

    Args:
        retention: Seconds for which the record is kept, if the namespace has no setting.
    """
    answer = None
    if _CANCEL.name not in gateway.denied:
        try:
            answer = await _cancel(gateway, partition, task_id, retention, replacement=replacement)
        except Refused as error:
            if not is_denied(error):
                raise
            gateway.denied.add(_CANCEL.name)
    if answer is None:
        return await _request(gateway, partition, task_id, replacement)
    if answer == b"missing":
        raise _not_found(gateway, partition, task_id)
    if answer in (b"deferred", b"started"):
        record = await read_record(gateway, partition, task_id)
        return State.CANCELLED if record is None else record.state
    return State.RUNNING if answer == b"requested" else State(answer.decode())


async def answer_requests(
    gateway: Gateway, partition: Partition, requests: Sequence[bytes], *, retention: float
) -> None:
    """Cancel the tasks whose cancellation was requested, and remove the requests. retention: see `cancel_task`."""
    for request in requests:
        task_id, *life = request.removeprefix(CANCEL_REQUEST).split(b" ")
        try:
            if is_task_id(name := task_id.decode("ascii", "replace")):
                life, further = life[:_LIFE], life[_LIFE:]
                await _cancel(gateway, partition, name, retention, life, replacement=Replacement.of(further))
        except Unavailable:
            raise  # the request stays
        except Exception as error:  # noqa: BLE001 - one request must not keep the others waiting
            report_once(f"could not cancel a task of queue {partition.queue!r} for {shown_bytes(request)}: {error}")
        await gateway.command("ZREM", partition.due, request)


async def _cancel(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    retention: float,
    life: Sequence[bytes] | None = None,
    *,
    replacement: Replacement | None = None,
    only: TaskScope | None = None,
) -> bytes:
    """Cancel a task that no worker runs, else ask its worker; return the answer of the script.

    life: that of the task, None for any; another one is left alone, and the answer is `changed`.
    """
    ready, record, steps, log, inbox, control = partition.run_keys(task_id)
    keys = [ready, record, steps, log, partition.due, partition.retentions, inbox, control, partition.timeline]
    keys += (partition.nudge, partition.outbox)
    namespace = Namespace(partition.namespace)
    answer, wakes, envelope = b"changed", b"", b""
    while answer == b"changed":  # the task was replaced or replayed after it was read
        stored, (source, *found) = await gateway.pipeline(
            [
                ("HGET", namespace.config, "result_ttl"),
                ("HMGET", record, "handed_from", *_READ, "wakes", "waits", "env"),
            ]
        )
        *read, wakes, waits, envelope = (value or b"" for value in found)
        if life is not None and life != _life(*read):
            return answer
        ttl = read_seconds(stored) or retention
        if source is not None:  # a cancelled successor must not be stored again once its record has expired
            await confirm_successor(gateway, namespace, source.decode())
        kept = (round(ttl * 1000), registered_retention(ttl))
        unstarted = b"1" if only is not None and only.unstarted else b""
        further = [b"", unstarted] if replacement is None else replacement.fields()
        further.append(b"" if replacement is None else replacement.limit.encode())
        further += [b"", b""] if only is None else only.fields()
        args = (GROUP, RESERVED, task_id, *kept, *read, namespace.worker_channel(""), waits, *further)
        answer = await gateway.run(_CANCEL, [*keys, *_parked_in(partition, waits.decode(), wakes)], args)
    if answer == b"deferred" and b"join:" in wakes:
        await _cancel_children(gateway, partition, task_id, wakes.decode(), retention)
    if answer == b"cancelled" and is_turn_id(task_id):
        await _end_turn(gateway, partition, task_id)
    if answer == b"cancelled" and replacement is None and b'"unique"' in envelope:
        await _free_key(gateway, namespace, task_id, envelope)
    return answer


async def _free_key(gateway: Gateway, namespace: Namespace, task_id: str, envelope: bytes) -> None:
    """Remove the marker of the unique key of a cancelled task: it takes memory only."""
    read = readable_envelope(envelope)
    if read is not None and read.unique is not None:
        with suppress(DecryptionError, Refused):
            await free_marker(gateway, namespace, read.unique, task_id)


async def _cancel_children(gateway: Gateway, partition: Partition, task_id: str, wakes: str, retention: float) -> None:
    """Cancel the children that a parent waits for, which may occupy the slots that its own end needs.

    Its worker cancels what is left, also if this caller dies or may not do so.
    """
    for group in awaited_joins(wakes):
        with suppress(Refused):
            for place, child in await stop_join(gateway, partition, task_id, group):
                with suppress(TaskNotFound):
                    await cancel_task(gateway, place, child, retention=retention)


async def cancel_request(
    gateway: Gateway, partition: Partition, task_id: str, replacement: Replacement | None = None
) -> bytes:
    """Return a request to cancel the task that has this id now, for the due set of its partition."""
    read = (value or b"" for value in await gateway.command("HMGET", partition.record(task_id), *_READ))
    further = [] if replacement is None else replacement.fields()
    return CANCEL_REQUEST + b" ".join((task_id.encode(), *_life(*read), *further))


async def _request(gateway: Gateway, partition: Partition, task_id: str, replacement: Replacement | None) -> State:
    """Request the cancellation of a task, and return the state that it has now. A request that is repeated is one."""
    record = await read_record(gateway, partition, task_id)
    if record is None:
        raise _not_found(gateway, partition, task_id)
    if not record.state.terminal:
        member = await cancel_request(gateway, partition, task_id, replacement)
        await gateway.pipeline(
            [("ZADD", partition.due, 0, member), ("XADD", partition.nudge, "MAXLEN", 16, "*", "why", "due")]
        )
    return record.state


def _life(at: bytes, entry: bytes, token: bytes, replays: bytes) -> list[bytes]:
    """Return what differs between the tasks of an id, and between a task and its replay: as cancel.lua compares it."""
    return [at or entry.partition(b"-")[0], token, replays]


def _not_found(gateway: Gateway, partition: Partition, task_id: str) -> TaskNotFound:
    return TaskNotFound(task_id, f"queue {partition.queue!r} on {gateway.address.shown}")


async def _end_turn(gateway: Gateway, partition: Partition, task_id: str) -> None:
    """End the turn of a cancelled task. A task of a forgotten session is deleted."""
    from .errors import TurnEarly
    from .sessions.record import SessionAddress, parse_turn_id
    from .sessions.removal import forget_task
    from .sessions.turns import SessionTurnEnd, end_turn

    if (turn := parse_turn_id(task_id)) is None:
        return
    address = SessionAddress.at(Namespace(partition.namespace), turn.digest)
    # Suppressed: Redis has lost the claim; this caller cannot read the next message, or has no rights to the session.
    with suppress(TurnEarly, DecryptionError, Refused):  # the session sweeper does the rest
        if not await end_turn(gateway, address, turn, SessionTurnEnd("cancelled", b"cancelled")):
            await forget_task(gateway, partition, task_id)


def _parked_in(partition: Partition, waits: str, wakes: bytes) -> tuple[str, ...]:
    """Return the set of parked tasks that one with these fields of its record is in: of a version, or of pauses."""
    if wakes.startswith(b"pause:"):
        return (partition.paused,)
    if not waits.startswith("version "):
        return ()
    _, of, task = waits.partition(" of ")
    return (partition.task_versions(task) if of else partition.versions,)
