"""Catalog of tasks: what workers publish about their apps, so that tasks can be enqueued by name alone.

One entry per app and version, which is a digest of the tasks' descriptions. So a rolling deploy has one entry for the
old and one for the new version, and each stays for `KEPT` after its last worker. Workers write an entry when they start
and seldom afterwards; no task costs anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from .defaults import nearest
from .envelope import TaskMessage
from .errors import CatalogError
from .keys import Namespace, check_name, is_name
from .lanes import NORMAL, Lane, read_lane
from .member_registry import AHEAD_MS, MemberRegistry, report_problems
from .presence import WorkerInfo
from .schemas import UnusableSchema, check_schema, find_problems
from .transport.gateway import Gateway
from .transport.scripts import milliseconds
from .unique import Unique, UniqueTask, unique_task
from .wording import listed

if TYPE_CHECKING:
    from .depth import MaxDepth
    from .limits.task_limits import TaskLimits

KEPT: Final = 30 * 86_400
"""TTL of an entry in seconds."""

CATALOG_REFRESH: Final = 6 * 3600.0
"""Seconds after which a worker publishes its entry again."""

_ENTRIES: Final = 100
"""Most entries of a namespace; the oldest are dropped."""

_VERSION = re.compile(r"[0-9a-f]{12}")

_ENTRY_BYTES: Final = 1_048_576
"""Largest entry; one that is larger with schemas is published without any."""

_NAME: Final = 256
"""Most characters of a task's name."""

_DESCRIPTION: Final = 1_000
"""Most characters of a description."""


@dataclass(frozen=True, slots=True)
class CatalogTask:
    """A task as its workers describe it.

    Attributes:
        description: The docstring of the handler.
        arguments, result: JSON schemas; None if they are unknown, or could not be used by producers.
        max_attempts, max_crashes: Limits of its retry policy; None if they are unknown.
        app, version: Set by the entry that lists the task.
        task_version: Version of the task's code.
        unique: Its rule for unique tasks, see `UniqueTask.published`; None without one.
        limits: Its limits, see `TaskLimits.published`; None without any.
        budgets: Its budgets, see `TaskBudgets.published`; None without any. A task is charged to those of its worker.
        lane: Its lane of the queue: "high", "normal", "low" or "idle".
        depth: Limit of the depth of its queue, see `MaxDepth.published`; None without one.
    """

    name: str
    queue: str
    description: str = ""
    arguments: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    app: str = ""
    version: str = ""
    task_version: int = 1
    unique: Mapping[str, Any] | None = None
    limits: Mapping[str, Any] | None = None
    budgets: Sequence[Mapping[str, Any]] | None = None
    lane: Lane = NORMAL
    depth: Mapping[str, Any] | None = None

    @property
    def problem(self) -> str | None:
        """Why its schemas cannot be used, or None."""
        return _schema_problem("arguments", self.arguments) or _schema_problem("result", self.result)

    @property
    def limit_names(self) -> list[str]:
        """Names of its limits; none where what is published cannot be read."""
        try:
            return [str(fields["name"]) for fields in (self.limits or {}).get("limits", ())]
        except (LookupError, TypeError, AttributeError):
            return []

    @property
    def budget_texts(self) -> list[str]:
        """Its budgets for people; none where what is published cannot be read."""
        if not self.budgets:
            return []
        from .budgets.definition import published_text

        try:
            return [published_text(fields) for fields in self.budgets]
        except (ValueError, LookupError, TypeError, AttributeError):
            return []

    def check(self, arguments: bytes) -> None:
        """Raise `CatalogError` if encoded arguments do not fit the schema. The text holds no values."""
        if self.arguments is None:
            return
        try:
            problems = find_problems(self.arguments, arguments)
        except UnusableSchema as error:
            raise CatalogError(
                f"could not check the arguments of task {self.name!r}: the schema that app {self.app!r} has published "
                f"(version {self.version}) cannot be used: {error}; name its queue, {self.queue!r}, to enqueue the "
                "task unchecked, and see 'perdure task catalog' for what is published"
            ) from None
        if problems:
            raise CatalogError(f"task {self.name!r}: {listed(problems, 3, '; ')}")

    def unique_task(self, unique: Unique | Literal[False] | None = None) -> UniqueTask | None:
        """Return the rule for unique tasks of a call. unique: the caller's own rule, False for none.

        Raises `CatalogError` if only the app can make the key, or what is published is no rule.
        """
        if unique is not None:
            return unique_task(self.name, unique)
        if self.unique is None:
            return None
        try:
            if self.unique.get("function"):
                raise CatalogError(
                    f"task {self.name!r} is unique by a function of app {self.app!r}, which only that app can call: "
                    "enqueue the task there, or let the app name the arguments in by="
                )
            return UniqueTask.read(self.name, self.unique)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CatalogError):
                raise
            raise CatalogError(f"could not read the rule for unique tasks of task {self.name!r}: {error}") from None

    def task_limits(self) -> TaskLimits | None:
        """Return its limits; None without any.

        Raises `CatalogError` if only the app can make a key, or what is published are no limits.
        """
        if not self.limits:
            return None
        from .limits.task_limits import TaskLimits

        try:
            functions = [fields["name"] for fields in self.limits["limits"] if fields.get("function")]
            if functions:
                raise CatalogError(
                    f"task {self.name!r} has limit {functions[0]!r} by a function of app {self.app!r}, which only that "
                    "app can call: enqueue the task there, or let the app name the arguments in by="
                )
            return TaskLimits.read(self.name, self.limits)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CatalogError):
                raise
            raise CatalogError(f"could not read the limits of task {self.name!r}: {error}") from None

    def limited(self, message: TaskMessage, costs: Mapping[str, int] | None = None) -> TaskMessage:
        """Return a message that is not encrypted yet with the uses of its limits. costs: those of the call.

        Raises `CatalogError`, `InvalidLimitUse`.
        """
        limits = self.task_limits()
        if limits is not None:
            return limits.limited(message, costs)
        if costs:
            raise CatalogError(f"task {self.name!r} has no limits, got costs of {', '.join(costs)}")
        return message

    def max_depth(self) -> MaxDepth | None:
        """Return the limit of the depth of its queue. Raises `CatalogError` for other data there."""
        if self.depth is None:
            return None
        from .depth import MaxDepth

        try:
            return MaxDepth.read(self.depth)
        except (LookupError, TypeError, ValueError) as error:
            raise CatalogError(f"could not read the max_depth of task {self.name!r}: {error}") from None


