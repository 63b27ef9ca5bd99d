"""Late duplicates of what parents, the workers of their children and janitors call for a join."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, LeaseLost, Partition
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.envelope import DEFAULT_PAYLOAD_LIMIT, EnvelopeTemplate
from perdure.queues.errors import TaskNotFound, Unavailable
from perdure.queues.joins import (
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    close_join,
    deliver_notices,
    life_of,
    watch_task,
)

from tests.conformance.late import Moments, Scene, Table
from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import SETTLING

JOINS = Table()

LIFE = life_of(0, 0)


def small(scene: Scene) -> Partition:
    return scene.namespace.partition("small")


def place(scene: Scene) -> JoinPlace:
    return JoinPlace(scene.partition, "x", "g")


async def spawn(
    gateway: Gateway, scene: Scene, parent: Delivery, *names: str, on_failure: OnFailure = OnFailure.RAISE
) -> None:
    children = [PlannedChild("small", EnvelopeTemplate("c").message(b"{}", task_id=name)) for name in names]
    how: dict[str, Any] = {"on_failure": on_failure, "limit": 1, "life": LIFE}
    await add_children(gateway, parent, place(scene), children, **how)


async def end(scene: Scene, how: str = "succeed") -> str:
    delivery = await read_one(await worker(scene.gateway, small(scene)))
    name = str(delivery.task_id)
    await SETTLING[how](scene.gateway, delivery, name)
    return name


async def deliver(gateway: Gateway, scene: Scene, name: str) -> None:
    await deliver_notices(gateway, [(small(scene), name)])


async def clear(scene: Scene) -> None:
    """Leave no key without a TTL."""
    await close_join(scene.gateway, place(scene), retention=60)
    for name in await scene.gateway.command("ZRANGE", small(scene).outbox, 0, -1):
        await deliver(scene.gateway, scene, name.decode())


@JOINS.each("advanced", "closed", "ended")
async def spawning(scene: Scene, variant: str) -> Moments:
    """The window has advanced, the join is closed, or the parent has ended: no child is added again."""
    parent = await scene.enqueue_and_read()
    scene.hold("add_children")
    await spawn(scene.late, scene, parent, "a", "b", "c")
    yield
    if variant == "advanced":
        await deliver(scene.gateway, scene, await end(scene))
        yield
    await clear(scene)
    if variant == "ended":
        await scene.settle("succeed", parent)
        yield
    elif variant == "advanced":
        yield


@JOINS.each("queued", "ended", "delivered")
async def launch(scene: Scene, variant: str) -> Moments:
    """The child is stored, has ended, or its parent knows of its end."""
    parent = await scene.enqueue_and_read()
    scene.hold("enqueue_child")
    await spawn(scene.late, scene, parent, "a", "b")
    yield
    if variant != "queued":
        name = await end(scene)
        yield
        if variant == "delivered":
            await deliver(scene.gateway, scene, name)
            yield
    await clear(scene)
    yield


@JOINS.each("ended", "closed")
async def confirmation(scene: Scene, variant: str) -> Moments:
    parent = await scene.enqueue_and_read()
    scene.hold("confirm_launch")
    await spawn(scene.late, scene, parent, "a", "b")
    yield
    if variant == "ended":
        await deliver(scene.gateway, scene, await end(scene))
        yield
    await clear(scene)
    yield


@JOINS.each("delivered", "closed")
async def chunk_of_a_result(scene: Scene, variant: str) -> Moments:
    parent = await scene.enqueue_and_read()
    await spawn(scene.gateway, scene, parent, "a")
    delivery = await read_one(await worker(scene.gateway, small(scene)))
    result = b'"%b"' % (b"x" * (DEFAULT_PAYLOAD_LIMIT + 1))
    await succeed(scene.gateway, delivery, "a", result, Counters(1), ran=0.1, ttl=60)
    scene.hold("put_result_chunk")
    await deliver(scene.late, scene, "a")
    if variant == "delivered":
        yield
    await clear(scene)
    yield


@JOINS.each("delivered", "advanced", "closed")
async def notice(scene: Scene, variant: str) -> Moments:
    """The window has advanced since: the notice opens no other child, and changes no result."""
    parent = await scene.enqueue_and_read()
    await spawn(scene.gateway, scene, parent, "a", "b", "c")
    name = await end(scene)
    scene.hold("notify_join")
    await deliver(scene.late, scene, name)
    if variant != "closed":
        yield
    if variant == "advanced":
        await deliver(scene.gateway, scene, await end(scene))
        yield
    await clear(scene)
    yield


@JOINS.each("replayed", "ended again")
async def confirmation_of_a_notice(scene: Scene, variant: str) -> Moments:
    """The child has been replayed, and its second end has a notice of its own."""
    parent = await scene.enqueue_and_read()
    await spawn(scene.gateway, scene, parent, "a", on_failure=OnFailure.WAIT)
    name = await end(scene, "bury")
    scene.hold("notice_sent")
    await deliver(scene.late, scene, name)
    letter = await find_letter(scene.gateway, [small(scene)], name)
    assert letter is not None
    assert await replay(scene.gateway, letter, Replay())
    yield
    if variant == "ended again":
        await end(scene)
        yield
    await clear(scene)
    yield


@JOINS.each("watched", "ended")
async def watching(scene: Scene, variant: str) -> Moments:
    """Another task watches as well, or the task has ended."""
    parent = await scene.enqueue_and_read()
    await scene.producer.enqueue("c", {}, task_id="other", queue="small")
    scene.hold("watch")
    await watch_task(scene.late, parent, place(scene), small(scene), "other", life=LIFE)
    if variant == "watched":
        await watch_task(scene.gateway, parent, place(scene)._replace(group="h"), small(scene), "other", life=LIFE)
        yield
        await close_join(scene.gateway, place(scene)._replace(group="h"), retention=60)
    await deliver(scene.gateway, scene, await end(scene))
    yield
    await clear(scene)


@JOINS.case
async def closing(scene: Scene) -> Moments:
    """A call of the attempt that follows has a name of its own: a late close finds nothing."""
    parent = await scene.enqueue_and_read()
    await spawn(scene.gateway, scene, parent, "a", "b")
    scene.hold("close_join")
    await close_join(scene.late, place(scene), retention=60)
    yield
    await clear(scene)
    with suppress(LeaseLost, TaskNotFound, Unavailable):
        await watch_task(scene.gateway, parent, place(scene), small(scene), "none", life=LIFE)
    yield
