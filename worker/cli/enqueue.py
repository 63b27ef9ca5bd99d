"""`perdure enqueue`: one task, or a file of tasks.

Each line of a file is a JSON object:

    {"task": "audit", "args": {"root": "src"}, "queue": "audit", "app": "audit", "delay": 60, "id": "audit-src",
     "key": "src", "headers": {}, "tags": [], "priority": "high", "idle": false, "expires": 3600}

`args` is required; the command line has the defaults for the other fields. The file is read twice, line by line, to
check all lines before the first task is sent, without holding the file in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import from_json

from ...queues.catalog import Catalog
from ...queues.defaults import MAX_SECONDS
from ...queues.depth import MaxDepth, WhenFull, make_limit
from ...queues.durations import FutureTime
from ...queues.envelope import EnvelopeTemplate, Options, TaskMessage
from ...queues.errors import TaskExists, TaskNotFound
from ...queues.handle import TaskHandle
from ...queues.json_form import finite_json
from ...queues.junk import report_once
from ...queues.keys import check_name
from ...queues.lanes import Lane, Priority, check_lane
from ...queues.partitions.route import spread
from ...queues.producer import Producer
from ...queues.security.secret_arguments import SecretPaths, names_beside, path_exists
from ...queues.transport.replication import Replicated
from ...queues.unique import UniqueTask
from ...queues.wording import iso_time
from .support.connection import connected_as_tenant, redis_now, seconds_of_delay, warn_unserved
from .support.errors import Misuse, misuse_of
from .support.options import (
    check_lines,
    in_duration,
    numbered_lines,
    opened,
    problem,
    read_app,
    read_batch,
    read_future,
    read_lines,
    read_object,
    read_queue,
    read_task_id,
)
from .support.output import Bar, StderrText, note
from .support.runner import Output, line

if TYPE_CHECKING:
    from ...queues.limits.task_limits import TaskLimits


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for the fields of a line, and the options, size limit and secret arguments of all tasks.

    batch: first part of the ids of lines without one. now: seconds by Redis' clock, from which `expires` counts.
    only_queue: whether lines must be for `queue`, and for tasks that the catalog has, on whatever queue.
    """

    task: str | None
    queue: str | None
    delay: FutureTime
    key: str | None
    options: Options
    payload_limit: int
    large_limit: int
    catalog: Catalog
    secrets: SecretPaths = ()
    tags: Sequence[str] = ()
    app: str | None = None
    lane: Lane | None = None
    max_depth: int | None = None
    when_full: WhenFull | None = None
    wait_limit: float | None = None
    batch: str | None = None
    now: float = 0.0
    only_queue: bool = False
    tenant: str | None = None

    def limit(self, published: MaxDepth | None) -> MaxDepth | None:
        """Return the limit of a queue's depth. published: that of the catalog. Raises `ValueError`."""
        return make_limit(self.max_depth, self.when_full, self.wait_limit, published)


@dataclass(frozen=True, slots=True)
class Item:
    """One task with its queue, its delay, its rule for unique tasks, and the limit of its queue's depth."""

    task: str
    queue: str
    delay: FutureTime
    unique: UniqueTask | None
    limit: MaxDepth | None
    message: TaskMessage