class AppEntry:
    """The tasks of one version of an app, ready to be published."""

    def __init__(self, app: str, tasks: Sequence[CatalogTask]) -> None:
        self.app = app
        data = _encode(tasks, schemas=True)
        self.data = data if len(data) <= _ENTRY_BYTES else _encode(tasks, schemas=False)
        self.version = hashlib.blake2b(self.data, digest_size=6).hexdigest()


class Catalog:
    """The published tasks of a namespace."""

    def __init__(self, entries: Sequence[Sequence[CatalogTask]], problems: Mapping[str, str] | None = None) -> None:
        """Args:
        entries: the tasks of each entry, those of the worker that started last first.
        problems: what another program wrote, by the name of the entry or key.
        """
        self.problems = dict(problems or {})
        self.tasks: list[CatalogTask] = []
        self.all_versions = [task for entry in entries for task in entry]
        known: set[tuple[str, str]] = set()
        for task in self.all_versions:
            if (task.app, task.name) not in known:  # the newest version of an app describes a task
                known.add((task.app, task.name))
                self.tasks.append(task)
        self.tasks.sort(key=lambda task: (task.name, task.app))

    def named(self, name: str, app: str | None = None) -> list[CatalogTask]:
        """Return the tasks of a name, at most one of each app. app: only that of this app."""
        return [task for task in self.tasks if task.name == name and app in (None, task.app)]

    def find(self, name: str, *, app: str | None = None, queue: str | None = None) -> CatalogTask:
        """Return the only task of a name, of an app or a queue if they are named.

        Raises:
            CatalogError: No app, or more than one, has it.
        """
        listed = self.named(name, app)
        found = [task for task in listed if queue in (None, task.queue)]
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(f"app {task.app!r} (queue {task.queue!r})" for task in found)
            other = " or one of the queues" if len({task.queue for task in found}) > 1 else ""
            raise CatalogError(f"task {name!r} is in several apps: name one of the apps{other}: {places}")
        if app is not None and self.tasks:
            apps = ", ".join(sorted({repr(task.app) for task in self.named(name)})) or "none"
            raise CatalogError(f"app {app!r} has published no task {name!r}; apps that have one: {apps}")
        if not self.tasks:
            raise CatalogError(
                f"could not find the queue of task {name!r}: no worker has published its tasks yet; name the queue, by "
                "default that of the app's name, or start a worker"
            )
        hint = self.hint(name) or "; start its worker, or name its queue"
        raise CatalogError(f"could not find task {name!r}: no worker has published it{hint}")

    def offered_by(self, workers: Sequence[WorkerInfo]) -> set[str] | None:
        """Return the names of the tasks that these workers have; None if the entry of one of them is not known."""
        entries = {(worker.app, worker.catalog) for worker in workers}
        if not entries <= {(task.app, task.version) for task in self.all_versions}:
            return None
        return {task.name for task in self.all_versions if (task.app, task.version) in entries}

    def hint(self, name: str) -> str:
        """Return a question for the end of a sentence about an unknown name; empty without a similar one."""
        names = {task.name for task in self.tasks}
        return "" if name in names else nearest(name, names)


async def publish_entry(gateway: Gateway, namespace: Namespace, entry: AppEntry, started: int) -> None:
    """Store or refresh an entry. started: when the worker did, in milliseconds of Redis' clock.

    Members that start in the future are removed. If there are more entries than a reader reads, so are members without
    an entry, and then the oldest ones.
    """
    index, member = namespace.catalog, f"{entry.app}:{entry.version}"
    registry = _registry(gateway, namespace)
    latest = await registry.latest()
    *_, listed = await gateway.pipeline(
        [
            ("SET", namespace.catalog_entry(entry.app, entry.version), entry.data, "EX", KEPT),
            ("ZREMRANGEBYSCORE", index, f"({latest}", "+inf"),
            ("ZADD", index, "GT", started, member),
            ("PEXPIRE", index, KEPT * 1000),
            ("ZCARD", index),
        ]
    )
    if listed > _ENTRIES:
        await registry.trim()
        await gateway.command("ZREMRANGEBYRANK", index, 0, -_ENTRIES - 1)


