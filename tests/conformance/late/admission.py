"""Late duplicates of calls for limited tasks: the task waits again, has ended, or others have had their turn since."""

from __future__ import annotations

from perdure.queues.admission import Admission
from perdure.queues.delivery.settlement import Counters, await_limit, park
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.parked import wake_for_limit

from tests.conformance.late import Moments, Scene, Table
from tests.support.limited_tasks import LIFE, admit, enqueue, publish, use

ADMISSION = Table()

POOL = Limit("pool", total=2, running=1, by="tenant")
LINE = Limit("line", running=1, by="user", ordered=True)


@ADMISSION.each(POOL, LINE)
async def enqueue_of_a_limited_task(scene: Scene, variant: Limit) -> Moments:
    await publish(scene.gateway, scene.namespace, variant)
    scene.hold("enqueue_limited")
    (partition,) = await enqueue(scene.late, scene.namespace, [use(variant, "a")], "x")
    yield
    await admit(scene.gateway, partition)
    yield
    delivery = await scene.read()
    yield
    await scene.settle("succeed", delivery)
    yield


@ADMISSION.each(POOL, LINE)
async def admission(scene: Scene, variant: Limit) -> Moments:
    """The late bytes admit none again, and leave the turns as later looks have set them."""
    await publish(scene.gateway, scene.namespace, variant)
    (partition,) = await enqueue(scene.gateway, scene.namespace, [use(variant, "a")], "x")
    await enqueue(scene.gateway, scene.namespace, [use(variant, "a")], "y")
    scene.hold("admit_limited")
    assert (await Admission(scene.late, scene.namespace, life=LIFE).admit_due(partition)).number == 1
    yield
    delivery = await scene.read()
    await scene.settle("reschedule", delivery)
    yield
    await scene.promote()
    yield


@ADMISSION.each(POOL, LINE)
async def return_to_a_waiting_list(scene: Scene, variant: Limit) -> Moments:
    await publish(scene.gateway, scene.namespace, variant)
    uses = [use(variant, "a")]
    (partition,) = await enqueue(scene.gateway, scene.namespace, uses, "x")
    await admit(scene.gateway, partition)
    delivery = await scene.read()
    scene.hold("await_limit")
    await await_limit(scene.late, delivery, "x", Counters(), uses, retry=0.0)
    yield
    await scene.gateway.command("DEL", scene.namespace.limits.holders("pool"))
    await scene.gateway.command("DEL", *(scene.namespace.limits.holders(one.name, one.key) for one in uses))
    await admit(scene.gateway, partition)
    yield
    later = await scene.read()
    yield
    await scene.settle("succeed", later)
    yield


@ADMISSION.case
async def wake_of_a_task_that_is_parked_for_a_limit(scene: Scene) -> Moments:
    delivery = await scene.enqueue_and_read()
    wait = {"delay": 60.0, "waits": "limit pool", "conditions": [("limit", "pool")]}
    await park(scene.gateway, delivery, "x", Counters(), **wait)  # type: ignore[arg-type]
    scene.hold("wake_for_limit")
    assert await wake_for_limit(scene.late, scene.partition, "x")
    yield
    later = await scene.promote_and_read()
    yield
    await scene.settle("succeed", later)
    yield
