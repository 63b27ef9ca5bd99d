"""Sessions as callers use them: a conversation with an agent that outlives the tasks of its turns."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import anyio
import orjson
from pydantic import ValidationError
from pydantic_core import to_json

from ..queues.catalog import Catalog
from ..queues.durations import Moment, seconds_until
from ..queues.envelope import new_task_id
from ..queues.errors import (
    DecryptionError,
    KeyMissing,
    Refused,
    SessionError,
    SessionFailed,
    SessionNotFound,
    TaskCancelled,
    TaskEnded,
    TaskFailed,
)
from ..queues.inbox import Sent, check_changes
from ..queues.inspection.views import checkpoint_fields, find_task
from ..queues.json_form import encodable
from ..queues.keys import Namespace
from ..queues.producer import Producer
from ..queues.records import Record, State, read_record
from ..queues.runtime import RUNTIME
from ..queues.sessions.record import (
    SessionAddress,
    SessionCorrection,
    SessionMessage,
    SessionRecord,
    TurnId,
    read_history,
    read_session,
    read_turn,
)
from ..queues.sessions.removal import forget_session
from ..queues.sessions.turns import enqueue_turn, send_to_session, store_correction
from ..queues.transport.backoff import retry_while_unavailable
from ..queues.transport.threadsafe_calls import blocking, iterate_blocking
from .agent_task import AgentTask
from .agents.agent import S
from .agents.journal.history import CannotCorrect, corrected
from .agents.journal.snapshot import decode_snapshot
from .agents.resume_notice import NOTE
from .errors import BadSnapshot, InvalidArguments, StateMismatch, first_problem
from .middleware import EnqueueCall

if TYPE_CHECKING:
    from ..queues.handle import TaskHandle
    from ..queues.streams import StreamItem, StreamQuery

T = TypeVar("T")

_POLL_INTERVAL: Final = 30.0
"""Seconds after which a waiter reads the session without a notification."""

_CLAIMED_INTERVAL: Final = 0.1
"""The same for a turn that is claimed, but has no task yet: nothing says when it is stored."""


class Session(Generic[S]):
    """A conversation with an agent. No task, slot or message exists while it is idle.

    session = app.session(Assistant, "user-42")
    turn = await session.send("Where is my parcel?")
    answer = await turn.result(timeout=60)

    Each message is a turn of its own, and each turn a task: the message is the goal, the result the answer. Turns run
    one at a time, in the order of the messages. The state of the agent carries over from turn to turn, except plan and
    results. It is in Redis, not in this object: `state()`, `record()` and `history()` are calls that read it there.

    Calls with the suffix `_sync` are for synchronous code, see `App.sync`.
    """

    def __init__(self, agent: AgentTask[S], session_id: str, inputs: dict[str, Any]) -> None:
        for name in inputs:
            if name not in agent.state_type.inputs:
                known = ", ".join(agent.state_type.inputs) or "none"
                raise InvalidArguments(agent.name, f"the session has an unknown input {name!r}; known are: {known}")
        self.id = session_id
        self._agent = agent
        self._inputs = inputs

    def __repr__(self) -> str:
        return f"Session({self._agent.name!r}, {self.id!r})"

    @property
    def _address(self) -> SessionAddress:
        return SessionAddress.of(self._namespace, self._agent.name, self.id)

    @property
    def _namespace(self) -> Namespace:
        """The namespace of the session's tenant."""
        return Namespace(self._agent.task.app.producer.namespace.name, self._agent.own_tenant)

    async def send(
        self, text: str, *, sender: str = "", message_id: str | None = None, skip_failed: bool = False
    ) -> TurnHandle:
        """Send a message, and return its turn. Once this returns, the message is never lost.

        Args:
            sender: Name of the sender, for the history.
            message_id: A message that is sent again under the same id is stored once.
            skip_failed: Pass over a turn that is a dead letter, in place of raising `SessionFailed`.

        Raises:
            SessionFailed: An earlier turn is a dead letter; the message was not stored.
            SessionError: Another app has a session with this agent and id.
            SessionFull: Too many messages wait for their turn.
            InvalidArguments: The inputs of the session are not valid.
            PayloadTooLarge: The message is too large.
            Unavailable: Redis did not answer.
        """
        task, text = self._agent.task, encodable(text)
        whole, _ = task.arguments.encode_call((text,), self._inputs)
        arguments, secrets = task.arguments.encode_call(("",), self._inputs)  # the message is stored once
        try:
            self._agent.state_type.kind(**task.arguments.decode(whole))
        except ValidationError as error:
            raise InvalidArguments(task.name, first_problem(error)) from None
        producer, sent = task.app.producer, list[TurnId]()
        options = {"message_id": message_id, "skip_failed": skip_failed or None}
        call = EnqueueCall(
            task.name,
            {"goal": text, **self._inputs},
            self._agent.queue,
            {name: value for name, value in options.items() if value is not None},
            {"session": self.id},
        )

        async def store() -> str:
            turn = await send_to_session(
                producer.gateway,
                self._namespace,
                self._agent.name,
                self.id,
                text,
                queue=self._agent.queue,
                lane=task.lane,
                app=task.app.name,
                aliases=task.app.aliases,
                sender=sender,
                message_id=message_id,
                inputs=(arguments, secrets),
                headers={name: value for name, value in call.headers.items() if name != "session"},
                skip_failed=skip_failed,
                limit=producer.payload_limit,
            )
            sent.append(turn)
            return str(turn)

        await (store() if (chain := task.app.enqueue_chain) is None else chain(call, store))
        return TurnHandle(producer, self._address, sent[0], task.decode)

    async def turn(self, number: int) -> TurnHandle:
        """Return a turn by its number, as `send` returned it or `history` has it.

        Raises:
            SessionNotFound: There is no such session.
            ValueError: No message was sent with this number.
        """
        record = await self.record()
        if not 1 <= number <= record.sent:
            raise ValueError(f"number must be that of a turn of the session, 1 to {record.sent}, got {number!r}")
        task, address = self._agent.task, self._address
        return TurnHandle(task.app.producer, address, TurnId(address.digest, str(record.born), number), task.decode)

    async def record(self) -> SessionRecord:
        """Return the record: status, turns, times. Raises `SessionNotFound`."""
        found = await read_session(self._agent.task.app.producer.gateway, self._address)
        if found is None:
            raise SessionNotFound(f"{self.id!r} of agent {self._agent.name!r}")
        return found

    async def state(self) -> S:
        """Return the state that the last turn left.

        Raises:
            SessionNotFound: There is no such session.
            BadSnapshot: This version of Perdure cannot read the state.
            StateMismatch: The state does not fit the agent's class.
        """
        record = await self.record()
        stored = stored_state(record)
        if stored is None:
            return self._agent.state_type.kind(**self._inputs)
        load = partial(self._agent.state_type.load, f"session {self.id}")
        for one in record.waiting_corrections():
            with suppress(CannotCorrect, StateMismatch):  # the turn refuses it
                load(after := corrected(stored, one.changes))
                stored = after
        return load(stored)

    async def correct(
        self, changes: Mapping[str, Any], *, by: str = "", message_id: str | None = None, confirm: bool = False
    ) -> Sent:
        """Correct the state; the agent reads the correction before its next step, and mentions it in its conversation.

        A turn that runs or waits gets it as `TaskHandle.correct` says. While no turn runs, the session stores it for
        the next one, or for the replay of a turn that is a dead letter. `state()` has it at once.

        Args:
            changes: JSON data by the path of a field, such as `context.city`, or by its JSON pointer.
            by: Name of the person.
            message_id: A correction that is sent again under the same id, before a turn has read it, is stored once.
            confirm: Confirm that an agent with `on_resume="ask"` may continue, also without changes.

        Raises:
            SessionNotFound: There is no such session.
            SessionError: There are no changes, and no turn that a confirmation is for.
            ValueError: The changes are empty or do not fit the state.
            StateMismatch: A value does not fit its field.
            PayloadTooLarge: The corrections that wait are too large.
        """

        def check(record: SessionRecord) -> None:
            if (stored := stored_state(record)) is not None:
                self._agent.state_type.load(f"session {self.id}", corrected(stored, changes))

        producer = self._agent.task.app.producer
        return await correct_session(
            producer, self.record, changes, check, by=by, message_id=message_id, confirm=confirm
        )

    async def history(self, *, after: int = 0) -> AsyncIterator[SessionMessage]:
        """Yield messages and answers of all turns in order, those that wait for their turn last.

        Args:
            after: Number of the turn after which to start.

        Raises:
            SessionNotFound: There is no such session.
        """
        await self.record()
        async for message in read_history(self._agent.task.app.producer.gateway, self._address, after=after):
            yield message

    async def forget(self) -> bool:
        """Delete the session with its state and history, and the tasks of its turns; return whether it was there.

        The worker that runs a turn loses its lease: nothing that it writes afterwards is stored. If the caller dies in
        the middle, a worker deletes the rest within a minute. Memories and the bytes of artifacts are kept.
        """
        return await forget_session(self._agent.task.app.producer.gateway, self._address)

    # synchronous calls

    def _run(self, call: Callable[[Session[S]], Coroutine[Any, Any, T]], instead: str) -> T:
        return self._agent.task.app.sync().call(lambda _: call(self), f"await session.{instead}")

    send_sync = blocking(send, _run)
    turn_sync = blocking(turn, _run)
    record_sync = blocking(record, _run)
    state_sync = blocking(state, _run)
    correct_sync = blocking(correct, _run)
    forget_sync = blocking(forget, _run)

    def history_sync(self, *, after: int = 0) -> list[SessionMessage]:
        """See `history`."""

        async def collect(_: object) -> list[SessionMessage]:
            return [message async for message in self.history(after=after)]

        return self._run(collect, "history()")


