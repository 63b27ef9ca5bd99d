"""Connection options of the commands, the open `Producer` for a command, and lookup of tasks, queues and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec
from uuid import UUID

import typer

from ....queues.catalog import Catalog
from ....queues.defaults import unknown_variables
from ....queues.durations import FutureTime
from ....queues.errors import Refused, TaskNotFound
from ....queues.handle import TaskHandle
from ....queues.inspection.views import find_tasks, queue_partitions
from ....queues.keys import Partition, with_tenant
from ....queues.presence import list_workers
from ....queues.producer import Producer
from ....queues.security.urls import has_credentials
from ...on_demand import keep_large_values
from ...settings import load_settings
from .errors import Failed, Misuse
from .options import InQueue, TaskId, read_tenant
from .output import note, timestamp
from .runner import OptionGroup, Resource, command

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


TenantName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=read_tenant,
        help="Tenant whose tasks and sessions are meant. Default: PERDURE_TENANT, then those of all tenants.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class ConnectionOptions(OptionGroup):
    """Connection options of a command; None leaves an option to the environment."""

    redis_url: RedisUrl = field(default=None, repr=False)
    namespace: NamespaceName = None
    data_dir: DataDir = None

    def __post_init__(self) -> None:
        warn_of_password("--redis-url", self.redis_url, "PERDURE_REDIS_URL")

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
            tenant=settings.tenant,
            payload_limit=settings.payload_limit,
            large_limit=settings.max_value_size,
            result_ttl=settings.result_ttl,
            encryptor=settings.encryptor,
            answer_keys=settings.answer_keys,
            replication=settings.replication,
            requirements=settings.requirements,
        )
        keep_large_values(producer.gateway, settings)
        return producer


@dataclass(frozen=True, slots=True)
class TenantOptions(ConnectionOptions):
    """Connection options of a command that knows tenants."""

    tenant: TenantName = None

    def overrides(self) -> dict[str, object]:
        """Return the options as settings."""
        return {**ConnectionOptions.overrides(self), "tenant": self.tenant}


def warn_of_password(option: str, url: str | None, variable: str) -> None:
    """Print a warning if a URL of the command line has a password. variable: the setting that hides it."""
    if url is not None and has_credentials(url):
        note(f"warning: all users of this machine can read the password in {option}: set {variable} instead")


def connected(function: Callable[Concatenate[Producer, P], Any]) -> Callable[..., None]:
    """Make a command of an async function: add the connection options, and pass an open `Producer` to it.

    The command is about the whole deployment, so it is refused with a tenant.
    """
    return command(function, Resource(ConnectionOptions, _of_all_tenants, redis_now))


def _of_all_tenants(place: ConnectionOptions) -> Producer:
    producer = place.producer()
    if (tenant := producer.namespace.tenant) is not None:
        raise Misuse(f"this command is about all tenants, and PERDURE_TENANT is {tenant!r}: unset PERDURE_TENANT")
    return producer


def connected_as_tenant(function: Callable[Concatenate[Producer, P], Any]) -> Callable[..., None]:
    """Make a command of an async function as `connected` does: it is about the tasks of one tenant if one is named."""
    return command(function, Resource(TenantOptions, TenantOptions.producer, redis_now, _with_tenant))


def _with_tenant(producer: Producer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command with the tenant in the ids of tasks.

    Raises:
        TaskNotFound: An id is one of another tenant.
    """
    tenant = producer.namespace.tenant
    if tenant is None:
        return dict(given)

    def own(task_id: str) -> str:
        try:
            return with_tenant(tenant, task_id)
        except ValueError:
            raise TaskNotFound(task_id, f"the tasks {where(producer)}") from None

    found = dict(given)
    for name, value in given.items():
        if isinstance(value, TaskOptions):
            found[name] = replace(value, task_id=own(value.task_id))
        elif name == "task_id" and value is not None:
            found[name] = own(value)
        elif name == "ids" and value is not None:
            found[name] = [own(task_id) for task_id in value]
    return found


def where(producer: Producer) -> str:
    """Return the namespace and the server, for messages."""
    tenant = producer.namespace.tenant
    of = "" if tenant is None else f"of tenant {tenant!r} "
    return f"{of}in namespace {producer.namespace.name!r} on {producer.address.shown}"


async def redis_now(producer: Producer) -> int:
    """Return the time of the Redis server in milliseconds; all times of Perdure are of this clock."""
    seconds, micros = await producer.gateway.command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def seconds_of_delay(producer: Producer, delay: FutureTime) -> float:
    """Return the seconds of a delay; those until a point in time by the clock of the server."""
    return delay.from_now(0 if delay.ms is None else await redis_now(producer))


@dataclass(frozen=True, slots=True)
class TaskOptions(OptionGroup):
    """Id of a task, and its queue if several have the id."""

    task_id: TaskId
    queue: InQueue = None

    async def find(self, producer: Producer) -> TaskHandle[Any]:
        """Find the task in its queue, or in any queue.

        Raises:
            TaskNotFound: The queue does not have it, or no queue of the namespace.
            Misuse: Several queues have a task of this id.
        """
        found = await find_tasks(producer.gateway, producer.namespace, self.task_id, self.queue)
        names = sorted({partition.queue for partition in found})
        if len(names) > 1:
            queues = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
            raise Misuse(
                f"id {self.task_id!r} must name one task, but queues {queues} have one each; choose with --queue"
            )
        handle = await producer.find(self.task_id, names[0]) if names else None
        if handle is None:
            place = "any queue" if self.queue is None else f"queue {self.queue!r}"
            place += f" of namespace {producer.namespace.name!r} on {producer.address.shown}"
            raise TaskNotFound(self.task_id, f"{place}{_made_on(self.task_id)}")
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
