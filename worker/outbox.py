"""The transactional outbox: tasks that a database transaction enqueues, and the relay that sends them to Redis.

`await task.enqueue_in(session, ...)` writes a row in the caller's transaction: if that commits, the task is enqueued,
and if it is rolled back, there never was a task. A relay runs wherever an app with an outbox is open, so in each of its
workers. It claims rows for `lease` seconds, sends their tasks, and deletes the rows. If it is killed in between,
another relay claims the rows after the lease and sends the tasks again under the ids of the rows, which changes nothing
for a task that Redis has. So each task is enqueued once, as long as Redis keeps its record: until `result_ttl` seconds
after its end.

A row that can never be sent keeps the error, and is not claimed again. Each database has a subclass in `integrations`,
whose functions run on a thread of the outbox, or in the event loop for an asynchronous driver.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import anyio
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..queues.durations import seconds_until
from ..queues.envelope import LimitUse, TaskMessage
from ..queues.errors import (
    ConfigurationError,
    DecryptionError,
    NotReplicated,
    PayloadTooLarge,
    QueueFull,
    TaskExists,
    Unavailable,
    UnreadableEnvelope,
)
from ..queues.keys import Namespace
from ..queues.runtime import RUNTIME
from ..queues.security.encryption import Encryptor
from ..queues.transport.backoff import Backoff
from ..queues.unique import UniqueTask
from .log import logger
from .loop_errors import LoopErrors, keep_running

if TYPE_CHECKING:
    from ..queues.depth import MaxDepth
    from ..queues.producer import Producer
    from .task import Task, TaskCall

T = TypeVar("T")

_FORMAT: Final = 1
"""Version of the content of a row."""

_FIELD: Final = "outbox"
"""Kind of what is encrypted."""

_FULL_WAIT: Final = Backoff(first=1.0, longest=60.0)
"""Delays of a row whose queue has no room."""

_OFFLINE: Final = Backoff(first=0.5, longest=15.0)
"""Delays of a relay whose Redis or database is unavailable."""

_FINAL: Final = (TaskExists, PayloadTooLarge, UnreadableEnvelope, DecryptionError, ValueError, TypeError)
"""Errors of a row that another try does not mend."""

_PATIENCE: Final = 10.0
"""Seconds that a relay which stops may need to finish its batch."""


class NewRow(NamedTuple):
    """A row to be written. app: name of the app of the task. body: the task, see `_Body`; encrypted if keys are set."""

    task_id: str
    app: str
    queue: str
    body: bytes


class OutboxRow(NamedTuple):
    """A claimed row. tries: number of its claims."""

    number: int
    task_id: str
    queue: str
    body: bytes
    tries: int


class Trouble(NamedTuple):
    """A row that was not sent. again: seconds until it may be claimed, None for never. error: text for the row."""

    number: int
    again: float | None
    error: str


class RelayedApp(Protocol):
    """Protocol of the app whose outbox is relayed."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Collection[str]: ...

    @property
    def producer(self) -> Producer: ...

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]: ...


class _Body(BaseModel):
    """The content of a row: a message, and the options of the call that are not in it.

    due: time from which it may run, in seconds since the epoch. unique: whether the rule of the task holds, or the rule
    of the call. depth, wait: limit of the queue's depth. chosen: whether the caller chose the id.
    """

    model_config = ConfigDict(extra="ignore")

    v: int = Field(ge=1, le=_FORMAT)
    envelope: str
    arguments: str
    number: int | None = None
    limits: tuple[LimitUse, ...] = ()
    due: float | None = None
    replicated: bool = False
    unique: bool | dict[str, Any] = False
    depth: int | None = None
    chosen: bool = False

    def message(self, task_id: str) -> TaskMessage:
        """Return the message, which Redis may have already."""
        message = TaskMessage(
            task_id, self.envelope.encode(), self.arguments.encode(), self.number, own_id=True, limits=self.limits
        )
        return message.placed_by_id()