class TurnHandle:
    """A turn of a session: one message and its answer.

    Attributes:
        number: Number of the turn, from 1.
        task_id: Id of its task, which exists from the end of the turn before it until a day after its own end.
    """

    def __init__(
        self,
        producer: Producer,
        address: SessionAddress,
        turn: TurnId,
        decode: Callable[[bytes], Any] = orjson.loads,
    ) -> None:
        self.number = turn.number
        self.task_id = str(turn)
        self._producer = producer
        self._address = address
        self._decode = decode
        self._born = int(turn.born)

    def __repr__(self) -> str:
        return f"TurnHandle({self.number}, task_id={self.task_id!r})"

    async def result(self, timeout: Moment | None = None) -> Any:
        """Wait for the answer of the agent, and return it. Retries while Redis is unavailable.

        Args:
            timeout: Seconds or a timedelta to wait, or a datetime until which to wait; None for ever.

        Raises:
            TimeoutError: The timeout has passed.
            TaskFailed: The turn is a dead letter, or was passed over.
            TaskCancelled: The turn was cancelled.
            SessionFailed: An earlier turn is a dead letter.
            SessionNotFound: The session was forgotten.
        """
        left = None if timeout is None else max(1.0, seconds_until(timeout, "timeout"))
        producer = self._producer
        started = RUNTIME.monotonic()
        try:
            with anyio.fail_after(left):
                async with producer.notifications.listen(self._address.session) as notifications:
                    while (record := await retry_while_unavailable(self._read)).ended < self.number:
                        if record.failed is not None:
                            await self._raise_failure(record)
                        with anyio.move_on_after(_POLL_INTERVAL):
                            await notifications.get()
        except TimeoutError:
            waited = RUNTIME.monotonic() - started
            raise TimeoutError(
                f"turn {self.number} of the session did not end within {waited:.0f} s; 'perdure task why "
                f"{self.task_id}' says what it waits for; server: {producer.address.shown}"
            ) from None
        turn = TurnId(self._address.digest, str(self._born), self.number)
        found = await retry_while_unavailable(lambda: read_turn(producer.gateway, self._address, turn))
        found = found or await retry_while_unavailable(self._read_task)
        answer, reason = (None, "no longer in the history") if found is None else found
        if answer is not None:
            return self._decode(answer)
        if reason == "cancelled":
            raise TaskCancelled(self.task_id)
        raise TaskFailed(self.task_id, reason, {})

    def stream(
        self, name: str = "output", *, type: Any = Any, after: str | int | None = None, last: int | None = None
    ) -> AsyncGenerator[StreamItem]:
        """Follow a stream of the turn (`ctx.emit`) until the turn has ended. Waits until it begins.

        The arguments, the items and the other errors are those of `TaskHandle.stream`.

        Raises:
            SessionFailed: An earlier turn is a dead letter.
            SessionNotFound: The session was forgotten before the turn began.
        """
        from ..queues.streams import stream_query

        return self._stream(stream_query(name, type, after, last))

    async def _stream(self, query: StreamQuery) -> AsyncGenerator[StreamItem]:
        from ..queues.streams import StreamItem, read_stream

        producer = self._producer
        handle = await self._begun()
        if handle is not None:
            async for item in read_stream(handle, producer.gateway, producer.notifications, query):
                yield item
            return
        number = 0 if query.after is None else query.after.number
        end = partial(StreamItem, "end", str(number), 0, query.name, self.task_id)
        try:
            yield end(state="succeeded", result=await self.result())
        except TaskCancelled as error:
            yield end(state="cancelled", error=str(error), error_type="TaskCancelled")
        except TaskFailed as error:
            yield end(state="dead", error=str(error), error_type="TaskFailed", reason=error.reason)

    async def _begun(self) -> TaskHandle[Any] | None:
        """Wait until the turn has a task, and return it; None if the turn has ended, and the task is gone."""
        producer, find = self._producer, partial(find_task, self._producer.gateway, self._producer.namespace)
        async with AsyncExitStack() as stack:
            listening = partial(producer.notifications.listen, self._address.session)
            notifications = await retry_while_unavailable(lambda: stack.enter_async_context(listening()))
            while True:
                record = await retry_while_unavailable(self._read)
                if record.turn >= self.number:
                    partition = await retry_while_unavailable(partial(find, self.task_id, record.queue))
                    if partition is not None:
                        return producer.handle_at(self.task_id, partition, self._decode)
                    if record.ended >= self.number or record.failed is not None:
                        return None
                elif record.failed is not None:
                    await self._raise_failure(record)
                claimed = record.turn >= self.number  # the process that claimed it is about to store its task
                with anyio.move_on_after(_CLAIMED_INTERVAL if claimed else _POLL_INTERVAL):
                    await notifications.get()

    async def notice(self) -> str:
        """Return the note for the user about the last interruption of the turn so far; empty if there was none.

        A task that continues the turn has notes of its own. Until a day after the end of the turn.
        """
        producer = self._producer
        partition = await find_task(producer.gateway, producer.namespace, self.task_id)
        if partition is None:
            return ""
        return (await checkpoint_fields(producer.gateway, partition, self.task_id, NOTE)).get(NOTE, b"").decode()

    async def _read_task(self) -> tuple[bytes | None, str] | None:
        """Return the answer that the task of a turn has, which the history does not keep any more."""
        with suppress(Refused):  # a producer's user may not search all queues for a task
            handle = await self._producer.find(self.task_id)
            record = None if handle is None else await handle.record()
            if handle is not None and record is not None and record.state == State.SUCCEEDED:
                return orjson.dumps(await handle.result(_POLL_INTERVAL)), ""
        return None

    async def _read(self) -> SessionRecord:
        record = await read_session(self._producer.gateway, self._address)
        if record is None or record.born != self._born:
            raise SessionNotFound(f"of turn {self.task_id}")
        return record

    async def _raise_failure(self, record: SessionRecord) -> None:
        """Raise the error of a failed session, unless its dead letter was replayed and will run."""
        producer, reason = self._producer, record.failed or "unknown"
        task_id = record.task_id(record.turn)
        task: Record | None = None
        with suppress(Refused):  # a producer's user may not search all queues for a task
            partition = await find_task(producer.gateway, producer.namespace, task_id)
            task = None if partition is None else await read_record(producer.gateway, partition, task_id)
        if task is not None and task.state not in (State.DEAD, State.SUCCEEDED):  # one that succeeded proved nothing
            return
        if record.turn != self.number:
            raise SessionFailed(record.name, record.turn, task_id, reason)
        raise TaskFailed(task_id, reason, dict((task.error if task else None) or {}))

    def _run(self, call: Callable[[TurnHandle], Coroutine[Any, Any, T]], instead: str) -> T:
        return self._producer.gateway.sync_caller.call(lambda: call(self), f"await turn.{instead}")

    result_sync = blocking(result, _run)
    notice_sync = blocking(notice, _run)

    def stream_sync(
        self, name: str = "output", *, type: Any = Any, after: str | int | None = None, last: int | None = None
    ) -> Iterator[StreamItem]:
        """See `stream`."""
        items = self.stream(name, type=type, after=after, last=last)
        return iterate_blocking(items, self._producer.gateway.sync_caller, "turn.stream(...)")