async def is_listed(gateway: Gateway, namespace: Namespace, entry: AppEntry) -> bool:
    """Return whether a reader finds an entry: it is stored, and there are not too many others."""
    score, stored, listed, time = await gateway.pipeline(
        [
            ("ZSCORE", namespace.catalog, f"{entry.app}:{entry.version}"),
            ("TYPE", namespace.catalog_entry(entry.app, entry.version)),
            ("ZCARD", namespace.catalog),
            ("TIME",),
        ],
        node_of=namespace.catalog,
    )
    in_time = score is not None and float(score) <= milliseconds(time) + AHEAD_MS
    return in_time and stored == b"string" and listed <= _ENTRIES


async def read_catalog(gateway: Gateway, namespace: Namespace) -> Catalog:
    """Return the catalog, in three round trips. Entries that have expired are left out.

    What another program wrote is left out, reported once, and named in `problems`. However much that is, a bounded
    number of members is read.
    """
    registry = _registry(gateway, namespace)
    problems = registry.problems

    def decode(member: str, data: bytes, _: int) -> list[CatalogTask]:
        tasks, problem = _decode(*_parts(member), data)
        if problem:
            problems[member] = problem
        return tasks

    entries = await registry.read(decode, limit=_ENTRIES)
    report_problems("catalog of tasks", problems)
    return Catalog(entries, problems)


def _registry(gateway: Gateway, namespace: Namespace) -> MemberRegistry:
    return MemberRegistry(gateway, namespace.catalog, partial(_entry_key, namespace), "string")


def _parts(member: str) -> tuple[str, str]:
    """Return the app and version that a member names."""
    app, _, version = member.rpartition(":")
    return app, version


def _entry_key(namespace: Namespace, member: str) -> str | None:
    """Return the key of a member's entry; None for one that no part of Perdure wrote."""
    app, version = _parts(member)
    return namespace.catalog_entry(app, version) if is_name(app) and _VERSION.fullmatch(version) else None


def _encode(tasks: Sequence[CatalogTask], *, schemas: bool) -> bytes:
    listed = []
    for task in sorted(tasks, key=lambda task: task.name):
        fields = asdict(task)
        del fields["app"], fields["version"]
        fields["description"] = task.description[:_DESCRIPTION]
        for kind in ("arguments", "result"):
            if not schemas or _schema_problem(kind, fields[kind], thorough=False) is not None:
                fields[kind] = None
        listed.append(fields)
    return orjson.dumps({"tasks": listed})


def _decode(app: str, version: str, data: bytes) -> tuple[list[CatalogTask], str]:
    """Decode an entry of any version of Perdure; return its tasks, and what is wrong. Unknown fields are ignored."""
    try:
        if len(data) > _ENTRY_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, more than {_ENTRY_BYTES:,}")
        listed = orjson.loads(data)["tasks"]
        if not isinstance(listed, list):
            raise TypeError("it has no list of tasks")
    except (LookupError, TypeError, ValueError) as error:
        problem = "it has no list of tasks" if isinstance(error, LookupError | TypeError) else str(error)
        return [], f"ignored: {problem}"
    tasks, problems = [], []
    for number, fields in enumerate(listed, 1):
        try:
            tasks.append(_task(app, version, fields))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            problems.append(f"task {number}: {problem}")
    return tasks, f"{len(problems)} tasks are ignored: {problems[0][:_NAME]}" if problems else ""


def _task(app: str, version: str, fields: Mapping[str, Any]) -> CatalogTask:
    name, queue, description = fields["name"], fields["queue"], fields.get("description", "")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME:
        raise ValueError(f"its name must be a text of 1 to {_NAME} characters")
    if not isinstance(queue, str) or not isinstance(description, str):
        raise TypeError("its queue and its description must be texts")
    return CatalogTask(
        name=name,
        queue=check_name("queue", queue),
        description=description[:_DESCRIPTION],
        arguments=fields.get("arguments"),
        result=fields.get("result"),
        max_attempts=_count(fields.get("max_attempts")),
        max_crashes=_count(fields.get("max_crashes")),
        app=app,
        version=version,
        task_version=_count(fields.get("task_version")) or 1,
        unique=fields.get("unique"),
        limits=fields.get("limits"),
        budgets=fields.get("budgets"),
        lane=read_lane(fields.get("lane")),
        depth=fields.get("depth"),
    )


def _schema_problem(kind: str, schema: object, *, thorough: bool = True) -> str | None:
    """Return why a schema cannot be used; None if it can, or is unknown. thorough: see `check_schema`."""
    if schema is None:
        return None
    try:
        check_schema(schema, thorough=thorough)
    except UnusableSchema as error:
        return f"{kind}: {error}"
    return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