def encode_row(call: TaskCall[..., Any], message: TaskMessage, encryptor: Encryptor, namespace: Namespace) -> NewRow:
    """Return the row of a call. Raises `ValueError` if a function makes its own unique key."""
    rule = call.unique_rule
    unique: bool | dict[str, Any] = rule is not None
    delay = seconds_until(call.delay, "delay") if call.delay else 0.0
    if rule is not None:
        rule.check_delay(delay)
        rule.digest(call.own_queue, message)
        if call.unique:
            unique = rule.published()
            if callable(rule.rule.by):
                raise ValueError(
                    "a task in an outbox cannot have the option unique with a function: name the arguments, or give "
                    "the rule to the task"
                )
    limit = call.depth_limit
    body = _Body(
        v=_FORMAT,
        envelope=message.envelope.decode(),
        arguments=message.arguments.decode(),
        number=message.number,
        limits=message.limits,
        due=RUNTIME.wall_clock() + delay if delay > 0 else None,
        replicated=call.durability is not None,
        unique=unique,
        depth=None if limit is None else limit.depth,
        chosen=call.task_id is not None,
    )
    data = body.model_dump_json(exclude_defaults=True).encode()
    cipher = encryptor.of(namespace.partition(call.own_queue), message.id)
    return NewRow(message.id, call.task.app.name, call.own_queue, cipher.encrypt(_FIELD, data))


