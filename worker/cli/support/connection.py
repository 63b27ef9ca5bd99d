"""Connection options of the commands, the open `Producer` for a command, and lookup of tasks, queues and workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec
from uuid import UUID

import anyio
import typer

from ....queues.catalog import Catalog
from ....queues.defaults import unknown_variables
from ....queues.errors import Refused, TaskNotFound
from ....queues.handle import TaskHandle
from ....queues.inspection.views import find_tasks, queue_partitions
from ....queues.keys import Partition
from ....queues.presence import list_workers
from ....queues.producer import Producer
from ....queues.security.urls import has_credentials
from ...on_demand import keep_large_values
from ...settings import load_settings
from .errors import Failed, Misuse
from .options import Delay, with_options
from .output import note, timestamp

P = ParamSpec("P")

_PANEL = "Connection"

RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="URL of the server: redis://, redis+cluster://, redis+sentinel:// (with TLS: rediss), unix:// or "
        "embedded:. Default: PERDURE_REDIS_URL, then the embedded server. Give a URL with a password by "
        "PERDURE_REDIS_URL: all users of a machine can read command lines.",
        rich_help_panel=_PANEL,
    ),
]
NamespaceName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Namespace of the deployment. Default: PERDURE_NAMESPACE, then perdure.",
        rich_help_panel=_PANEL,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the embedded server. Default: PERDURE_DATA_DIR, then a folder in your home folder.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Connection options of a command; None leaves an option to the environment."""

    redis_url: str | None = field(default=None, repr=False)
    namespace: str | None = None
    data_dir: Path | None = None

    def overrides(self) -> dict[str, object]:
        """Return the options as settings. `--data-dir` alone selects the embedded server in that folder."""
        if self.data_dir is not None and not (self.redis_url or "embedded:").startswith("embedded:"):
            raise Misuse("--data-dir is for the embedded server, but --redis-url names another one: give one of them")
        url = self.redis_url or (None if self.data_dir is None else "embedded:")
        return {"redis_url": url, "namespace": self.namespace, "data_dir": self.data_dir}

    def producer(self) -> Producer:
        """Return a producer that is not open yet."""
        settings = load_settings(**self.overrides())
        for problem in unknown_variables():
            note(problem)
        producer = Producer(
            address=settings.address,
            namespace=settings.namespace,
            payload_limit=settings.payload_limit,
            large_limit=settings.max_value_size,
            result_ttl=settings.result_ttl,
            encryptor=settings.encryptor,
            replication=settings.replication,
            requirements=settings.requirements,
        )
        keep_large_values(producer.gateway, settings)
        return producer


def with_connection_options(command: Callable[Concatenate[ConnectionOptions, P], None]) -> Callable[..., None]:
    """Add the connection options to a command, which receives them as its first argument."""
    options = {"redis_url": RedisUrl, "namespace": NamespaceName, "data_dir": DataDir}
    return with_options(command, options, _connection_options)


def _connection_options(**given: Any) -> ConnectionOptions:
    warn_of_password("--redis-url", given["redis_url"], "PERDURE_REDIS_URL")
    return ConnectionOptions(**given)


def warn_of_password(option: str, url: str | None, variable: str) -> None:
    """Print a warning if a URL of the command line has a password. variable: the setting that hides it."""
    if url is not None and has_credentials(url):
        note(f"warning: all users of this machine can read the password in {option}: set {variable} instead")


def connected(command: Callable[Concatenate[Producer, P], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Add the connection options to an async command, and run it with an open `Producer` as its first argument."""

    @functools.wraps(command)
    def called(place: ConnectionOptions, /, *args: P.args, **kwargs: P.kwargs) -> None:
        async def connect_and_run() -> None:
            async with place.producer() as producer:
                await command(producer, *args, **kwargs)

        anyio.run(connect_and_run)

    return with_connection_options(called)


async def redis_now(producer: Producer) -> int:
    """Return the time of the Redis server in milliseconds; all times of Perdure are of this clock."""
    seconds, micros = await producer.gateway.command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def seconds_of_delay(producer: Producer, delay: Delay) -> float:
    """Return the seconds of a delay; those until a point in time by the clock of the server."""
    return delay.from_now(0 if delay.until is None else await redis_now(producer))


async def find_handle(producer: Producer, task_id: str, queue: str | None = None) -> TaskHandle[Any]:
    """Find a task in a queue, or in any queue.

    Raises:
        TaskNotFound: The queue does not have it, or no queue of the namespace.
        Misuse: Several queues have a task of this id.
    """
    found = await find_tasks(producer.gateway, producer.namespace, task_id, queue)
    names = sorted({partition.queue for partition in found})
    if len(names) > 1:
        queues = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
        raise Misuse(f"id {task_id!r} must name one task, but queues {queues} have one each; choose with --queue")
    handle = await producer.find(task_id, names[0]) if names else None
    if handle is None:
        where = f"{'any queue' if queue is None else f'queue {queue!r}'} of namespace {producer.namespace.name!r}"
        raise TaskNotFound(task_id, f"{where} on {producer.address.shown}{_made_on(task_id)}")
    return handle


def _made_on(task_id: str) -> str:
    """Return when an id was made, if it says so: Perdure's own do. A record may have expired since."""
    try:
        made = UUID(task_id)
    except ValueError:
        return ""
    return f" (its id was made on {timestamp(made.int >> 80)})" if made.version == 7 else ""


async def known_partitions(producer: Producer, queue: str | None) -> Sequence[Partition]:
    """Return the partitions of one queue, or of all queues.

    Raises:
        Failed: The queue does not exist.
    """
    partitions = await queue_partitions(producer.gateway, producer.namespace, queue)
    if queue is not None and not partitions:
        known = {partition.queue for partition in await queue_partitions(producer.gateway, producer.namespace)}
        names = ", ".join(sorted(known)) or "none"
        raise Failed(f"no queue {queue!r} in namespace {producer.namespace.name!r}; existing queues: {names}")
    return partitions


async def warn_unserved(
    producer: Producer, tasks: Mapping[str, Set[str]], catalog: Catalog | None = None, *, app: str | None = None
) -> None:
    """Warn of queues that no live worker serves, and of tasks that none of a queue's live workers has.

    A user who may not read the registry of workers gets no warning.

    Args:
        tasks: names of tasks by queue.
        catalog: what workers have published.
        app: only workers of this app count.
    """
    try:
        workers = await list_workers(producer.gateway, producer.namespace)
    except Refused:
        return
    live = [worker for worker in workers if not worker.presumed_dead and worker.runs(app)]
    of = "" if app is None else f" of app {app!r}"
    for queue, names in sorted(tasks.items()):
        serving = [worker for worker in live if queue in worker.queues]
        if not serving:
            note(f"no worker{of} serves queue {queue!r} now; start one: perdure worker run APP --queues {queue}")
            continue
        known = None if catalog is None else catalog.offered_by(serving)
        for name in sorted(names - known) if known is not None else ():
            note(
                f"no live worker{of} of queue {queue!r} has a task {name!r}: the task waits for one, and becomes a "
                f"dead letter if none comes; the workers there have: {', '.join(sorted(known or ())) or 'none'}"
            )
