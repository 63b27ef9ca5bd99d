"""Limits of a test: published as a worker does, and what holds and waits for their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from perdure import App
from perdure.queues.admission import Admission
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.store import LimitStore, ReleaseRequest

from tests.support.workers import wait_until


def store(app: App) -> LimitStore:
    producer = app.producer
    return LimitStore(producer.gateway, producer.namespace)


async def publish(app: App, *limits: Limit) -> None:
    """Publish limits as the worker of another app does."""
    await store(app).publish(limits, "another", starts=True)


async def release(app: App, member: str, uses: Sequence[LimitUse]) -> None:
    """Release a token, and let what waited for it start, as a worker does."""
    released = await store(app).release([ReleaseRequest(member, uses)])
    producer = app.producer
    await Admission(producer.gateway, producer.namespace, life=30.0).start_waiting(released)


async def held(app: App, name: str) -> list[str]:
    """Return the tokens of a limit that have not expired."""
    view = (await store(app).read([name]))[0]
    return [holder.member for holder in view.holders]


async def waiting(app: App, name: str) -> list[str]:
    """Return what waits for a limit, whatever its key."""
    view = (await store(app).read([name]))[0]
    return list(view.waiters)


async def is_free(app: App, name: str) -> None:
    """Wait until nothing holds a token of a limit."""

    async def free() -> bool:
        return not await held(app, name)

    await wait_until(free, f"no token of limit {name} is held")