def _read_line_time(given: object) -> FutureTime:
    """Parse a time in a line. Raises `ValueError`."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError("must be a number of seconds, a duration such as 15m, or an ISO time")
    found = FutureTime.parse(given, zoned=True)  # the file may be of another host
    if found.ahead > MAX_SECONDS:
        raise ValueError(f"must be at most {MAX_SECONDS:.0e} seconds")
    return found


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    args: dict[str, Any]
    task: str | None = None
    queue: Annotated[str, AfterValidator(lambda name: check_name("queue", name))] | None = None
    app: Annotated[str, AfterValidator(lambda name: check_name("app", name))] | None = None
    delay: Annotated[FutureTime, BeforeValidator(_read_line_time)] | None = None
    id: str | None = None
    key: str | None = None
    headers: dict[str, str] = {}
    tags: list[str] | None = None
    priority: Priority | None = None
    idle: bool | None = None
    expires: Annotated[FutureTime, BeforeValidator(_read_line_time)] | None = None


def check(file: IO[bytes], defaults: Defaults) -> int:
    """Check all lines; return the number of tasks.

    Raises:
        Misuse: Lines are invalid; the text lists them.
    """
    hashes = array("Q")  # of the given ids, eight bytes each: files may be long
    unseen = defaults.secrets

    def check_line(number: int, text: bytes) -> None:
        nonlocal unseen
        message = read_item(number, text, defaults).message
        if unseen:
            unseen = _missing(unseen, from_json(message.arguments))
        if message.own_id:
            hashes.append(spread(message.id))

    def repeated() -> Iterator[str]:
        if duplicates := {one for one, other in pairwise(sorted(hashes)) if one == other}:
            yield from _duplicate_ids(file, defaults, duplicates)

    count = check_lines(file, check_line, "nothing was sent", repeated=repeated)
    if unseen and count:
        raise Misuse(f"--secret: no line has an argument called {'.'.join(unseen[0])!r}; nothing was sent")
    return count


def _missing(paths: SecretPaths, arguments: Any) -> SecretPaths:
    return tuple(path for path in paths if not path_exists(arguments, path))


def _duplicate_ids(file: IO[bytes], defaults: Defaults, duplicates: Set[int]) -> Iterator[str]:
    """Yield a problem for each line that repeats an id."""
    first_lines: dict[str, int] = {}
    for number, text in numbered_lines(file):
        with suppress(ValueError):  # reported already
            message = read_item(number, text, defaults).message
            if message.own_id and spread(message.id) in duplicates:
                first = first_lines.setdefault(message.id, number)
                if first != number:
                    yield f"line {number}: id {message.id!r} must be unique, line {first} has it too"


def make_message(
    task: str,
    args: dict[str, Any],
    defaults: Defaults,
    *,
    task_id: str | None,
    key: str | None,
    headers: dict[str, str] | None = None,
    tags: Sequence[str] | None = None,
    app: str | None = None,
    lane: Lane | None = None,
    expires: FutureTime | None = None,
) -> TaskMessage:
    """Return a task ready to be sent. expires: in place of that of the command line.

    Raises:
        ValueError: The task is invalid; see `problem` for the text.
    """
    given = defaults.tags if tags is None else tags
    options = defaults.options
    if expires is not None:
        options = options.model_copy(update={"expires": _deadline("expires", expires, defaults.now)})
    form = EnvelopeTemplate(task, headers, options, given, app=app, lane=lane)
    data = finite_json(args, "args")
    message = form.message(data, defaults.secrets, key=key, task_id=task_id, tenant=defaults.tenant)
    message.check(defaults.payload_limit, defaults.large_limit)
    return message


class Listed(NamedTuple):
    """The queue of a task, and what the catalog says: its rule for unique tasks, its limits, that of the depth."""

    queue: str
    unique: UniqueTask | None = None
    limits: TaskLimits | None = None
    max_depth: MaxDepth | None = None

    def checked(self, message: TaskMessage, delay: float) -> TaskMessage:
        """Return a message with the uses of its limits. Raises `ValueError` if the arguments make no key."""
        if self.unique is not None:
            self.unique.digest(self.queue, message)
            self.unique.check_delay(delay)
        return message if self.limits is None else self.limits.limited(message)


def resolve_queue(task: str, queue: str | None, app: str | None, arguments: bytes, catalog: Catalog) -> Listed:
    """Return the queue of a task, and what the catalog says of the task.

    The queue is the one that is named, else the catalog's. If it is named, a schema that cannot be used is reported and
    not used.

    Raises:
        CatalogError: The catalog does not know the queue, several apps have the task there and none is named, the
            arguments do not fit the task that it lists, or only its app can make a key.
    """
    if queue is None or any(listed.queue == queue for listed in catalog.named(task, app)):
        listed = catalog.find(task, app=app, queue=queue)
        if queue is None or listed.problem is None:
            listed.check(arguments)
        else:
            report_once(f"the arguments of task {task!r} were not checked: {listed.problem}")
        return Listed(listed.queue, listed.unique_task(), listed.task_limits(), listed.max_depth())
    return Listed(queue)


def lane_of_task(task: str, queue: str | None, app: str | None, lane: Lane | None, catalog: Catalog) -> Lane | None:
    """Return the lane of a task, the one that is given, else the catalog's; None if that lists no or several lanes."""
    if lane is not None:
        return lane
    found: set[Lane] = {listed.lane for listed in catalog.named(task, app) if queue in (None, listed.queue)}
    return found.pop() if len(found) == 1 else None


