"""The producer: enqueues tasks by name, one, many or a stream, now or later."""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

from pydantic_core import from_json

from .catalog import Catalog, CatalogTask, read_catalog
from .defaults import MAX_SECONDS, ConnectionSettings, read_settings, unknown_variables
from .derived_tasks import check_conflicts, check_same_app, find_conflicts
from .durations import Duration, Moment, seconds_until, to_seconds
from .enqueueing import BatchEnqueuer, BatchLimits
from .envelope import (
    DEFAULT_LARGE_LIMIT,
    DEFAULT_PAYLOAD_LIMIT,
    EnvelopeTemplate,
    TaskMessage,
    encode_arguments,
    make_options,
)
from .errors import CatalogError, QueueFull, TaskNotFound
from .groups import DEFAULT_GROUP_LIMIT, GroupErrors, GroupItem, check_group, encode_group
from .handle import DEFAULT_RESULT_TTL, TaskHandle, is_served_here
from .inbox import Sent
from .inspection.views import find_task
from .keys import Namespace, Partition, check_tenant, common_tenant, with_tenant
from .lanes import Lane, Priority, check_lane
from .partitions.router import PartitionRouter
from .pubsub import TaskNotifications
from .runtime import RUNTIME
from .security.encryption import Encryptor
from .transport.address import Address
from .transport.gateway import Gateway
from .transport.replication import Replicated, Replication
from .transport.server_check import ServerRequirements
from .unique import Unique, UniqueTask, unique_task

if TYPE_CHECKING:
    from .depth import KnownDepths, MaxDepth, WhenFull
    from .security.approvers import AnswerKeys, ApproverKey
    from .waits import AnswerReceipt

R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")

Key = str | Callable[[Mapping[str, Any]], str] | None
"""Ordering key of tasks: one for a whole call, or a function of each task's arguments; None for no order."""

_logger = logging.getLogger(__name__)

_CATALOG_AGE: Final = 10.0
"""Seconds for which a producer uses the catalog that it has read."""


class PreparedTask(NamedTuple):
    """A task that is checked and encoded, its queue, its rule for unique tasks, and the limit of its queue's depth."""

    message: TaskMessage
    queue: str
    unique: UniqueTask | None
    limit: MaxDepth | None


