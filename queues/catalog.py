"""Catalog of tasks: what workers publish about their apps, so that tasks can be enqueued by name alone.

One entry per app and version, which is a digest of the tasks' descriptions. So a rolling deploy has one entry for the
old and one for the new version, and each stays for `KEPT` after its last worker. Workers write an entry when they start
and seldom afterwards; no task costs anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

import orjson

from .defaults import nearest
from .errors import CatalogError, Refused
from .junk import report_once, shown_bytes, split
from .keys import Namespace
from .presence import WorkerInfo
from .transport import Gateway

__all__ = ["CATALOG_REFRESH", "AppEntry", "Catalog", "CatalogTask", "publish_entry", "read_catalog"]

KEPT: Final = 30 * 86_400
"""TTL of an entry in seconds."""

CATALOG_REFRESH: Final = 6 * 3600.0
"""Seconds after which a worker publishes its entry again."""

_ENTRIES: Final = 100
"""Most entries of a namespace; the oldest are dropped."""

_SCHEMA_BYTES: Final = 16_384
"""Largest schema that is published; a task with a larger one is listed without it."""

_ENTRY_BYTES: Final = 1_048_576
"""Largest entry with schemas; a larger one is published without any."""

_DESCRIPTION: Final = 1_000
"""Most characters of a description."""


@dataclass(frozen=True, slots=True)
class CatalogTask:
    """A task as its workers describe it.

    Attributes:
        description: The docstring of the handler.
        arguments, result: JSON schemas; None if they are unknown or too large.
        max_attempts, max_crashes: Limits of its retry policy; None if they are unknown.
        app, version: Set by the entry that lists the task.
        task_version: Version of the task's code.
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

    def check(self, arguments: bytes) -> None:
        """Raise `CatalogError` if encoded arguments do not fit the schema. The text holds no values."""
        if self.arguments is None:
            return
        problems = _validate(orjson.dumps(self.arguments), arguments)
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise CatalogError(f"task {self.name!r}: {'; '.join(problems[:3])}{more}")


class AppEntry:
    """The tasks of one version of an app, ready to be published."""

    def __init__(self, app: str, tasks: Sequence[CatalogTask]) -> None:
        self.app = app
        data = _encode(tasks, schemas=True)
        self.data = data if len(data) <= _ENTRY_BYTES else _encode(tasks, schemas=False)
        self.version = hashlib.blake2b(self.data, digest_size=6).hexdigest()


class Catalog:
    """The published tasks of a namespace."""

    def __init__(self, entries: Sequence[Sequence[CatalogTask]]) -> None:
        """entries: the tasks of each entry, those of the worker that started last first."""
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
    """Store or refresh an entry. started: when the worker did, in milliseconds of Redis' clock."""
    index, member = namespace.catalog, f"{entry.app}:{entry.version}"
    await gateway.pipeline(
        [
            ("SET", namespace.catalog_entry(entry.app, entry.version), entry.data, "EX", KEPT),
            ("ZADD", index, "GT", started, member),
            ("ZREMRANGEBYRANK", index, 0, -_ENTRIES - 1),
            ("PEXPIRE", index, KEPT * 1000),
        ]
    )


async def read_catalog(gateway: Gateway, namespace: Namespace) -> Catalog:
    """Return the catalog, in two round trips. Entries that have expired or cannot be read are left out."""
    (members,) = await gateway.pipeline_each([("ZRANGE", namespace.catalog, 0, -1, "REV")])
    if isinstance(members, Refused):
        if "WRONGTYPE" not in str(members):
            raise members
        report_once(f"the catalog of tasks is ignored: key {namespace.catalog}: {members}")
        return Catalog([])
    known, foreign = split(members, _is_member)
    if foreign:
        report_once(f"members of {namespace.catalog} are ignored, such as {shown_bytes(foreign[0])}")
    names = [(app, version) for app, _, version in (member.partition(":") for member in known)]
    stored = await gateway.pipeline_each([("GET", namespace.catalog_entry(*name)) for name in names]) if names else []
    for reply in stored:
        if isinstance(reply, Refused):
            report_once(f"an entry of the catalog of tasks is ignored: {reply}")
    found = [(name, data) for name, data in zip(names, stored, strict=True) if isinstance(data, bytes)]
    return Catalog([_decode(*name, data) for name, data in found])


def _is_member(text: str) -> bool:
    app, colon, version = text.partition(":")
    return bool(app and colon and version)


def _encode(tasks: Sequence[CatalogTask], *, schemas: bool) -> bytes:
    listed = []
    for task in sorted(tasks, key=lambda task: task.name):
        fields = asdict(task)
        del fields["app"], fields["version"]
        fields["description"] = task.description[:_DESCRIPTION]
        for kind in ("arguments", "result"):
            if not schemas or len(orjson.dumps(fields[kind])) > _SCHEMA_BYTES:
                fields[kind] = None
        listed.append(fields)
    return orjson.dumps({"tasks": listed})


def _decode(app: str, version: str, data: bytes) -> list[CatalogTask]:
    """Decode an entry of any version of Perdure. Unknown fields are ignored."""
    try:
        return [
            CatalogTask(
                name=str(one["name"]),
                queue=str(one["queue"]),
                description=str(one.get("description", "")),
                arguments=_schema(one.get("arguments")),
                result=_schema(one.get("result")),
                max_attempts=one.get("max_attempts"),
                max_crashes=one.get("max_crashes"),
                app=app,
                version=version,
                task_version=int(one.get("task_version", 1)),
            )
            for one in orjson.loads(data)["tasks"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _schema(value: Any) -> Any:
    """Return a stored schema; None for what is no object."""
    return value if isinstance(value, dict) else None


def _validate(schema: bytes, arguments: bytes) -> list[str]:
    """Return what is wrong with the arguments, field by field."""
    validator = _validator(schema)
    if validator is None:
        return []
    found = []
    for error in validator.iter_errors(orjson.loads(arguments)):
        where = ".".join(str(part) for part in error.instance_path)
        found.append(f"{where}: {error.message}" if where else error.message)
    return found


@lru_cache(maxsize=64)
def _validator(schema: bytes) -> Any:
    """Return the validator of a schema; None for one that cannot be used, as a later version may publish."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(orjson.loads(schema), mask="the value")
    except (ValueError, jsonschema_rs.ReferencingError):
        return None