def read_item(number: int | None, text: bytes, defaults: Defaults) -> Item:
    """Return the task of a line; number: None if the file has no lines, but one object.

    Raises `ValueError`, of which `problem` has the text.
    """
    given = _Line.model_validate(read_object(text))
    task = defaults.task if given.task is None else given.task
    if task is None:
        raise ValueError(
            f"task is missing{'' if defaults.only_queue else ', and the command line has no default for it'}"
        )
    key = defaults.key if given.key is None else given.key
    app = given.app or defaults.app
    if defaults.only_queue:
        if given.queue not in (None, defaults.queue):
            raise ValueError(f"queue must be {defaults.queue!r} here, got {given.queue!r}")
        if not defaults.catalog.named(task, app):
            defaults.catalog.find(task, app=app)
    lane = check_lane(given.priority, given.idle) or defaults.lane
    lane = lane_of_task(task, given.queue or defaults.queue, app, lane, defaults.catalog)
    fields: dict[str, Any] = {"headers": given.headers, "tags": given.tags, "app": app, "lane": lane}
    task_id = given.id
    if task_id is None and defaults.batch is not None:
        task_id = defaults.batch if number is None else f"{defaults.batch}-{number}"
    message = make_message(task, given.args, defaults, task_id=task_id, key=key, expires=given.expires, **fields)
    listed = resolve_queue(task, given.queue or defaults.queue, app, message.arguments, defaults.catalog)
    delay = defaults.delay if given.delay is None else given.delay
    message = listed.checked(message, delay.ahead or float(delay.ms or 0))
    return Item(task, listed.queue, delay, listed.unique, defaults.limit(listed.max_depth), message)


class Durability(StrEnum):
    """Values of `--durability`."""

    REPLICATED = "replicated"