class Producer:
    """Client that enqueues tasks by name, without handler code.

    async with Producer("redis://localhost") as producer:
        handle = await producer.enqueue("audit", {"root": "src"}, queue="reports")
        report = await handle.result(timeout=60)
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        namespace: str | None = None,
        tenant: str | None = None,
        address: Address | None = None,
        payload_limit: int = DEFAULT_PAYLOAD_LIMIT,
        large_limit: int = DEFAULT_LARGE_LIMIT,
        result_ttl: Duration = DEFAULT_RESULT_TTL,
        gateway: Gateway | None = None,
        replication: Replication | None = None,
        encryptor: Encryptor | None = None,
        answer_keys: AnswerKeys | None = None,
        requirements: ServerRequirements | None = None,
    ) -> None:
        """Create a producer; `async with` opens it.

        Args:
            redis_url: Default: PERDURE_REDIS_URL, else the embedded server.
            namespace: Default: PERDURE_NAMESPACE, else `perdure`.
            tenant: Whose tasks it enqueues and finds. Default: PERDURE_TENANT, else those of all tenants.
            address: In place of a URL.
            payload_limit: Largest size of envelope and arguments of one task in one message, in bytes.
            large_limit: Largest size of arguments that are stored in chunks; 0 for none.
            result_ttl: Seconds for which the record of a task is kept that is cancelled before it runs, unless
                `perdure config set result_ttl` has stored another value.
            gateway: An open gateway to share. The producer does not close it.
            replication: Meaning of `durability="replicated"`. Default: PERDURE_REPLICAS and
                PERDURE_REPLICATION_TIMEOUT, else one replica within 5 s.
            encryptor: Encryption of the tasks' data. Default: the keys that the environment names.
            answer_keys: Keys of approvers. Default: those that the environment names.
            requirements: Conditions under which the server is used. Default: PERDURE_ALLOW_EVICTION and
                PERDURE_REQUIRE_DURABLE.
        """
        settings = read_settings(
            ConnectionSettings, {"redis_url": redis_url or None, "namespace": namespace or None, "tenant": tenant}
        )
        self.address = address or settings.address
        self.namespace = Namespace(settings.namespace, settings.tenant)
        self.payload_limit, self.large_limit = payload_limit, large_limit
        self.result_ttl = to_seconds(result_ttl, "result_ttl")
        self.gateway = gateway or Gateway(
            self.address,
            replication=replication or settings.replication,
            encryptor=settings.encryptor if encryptor is None else encryptor,
            answer_keys=settings.answer_keys if answer_keys is None else answer_keys,
            requirements=requirements or settings.requirements,
        )
        self._owns_gateway = gateway is None
        for problem in unknown_variables() if Gateway.log_findings else ():
            _logger.warning(problem)
        self.notifications = TaskNotifications(self.gateway)
        self._routers: dict[str, PartitionRouter] = {}
        self._depths: dict[tuple[str, bool], dict[Lane, KnownDepths]] = {}
        self._catalog: tuple[float, Catalog] | None = None

    async def __aenter__(self) -> Self:
        if self._owns_gateway:
            await self.gateway.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.notifications.close()
        if self._owns_gateway:
            await self.gateway.close()

    def for_tenant(self, tenant: str | None) -> Producer:
        """Return a producer of one tenant with the connections of this one, which closes them. None returns this one.

        Raises `ValueError` if this producer is one of another tenant.
        """
        tenant = common_tenant("a producer", tenant, self.namespace.tenant)
        if tenant == self.namespace.tenant:
            return self
        scoped = copy(self)
        scoped.namespace, scoped._owns_gateway = Namespace(self.namespace.name, tenant), False
        return scoped

    async def enqueue(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        queue: str | None = None,
        app: str | None = None,
        delay: Moment = 0.0,
        key: str | None = None,
        task_id: str | None = None,
        tenant: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        result_ttl: Duration | None = None,
        expires: Moment | None = None,
        durability: Replicated | None = None,
        tags: Collection[str] = (),
        unique: Unique | Literal[False] | None = None,
        costs: Mapping[str, int] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> TaskHandle[Any]:
        """Enqueue one task by name. Once this returns, the task is never lost.

        Args:
            args: Arguments by name, plain JSON data. A `SecretStr` is sent in full and never shown.
            queue: Default: that of the task in the catalog, which its workers publish. The arguments are then checked
                against the task's schema.
            app: App whose workers run the task. Default: any app that has a task of this name on the queue.
            delay: Seconds or a timedelta until the task may run, or a datetime at which it may.
            key: Tasks of one key are started in the order of their enqueues.
            task_id: An id chosen by the caller makes the call idempotent: a task that is stored already, under the
                same key, is left alone if it has the same name and arguments.
            tenant: Tenant that the task belongs to. Default: that of the producer.
            timeout, max_attempts, result_ttl: See `Options`.
            expires: Seconds, a timedelta or a datetime: a task that has not started by then becomes a dead letter
                `expired`.
            durability: "replicated" waits until replicas have the task.
            tags: Words by which people find the task in lists.
            unique: Rule for tasks of which one of each key may be there. Default: that of the catalog, if no queue is
                named. False for none.
            costs: What the task costs, by the names of its limits. Without a queue; the limits of a task whose queue
                is named are read by its worker.
            priority: "high", "normal" or "low"; idle: whether the task runs on spare slots only. Default: those of the
                catalog, if no queue is named.
            max_depth: Number of tasks waiting in the queue from which on this one is not stored. Default: that of the
                catalog, if no queue is named. False for no limit.
            when_full: "refuse" raises `QueueFull` then; "wait" waits for room.
            wait_limit: Seconds without room after which a waiting call raises `QueueFull`; 60 by default.

        Raises:
            CatalogError: No queue is named, and the catalog lists no such task, several, other arguments, or a rule
                or limit whose key only the app can make.
            PayloadTooLarge: The arguments are over the limit of large ones.
            TaskExists: A stored task has this id, and another name or other arguments.
            TypeError: The arguments are not JSON.
            InvalidUniqueKey: The arguments make no key.
            InvalidLimitUse: The arguments make no key of a limit, or a cost is too large.
            QueueFull: As many tasks wait as `max_depth` allows.
            ValueError: An option is wrong.
            Unavailable: Redis is unavailable; `ServerFull` and `NotReplicated` are subclasses.
        """
        prepared = await self.prepare(
            task,
            args,
            queue=queue,
            app=app,
            key=key,
            task_id=task_id,
            tenant=tenant,
            headers=headers,
            timeout=timeout,
            max_attempts=max_attempts,
            result_ttl=result_ttl,
            expires=expires,
            tags=tags,
            unique=unique,
            costs=costs,
            priority=priority,
            idle=idle,
            max_depth=max_depth,
            when_full=when_full,
            wait_limit=wait_limit,
        )
        return await self.send_one(
            prepared.message,
            queue=prepared.queue,
            delay=delay,
            durability=durability,
            unique=prepared.unique,
            limit=prepared.limit,
        )

    async def prepare(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        queue: str | None = None,
        app: str | None = None,
        key: str | None = None,
        task_id: str | None = None,
        tenant: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        result_ttl: Duration | None = None,
        expires: Moment | None = None,
        tags: Collection[str] = (),
        unique: Unique | Literal[False] | None = None,
        costs: Mapping[str, int] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> PreparedTask:
        """Check and encode a task, and look it up in the catalog, for `send_one` and `send`. See `enqueue`."""
        lane, listed = check_lane(priority, idle), None
        tenant = self._tenant(tenant)
        if queue is None:
            listed = await self._listed(task, app)
            lane = lane or listed.lane
        if headers or tags or (timeout, max_attempts, result_ttl, expires) != (None, None, None, None):
            options = make_options(timeout, max_attempts, result_ttl, expires)
            form = EnvelopeTemplate(task, headers, options, tags, app=app, lane=lane)
        else:
            form = _plain(task, app, lane)
        data, secrets = encode_arguments(args or {})
        message = form.message(data, secrets, key=key, task_id=task_id, tenant=tenant)
        rule = unique_task(task, unique)
        if listed is not None:
            listed.check(message.arguments)
            queue, rule, message = listed.queue, listed.unique_task(unique), listed.limited(message, costs)
        elif costs:
            raise ValueError("costs must be without queue, since the catalog says which limits the task has")
        assert queue is not None  # noqa: S101 - it was given, or is that of the catalog
        return PreparedTask(message, queue, rule, _limit(max_depth, when_full, wait_limit, listed))

    def _tenant(self, tenant: str | None) -> str | None:
        """Return the tenant of a call. Raises `ValueError` for another one than that of the producer."""
        if tenant is None:
            return self.namespace.tenant
        return common_tenant("a call", check_tenant(tenant), self.namespace.tenant)

    async def enqueue_many(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str | None = None,
        app: str | None = None,
        delay: Moment = 0.0,
        key: Key = None,
        tenant: str | None = None,
        durability: Replicated | None = None,
        unique: Unique | Literal[False] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments. All are checked before the first one is sent.

        queue, app, tenant, unique, priority, idle, max_depth, when_full, wait_limit: see `enqueue`. If the queue is
        full, the tasks before that stay stored, and `QueueFull.stored` has their ids.
        """
        listed, rule, lane = None, unique_task(task, unique), check_lane(priority, idle)
        if queue is None:
            listed = await self._listed(task, app)
            queue, rule, lane = listed.queue, listed.unique_task(unique), lane or listed.lane
        messages = _messages(_plain(task, app, lane), many, key, listed, self._tenant(tenant))
        limit = _limit(max_depth, when_full, wait_limit, listed)
        return await self.send(messages, queue=queue, delay=delay, durability=durability, unique=rule, limit=limit)

    async def enqueue_group(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]],
        *,
        then: str,
        arguments: Mapping[str, Any] | None = None,
        queue: str | None = None,
        then_queue: str | None = None,
        app: str | None = None,
        key: Key = None,
        task_id: str | None = None,
        tenant: str | None = None,
        limit: int = DEFAULT_GROUP_LIMIT,
        errors: GroupErrors = "raise",
    ) -> TaskHandle[Any]:
        """Enqueue one task per set of arguments, and a callback that gets the list of their results first.

        Returns the handle of the callback, whose children the tasks are.

        Args:
            then: Name of the callback's task.
            arguments: Further arguments of the callback, by name.
            queue, app: See `enqueue`. then_queue: that of the callback.
            task_id: Id that the caller has chosen for the callback.
            tenant: Tenant of the callback, and so of its tasks. Default: that of the producer.
            limit, errors: See `Task.enqueue_group`.
        """
        listed = limits = callback = None
        if queue is None:
            listed = await self._listed(task, app)
            queue, limits = listed.queue, listed.task_limits()
        then_lane = None
        if then_queue is None:
            callback = await self._listed(then, app)
            then_queue, then_lane = callback.queue, callback.lane
        items: list[GroupItem] = []
        for args in many:
            data, secrets = encode_arguments(args)
            if secrets:
                raise ValueError(f"task {task!r}: the tasks of a group cannot have secret arguments")
            if listed is not None:
                listed.check(data)
            items.append(GroupItem(data, key_of(key, args), () if limits is None else limits.uses_of(args)))
        check_group(items, limit, errors)
        form = EnvelopeTemplate(task, app=app, lane=None if listed is None else listed.lane)
        data = encode_group(form, queue, items, limit=limit, errors=errors, arguments=arguments or {})
        callback_form = EnvelopeTemplate(then, app=app, lane=then_lane, group=True)
        message = callback_form.message(data, task_id=task_id, tenant=self._tenant(tenant))
        if callback is not None and (own := callback.task_limits()) is not None:
            message = own.limited(message, arguments=arguments or {})
        return await self.send_one(message, queue=then_queue)

    async def enqueue_stream(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str | None = None,
        app: str | None = None,
        delay: Moment = 0.0,
        key: Key = None,
        tenant: str | None = None,
        durability: Replicated | None = None,
        unique: Unique | Literal[False] | None = None,
        priority: Priority | None = None,
        idle: bool | None = None,
        max_depth: int | Literal[False] | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> AsyncIterator[TaskHandle[Any]]:
        """Enqueue one task per set of arguments, in constant memory; yield a handle per stored task.

        If a set of arguments is refused, tasks before it may be stored. queue, app, tenant, unique, priority, idle,
        max_depth, when_full, wait_limit: see `enqueue`.
        """
        listed, rule, lane = None, unique_task(task, unique), check_lane(priority, idle)
        if queue is None:
            listed = await self._listed(task, app)
            queue, rule, lane = listed.queue, listed.unique_task(unique), lane or listed.lane
        messages = _messages(_plain(task, app, lane), many, key, listed, self._tenant(tenant))
        limit = _limit(max_depth, when_full, wait_limit, listed)
        handles: AsyncGenerator[TaskHandle[Any]] = self.send_stream(
            messages, queue=queue, delay=delay, durability=durability, unique=rule, limit=limit
        )
        async with aclosing(handles):
            async for handle in handles:
                yield handle

    async def send_one(
        self,
        message: TaskMessage,
        *,
        queue: str,
        delay: Moment = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
        same: Callable[[bytes, bytes], bool] | None = None,
        unique: UniqueTask | None = None,
        limit: MaxDepth | None = None,
    ) -> TaskHandle[R]:
        """Enqueue one encoded task. same: see `find_conflicts`. unique: its rule. limit: of the queue's depth.

        Raises `TaskExists`, `QueueFull`.
        """
        if unique is not None:
            stored = self._unique([message], queue, delay, durability, unique, same, limit)
            [handle] = [self._handle(*one, decode) async for one in stored]
            return handle
        message = self._ready(message, queue)
        if durability is not None:
            message = message.placed_by_id()
        enqueuer = self._enqueuer(queue, delay, durability, limit)
        partition = await enqueuer.one(message)
        if known := enqueuer.take_known():
            check_conflicts(await find_conflicts(self.gateway, known, same))
        return self._handle(message.id, partition, bool(known) and message.own_id, decode)

    async def enqueue_fresh(
        self, message: TaskMessage, *, queue: str, decode: Callable[[bytes], R] = from_json
    ) -> TaskHandle[R]:
        """Enqueue an encoded task in the place of an ended one with the same id, and delete what that one left.

        Raises:
            StillRunning: The earlier task has not ended.
            TaskExists: The earlier task belongs to another app.
        """
        message = self._ready(message, queue)
        check = partial(check_same_app, self.gateway, message)
        return self._handle(message.id, await self._enqueuer(queue, 0.0, None).fresh(message, check), False, decode)

    async def send(
        self,
        messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage],
        *,
        queue: str,
        delay: Moment = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
        same: Callable[[bytes, bytes], bool] | None = None,
        unique: UniqueTask | None = None,
        limit: MaxDepth | None = None,
    ) -> list[TaskHandle[R]]:
        """Enqueue encoded tasks in few round trips. All are checked before the first one is sent.

        Each task is stored or not; the call is not a transaction. same: see `find_conflicts`. unique: their rule.
        limit: of the queue's depth.

        Raises `TaskExists` after the other tasks of the batch are stored, `QueueFull` with those that are stored.
        """
        listed = [message async for message in messages] if isinstance(messages, AsyncIterable) else list(messages)
        if unique is not None:
            stored = self._unique(listed, queue, delay, durability, unique, same, limit)
        else:
            enqueuer = self._enqueuer(queue, delay, durability, limit)
            ready = [self._ready(message, queue) for message in listed]
            if durability is not None:
                ready = [message.placed_by_id() for message in ready]
            stored = self._stored(enqueuer, ready, same)
        handles: list[TaskHandle[R]] = []
        try:
            async for one in stored:
                handles.append(self._handle(*one, decode))  # noqa: PERF401 - those before an error count
        except QueueFull as error:
            raise error.of_call([handle.id for handle in handles], len(listed) - len(handles)) from None
        return handles

    async def send_stream(
        self,
        messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage],
        *,
        queue: str,
        delay: Moment = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
        unique: UniqueTask | None = None,
        limit: MaxDepth | None = None,
    ) -> AsyncGenerator[TaskHandle[R]]:
        """Enqueue encoded tasks in constant memory; yield a handle per stored task. unique: their rule.

        limit: of the queue's depth.

        Raises `QueueFull`, and `TaskExists`, after the handles of the other tasks of the batch.
        """
        if unique is not None:
            async with aclosing(batched(messages, BatchLimits().script)) as batches:
                async for batch in batches:
                    async for one in self._unique(batch, queue, delay, durability, unique, None, limit):
                        yield self._handle(*one, decode)
            return
        ready = map_items(lambda message: self._ready(message, queue), messages)
        if durability is not None:
            ready = map_items(TaskMessage.placed_by_id, ready)
        stored = self._stored(self._enqueuer(queue, delay, durability, limit), ready)
        async with aclosing(stored):
            async for one in stored:
                yield self._handle(*one, decode)

    async def _stored(
        self,
        enqueuer: BatchEnqueuer,
        messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage],
        same: Callable[[bytes, bytes], bool] | None = None,
    ) -> AsyncGenerator[tuple[str, Partition, bool]]:
        """Yield the ids and partitions of tasks that are stored, and whether they were before. Raises `TaskExists`."""
        batches = enqueuer.all(messages)
        async with aclosing(batches):
            async for batch in batches:
                known = enqueuer.take_known()
                conflicts = await find_conflicts(self.gateway, known, same) if known else {}
                existed = {message.id for _, message in known if message.own_id}
                for task_id, partition in batch:
                    if task_id not in conflicts:
                        yield task_id, partition, task_id in existed
                check_conflicts(conflicts)

    async def _unique(
        self,
        messages: Sequence[TaskMessage],
        queue: str,
        delay: Moment,
        durability: Replicated | None,
        unique: UniqueTask,
        same: Callable[[bytes, bytes], bool] | None = None,
        limit: MaxDepth | None = None,
    ) -> AsyncGenerator[tuple[str, Partition, bool]]:
        """Store the messages of a unique task, or find those that have their keys; yield as `_stored` does."""
        from .unique_enqueueing import UniqueEnqueuer

        seconds = unique.check_delay(seconds_until(delay, "delay") if delay else 0.0)
        enqueuer = self._enqueuer(queue, seconds, durability, limit)
        ready: list[tuple[str, TaskMessage]] = []
        for message in messages:
            digest = unique.digest(queue, message)
            found = self._ready(message.with_unique(digest), queue)
            ready.append((digest, found if durability is None else found.placed_by_id()))
        place = (self.gateway, self.namespace, queue, enqueuer, unique.rule)
        stored, full = await UniqueEnqueuer(*place, delay=seconds, retention=self.result_ttl).all(ready)
        known = enqueuer.take_known()
        conflicts = await find_conflicts(self.gateway, known, same) if known else {}
        existed = {message.id for _, message in known}
        for one in stored:
            if one.task_id not in conflicts:
                yield one.task_id, one.partition, one.existed or one.task_id in existed
        check_conflicts(conflicts)
        if full is not None:
            raise full

    async def catalog(self) -> Catalog:
        """Return the catalog of the namespace, read at most once in ten seconds."""
        now = RUNTIME.monotonic()
        if self._catalog is None or now - self._catalog[0] > _CATALOG_AGE:
            self._catalog = (now, await read_catalog(self.gateway, self.namespace))
        return self._catalog[1]

    async def _listed(self, task: str, app: str | None = None) -> CatalogTask:
        """Return a task of the catalog. One that is not in a catalog read before is looked up once more."""
        known = self._catalog
        try:
            return (await self.catalog()).find(task, app=app)
        except CatalogError:
            if self._catalog is not known:
                raise
            self._catalog = None
            return (await self.catalog()).find(task, app=app)

    async def find(self, task_id: str, queue: str | None = None) -> TaskHandle[Any] | None:
        """Return the handle of a task by its id; None if no queue of the namespace has it. queue: look only there."""
        partition = await find_task(self.gateway, self.namespace, task_id, queue)
        if partition is None:
            return None
        return self._handle(with_tenant(self.namespace.tenant, task_id), partition, True, from_json)

    async def send_message(
        self, to: str | TaskHandle[Any], content: Any, *, sender: str = "", message_id: str | None = None
    ) -> Sent:
        """Send a message to a task, by its id or handle. See `TaskHandle.send`."""
        handle = await self.find(to) if isinstance(to, str) else to
        if handle is None:
            raise TaskNotFound(str(to), f"any queue of namespace {self.namespace.name!r} on {self.address.shown}")
        return await handle.send(content, sender=sender, message_id=message_id)

    async def answer(
        self,
        token: str,
        value: Any,
        *,
        by: str = "",
        answer_id: str | None = None,
        shows: str | None = None,
        approver: ApproverKey | Path | str | None = None,
    ) -> AnswerReceipt:
        """Answer the open wait with a token, `ctx.wait_for(..., token=...)`. See `TaskHandle.answer`.

        Raises `WaitNotFound` if no open wait has the token.
        """
        from .waits import answer_token

        options: dict[str, Any] = {"by": by, "answer_id": answer_id, "limit": self.payload_limit, "shows": shows}
        return await answer_token(self.gateway, self.namespace, token, value, approver=approver, **options)

    def _enqueuer(
        self, queue: str, delay: Moment, durability: Replicated | None, limit: MaxDepth | None = None
    ) -> BatchEnqueuer:
        delay = seconds_until(delay, "delay") if delay else 0.0
        if not 0 <= delay <= MAX_SECONDS:
            raise ValueError(f"delay must be 0 to {MAX_SECONDS:.0e} seconds, got {delay}")
        if durability not in (None, "replicated"):
            raise ValueError(f"durability must be 'replicated' or None, got {durability!r}")
        router = self._routers.get(queue)
        if router is None:
            router = self._routers[queue] = PartitionRouter(self.gateway, self.namespace, queue)
        room = None
        if limit is not None and not (limit.wait and is_served_here(queue)):
            from .depth import RoomFinder

            known = self._depths.setdefault((queue, delay > 0), {})
            room = RoomFinder(self.gateway, router, queue, limit, known, delayed=delay > 0)
        return BatchEnqueuer(self.gateway, router, delay, replicated=durability is not None, room=room)

    def _ready(self, message: TaskMessage, queue: str) -> TaskMessage:
        """Return the message as it is stored. Raises `PayloadTooLarge`."""
        encryptor, limit = self.gateway.encryptor, self.payload_limit
        if len(message.envelope) + len(message.arguments) > limit:
            message.check(limit, self.large_limit)
        elif not encryptor.active:
            return message
        cipher = encryptor.of(self.namespace.partition(queue), message.id)
        return message.encrypted(cipher, limit, store=self.gateway.value_store)

    def handle_at(self, task_id: str, partition: Partition, decode: Callable[[bytes], R]) -> TaskHandle[R]:
        """Return the handle of a task that is known to be stored in a partition."""
        return self._handle(task_id, partition, True, decode)

    def _handle(self, task_id: str, partition: Partition, existed: bool, decode: Callable[[bytes], R]) -> TaskHandle[R]:
        return TaskHandle(
            task_id,
            partition,
            self.gateway,
            self.notifications,
            decode,
            retention=self.result_ttl,
            payload_limit=self.payload_limit,
            existed=existed,
        )


