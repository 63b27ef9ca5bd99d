"""Late duplicates of calls on limits: their bytes arrive after the token was released, or another one was taken."""

from __future__ import annotations

from perdure import Limit
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse, LimitUse
from perdure.queues.limits.store import LimitStore, ReleaseRequest, TakeRequest

from tests.conformance.late import Moments, Scene, Table

LIMITS = Table()

USES = [LimitUse("openai", "0" * 16, 5)]
LIMIT = Limit("openai", total=1, running=1, by="tenant", cost="100/d")


async def hold_bytes(scene: Scene, script: str) -> tuple[LimitStore, LimitStore]:
    """Publish the limit; return a store on the line that holds back the next call of a script, and another one."""
    store = LimitStore(scene.gateway, scene.namespace)
    await store.publish([LIMIT], "app", starts=True)
    scene.hold(script)
    return LimitStore(scene.late, scene.namespace), store


@LIMITS.case
async def release_of_a_token(scene: Scene) -> Moments:
    """It pays nothing back a second time, and does not touch the token of another task."""
    late, store = await hold_bytes(scene, "release_limits")
    await store.take([TakeRequest("a", USES)])
    await late.release([ReleaseRequest("a", USES, "error", {"openai": 1})])
    yield
    assert (await store.take([TakeRequest("b", USES, waiter="q/0/b")])).answers[0].granted
    await store.take([TakeRequest("c", USES, waiter="q/0/c")])
    yield
    await store.release([ReleaseRequest("b", USES)])


@LIMITS.case
async def renewal_of_a_token(scene: Scene) -> Moments:
    late, store = await hold_bytes(scene, "renew_limits")
    await store.take([TakeRequest("a", USES)])
    assert await late.renew([("a", USES)]) == []
    await store.release([ReleaseRequest("a", USES)])
    yield
    await store.take([TakeRequest("b", USES)])
    yield
    await store.release([ReleaseRequest("b", USES)])


@LIMITS.each(True, False)
async def definition(scene: Scene, variant: bool) -> Moments:
    """The worker of another app has started since. variant: whether the late one is that of a start."""
    late, store = await hold_bytes(scene, "publish_limit")
    await late.publish([LIMIT], "app", starts=variant)
    await store.publish([Limit("openai", total=7)], "other", starts=True)
    yield


TASK = BudgetUse("x", "", {"tokens": 100})


@LIMITS.case
async def charge_of_a_budget(scene: Scene) -> Moments:
    """It counts no second time, also if the budget was raised or begins again since."""
    scene.hold("charge_budget")
    late, store = (BudgetStore(through, scene.namespace) for through in (scene.late, scene.gateway))
    (standing,) = await late.charge([TASK], "a", {"tokens": 60})
    assert standing.spent["tokens"] == 60
    yield
    await store.raise_("x", {"tokens": 50})
    yield
    await store.reset("x")
    yield


@LIMITS.each("raise", "reset")
async def raise_of_a_budget(scene: Scene, variant: str) -> Moments:
    """Another operator has raised it since."""
    late, store = (BudgetStore(through, scene.namespace) for through in (scene.late, scene.gateway))
    await store.charge([TASK], "a", {"tokens": 60})
    scene.hold("raise_budget")
    assert await late.raise_("x", {"tokens": 50}, again=variant == "reset")
    yield
    await store.charge([TASK], "b", {"tokens": 1})
    await store.raise_("x", {"tokens": 7})
    yield


@LIMITS.case
async def question_about_a_budget(scene: Scene) -> Moments:
    """It was raised since, and another task asks."""
    late, store = (BudgetStore(through, scene.namespace) for through in (scene.late, scene.gateway))
    (standing,) = await store.charge([TASK], "a", {"tokens": 100})
    scene.hold("ask_for_budget")
    assert await late.wait("x", scene.partition, "x", standing.raises)
    await store.raise_("x", {"tokens": 7})
    yield
    (standing,) = await store.charge([TASK], "b", {"tokens": 7})
    assert await store.wait("x", scene.partition, "y", standing.raises)
    yield