class PriorityOption(StrEnum):
    """Values of `--priority`."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Full(StrEnum):
    """Values of `--when-full`."""

    REFUSE = "refuse"
    WAIT = "wait"


@connected_as_tenant
async def enqueue(
    producer: Producer,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Name of the task.")] = None,
    *,
    args: Annotated[str | None, typer.Option(metavar="JSON", help="Arguments by name, as a JSON object.")] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="QUEUE", parser=read_queue, help="Queue of the task; by default the catalog's."),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", parser=read_app, help="App whose workers run the task; by default any that has the task."
        ),
    ] = None,
    delay: Annotated[
        FutureTime | None,
        typer.Option(
            metavar="TIME", parser=read_future, help="Time before the task may run: 90, 15m, 2h; or an ISO time."
        ),
    ] = None,
    expires: Annotated[
        FutureTime | None,
        typer.Option(
            metavar="TIME",
            parser=read_future,
            help="Time by which a worker must start the task, or it becomes a dead letter: 15m, or an ISO time.",
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Enqueue the tasks of this file of JSON lines; - for stdin.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=read_batch,
            help="With --file: give lines without an id the ids NAME-1, NAME-2, ..., by their numbers, so that the "
            "command can be repeated.",
        ),
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            parser=read_task_id,
            help="Id of the task. If the same task with this id exists, nothing is enqueued.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Ordering key: tasks with the same key start in the order of enqueuing."),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Word by which lists find the task. Repeatable.")
    ] = None,
    timeout: Annotated[
        float | None,
        in_duration("Time limit of one attempt.", positive=True),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Attempts before the task becomes a dead letter.")
    ] = None,
    result_ttl: Annotated[
        float | None,
        in_duration("Time for which the outcome is kept.", positive=True),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Argument that is never shown; a.b for a member of an argument. Repeatable."),
    ] = None,
    durability: Annotated[
        Durability | None,
        typer.Option(help="Wait until Redis replicas have the task too: PERDURE_REPLICAS of them, or one."),
    ] = None,
    priority: Annotated[
        PriorityOption | None,
        typer.Option(help="Priority among the waiting tasks of the queue; by default the catalog's."),
    ] = None,
    idle: Annotated[
        bool | None,
        typer.Option("--idle/--not-idle", help="Run the task on spare slots only; by default the catalog's."),
    ] = None,
    max_depth: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Enqueue nothing while N tasks wait in the queue; by default the catalog's number."
        ),
    ] = None,
    when_full: Annotated[Full | None, typer.Option(help="With that many: refuse at once, or wait for room.")] = None,
    wait_limit: Annotated[
        float | None,
        in_duration("Time without room after which a waiting command fails. Default: 1m.", positive=True),
    ] = None,
) -> AsyncIterator[Output]:
    """Enqueue a task, and print its id.

    When the id is printed, Redis has stored the task.

    Example: perdure enqueue audit --args '{"root": "src"}' --delay 60

    With --file, each line is one task: {"args": {...}, "task"?, "queue"?,
    "app"?, "delay"?, "id"?, "key"?, "headers"?, "tags"?, "priority"?, "idle"?,
    "expires"?}. The command line has the defaults for missing fields. All lines
    are checked before the first is sent. With --batch, a command that was cut
    off can be given again: it enqueues only the lines that are missing.

    Workers publish the queue and the arguments of their tasks (perdure task
    catalog), so arguments are checked, and --queue is needed only before the
    first worker has started. If several apps have a task of this name, --app
    names one: workers of the others leave the task alone.

    Of a task that its app has declared as unique, one of each key is stored:
    the id may be that of a task that was there before.

    While as many tasks wait in the queue as --max-depth or the app allows, the
    command fails (exit code 1), or waits for room with --when-full wait. With
    --file, the lines whose ids are printed are stored, the others are not.

    Example: perdure enqueue audit --file tasks.jsonl --batch audit-2026-11
    """
    if batch is not None and file is None:
        raise Misuse("--batch is for the lines of a file: give --file too, or the --id of the task")
    now = 0.0 if expires is None and file is None else await redis_now(producer) / 1000
    try:
        deadline = None if expires is None else _deadline("--expires", expires, now)
        options = Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl, expires=deadline)
    except ValueError as error:
        raise Misuse(problem(error)) from None
    secrets = tuple(tuple(name.split(".")) for name in secret or ())
    limits = producer.payload_limit, producer.large_limit
    catalog, starts = await producer.catalog(), delay or FutureTime()
    with misuse_of("--priority or --idle"):
        lane = check_lane(None if priority is None else priority.value, idle)
    full: WhenFull | None = None if when_full is None else "wait" if when_full is Full.WAIT else "refuse"
    defaults = Defaults(
        task,
        queue,
        starts,
        key,
        options,
        *limits,
        catalog,
        secrets,
        tag or (),
        app,
        lane,
        max_depth=max_depth,
        when_full=full,
        wait_limit=wait_limit,
        batch=batch,
        now=now,
        tenant=producer.namespace.tenant,
    )
    replicated: Replicated | None = None if durability is None else "replicated"
    if file is None:
        sending = _send_one(producer, defaults, args, task_id, replicated)
    elif args is not None or task_id is not None:
        raise Misuse("--args and --id are for one task: with --file, give them in each line")
    else:
        sending = _send_file(producer, defaults, file, replicated)
    async for output in sending:
        yield output


def _deadline(what: str, expires: FutureTime, now: float) -> float:
    """Return the deadline in seconds since the epoch. Raises `ValueError`."""
    deadline = now + expires.ahead if expires.ms is None else expires.ms / 1000
    if not now < deadline <= now + MAX_SECONDS:
        given = iso_time(expires.ms) if expires.ms is not None else f"{expires.ahead:g} s"
        raise ValueError(f"{what} must be in the future, and at most {MAX_SECONDS:.0e} seconds ahead; got {given}")
    return deadline


async def _send_one(
    producer: Producer,
    defaults: Defaults,
    args: str | None,
    task_id: str | None,
    durability: Replicated | None,
) -> AsyncIterator[Output]:
    """Send a task; yield its id."""
    if defaults.task is None:
        raise Misuse("give a TASK, or a file of tasks with --file")
    with misuse_of("--args"):
        arguments = {} if args is None else read_object(args)
    for path in _missing(defaults.secrets, arguments):
        names = ", ".join(names_beside(arguments, path)) or "none"
        raise Misuse(f"--secret: no argument is called {'.'.join(path)!r}; there are {names}")
    lane = lane_of_task(defaults.task, defaults.queue, defaults.app, defaults.lane, defaults.catalog)
    try:
        message = make_message(
            defaults.task, arguments, defaults, task_id=task_id, key=defaults.key, app=defaults.app, lane=lane
        )
    except ValueError as error:
        raise Misuse(problem(error)) from None
    listed = resolve_queue(defaults.task, defaults.queue, defaults.app, message.arguments, defaults.catalog)
    with misuse_of("--max-depth, --when-full or --wait-limit"):
        limit = defaults.limit(listed.max_depth)
    queue, delay = listed.queue, await seconds_of_delay(producer, defaults.delay)
    with misuse_of("--args or --delay"):
        message = listed.checked(message, delay)
    handles: list[TaskHandle[Any]] = await producer.send(
        [message], queue=queue, delay=delay, durability=durability, unique=listed.unique, limit=limit
    )
    (handle,) = handles
    enqueued = StderrText(f"enqueued {defaults.task} on queue {queue} of {producer.address.shown}")
    yield Output(_shown(handle), handle.id, None if handle.existed else enqueued)
    if handle.existed:
        with suppress(TaskNotFound):  # of a key for a number of seconds
            state = (await handle.record()).state
            why = "" if handle.id == message.id else ", as the task of this unique key"
            note(f"task {handle.id} exists already on queue {queue}{why}, and is {state}: nothing was enqueued")
    await warn_unserved(producer, {queue: {defaults.task}}, defaults.catalog, app=defaults.app)


async def _send_file(
    producer: Producer, defaults: Defaults, path: str, durability: Replicated | None
) -> AsyncIterator[Output]:
    """Send tasks in the order of the lines; yield ids after their tasks are stored."""
    sent_to: dict[str, set[str]] = {}
    existed = 0
    with opened(path) as file:
        count = check(file, defaults)
        with Bar("enqueuing", count, rest=None) as bar, _noting_rest(bar, count, defaults.batch):
            for (queue, delay, unique, limit), run in groupby(
                read_lines(file, partial(read_item, defaults=defaults)),
                key=attrgetter("queue", "delay", "unique", "limit"),
            ):
                names = sent_to.setdefault(queue, set())
                messages = (_noted(item, names) for item in run)
                start = await seconds_of_delay(producer, delay)
                handles: AsyncIterator[TaskHandle[Any]] = producer.send_stream(
                    messages, queue=queue, delay=start, durability=durability, unique=unique, limit=limit
                )
                async for handle in handles:
                    existed += handle.existed
                    yield line(_shown(handle), handle.id)
                    bar.advance()
    before = f"; existed already: {existed}" if existed else ""
    note(f"tasks enqueued on {producer.address.shown}: {count - existed}{before}")
    await warn_unserved(producer, sent_to, defaults.catalog, app=defaults.app)


@contextmanager
def _noting_rest(bar: Bar, count: int, batch: str | None) -> Iterator[None]:
    """Print how many lines are stored if an error or a signal ends the block."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TaskExists):
            rest = "correct the line, and give the command again"
        else:
            rest = "the same command enqueues the rest" if batch else "with --batch, the command could be repeated"
        note(f"at least {bar.done:,} of {count:,} lines are stored; {rest}")
        raise


def _noted(item: Item, names: set[str]) -> TaskMessage:
    names.add(item.task)
    return item.message


def _shown(handle: TaskHandle[Any]) -> dict[str, Any]:
    return {"id": handle.id, "queue": handle.partition.queue, "existed": handle.existed}
