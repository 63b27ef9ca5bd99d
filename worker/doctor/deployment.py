"""Checks of a namespace: format, settings, workers, consumers, leases, places of tasks, values of other programs."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ...queues.delivery.consumer import remove_consumer
from ...queues.delivery.lost_tasks import Place, find_places, put_back_lost
from ...queues.envelope import is_task_id
from ...queues.errors import Refused
from ...queues.inspection.junk_items import read_junk
from ...queues.inspection.views import list_queues, queue_partitions
from ...queues.junk import split
from ...queues.keys import GROUP, Namespace, Partition, SessionPartition, is_reserved, stored_type
from ...queues.partitions.resharding import read_routes, read_schema, sync_route
from ...queues.presence import WorkerInfo, read_registered, trim_registry
from ...queues.shared_config import SHARED, load_config
from ...queues.transport.clients import is_missing_group
from ...queues.transport.gateway import Gateway
from ...queues.transport.scripts import pairs
from ...queues.wording import duration, listed
from ..app import App
from ..backup.dump import partitions_with_keys
from ..settings import Settings
from .result import CheckResult, Severity

_SHOWN: Final = 5

GONE: Final = 3600.0
"""Seconds for which a consumer without messages of an unknown worker is left alone."""

_LEASE: Final = 15.0
"""Lease of a worker that does not publish it."""

_STUCK: Final = 3.0
"""Leases after which a task that was not renewed should have been claimed."""

_PAGE: Final = 250

_LOOKED_AT: Final = 1000
"""Tasks of a partition whose places are compared with their records."""

_SAMPLED: Final = 40
"""Tasks of a queue whose memory is measured."""

_GRACE: Final = 60.0
"""Seconds for which a run is left alone that may have lost its message."""

_FREE: Final = 1_000_000_000
"""Bytes that should be free on the disk of the embedded server."""


async def check_schema(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Compare the format of the namespace's keys with that of this version."""
    stored = await read_schema(gateway, namespace)
    problem = stored.problem(namespace)
    if problem is not None:
        yield CheckResult("schema", Severity.ERROR, stored.shown, problem.text, problem.remedy)
    else:
        yield CheckResult("schema", Severity.OK, stored.shown)


