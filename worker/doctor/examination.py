"""Examination: all checks of a deployment, each on its own, and the fixes that are safe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

import redis.exceptions

from ...queues.errors import PerdureError, Refused, Unavailable, WrongType
from ...queues.keys import Namespace
from ...queues.presence import list_workers
from ...queues.producer import Producer
from ...queues.transport.gateway import Gateway
from ..app import App
from ..settings import Settings
from .deployment import (
    check_app,
    check_consumers,
    check_disk,
    check_junk,
    check_lost_queues,
    check_memory,
    check_places,
    check_queues,
    check_routes,
    check_schema,
    check_scripts,
    check_workers,
)
from .result import CheckResult, Severity
from .rights import check_certificates, check_rights
from .server import (
    Observed,
    check_clock,
    check_eviction,
    check_latency,
    check_persistence,
    check_replication,
    check_version,
    observe_all,
)

_LIMIT: Final = 30.0
"""Seconds for one check."""

_AGAIN: Final = "mend that, then run 'perdure doctor' again"

_LOST: Final = "server"
"""Check of a server that does not answer."""

_CREDENTIALS: Final = (
    "give user and password of the server in PERDURE_REDIS_URL (redis://user:password@host:6379/0); ACL LIST shows its "
    "users to an administrator"
)

_OF_A_SERVER: Final[Sequence[Callable[[Observed], Iterable[CheckResult]]]] = (
    check_version,
    check_persistence,
    check_eviction,
    check_replication,
    check_latency,
)


async def examine(
    producer: Producer,
    settings: Settings,
    *,
    role: str | None = None,
    user: str | None = None,
    apps: Sequence[tuple[str, App]] = (),
) -> list[CheckResult]:
    """Run all checks, and change nothing.

    Args:
        producer: A producer that is not open. One without requirements examines a server that others refuse.
        settings: Those of this environment.
        role: Role whose rights the user must have; None for any.
        user: User whose rights are looked at; None for that of the connection.
        apps: Apps to compare with the workers that run, by their names on the command line.
    """
    async with AsyncExitStack() as opened:
        try:
            await opened.enter_async_context(producer)
        except (Unavailable, Refused) as error:
            remedy = _CREDENTIALS if "credentials" in str(error) else _AGAIN
            return [CheckResult("server", Severity.ERROR, str(error), "no process can enqueue or run tasks", remedy)]
        return await _examine(producer, settings, role, user, apps)


async def _examine(
    producer: Producer, settings: Settings, role: str | None, user: str | None, apps: Sequence[tuple[str, App]]
) -> list[CheckResult]:
    gateway, namespace, address = producer.gateway, producer.namespace, producer.address
    found: list[CheckResult] = []
    checks = {
        "server": _of_servers(gateway, address.encrypted),
        "disk": _each(check_disk(address.directory)),
        "certificates": _awaited(check_certificates(address)),
        "rights": _awaited(check_rights(next(iter(gateway.primaries().values())), address, namespace, role, user)),
        "schema": check_schema(gateway, namespace),
    }
    for name, results in checks.items():
        found += await _collected(name, results)
    if any(finding.severity is Severity.ERROR and finding.check in ("schema", _LOST) for finding in found):
        return found  # this version cannot read the rest
    checks = {
        "scripts": check_scripts(gateway),
        "lost queues": check_lost_queues(gateway, namespace),
        "foreign values": check_routes(gateway, namespace),
        "junk": check_junk(gateway, namespace),
        "workers": check_workers(gateway, namespace, settings),
        "queues": check_queues(gateway, namespace),
        "leases": check_consumers(gateway, namespace),
        "places": check_places(gateway, namespace),
        "queue memory": check_memory(gateway, namespace),
    }
    for name, results in checks.items():
        found += await _collected(name, results)
    if apps:
        found += await _collected("app", _of_apps(gateway, namespace, apps))
    return found


async def _of_servers(gateway: Gateway, encrypted: bool) -> AsyncIterator[CheckResult]:
    servers = await observe_all(gateway.primaries(), encrypted=encrypted)
    for server in servers:
        for check in _OF_A_SERVER:
            for finding in check(server):
                yield replace(finding, where=server.name)
    for finding in check_clock(servers):
        yield finding


async def _of_apps(
    gateway: Gateway, namespace: Namespace, apps: Sequence[tuple[str, App]]
) -> AsyncIterator[CheckResult]:
    live = [worker for worker in await list_workers(gateway, namespace) if not worker.presumed_dead]
    for name, app in apps:
        for finding in check_app(name, app, live):
            yield finding


async def _each(results: Iterable[CheckResult]) -> AsyncIterator[CheckResult]:
    for finding in results:
        yield finding


async def _awaited(results: Awaitable[Iterable[CheckResult]]) -> AsyncIterator[CheckResult]:
    for finding in await results:
        yield finding


async def _collected(name: str, findings: AsyncIterator[CheckResult]) -> list[CheckResult]:
    """Collect the findings of a check; one that fails is a finding."""
    found: list[CheckResult] = []
    try:
        async with asyncio.timeout(_LIMIT):
            async for finding in findings:
                found.append(finding)  # noqa: PERF401 - those before an error are kept
    except TimeoutError:
        found.append(_failed(name, f"it took longer than {_LIMIT:g} s", "look again when the server is less busy"))
    except WrongType as error:
        found.append(_failed(name, str(error), "mend the finding 'foreign values': perdure doctor --fix"))
    except (Unavailable, redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        lost = f"the connection was lost during the check {name!r}: {error}"
        found.append(CheckResult(_LOST, Severity.ERROR, lost, "no process can enqueue or run tasks", _AGAIN))
    except (PerdureError, redis.exceptions.RedisError) as error:
        found.append(_failed(name, str(error), "run 'perdure doctor' with the rights of an operator, and look again"))
    return found


def _failed(name: str, why: str, remedy: str) -> CheckResult:
    return CheckResult(
        name,
        Severity.WARNING,
        f"could not be checked: {why}",
        "a problem there is not found",
        remedy,
    )


async def fix(producer: Producer, findings: Sequence[CheckResult]) -> list[CheckResult]:
    """Run the safe fixes; return the findings with what was done. Each is idempotent; one that fails says so."""
    done: list[CheckResult] = []
    async with producer:
        for finding in findings:
            if finding.fix is None:
                done.append(finding)
                continue
            try:
                text = await finding.fix() or "nothing was left to do"
            except PerdureError as error:
                text = f"could not be fixed: {error}"
            done.append(replace(finding, done=text))
    return done