_TRIES: Final = 20
"""Reads of a session, each followed by a change of it that comes before the write, after which a correction fails."""


def stored_state(record: SessionRecord) -> dict[str, Any] | None:
    """Return the state that the last turn left, as JSON, None before the first one; without corrections that wait.

    Raises `DecryptionError`, `BadSnapshot`.
    """
    data = record.opened_state()
    return None if data is None else decode_snapshot(f"session {record.id}", data, owner=record.agent).state


async def correct_session(
    producer: Producer,
    read: Callable[[], Awaitable[SessionRecord]],
    changes: Mapping[str, Any],
    check: Callable[[SessionRecord], None],
    *,
    by: str = "",
    message_id: str | None = None,
    confirm: bool = False,
) -> Sent:
    """Correct the state of a session. See `Session.correct`.

    Args:
        read: returns the record.
        check: raises if the changes do not fit the state in a record.
    """
    message_id = message_id or new_task_id()
    for _ in range(_TRIES):
        record = await read()
        turn = TurnId(record.address.digest, str(record.born), record.turn)
        if record.status == "running" or (confirm and not changes and record.status == "failed"):
            await enqueue_turn(producer.gateway, record.address, turn)  # in case that its sender has not stored it yet
            if (handle := await producer.find(str(turn))) is not None:
                with suppress(TaskEnded):  # after the read
                    return await handle.correct(changes, by=by, message_id=message_id, confirm=confirm)
        elif confirm and not changes:
            raise SessionError(f"no turn of session {record.name} is running or stopped: there is nothing to confirm")
        else:
            check_changes(changes)
            check(record)
            data = orjson.loads(to_json(dict(changes), inf_nan_mode="strings"))
            correction, limit = SessionCorrection(message_id, by, data), producer.payload_limit
            if await store_correction(producer.gateway, record, correction, limit=limit) == "stored":
                if record.status == "failed":
                    return Sent(str(turn), 0, State.DEAD)
                return Sent(record.task_id(record.turn + 1), 0, State.WAITING)
    raise SessionError("could not correct the session: its turns begin and end at the same time; try again")