async def check_routes(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Find queues whose route cannot be read, and keys of another type."""
    _, problems = await read_routes(gateway, namespace)
    for problem in problems.values():
        yield CheckResult(
            "foreign values",
            Severity.WARNING,
            problem,
            "producers and workers use the first partition only",
            "find the program that wrote it; 'perdure queue junk' shows what workers have moved away",
        )
    keys = [*namespace.shared_keys, namespace.junk]
    for partition in await queue_partitions(gateway, namespace):
        keys += partition.shared_keys
    for sessions in namespace.session_partitions:
        keys += sessions.shared_keys
    wrong = []
    for start in range(0, len(keys), _PAGE):
        some = keys[start : start + _PAGE]
        types = await gateway.pipeline([("TYPE", key) for key in some])
        wrong += [
            key
            for key, found in zip(some, types, strict=True)
            if found.decode() not in ("none", stored_type(key) or found.decode())
        ]

    async def set_aside() -> str:
        return f"moved {listed(wrong, _SHOWN)} to the junk" if await gateway.set_keys_aside(wrong) else ""

    if wrong:
        yield CheckResult(
            "foreign values",
            Severity.ERROR,
            f"another program has written values of another type: {listed(wrong, _SHOWN)}",
            "reads of these keys are refused until a worker moves the values away",
            "find that program; --fix moves the values to the junk, where they are kept for 30 days",
            fix=set_aside,
        )


async def check_lost_queues(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Find queues that have tasks and no route, so that no list shows them. Looks at the keys that one SCAN finds."""
    known = {partition.queue for partition in await queue_partitions(gateway, namespace)}
    lost = sorted({partition.queue for partition in await partitions_with_keys(gateway, namespace, "ready")} - known)

    async def register() -> str:
        for queue in lost:
            await sync_route(gateway, namespace, queue)
        return f"registered {listed(lost, _SHOWN)}" if lost else ""

    if lost:
        yield CheckResult(
            "lost queues",
            Severity.ERROR,
            f"queues have tasks and no route: {listed(lost, _SHOWN)}",
            "no list shows them, and their tasks run only if a worker serves them",
            "another program has deleted the routes, or a producer stored tasks during a restore; --fix registers the "
            "queues, or start a worker of each",
            fix=register,
        )


async def check_junk(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Find what workers have moved out of the keys because another program wrote it."""
    places: list[Partition | SessionPartition | Namespace] = [namespace, *namespace.session_partitions]
    places += await queue_partitions(gateway, namespace)
    items, problems = await read_junk(gateway, places, _PAGE)
    if items:
        kinds = Counter(item.reason for item in items)
        shown = listed([f"{count} because {reason}" for reason, count in kinds.items()], _SHOWN)
        yield CheckResult(
            "junk",
            Severity.WARNING,
            f"{_count(items)} items of other programs: {shown}",
            "another program writes into the keys of this namespace; what it overwrote may be lost",
            "see 'perdure queue junk', find the program, and give it a user with other keys; the items expire by "
            "themselves after 30 days",
        )
    for problem in problems:
        yield CheckResult("junk", Severity.WARNING, problem, "junk is not shown", "see 'perdure queue junk'")
    if not items and not problems:
        yield CheckResult("junk", Severity.OK, "nothing was written by other programs")


async def check_workers(gateway: Gateway, namespace: Namespace, settings: Settings) -> AsyncIterator[CheckResult]:
    """Look at the registered workers: those that are lost, and those that differ in version, settings or tasks."""
    registered, problems = await read_registered(gateway, namespace)
    live = [worker for worker in registered if not worker.presumed_dead]
    for name, problem in problems.items():
        yield CheckResult("workers", Severity.WARNING, f"registry of workers: {name}: {problem}", "it is ignored", "")
    members = await gateway.command("ZCARD", namespace.workers)

    async def trim() -> str:
        count = await trim_registry(gateway, namespace)
        return f"removed {count} expired registrations" if count else ""

    if members > len(registered) + len(problems):
        yield CheckResult(
            "workers",
            Severity.NOTE,
            f"{members - len(registered) - len(problems)} registrations have expired",
            "none: lists leave them out",
            "workers remove them in time; --fix does it now",
            fix=trim,
        )
    lost = [worker for worker in registered if worker.presumed_dead]
    if lost:
        names = listed([f"{worker.id} on {worker.host}" for worker in lost], _SHOWN)
        yield CheckResult(
            "workers",
            Severity.WARNING,
            f"{len(lost)} workers are presumed dead: {names}",
            "their tasks are claimed after the lease, and run again from the last recorded step",
            "see why they ended: their log, and 'perdure task list --state running'",
        )
    unwell = [worker for worker in live if worker.status not in ("ready", "draining", "?")]
    if unwell:
        yield CheckResult(
            "workers",
            Severity.WARNING,
            listed([f"{worker.id} on {worker.host} is {worker.status}" for worker in unwell], _SHOWN),
            "they run fewer tasks than they could, or none",
            "see 'perdure worker health'",
        )
    if live:
        slots = sum(worker.concurrency for worker in live)
        yield CheckResult("workers", Severity.OK, f"{len(live)} workers, {slots} slots")
    for finding in (*_versions(live), *_sharing(live)):
        yield finding
    async for finding in _settings(gateway, namespace, settings, live):
        yield finding


def _versions(live: Sequence[WorkerInfo]) -> list[CheckResult]:
    releases = sorted({worker.version for worker in live})
    if len(releases) < 2:
        return []
    return [
        CheckResult(
            "versions",
            Severity.NOTE,
            f"workers of several releases of Perdure: {', '.join(releases)}",
            "fine during a deploy; tasks that need the newer one wait for its workers",
            "finish the deploy: 'perdure worker list'",
        )
    ]


def _sharing(live: Sequence[WorkerInfo]) -> list[CheckResult]:
    apps: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker in live:
        for queue in worker.queues:
            apps[queue][worker.app].add(worker.catalog)
    found = []
    for queue, versions in sorted(apps.items()):
        if len(versions) > 1:
            found.append(
                CheckResult(
                    "sharing",
                    Severity.WARNING,
                    f"queue {queue!r} is served by the apps {listed(sorted(versions), _SHOWN)}",
                    "a worker returns tasks of the other app to the queue, which delays them",
                    "give each app a queue of its own: App(NAME, queue=...) or 'perdure worker run APP --queues ...'",
                    where=queue,
                )
            )
        elif any(len(catalogs) > 1 for catalogs in versions.values()):
            found.append(
                CheckResult(
                    "versions",
                    Severity.NOTE,
                    f"queue {queue!r} is served by workers with different code",
                    "fine during a deploy; else a task may run with old code",
                    "finish the deploy: 'perdure worker list' shows the workers, 'perdure task catalog' their tasks",
                    where=queue,
                )
            )
    return found


async def _settings(
    gateway: Gateway, namespace: Namespace, settings: Settings, live: Sequence[WorkerInfo]
) -> AsyncIterator[CheckResult]:
    stored = await load_config(gateway, namespace)
    differing = []
    for name in SHARED:
        own, kept = getattr(settings, name), stored.stored.get(name)
        if name in settings.model_fields_set and kept is not None and kept != own:
            differing.append(f"{name} is {own:g} s in this environment and {kept:g} s in the namespace")
    if differing:
        yield CheckResult(
            "settings",
            Severity.WARNING,
            "; ".join(differing),
            "workers use the stored value and warn; with --strict they do not start",
            "remove the variable, or store its value: perdure config set NAME DURATION",
        )
    leases = sorted({worker.lease for worker in live if worker.lease is not None})
    if len(leases) > 1 and not stored.changing:
        yield CheckResult(
            "settings",
            Severity.ERROR,
            f"workers have different leases: {', '.join(f'{lease:g} s' for lease in leases)}",
            "the workers with the shorter one claim tasks from workers that are alive: steps run twice",
            "store one for all: perdure config set lease DURATION",
        )
    for name, value in stored.ignored.items():
        yield CheckResult(
            "settings",
            Severity.WARNING,
            f"the stored {name} is ignored: {value!r} is no time",
            "workers use their own values",
            f"perdure config unset {name}",
        )
    if not differing and len(leases) < 2 and not stored.ignored:
        yield CheckResult("settings", Severity.OK, f"lease {leases[0]:g} s" if leases else "no difference")


async def check_queues(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Find queues whose tasks wait although no worker serves them, paused ones, and dead letters."""
    for stats in await list_queues(gateway, namespace):
        waiting = stats.depth + stats.in_flight + stats.limited
        if stats.pause is not None:
            yield CheckResult(
                "queues",
                Severity.NOTE,
                f"queue {stats.queue!r} is paused, {waiting:,} tasks wait",
                "its tasks do not start",
                f"'perdure queue list' says by whom; perdure queue resume {stats.queue}",
                where=stats.queue,
            )
        elif waiting and not stats.workers:
            oldest = f", the oldest for {duration(stats.oldest_age, whole=True)}" if stats.oldest_age else ""
            yield CheckResult(
                "queues",
                Severity.WARNING,
                f"no worker serves queue {stats.queue!r}: {waiting:,} tasks wait{oldest}",
                "they do not run",
                f"perdure worker run APP --queues {stats.queue}",
                where=stats.queue,
            )
        if stats.dead:
            yield CheckResult(
                "dead letters",
                Severity.NOTE,
                f"{stats.dead:,} dead letters in queue {stats.queue!r}",
                "tasks that were given up; they are deleted after their retention",
                f"perdure dlq groups --queue {stats.queue}",
                where=stats.queue,
            )


async def check_consumers(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Find consumers of workers that are gone, and messages whose lease has passed long ago."""
    registered, _ = await read_registered(gateway, namespace)
    live = [worker for worker in registered if not worker.presumed_dead]
    known = {worker.id for worker in registered}
    config = await load_config(gateway, namespace)
    lease = max([worker.lease or _LEASE for worker in live], default=config.stored.get("lease", _LEASE))
    leaked: list[tuple[Partition, str]] = []
    clean = True
    for partition in await queue_partitions(gateway, namespace):
        try:
            consumers = await gateway.command("XINFO", "CONSUMERS", partition.ready, GROUP)
            idle = round(lease * _STUCK * 1000)
            pending = await gateway.command("XPENDING", partition.ready, GROUP, "IDLE", idle, "-", "+", _PAGE)
        except Refused as error:
            if is_missing_group(error) or "no such key" in str(error):
                continue
            raise
        for fields in map(pairs, consumers):
            names = split([fields[b"name"]]).good
            gone = int(fields[b"idle"]) > GONE * 1000 and not int(fields[b"pending"])
            leaked += [(partition, name) for name in names if gone and name not in known and not is_reserved(name)]
        stuck = [entry for entry, name, *_ in pending if not is_reserved(name.decode("utf-8", "replace"))]
        if stuck:
            clean = False
            serving = [worker.id for worker in live if partition.queue in worker.queues]
            yield CheckResult(
                "leases",
                Severity.ERROR if serving else Severity.WARNING,
                f"{_count(stuck)} tasks of queue {partition.queue!r}, partition {partition.index}, are held by workers "
                f"that have not renewed them for {duration(idle / 1000)}",
                f"they do not run{', although workers serve' if serving else '; no worker serves'} the queue",
                "start a worker: it claims them; if one runs, see its log and 'perdure task why ID'",
                where=partition.queue,
            )
    if leaked:

        async def remove() -> str:
            done = [await remove_consumer(gateway, partition, name) for partition, name in leaked]
            return f"removed {sum(done)} consumers of workers that are gone" if any(done) else ""

        clean = False
        yield CheckResult(
            "consumers",
            Severity.NOTE,
            f"{len(leaked)} consumers of workers that are gone: {listed(sorted({name for _, name in leaked}), _SHOWN)}",
            "each costs some bytes, and makes lists of consumers longer",
            "workers remove them in time; --fix does it now",
            fix=remove,
        )
    if clean:
        yield CheckResult("leases", Severity.OK, "no consumer without a worker, no lease that has passed")


def _count(found: Sequence[object]) -> str:
    """Return the number of items of a page, as it is shown."""
    return f"{len(found)} or more" if len(found) == _PAGE else str(len(found))


async def check_places(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Compare where tasks are with what their records say: the latest ones of each partition."""
    found = 0
    for partition in await queue_partitions(gateway, namespace):
        ids = split(await gateway.command("ZREVRANGE", partition.timeline, 0, _LOOKED_AT - 1), is_task_id).good
        lost = []
        for start in range(0, len(ids), _PAGE):
            some = ids[start : start + _PAGE]
            places = await find_places(gateway, partition, some)
            lost += [(task_id, place) for task_id, place in zip(some, places, strict=False) if place is not Place.SOUND]
        if lost:
            found += len(lost)

            async def put_back(where: Partition) -> str:
                count = await put_back_lost(gateway, where, _GRACE)
                return f"put {count} tasks of queue {where.queue!r} back" if count else ""

            shown = [f"{task_id} ({_PLACES[place]})" for task_id, place in lost]
            yield CheckResult(
                "places",
                Severity.ERROR,
                f"{len(lost)} tasks of queue {partition.queue!r} are not where their records say: {listed(shown, 3)}",
                "they do not run until a worker puts them back, which it does once a minute",
                "find the program that deleted messages or keys; --fix puts the tasks back now",
                where=partition.queue,
                fix=partial(put_back, partition),
            )
    if not found:
        yield CheckResult("places", Severity.OK, f"the latest {_LOOKED_AT:,} tasks of each partition are in place")


_PLACES: Final[Mapping[Place, str]] = {
    Place.NO_MESSAGE: "its message is gone",
    Place.SKIPPED: "its message was read by no worker",
    Place.NOT_DUE: "its due time is gone",
    Place.NO_PAYLOAD: "its message and its arguments are gone",
    Place.NOT_IN_LIST: "it is not in the list of its limit",
    Place.LIST_OF_ANOTHER_TYPE: "the list of its limit is of another type",
}


async def check_memory(gateway: Gateway, namespace: Namespace) -> AsyncIterator[CheckResult]:
    """Estimate the memory of each queue, from some of its tasks."""
    queues: dict[str, list[Partition]] = defaultdict(list)
    for partition in await queue_partitions(gateway, namespace):
        queues[partition.queue].append(partition)
    for queue, partitions in sorted(queues.items()):
        try:
            shared, tasks, sampled, bytes_sampled = 0, 0, 0, 0
            for partition in partitions:
                shared += await _memory(gateway, partition.shared_keys)
                tasks += await gateway.command("ZCARD", partition.timeline)
                want = -(-_SAMPLED // len(partitions))
                ids = split(await gateway.command("ZREVRANGE", partition.timeline, 0, want - 1), is_task_id).good
                keys = [key for task_id in ids for key in partition.run_keys(task_id)[1:]]
                sampled += len(ids)
                bytes_sampled += await _memory(gateway, keys)
        except Refused:
            yield CheckResult(
                "queue memory",
                Severity.NOTE,
                "this user may not run MEMORY USAGE",
                "the memory of each queue is unknown",
                "grant +memory|usage, or run 'perdure doctor' as an administrator",
            )
            return
        each = bytes_sampled / sampled if sampled else 0.0
        yield CheckResult(
            "queue memory",
            Severity.OK,
            f"about {(shared + each * tasks) / 1e6:,.1f} MB: {tasks:,} tasks of about {each:,.0f} bytes (from "
            f"{sampled}), lists {shared / 1e6:,.1f} MB",
            where=queue,
        )


async def _memory(gateway: Gateway, keys: Sequence[str]) -> int:
    found = await gateway.pipeline([("MEMORY", "USAGE", key, "SAMPLES", 10) for key in keys])
    return sum(size or 0 for size in found)


async def check_scripts(gateway: Gateway) -> AsyncIterator[CheckResult]:
    """Find out whether the server has the scripts of this version."""
    missing = await gateway.missing_scripts()

    async def load() -> str:
        count = await gateway.load_scripts()
        return f"loaded {count} scripts" if count else ""

    if missing:
        yield CheckResult(
            "scripts",
            Severity.NOTE,
            f"the server lacks {missing} scripts of this version",
            "a producer without the right to load scripts waits for a worker of this version",
            "start a worker, or: perdure server prepare; --fix loads them",
            fix=load,
        )
    else:
        yield CheckResult("scripts", Severity.OK, "all scripts of this version are loaded")


def check_disk(directory: Path | None) -> list[CheckResult]:
    """Look at the disk of the embedded server."""
    if directory is None or not directory.exists():
        return []
    left = shutil.disk_usage(directory).free
    if left < _FREE:
        return [
            CheckResult(
                "disk",
                Severity.ERROR if left < _FREE / 10 else Severity.WARNING,
                f"{left / 1e6:,.0f} MB are free on the disk of {directory}",
                "when it is full, the server stores nothing new",
                "free space, or move the folder: --data-dir",
            )
        ]
    return [CheckResult("disk", Severity.OK, f"{left / 1e9:,.1f} GB free")]


def check_app(name: str, app: App, live: Sequence[WorkerInfo]) -> list[CheckResult]:
    """Compare an app with the workers that run: whether each of its queues has one with its tasks."""
    found = []
    queues = app.tasks.queues
    for queue in queues:
        serving = [worker for worker in live if queue in worker.queues and worker.runs(app.name)]
        if not serving:
            found.append(
                CheckResult(
                    "app",
                    Severity.WARNING,
                    f"no worker of app {name} serves queue {queue!r}",
                    "its tasks wait",
                    f"perdure worker run {name} --queues {queue}",
                    where=queue,
                )
            )
    return found or [CheckResult("app", Severity.OK, f"{name}: queues {', '.join(queues) or 'none'} have workers")]