def _limit(
    max_depth: int | Literal[False] | None,
    when_full: WhenFull | None,
    wait_limit: Duration | None,
    listed: CatalogTask | None,
) -> MaxDepth | None:
    """Return the limit of a queue's depth for one call. listed: the task in the catalog, if the call names no queue."""
    published = None if listed is None else listed.depth
    if (max_depth, when_full, wait_limit) == (None, None, None) and published is None:
        return None
    from .depth import make_limit

    return make_limit(max_depth, when_full, wait_limit, None if listed is None else listed.max_depth())


def key_of(key: Key, args: Mapping[str, Any]) -> str | None:
    """Return the key of one task of a call. Raises `TypeError` if the function does not return a string."""
    if key is None:
        return None
    found = key(args) if callable(key) else key
    if not isinstance(found, str):
        raise TypeError(f"key must be a string, got {found!r}; use key=lambda args: str(...)")
    return found


@lru_cache(maxsize=256)
def _plain(task: str, app: str | None = None, lane: Lane | None = None) -> EnvelopeTemplate:
    return EnvelopeTemplate(task, app=app, lane=lane)


def _messages(
    form: EnvelopeTemplate,
    many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
    key: Key,
    listed: CatalogTask | None,
    tenant: str | None,
) -> Iterable[TaskMessage] | AsyncIterable[TaskMessage]:
    limits = None if listed is None else listed.task_limits()

    def make(args: Mapping[str, Any]) -> TaskMessage:
        message = form.message(*encode_arguments(args), key=key_of(key, args), tenant=tenant)
        if listed is not None:
            listed.check(message.arguments)
        return message if limits is None else limits.limited(message)

    return map_items(make, many)


def map_items(make: Callable[[T], U], many: Iterable[T] | AsyncIterable[T]) -> Iterable[U] | AsyncIterable[U]:
    """Apply a function to each item, asynchronously for an asynchronous iterable."""
    if isinstance(many, AsyncIterable):
        return (make(one) async for one in many)
    return map(make, many)


async def batched(many: Iterable[T] | AsyncIterable[T], size: int) -> AsyncGenerator[list[T]]:
    """Yield lists of at most so many items."""
    batch: list[T] = []
    if isinstance(many, AsyncIterable):
        async for item in many:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    else:
        for item in many:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    if batch:
        yield batch