class SentMessage(NamedTuple):
    """The turn of a message, with the queue of the agent, and its app; None for any."""

    turn: TurnId
    queue: str
    app: str | None


async def send_by_catalog(
    producer: Producer,
    agent: str,
    session_id: str,
    text: str,
    catalog: Catalog,
    *,
    queue: str | None = None,
    app: str | None = None,
    sender: str = "",
    message_id: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    skip_failed: bool = False,
) -> SentMessage:
    """Send a message to a session of an agent that the catalog has.

    Args:
        queue, app: Default: those of the session, or those of the agent in the catalog.
        message_id, inputs, skip_failed: See `send_to_session`.

    Raises:
        CatalogError: The agent is unknown, or the inputs do not fit it.
        ValueError: The id of the session is not valid.
        SessionFailed, SessionFull, SessionError, PayloadTooLarge, NoKey
    """
    found = await read_session(producer.gateway, SessionAddress.of(producer.namespace, agent, session_id))
    if queue is None and (found is None or (found.basis is None and found.sent == found.ended)):
        queue = catalog.find(agent, app=app).queue
    owner = app or (None if found is None else found.app)
    if inputs is not None or found is None:
        for listed in catalog.named(agent, owner):
            listed.check(orjson.dumps({**(inputs or {}), "goal": ""}))
    turn = await send_to_session(
        producer.gateway,
        producer.namespace,
        agent,
        session_id,
        text,
        queue=queue,
        app=app,
        sender=sender,
        message_id=message_id,
        inputs=None if inputs is None else (orjson.dumps(inputs), ()),
        skip_failed=skip_failed,
        limit=producer.payload_limit,
    )
    return SentMessage(turn, queue or ("" if found is None else found.queue), owner)


def session_content(record: SessionRecord) -> dict[str, Any]:
    """Return the state that the last turn left, and the corrections that wait for the next one.

    If one of them cannot be read, it is missing, and `problem` says why.
    """
    content: dict[str, Any] = {"state": None, "corrections": []}
    try:
        content["state"] = stored_state(record)
        content["corrections"] = [asdict(one) for one in record.waiting_corrections()]
    except KeyMissing as error:  # a worker may have the key
        content["problem"] = str(error)
    except (BadSnapshot, DecryptionError) as error:
        why = error.problem if isinstance(error, BadSnapshot) else error
        forget = shlex.join(["perdure", "session", "forget", record.agent, record.id])
        content["problem"] = (
            f"could not read the state of session {record.name}: {why}; a worker that cannot read it fails the turn; "
            f"'{forget}' deletes the session"
        )
    return content