class Outbox(ABC):
    """A table of tasks that transactions have enqueued.

    Args:
        relay: whether an app that has this outbox sends its rows while it is open. False for a process that only
            writes, such as a web server that leaves the sending to workers.
        poll: seconds between two looks for rows. A transaction of the same process wakes the relay at once.
        batch: rows that a relay claims at once.
        lease: seconds after which another relay may claim the rows of one that has not sent them.

    Raises:
        ConfigurationError: an argument is not a positive number.
    """

    def __init__(self, *, relay: bool = True, poll: float = 1.0, batch: int = 100, lease: float = 30.0) -> None:
        for name, value in {"poll": poll, "batch": batch, "lease": lease}.items():
            if not value > 0:
                raise ConfigurationError(f"{name} of an outbox must be more than 0, got {value!r}")
        self._relay = relay
        self._poll = poll
        self.batch = batch
        self._lease = lease
        self._wakers: set[Callable[[], None]] = set()
        self._threads: ThreadPoolExecutor | None = None

    @abstractmethod
    async def add(self, session: Any, row: NewRow) -> None:
        """Write a row in the transaction of a session. Raises `TypeError` for anything that is not a session."""

    @abstractmethod
    def add_sync(self, session: Any, row: NewRow) -> None:
        """Write a row in the transaction of a synchronous session. Raises `TypeError` for anything else."""

    @abstractmethod
    def claim(self, connection: Any, apps: Sequence[str], now: float, until: float, token: str) -> list[OutboxRow]:
        """Claim rows that are due at a time, in order, and commit. until: end of the lease. token: of the claim."""

    @abstractmethod
    def finish(self, connection: Any, sent: Sequence[int], troubles: Sequence[Trouble], token: str, now: float) -> None:
        """Delete the rows that were sent, note what became of the others, and commit.

        Rows that another relay has claimed since are left to it.
        """

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call `claim` or `finish` with a connection, on a thread that only this outbox uses."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="perdure-outbox")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.on_thread, function, *args)

    def on_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function with a connection, in the thread of the outbox."""
        return function(None, *args)

    @property
    def relays_here(self) -> bool:
        """Whether a relay of this process sends its rows now."""
        return bool(self._wakers)

    def wake(self) -> None:
        """Let the relays of this process look for rows now, from any thread."""
        for waker in tuple(self._wakers):
            waker()

    @asynccontextmanager
    async def relaying(self, app: RelayedApp) -> AsyncGenerator[None]:
        """Send rows while the block runs; the batch that it sends is finished."""
        if not self._relay:
            yield
            return
        loop, woken, stopping = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        relay = Relay(self, app, woken, stopping, lease=self._lease, poll=self._poll)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

        self._wakers.add(wake)
        running = asyncio.create_task(keep_running(relay.run))
        try:
            yield
        finally:
            self._wakers.discard(wake)
            stopping.set()
            woken.set()
            await asyncio.wait([running], timeout=_PATIENCE)
            running.cancel()
            await asyncio.wait([running])
            if self._threads is not None and not self._wakers:
                self._threads.shutdown(wait=False)
                self._threads = None


class Relay:
    """Sends the rows of an outbox, batch after batch."""

    def __init__(
        self,
        outbox: Outbox,
        app: RelayedApp,
        woken: asyncio.Event,
        stopping: asyncio.Event,
        *,
        lease: float,
        poll: float,
    ) -> None:
        self._outbox = outbox
        self._app = app
        self._woken = woken
        self._stopping = stopping
        self._lease = lease
        self._poll = poll
        self._errors = LoopErrors("relay the outbox")
        self._down = False

    async def run(self) -> None:
        """Send rows until the relay is stopped."""
        delays = _OFFLINE.delays()
        while not self._stopping.is_set():
            self._woken.clear()
            wait = self._poll
            try:
                if await self.send_batch() >= self._outbox.batch:
                    continue
                if self._down:
                    logger.info("the relay of the outbox of app {} continues", self._app.name)
                self._down, delays = False, _OFFLINE.delays()
            except Exception as error:  # noqa: BLE001 - of any database driver
                if not self._down:
                    logger.warning("could not relay the outbox of app {}: {}; it retries", self._app.name, error)
                self._down, wait = True, next(delays)
            with anyio.move_on_after(wait):
                await self._woken.wait()

    async def send_batch(self) -> int:
        """Claim rows, send their tasks, and delete the rows; return how many were claimed.

        Raises `Unavailable` after the rows are free again, and errors of the database.
        """
        token, now = RUNTIME.token(8), RUNTIME.wall_clock()
        apps = [self._app.name, *sorted(self._app.aliases)]
        rows = await self._outbox.call(self._outbox.claim, apps, now, now + self._lease, token)
        if not rows:
            return 0
        ordered: dict[int, list[OutboxRow]] = {}
        decoded: dict[int, _Body | Trouble] = {row.number: self._decoded(row) for row in rows}
        for row in rows:  # those of one key one after another, in their order
            body = decoded[row.number]
            number = body.number if isinstance(body, _Body) else None
            ordered.setdefault(-row.number - 1 if number is None else number, []).append(row)
        results: list[Trouble | Unavailable | None] = []
        for found in await asyncio.gather(*(self._send_all(line, decoded) for line in ordered.values())):
            results += found
        line = [row for rows in ordered.values() for row in rows]
        sent = [row.number for row, result in zip(line, results, strict=True) if result is None]
        troubles = [result for result in results if isinstance(result, Trouble)]
        lost = [result for result in results if isinstance(result, Unavailable)]
        troubles += [
            Trouble(row.number, 0.0, "")
            for row, result in zip(line, results, strict=True)
            if isinstance(result, Unavailable)
        ]
        await self._outbox.call(self._outbox.finish, sent, troubles, token, RUNTIME.wall_clock())
        if lost:
            raise lost[0]
        return len(rows)

    def _decoded(self, row: OutboxRow) -> _Body | Trouble:
        producer = self._app.producer
        cipher = producer.gateway.encryptor.of(producer.namespace.partition(row.queue), row.task_id)
        try:
            data = cipher.decrypt(_FIELD, row.body)
        except DecryptionError as error:
            return self._refused(row, str(error))
        try:
            return _Body.model_validate_json(data)
        except ValidationError:
            if self._is_newer(data):
                return Trouble(row.number, 60.0, "written by a later version of Perdure: upgrade this worker")
            return self._refused(row, "not the content of a row of an outbox")

    @staticmethod
    def _is_newer(data: bytes) -> bool:
        try:
            return int(orjson.loads(data)["v"]) > _FORMAT
        except (ValueError, TypeError, LookupError):
            return False

    async def _send_all(
        self, rows: Sequence[OutboxRow], decoded: Mapping[int, _Body | Trouble]
    ) -> list[Trouble | Unavailable | None]:
        """Send rows one after another; after one that must wait, those behind it wait too."""
        results: list[Trouble | Unavailable | None] = []
        for row in rows:
            body = decoded[row.number]
            before = results[-1] if results else None
            if isinstance(before, Unavailable):
                results.append(before)
            elif isinstance(before, Trouble) and before.again is not None:
                results.append(before._replace(number=row.number))
            elif isinstance(body, Trouble):
                results.append(body)
            else:
                results.append(await self._send(row, body))
        return results

    async def _send(self, row: OutboxRow, body: _Body) -> Trouble | Unavailable | None:
        """Send one row. Return None if Redis has its task, else what is to be done."""
        producer, message = self._app.producer, body.message(row.task_id)
        try:
            task = self._app.tasks.get(orjson.loads(message.envelope)["task"])
            unique = self._rule(body, task)
            if unique is not None and row.tries > 1 and await producer.find(row.task_id, row.queue) is not None:
                return None  # a rule that keeps the last task would replace a later one by this one
            await producer.send_one(
                message,
                queue=row.queue,
                delay=0.0 if body.due is None else max(0.0, body.due - RUNTIME.wall_clock()),
                durability="replicated" if body.replicated else None,
                same=None if task is None else task.arguments.same,
                unique=unique,
                limit=None if body.depth is None else _refusing(body.depth),
            )
        except Exception as error:  # noqa: BLE001 - one row must not hold up the others
            return self._problem(row, error)
        return None

    def _problem(self, row: OutboxRow, error: Exception) -> Trouble | Unavailable:
        """Return what follows from an error of one row. An unavailable Redis is a problem of all rows."""
        if isinstance(error, Unavailable) and not isinstance(error, NotReplicated):
            return error
        if isinstance(error, _FINAL):
            return self._refused(row, str(error))
        if not isinstance(error, QueueFull | NotReplicated):
            self._errors.note(error, row.task_id)
        return Trouble(row.number, _waits(row.tries), str(error) or repr(error))

    def _rule(self, body: _Body, task: Task[Any, Any] | None) -> UniqueTask | None:
        """Return the rule for unique tasks of a row. Raises `LookupError` if it is that of a task not known here."""
        if not body.unique:
            return None
        if isinstance(body.unique, dict):
            return UniqueTask.read(orjson.loads(body.envelope)["task"], body.unique)
        if task is None:
            raise LookupError("the task has a rule for unique tasks, which only a process that has the task knows")
        return task.unique

    def _refused(self, row: OutboxRow, problem: str) -> Trouble:
        logger.bind(task_id=row.task_id, queue=row.queue).error(
            "could not send task {} of the outbox: {}; its row keeps the error, and is not sent again",
            row.task_id,
            problem,
        )
        return Trouble(row.number, None, problem)


def _refusing(depth: int) -> MaxDepth:
    """Return a limit of a queue's depth that refuses at once: the row waits in the table, not its relay."""
    from ..queues.depth import MaxDepth

    return MaxDepth(depth)


def _waits(tries: int) -> float:
    """Return the seconds until a row is claimed again."""
    return min(_FULL_WAIT.first * 2.0 ** min(tries - 1, 10), _FULL_WAIT.longest)


def check_outbox(outbox: object) -> Outbox:
    """Return an outbox. Raises `ConfigurationError` for anything else."""
    given: object = outbox
    if not isinstance(given, Outbox):
        raise ConfigurationError(
            "outbox of an app must be an outbox of perdure.integrations.sqlalchemy or perdure.integrations.django, "
            f"got {given!r}"
        )
    return given
